"""How Python values are spelled for a CUDA C++ kernel: type names, and a row layout as a struct."""

from __future__ import annotations

import ctypes

import torch

from tilewright.toolkit.rows import Rows

# The names in include/tilewright/vector.cuh.
TYPE_NAMES = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}


class RowsArgument(ctypes.Structure):
    """`struct Rows` of include/tilewright/rows.cuh: where row r of a tensor starts, in elements."""

    _fields_ = [
        ("outer_stride", ctypes.c_int64),
        ("inner_stride", ctypes.c_int64),
        ("inner", ctypes.c_uint32),
    ]


def rows_argument(rows: Rows | None) -> RowsArgument:
    """The kernel's view of `rows`; of a tensor that is absent, one that is never followed."""
    if rows is None:
        return RowsArgument(0, 0, 1)
    return RowsArgument(rows.outer_stride, rows.inner_stride, rows.inner)


def instance(template: str, *parameters: str | int | bool) -> str:
    """A template instance as NVRTC wants it: `softmax_v2<float, f16, 4, 8, true>`."""
    words = [str(p).lower() if isinstance(p, bool) else str(p) for p in parameters]
    return f"{template}<{', '.join(words)}>"
