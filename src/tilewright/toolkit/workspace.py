"""Memory that the calls of a stream share: partial sums, and flags that are 0 between kernels.

Calls of one stream follow each other, so they may use the same memory; calls of two streams may
not. A kernel leaves the flags as it found them. A captured graph may be replayed on any stream, so
each captured call has memory of its own: sums from the graph's pool, and flags that were cleared
before, for clearing them in the graph would take as long as a small kernel. A room lives as long as
the program: at most some tens of MB for each stream that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from tilewright.toolkit import memory

SPARE = 2**20  # flags of a device for captured calls; when they are gone, graphs clear their own

Room = tuple[torch.Tensor, torch.Tensor]  # float32 sums, int32 flags
Made = TypeVar("Made")

_rooms: dict[tuple[int, int], Room] = {}  # by device and stream
_spare: dict[int, torch.Tensor] = {}  # flags that no captured call has yet, by device
_taking = Lock()  # them
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def per_stream(sums: int, flags: int, device: torch.device) -> Callable[[], Room]:
    """A function that returns room for so many floats and flags, on the current stream."""
    if memory.guards or device.type != "cuda" or _current_stream is None:
        return partial(_new, sums, flags, device)
    index = torch.cuda.current_device()
    if index not in _spare and not _is_capturing():  # else they were cleared in that graph alone
        _spare[index] = _apart(partial(_cleared, SPARE, device))

    def room() -> Room:
        if _is_capturing():
            return _captured(sums, flags, device, index)
        key = index, _current_stream(index)
        found = _rooms.get(key)
        if found is None or len(found[0]) < sums or len(found[1]) < flags:
            before = (0, 0) if found is None else (len(found[0]), len(found[1]))
            sizes = max(sums, before[0]), max(flags, before[1])
            found = _rooms[key] = _apart(partial(_new, *sizes, device))
        return found

    return room


def _captured(sums: int, flags: int, device: torch.device, index: int) -> Room:
    with _taking:
        spare = _spare.get(index)
        if spare is None or len(spare) < flags:
            return _new(sums, flags, device)
        _spare[index] = spare[-(-flags // 4) * 4 :]  # 16 bytes, as kernels want them
    return _sums(sums, device), spare[:flags]


def _apart(make: Callable[[], Made]) -> Made:
    """What lives on is made in a thread of its own: torch may be sending this one's allocations to
    the pool of a graph. It is there, and cleared, when this returns, for streams of any kind."""
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def run() -> Made:
        with torch.cuda.stream(stream) if stream else nullcontext():
            return make()

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(run).result()
    if stream is not None:
        stream.synchronize()
    return made


def _new(sums: int, flags: int, device: torch.device) -> Room:
    return _sums(sums, device), _cleared(flags, device)


def _sums(count: int, device: torch.device) -> torch.Tensor:
    return memory.contiguous((count,), torch.float32, device)()


def _cleared(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
