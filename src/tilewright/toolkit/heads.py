"""Tensors of heads: where the head h of token t of sequence b starts, whatever the layout.

Layouts are named as their dims follow: "bhsd" (batch, heads, tokens, head dim), "bshd", and "thd"
for sequences packed one after another. The elements of a head lie side by side; every other stride
is free, so that views of a fused projection and transposed ones are read where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.toolkit.memory import contiguous_strides

# the dims of (batch, token, head); no dim: one sequence
LAYOUTS: dict[str, tuple[int | None, int, int]] = {
    "bhsd": (0, 2, 1),
    "bshd": (0, 1, 2),
    "thd": (None, 0, 1),
}


@dataclass(frozen=True)
class Heads:
    batches: int
    tokens: int  # of a sequence
    heads: int
    dim: int
    batch_stride: int  # elements
    token_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.batch_stride, self.token_stride, self.head_stride


def heads_of(shape: Sequence[int], strides: Sequence[int], layout: str) -> Heads | None:
    """None: the elements of a head do not lie side by side, which those of no head do."""
    if shape[-1] > 1 and strides[-1] != 1 and 0 not in shape:
        return None

    def dim(place: int | None) -> tuple[int, int]:
        """Size and stride; a dim of one is never stepped along."""
        if place is None or shape[place] <= 1:
            return 1 if place is None else shape[place], 0
        return shape[place], strides[place]

    (batches, batch), (tokens, token), (heads, head) = map(dim, LAYOUTS[layout])
    return Heads(batches, tokens, heads, shape[-1], batch, token, head)


def result_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dense, with the dims of a head's elements last and the others in the tensor's own order."""
    order = sorted(range(len(shape) - 1), key=lambda i: -strides[i])
    dense = contiguous_strides([shape[i] for i in order] + [shape[-1]])
    found = [1] * len(shape)
    for place, stride in zip(order, dense, strict=False):
        found[place] = stride
    return tuple(found)


def is_tame(tensor: torch.Tensor) -> bool:
    """Whether the last dim is contiguous."""
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def tame(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it whose last dim is contiguous."""
    return tensor if is_tame(tensor) else tensor.contiguous()


def taming(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`run`, with its first `count` arguments tamed on every call."""
    return lambda *args: run(*map(tame, args[:count]), *args[count:])
