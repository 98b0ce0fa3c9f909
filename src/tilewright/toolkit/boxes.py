"""What TMA is told of a product's operands, and which ones it cannot read."""

from __future__ import annotations

import torch

from tilewright.toolkit.launch import Described
from tilewright.toolkit.matmul_call import Operand
from tilewright.toolkit.rows import VECTOR_BYTES


def unreadable(name: str, tensor: torch.Tensor, operand: Operand) -> str | None:
    if not (operand.by_rows or operand.by_columns):
        return f"{name} has neither rows nor columns whose elements lie side by side"
    if not operand.pitch:
        return f"{name} is expanded along a dim: TMA cannot read it so"
    steps = (operand.pitch, operand.inner_stride)
    whole = all(step * tensor.element_size() % VECTOR_BYTES == 0 for step in steps)
    if not whole or tensor.data_ptr() % VECTOR_BYTES:
        return f"{name} has rows that do not start at a multiple of 16 bytes, as TMA wants it"
    return None


def described(
    dtype: torch.dtype,
    operand: Operand,
    count: int,
    rows: int,
    columns: int,
    *,
    gluon: bool = False,
) -> Described:
    """A stack of matrices as TMA sees it: [matrices, rows, columns], or columns before rows."""
    sizes, block = (operand.rows, operand.columns), (rows, columns)
    if not operand.by_rows:
        sizes, block = sizes[::-1], block[::-1]
    # TMA wants a stride even where there is nothing to step to
    stack = operand.inner_stride or operand.pitch * sizes[0]
    matrices = count if operand.inner_stride else 1
    return Described(dtype, (matrices, *sizes), (stack, operand.pitch, 1), (1, *block), gluon=gluon)
