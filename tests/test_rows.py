"""toolkit: rows of strided tensors, load widths, tiles, and memory that shows a missing write."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import library, ops
from tilewright.toolkit import memory, tiles
from tilewright.toolkit.rows import (
    VECTOR_BYTES,
    Rows,
    contiguous_rows,
    on_rows,
    rows_of,
    vector_width,
)
from tilewright.verify import compare

# --- rows ----------------------------------------------------------------------------------------


def row_offsets(view: Rows) -> list[int]:
    """Where a kernel looks for each row."""
    return [
        (r // view.inner) * view.outer_stride + (r % view.inner) * view.inner_stride
        for r in range(view.count)
    ]


def true_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each row is, in the order of the contiguous copy."""
    places = itertools.product(*(range(size) for size in shape[:-1]))
    return [sum(i * s for i, s in zip(place, strides[:-1], strict=True)) for place in places]


def random_view(rng: random.Random) -> torch.Tensor:
    """A meta tensor after a few random slices, steps, expands, permutes and unsqueezes."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
    x = torch.empty(shape, device="meta")
    for _ in range(rng.randint(0, 4)):
        dim = rng.randrange(x.dim())
        change = rng.choice(["slice", "step", "expand", "permute", "lead", "unsqueeze", "select"])
        if change == "slice" and x.shape[dim] > 1:
            start = rng.randrange(x.shape[dim])
            x = x.narrow(dim, start, rng.randint(1, x.shape[dim] - start))
        elif change == "step":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "expand":
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], rng.randint(1, 4), *x.shape[dim + 1 :])
        elif change == "permute":
            x = x.permute(rng.sample(range(x.dim()), x.dim()))
        elif change == "lead":  # keep the last dim, so that more views stay rows
            x = x.permute(*rng.sample(range(x.dim() - 1), x.dim() - 1), x.dim() - 1)
        elif change == "unsqueeze":
            x = x.unsqueeze(dim)
        elif x.dim() > 1:
            x = x.select(dim, x.shape[dim] - 1)
    return x


def test_rows_of_random_views_are_where_the_tensor_has_them() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(4000):
        x = random_view(rng)
        view = rows_of(x.shape, x.stride())
        if view is None:
            continue
        found += 1
        assert (view.count, view.n) == (x.numel() // x.shape[-1], x.shape[-1]), (
            x.shape,
            x.stride(),
        )
        assert row_offsets(view) == true_offsets(x.shape, x.stride()), (x.shape, x.stride())
    assert 1500 < found < 3900  # both answers are exercised


def test_rows_of_refuses_only_what_two_levels_cannot_describe() -> None:
    """A copy where none is needed costs bandwidth: brute force over all (inner, outer, step)."""
    rng = random.Random(1)
    refused = 0
    for _ in range(3000):
        x = random_view(rng)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            assert rows_of(x.shape, x.stride()) is None
        elif rows_of(x.shape, x.stride()) is None:
            refused += 1
            offsets = true_offsets(x.shape, x.stride())
            for inner in range(1, len(offsets) + 1):
                outer = offsets[inner] if inner < len(offsets) else 0
                step = offsets[1] if inner > 1 else 0
                view = Rows(len(offsets), x.shape[-1], inner, outer, step)
                assert row_offsets(view) != offsets, (x.shape, x.stride(), view)
    assert refused > 20


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.empty(6, 8), Rows(6, 8, 1, 8, 0)),
        (lambda: torch.empty(8), Rows(1, 8, 1, 8, 8)),
        (lambda: torch.empty(2, 3, 8), Rows(6, 8, 1, 8, 0)),
        (lambda: torch.empty(6, 3, 8)[:, 1], Rows(6, 8, 1, 24, 0)),
        (lambda: torch.empty(6, 4, 8)[:, :2], Rows(12, 8, 2, 32, 8)),
        (lambda: torch.empty(1, 8).expand(6, 8), Rows(6, 8, 1, 0, 0)),
        (lambda: torch.empty(8, 6).t(), None),
        (lambda: torch.empty(6, 1)[:, :1].expand(6, 8), None),
        (lambda: torch.empty(6, 16)[:, ::2], None),
        (lambda: torch.empty(0, 8), Rows(0, 8, 1, 8, 0)),
    ],
)
def test_rows_of_the_layouts_users_have(
    make: Callable[[], torch.Tensor], expected: Rows | None
) -> None:
    x = make()
    assert rows_of(x.shape, x.stride()) == expected


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (1, 1, 8), (2, 0, 8)])
def test_contiguous_rows_are_where_contiguous_tensors_have_them(shape: tuple[int, ...]) -> None:
    view = contiguous_rows(shape)
    assert row_offsets(view) == true_offsets(shape, torch.empty(shape).stride())


def test_units_count_strides_in_vectors() -> None:
    assert Rows(12, 8, 2, 32, 8).units(8) == (2, 4, 1)
    assert Rows(12, 8, 2, 32, 8).units(1) == (2, 32, 8)


def test_on_rows_copies_wild_tensors_on_every_call_and_leaves_others_alone() -> None:
    seen = []

    @on_rows
    def prepare(gpu: Any, *args: Any) -> Callable[..., Any]:
        seen.append(args)
        return lambda *args: args

    tame, wild = torch.randn(4, 6)[:, :3], torch.randn(3, 4).t()
    run = prepare(None, tame, wild, None, 1.0)
    for _ in range(2):
        wild.add_(1)  # a copy kept from the first call would be stale
        got = run(tame, wild, None, 1.0)
        assert got[0] is tame
        assert got[1].is_contiguous()
        assert torch.equal(got[1], wild)
        assert got[2:] == (None, 1.0)
    assert seen[0][1].is_contiguous()


# --- vector_width --------------------------------------------------------------------------------


def _width(n: int, *tensors: torch.Tensor) -> int:
    return vector_width(n, *((t, rows_of(t.shape, t.stride())) for t in tensors))


@pytest.mark.parametrize(
    ("dtype", "full"), [(torch.float32, 4), (torch.float16, 8), (torch.bfloat16, 8)], ids=str
)
def test_vector_width_classes(dtype: torch.dtype, full: int) -> None:
    base = torch.empty(64 * 64, dtype=dtype)
    assert base.data_ptr() % VECTOR_BYTES == 0
    assert _width(64, base.view(64, 64)) == full
    assert _width(full, base[: 8 * full].view(8, full)) == full
    assert _width(full + 1, base[: 8 * (full + 1)].view(8, -1)) == 1  # rows end inside a load
    assert _width(8, base[1:65].view(8, 8)) == 1  # the first address
    assert _width(8, base.view(64, 64)[:, 8:16]) == full  # a slice on a boundary
    assert _width(8, base.view(64, 64)[:, 1:9]) == 1  # a slice off it
    assert _width(8, base[: 64 * 9].view(64, 9)[:, :8]) == 1  # the distance between rows
    assert _width(8, base[:8].expand(4, 8)) == full  # distance zero
    assert _width(8, base[: 2 * 9 * 8].view(2, 9, 8)[:, :2]) == full  # both levels


def test_vector_width_is_that_of_the_widest_dtype_and_the_worst_operand() -> None:
    half, single = torch.empty(4, 64, dtype=torch.float16), torch.empty(4, 64)
    assert _width(64, half, half) == 8
    assert _width(64, half, single) == 4
    assert _width(64, half, single, torch.empty(4, 65)[:, 1:]) == 1
    assert vector_width(64, (half, rows_of((4, 64), (64, 1))), (single[0], None)) == 4
    assert vector_width(64, (half, None), (torch.empty(65)[1:], None)) == 1


# --- tiles ---------------------------------------------------------------------------------------

LENGTHS = sorted(
    {n for p in range(19) for n in (2**p - 1, 2**p, 2**p + 1, 3 * 2**p) if n} | set(range(1, 300))
)


@pytest.mark.parametrize("widest", [8192, 16384, 32768])
@pytest.mark.parametrize("vec", [1, 4, 8])
def test_a_tile_covers_its_row_or_loops(vec: int, widest: int) -> None:
    for n in LENGTHS:
        tile = tiles.tile(n, vec, widest)
        assert tile.block & (tile.block - 1) == 0
        if tile.whole:
            assert n <= tile.block <= widest
        else:
            table = tiles.ALIGNED if vec > 1 else tiles.UNALIGNED
            assert n > max(t.block for t in table if t.block <= widest)
            assert tile.rows == 1


@pytest.mark.parametrize("vec", [1, 8])
def test_longer_rows_never_get_smaller_tiles(vec: int) -> None:
    whole = [t for t in (tiles.tile(n, vec) for n in LENGTHS) if t.whole]
    assert [t.block for t in whole] == sorted(t.block for t in whole)
    assert [t.rows for t in whole] == sorted((t.rows for t in whole), reverse=True)
    loops = [tiles.tile(n, vec).whole for n in LENGTHS]
    assert loops == sorted(loops, reverse=True)  # once a row loops, every longer one does


@pytest.mark.parametrize(
    "tile", [*tiles.ALIGNED, *tiles.UNALIGNED, tiles.WIDE, tiles.WIDE_UNALIGNED]
)
def test_a_tile_gives_each_thread_something_and_not_too_much(tile: tiles.Tile) -> None:
    assert 1 <= tile.rows * tile.block / (32 * tile.warps) <= 32


# --- guarded memory ------------------------------------------------------------------------------


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return memory.contiguous(shape, dtype, torch.device("cpu"))()


def _buffer(guard: memory.Guard, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    buffer = _new(3, 5, dtype=dtype)
    assert guard.buffers
    return buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_guarded_buffer_is_an_ordinary_aligned_tensor_of_nan(dtype: torch.dtype) -> None:
    with memory.guarded() as guard:
        buffer = _buffer(guard, dtype)
        assert (buffer.shape, buffer.stride(), buffer.dtype) == ((3, 5), (5, 1), dtype)
        assert buffer.isnan().all()
        assert buffer.data_ptr() % VECTOR_BYTES == 0
        buffer.fill_(1)
    assert guard.faults() == []


def test_an_unwritten_element_shows_as_nan() -> None:
    with memory.guarded() as guard:
        buffer = _buffer(guard)
        buffer.view(-1)[:-1] = 1
    assert buffer.isnan().nonzero().tolist() == [[2, 4]]


@pytest.mark.parametrize("distance", [1, 7, memory.MARGIN])
@pytest.mark.parametrize("side", ["before", "past"])
def test_a_write_outside_is_a_fault(side: str, distance: int) -> None:
    with memory.guarded() as guard:
        buffer = _buffer(guard)
        buffer.fill_(1)
        first, last = buffer.storage_offset(), buffer.storage_offset() + buffer.numel() - 1
        at = first - distance if side == "before" else last + distance
        buffer.as_strided((1,), (1,), at).fill_(0)
    assert guard.faults() == [f"wrote {side} a buffer of 15 elements"]


def test_an_empty_buffer_is_guarded_too() -> None:
    with memory.guarded() as guard:
        buffer = _new(0, 5)
        buffer.as_strided((1,), (1,), buffer.storage_offset()).fill_(0)
    assert guard.faults() == ["wrote past a buffer of 0 elements"]


def test_guards_nest_and_end_with_an_exception() -> None:
    with memory.guarded() as outer:
        with pytest.raises(KeyError), memory.guarded() as inner:
            _buffer(inner)
            raise KeyError
        _buffer(outer)
    assert len(inner.buffers) == len(outer.buffers) == 1
    _new(2)
    assert len(outer.buffers) == 1


def _planted(fault: str) -> Callable[..., torch.Tensor]:
    """A relu with one mistake, as a kernel would make it."""

    def relu(x: torch.Tensor, backend: str) -> torch.Tensor:
        strides = x.stride() if fault != "strides" else tuple(reversed(x.stride()))
        y = memory.allocator(x.shape, strides, x.dtype, x.device)()
        y.copy_(x.relu())
        if fault == "unwritten":
            y.as_strided((1,), (1,), y.storage_offset()).fill_(torch.nan)
        elif fault == "before":
            y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(0)
        elif fault == "past":
            y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(0)
        elif fault == "input":
            x.zero_()
        elif fault == "value":
            y[0, 0] += 1
        return y

    return relu


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", ""),
        ("unwritten", "nan at (0, 0)"),
        ("before", "wrote before"),
        ("past", "wrote past"),
        ("input", "argument input was changed"),
        ("strides", "declared"),
        ("value", ""),
    ],
)
def test_verify_catches_what_is_planted(fault: str, says: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(library.calls, "relu", _planted(fault))
    args = (torch.arange(1.0, 17.0).view(4, 4),)
    verdict, _ = compare.forward(ops.registry()["relu"], args, "planted", interpreted=False)
    assert verdict.passed == (fault == "")
    assert says in verdict.message


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (1, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert memory.contiguous_strides(shape) == torch.empty(shape).stride()
