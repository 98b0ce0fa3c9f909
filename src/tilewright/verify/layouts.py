"""Eight hostile layouts: the same values, laid out as users lay them out without thinking."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.toolkit.rows import VECTOR_BYTES, rows_of

Layout = Callable[[torch.Tensor], torch.Tensor]


def transposed(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(-1, -2).contiguous().transpose(-1, -2)


def column_slice(values: torch.Tensor) -> torch.Tensor:
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + 64), torch.nan)
    view = wide[..., 32 : 32 + values.shape[-1]]
    return view.copy_(values)


def row_step(values: torch.Tensor) -> torch.Tensor:
    *leading, rows, n = values.shape
    tall = values.new_full((*leading, 2 * rows, n), torch.nan)
    return tall[..., ::2, :].copy_(values)


def expanded(values: torch.Tensor) -> torch.Tensor:
    return values[..., :1, :].expand(values.shape)


def misaligned(values: torch.Tensor) -> torch.Tensor:
    flat = values.new_full((values.numel() + 1,), torch.nan)
    return flat[1:].view(values.shape).copy_(values)


def fused_qkv(values: torch.Tensor) -> torch.Tensor:
    """The middle third, heads before columns: rows of two levels where there are 3 dims or more."""
    *leading, heads, n = values.shape
    fused = values.new_full((*leading, 3, heads, n), torch.nan)
    return fused[..., 1, :, :].copy_(values)


def five_dims(values: torch.Tensor) -> torch.Tensor:
    """Leading dims in an order that no two strides describe."""
    rows, n = values.shape[-2:]
    shaped = values.reshape(-1, rows, 1, 1, n).expand(-1, rows, 2, 3, n)
    return shaped.permute(3, 2, 1, 0, 4).contiguous().permute(3, 2, 1, 0, 4)


def channels_last(values: torch.Tensor) -> torch.Tensor:
    rows, n = values.shape[-2:]
    image = values.reshape(-1, 1, rows, n).expand(-1, 3, rows, n)
    return image.contiguous(memory_format=torch.channels_last)


LAYOUTS: dict[str, Layout] = {
    "transposed": transposed,
    "column slice": column_slice,
    "row step 2": row_step,
    "expanded": expanded,
    "misaligned": misaligned,
    "fused qkv": fused_qkv,
    "5-d leading": five_dims,
    "channels last": channels_last,
}
# those that keep shape and values, for random cases
SAME_VALUES = ("transposed", "column slice", "row step 2", "misaligned", "fused qkv")


def is_aligned(tensor: torch.Tensor) -> bool:
    """The alignment class: whether kernels may read this tensor 16 bytes at a time."""
    view = rows_of(tensor.shape, tensor.stride())
    if view is None:
        return (
            tensor.shape[-1] * tensor.element_size() % VECTOR_BYTES == 0
        )  # copied: fresh, aligned
    steps = (view.outer_stride, view.inner_stride, view.n)
    whole = all(step * tensor.element_size() % VECTOR_BYTES == 0 for step in steps)
    return whole and tensor.data_ptr() % VECTOR_BYTES == 0
