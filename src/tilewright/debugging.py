"""The debug switch: checks of values, which make the host wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_active: ContextVar[bool] = ContextVar("tilewright_debug", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Inside, ops also check what stands in index tensors: rope's positions against its tables.

    Without it nothing on a GPU is read back, and a position outside the tables gives NaN. So it is
    inside `torch.compile`d code and while a CUDA graph is captured, where nothing can be read.

    >>> import torch, tilewright
    >>> q, table, positions = torch.ones(1, 1, 2), torch.ones(4, 2), torch.tensor([9])
    >>> with tilewright.debug():
    ...     tilewright.rope(q, q, table, table, position_ids=positions, layout="thd")
    Traceback (most recent call last):
      ...
    tilewright.errors.InputError: rope: position_ids ...
    """
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> bool:
    return _active.get()
