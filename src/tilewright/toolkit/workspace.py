"""Memory that the calls of a stream share: partial sums, and flags that are 0 between kernels.

Calls of one stream follow each other, so they may use the same memory; calls of two streams may
not. A kernel leaves the flags as it found them. A captured graph may be replayed on any stream, so
each captured call has memory of its own, whose flags the graph clears.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilewright.toolkit import memory

Room = tuple[torch.Tensor, torch.Tensor]  # float32 sums, int32 flags

_rooms: dict[tuple[int, int], Room] = {}  # by device and stream
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def per_stream(sums: int, flags: int, device: torch.device) -> Callable[[], Room]:
    """A function that returns room for so many floats and flags, on the current stream."""
    if memory.guards or device.type != "cuda" or _current_stream is None:
        return partial(_new, sums, flags, device)
    index = torch.cuda.current_device()

    def room() -> Room:
        if _is_capturing():
            return _new(sums, flags, device)
        key = index, _current_stream(index)
        found = _rooms.get(key)
        if found is None or len(found[0]) < sums or len(found[1]) < flags:
            if found is not None:
                sums_, flags_ = max(len(found[0]), sums), max(len(found[1]), flags)
            else:
                sums_, flags_ = sums, flags
            found = _rooms[key] = _new(sums_, flags_, device)
        return found

    return room


def _new(sums: int, flags: int, device: torch.device) -> Room:
    return (
        memory.contiguous((sums,), torch.float32, device)(),
        torch.zeros(flags, dtype=torch.int32, device=device),
    )
