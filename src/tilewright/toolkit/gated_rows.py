"""Where a gated activation, act(gate) * up, finds its operands: two tensors, or two halves of one.

Both are rows of n elements that start `gate_at` and `up_at` into the rows of what was given. The
gradients of gate and up are laid out as their operands, contiguous: two tensors, or halves of one.
Tensors that are all contiguous are one long row, so that short rows lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.toolkit.rows import Rows, levels, rows, vector_width


@dataclass(frozen=True)
class Operands:
    """The views of one call; lengths, offsets and strides in elements."""

    gate: Rows
    up: Rows
    grad: Rows  # of the result; a forward has none, and the gate's stands in
    gate_at: int
    up_at: int
    step: int  # from row to row of the gradients of gate and up
    vec: int  # elements to a load

    @property
    def count(self) -> int:
        return self.gate.count

    @property
    def n(self) -> int:
        return self.gate.n

    @property
    def levels(self) -> int:
        """How much arithmetic finds a row: none if there is one, a product, or a division too."""
        return levels(self.gate, self.up, self.grad)


def are_contiguous(*tensors: torch.Tensor) -> bool:
    return all(t.is_contiguous() for t in tensors)


def separate(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor | None = None) -> Operands:
    tensors = [gate, up, gate if grad is None else grad]
    if are_contiguous(*tensors):
        views = [Rows(1, gate.numel(), 1, 0, 0)] * 3
    else:
        views = [rows(t) for t in tensors]
    n = views[0].n
    vec = vector_width(n, *zip(tensors, views, strict=True))
    return Operands(views[0], views[1], views[2], gate_at=0, up_at=0, step=n, vec=vec)


def packed(x: torch.Tensor, order: str, grad: torch.Tensor | None = None) -> Operands:
    """The halves of x, gate first or up first, as `order` says."""
    whole = rows(x)
    n = whole.n // 2
    half = Rows(whole.count, n, whole.inner, whole.outer_stride, whole.inner_stride)
    grad_view = half if grad is None else rows(grad)
    tensors = [(x, half)] if grad is None else [(x, half), (grad, grad_view)]
    gate_at, up_at = (0, n) if order == "gate_up" else (n, 0)
    vec = vector_width(n, *tensors)
    return Operands(half, half, grad_view, gate_at, up_at, step=2 * n, vec=vec)
