"""The driver's tensor maps: what TMA is told of a tensor, 128 bytes for each address.

Everything but the address is the same for all calls of a binding, and allocators hand out the same
addresses again, so each is encoded once: that takes the driver some microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tilewright.errors import LaunchError
from tilewright.toolkit.launch import MAX_ADDRESSES, Described

SIZE, ALIGNMENT = 128, 64
LINE = 128  # bytes of a row of a box, whose 16-byte parts are swapped from row to row
CUDA_OF_MAPS = 12000  # the CUDA release that brought cuTensorMapEncodeTiled

# Numbers of the driver's enumerations.
DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
NOT_INTERLEAVED, SWAPPED_BY_128, PREFETCH_256, ZEROS_OUTSIDE = 0, 3, 3, 0


class Place(int):
    """Where a map lies; keeps it alive."""

    owner: Any


class Maps:
    """The maps of one tensor argument, by address."""

    def __init__(self, like: Described, encode: Callable[..., int] | None = None) -> None:
        if like.block[-1] * like.dtype.itemsize != LINE:
            raise LaunchError(f"a box has rows of {like.block[-1]} {like.dtype}, not {LINE} bytes")
        self.like, self.encode = like, encode
        self.known: dict[int, Place] = {}
        strides = [step * like.dtype.itemsize for step in like.strides[:-1]]
        self.sizes = _longs(like.shape), _longs(strides), _words(like.block)
        self.steps = _words([1] * len(like.shape))

    def at(self, address: int) -> Place:
        """Where the map of a tensor at this address lies; to be held until the launch."""
        return self.known.get(address) or self._made(address)

    def _made(self, address: int) -> Place:
        if len(self.known) >= MAX_ADDRESSES:
            self.known.clear()
        room = ctypes.create_string_buffer(SIZE + ALIGNMENT)
        place = Place(-(-ctypes.addressof(room) // ALIGNMENT) * ALIGNMENT)
        place.owner = room
        encode, like = self.encode or _encode(), self.like
        error = encode(
            place, DTYPES[like.dtype], len(like.shape), address, *self.sizes, self.steps,
            NOT_INTERLEAVED, SWAPPED_BY_128, PREFETCH_256, ZEROS_OUTSIDE,
        )  # fmt: skip
        if error:
            raise LaunchError(f"the driver answered error {error} when it encoded {like}")
        self.known[address] = place
        return place


def _longs(sizes: Any) -> Any:
    """Innermost first, as the driver wants them."""
    return (ctypes.c_uint64 * len(sizes))(*reversed(sizes))


def _words(sizes: Any) -> Any:
    return (ctypes.c_uint32 * len(sizes))(*reversed(sizes))


@cache
def _encode() -> Callable[..., int]:
    from cuda.bindings import driver

    error, address, _ = driver.cuGetProcAddress(b"cuTensorMapEncodeTiled", CUDA_OF_MAPS, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not address:
        raise LaunchError(
            f"the driver has no cuTensorMapEncodeTiled ({error}); update it to CUDA 12"
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int
    words = (pointer, number, ctypes.c_uint32, pointer, *[pointer] * 4, *[number] * 4)
    return ctypes.CFUNCTYPE(number, *words)(int(address))
