"""Products that tests of matmul ask about: a call's arguments, on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.spec import Args
from tilewright.toolkit.matmul_call import Product, see

BFLOAT = torch.bfloat16


def call(m: int, n: int, k: int, **how: Any) -> Args:
    """A call's arguments, on meta tensors. b lies by columns, as a linear layer's weight."""
    dtype, count = how.get("dtype", BFLOAT), how.get("count", 1)
    lead = (count,) if count > 1 else ()

    def laid(rows: int, columns: int, by: str) -> torch.Tensor:
        sizes = (rows, columns) if by == "rows" else (columns, rows)
        x = torch.empty(*lead, *sizes, dtype=dtype, device="meta")
        return x if by == "rows" else x.mT

    a, b = laid(m, k, how.get("a", "rows")), laid(k, n, how.get("b", "columns"))
    precision, deterministic = how.get("precision", "ieee"), how.get("deterministic", False)
    return a, b, how.get("out_dtype"), precision, how.get("block"), deterministic


def product(m: int, n: int, k: int, **how: Any) -> Product:
    found = see(*call(m, n, k, **how)[:2])
    assert found is not None
    return found
