"""toolkit/tensor_map: what the driver is told of a tensor, and how a launch hands the map on."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

from tilewright.errors import LaunchError
from tilewright.toolkit import cuda_launch, tensor_map
from tilewright.toolkit.cuda_launch import Shape
from tilewright.toolkit.launch import Described
from tilewright.toolkit.tensor_map import Maps

LIKE = Described(torch.bfloat16, (3, 40, 72), (4000, 96, 1), (1, 16, 64))


class Encoder:
    """Writes down what it is asked for, and a number where the map lies."""

    def __init__(self, answer: int = 0) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answer = answer

    def __call__(self, place: int, dtype: int, rank: int, address: int, *more: Any) -> int:
        assert place % 64 == 0
        ctypes.c_uint64.from_address(place).value = address + 1
        arrays, modes = [tuple(array) for array in more[:4]], more[4:]
        self.asked.append((dtype, rank, address, *arrays, modes))
        return self.answer


def test_the_driver_is_told_sizes_innermost_first_and_strides_in_bytes() -> None:
    encoder = Encoder()
    Maps(LIKE, encoder).at(4096)
    ((dtype, rank, address, sizes, strides, box, steps, modes),) = encoder.asked
    assert (dtype, rank, address) == (9, 3, 4096)
    assert (sizes, strides) == ((72, 40, 3), (192, 8000))
    assert (box, steps) == ((64, 16, 1), (1, 1, 1))
    assert modes == (0, 3, 3, 0)  # lines of 128 bytes swapped, 256 prefetched, zeros outside


def test_an_address_is_encoded_once() -> None:
    encoder = Encoder()
    maps = Maps(LIKE, encoder)
    places = [maps.at(address) for address in (64, 128, 64, 64, 128)]
    assert len(encoder.asked) == 2
    assert places == [places[0], places[1], places[0], places[0], places[1]]
    assert [ctypes.c_uint64.from_address(place).value for place in places[:2]] == [65, 129]


def test_maps_that_are_forgotten_live_as_long_as_they_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_map, "MAX_ADDRESSES", 4)
    maps = Maps(LIKE, Encoder())
    held = maps.at(16)
    for address in range(32, 32 + 16 * 9, 16):
        maps.at(address)
    assert len(maps.known) <= 4
    assert ctypes.c_uint64.from_address(held).value == 17


def test_a_refusal_names_what_was_asked() -> None:
    with pytest.raises(LaunchError, match=r"error 1 .*shape=\(3, 40, 72\)"):
        Maps(LIKE, Encoder(answer=1)).at(64)


def test_other_lines_are_refused() -> None:
    narrow = Described(torch.bfloat16, (3, 40, 72), (4000, 96, 1), (1, 16, 32))
    with pytest.raises(LaunchError, match="rows of 32"):
        Maps(narrow)


def test_a_launch_hands_on_maps_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result's pointer, a map of each operand, then the scalars."""
    seen: list[tuple[int, ...]] = []

    def launch(config: int, function: int, arguments: int, extra: None) -> int:
        array = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        words = (ctypes.c_uint64.from_address(array[i]).value for i in range(3))
        seen.append((*words, ctypes.c_int32.from_address(array[3]).value))
        return 0

    made = torch.empty(4)
    cases = types.SimpleNamespace(CUresult=types.SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201))
    monkeypatch.setattr(cuda_launch, "_driver", lambda: cases)
    monkeypatch.setattr(cuda_launch, "_launch_function", lambda: launch)
    monkeypatch.setattr(cuda_launch, "_load", lambda *_: None)
    monkeypatch.setattr(cuda_launch, "_config", lambda *_: types.SimpleNamespace(getPtr=lambda: 5))
    monkeypatch.setattr(tensor_map, "_encode", lambda encoder=Encoder(): encoder)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 1000 + i, raising=False)
    shape = Shape("k", (2, 1, 1), 384, 0, 2)
    loaded, scalars = types.SimpleNamespace(handle=77), [ctypes.c_int32(7)]
    tensors = [torch.bfloat16, LIKE, LIKE]
    a, b = torch.empty(8), torch.empty(8)
    run = cuda_launch.make_run(loaded, shape, tensors, scalars, 0, 0, lambda: made)
    assert run(a, b, "what follows is ignored") is made
    assert run(b, a) is made
    plain = cuda_launch.make_run(loaded, shape, tensors, scalars, 0, 0, None)
    plain(made, a, b)
    first = (made.data_ptr(), a.data_ptr() + 1, b.data_ptr() + 1, 7)
    assert seen == [first, (made.data_ptr(), b.data_ptr() + 1, a.data_ptr() + 1, 7), first]
