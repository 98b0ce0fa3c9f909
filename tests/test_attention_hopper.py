"""Attention's forward for Hopper: its table and launch choices, the calls that it serves, what its
blocks hold, and that they compute every tile once.

No GPU: launchers are asked on meta tensors, what a kernel does with numbers runs as plain Python,
and one binary is compiled and taken apart.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import triton

import script
import tilewright
from tilewright import dispatch, gpu, matrix
from tilewright.errors import UnsupportedError
from tilewright.matrix import Wanted, reach
from tilewright.ops.attention import gluon_impl, hopper_kernels, op
from tilewright.ops.attention.gluon_impl import CAPPED, Launch, table
from tilewright.toolkit import gluon_compat
from tilewright.toolkit import launch as launching
from tilewright.toolkit.attention_call import Call
from tilewright.toolkit.gluon_compat import gl

ROOT = Path(__file__).parents[1]
BUILD = sys.modules["tilewright.matrix.build"]  # whose name in the package is its function's
SHARED = 227 * 1024  # bytes that a block of an SM 90 may have
GLUON = next(b for b in op.OP.backends if b.name == "gluon")
COLUMNS, BORDERS = (64, 128, 256), (False, True)
CELLS = list(itertools.product(COLUMNS, BORDERS))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


# --- the table -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuner() -> ModuleType:
    return script.load("tune_attention")


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads((ROOT / "results" / "h200" / "tune-attention.json").read_text())


def test_the_table_has_a_choice_for_every_number_of_keys() -> None:
    assert list(table()) == CELLS
    for choices in table().values():
        bounds = [up_to for up_to, _ in choices]
        assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf")


def test_the_table_is_what_the_record_says(tuner: ModuleType, record: Any) -> None:
    stored = json.loads(tuner.TABLE.read_text())
    assert stored["choices"] == record["choices"] == tuner.table(record["cells"])
    assert stored["found_on"] == record["environment"]["gpu"] == "NVIDIA H200"
    out = [(one["dim"], one["causal"], one["launch"]) for one in record["out"]]
    for one in stored["choices"]:
        assert (one["columns"], one["borders"], one["launch"]) not in out
        assert Launch(**one["launch"]) in tuner.candidates(one["columns"])


def test_the_choice_of_each_length_that_was_timed_is_among_the_quickest(
    tuner: ModuleType, record: Any
) -> None:
    cells = {(c["dim"], c["causal"], c["tokens"]): c["candidates"] for c in record["cells"]}
    assert set(cells) == set(itertools.product(COLUMNS, BORDERS, tuner.LENGTHS))
    for (columns, borders, tokens), timed in cells.items():
        chosen = asdict(choice(columns, borders, tokens))
        (us,) = (one["us"] for one in timed if one["launch"] == chosen)
        assert us <= 1.005 * min(one["us"] for one in timed), (columns, borders, tokens)


# --- the launch choice ---------------------------------------------------------------------------


def choice(columns: int, borders: bool, keys: int, **how: bool) -> Launch:
    plain = {"window": False, "capped": False, "ragged": False, "chained": False}
    return gluon_impl.launch(columns, borders, keys, **{**plain, **how})


@pytest.mark.parametrize(("columns", "borders"), CELLS)
def test_a_plain_call_takes_the_tables_choice(columns: int, borders: bool) -> None:
    entries = table()[columns, borders]
    first = 1
    for up_to, wanted in entries:
        last = 2**30 if up_to == float("inf") else int(up_to)
        assert choice(columns, borders, first) == choice(columns, borders, last) == wanted
        first = last + 1
    assert table()[columns, borders] == entries


@pytest.mark.parametrize(("columns", "borders"), CELLS)
def test_lengths_a_window_and_softcap_have_choices_of_their_own(
    columns: int, borders: bool
) -> None:
    for up_to, plain in table()[columns, borders]:
        keys = min(up_to, 2**30)
        for capped, chained in itertools.product((False, True), (False, True)):
            how = {"capped": capped, "chained": chained}
            wanted = CAPPED[columns, borders] if capped else plain
            wanted = replace(wanted, turns=True, lazy=True) if chained else wanted
            assert choice(columns, borders, keys, **how) == wanted
            spare = replace(wanted, workers=2, lazy=True)
            found = choice(columns, borders, keys, window=True, **how)
            assert found == replace(spare, turns=True, order="one")
            turns = chained or columns == 64
            for window in (False, True):
                found = choice(columns, borders, keys, ragged=True, window=window, **how)
                assert found == replace(spare, turns=turns, order="queue")


@pytest.mark.parametrize(
    ("scale", "softcap", "wanted"),
    [
        (0.125, 50.0, 0.0025),
        (-0.3, 30.0, -0.01),
        (0.0, 5.0, 0.0),
        (0.125, 0.0, 0.0),
        (0.125, 1e-40, 2.0**100),
        (-3.0, 1e-45, -(2.0**100)),
    ],
)
def test_scores_are_bent_by_a_finite_factor(scale: float, softcap: float, wanted: float) -> None:
    call = cast(Call, SimpleNamespace(scale=scale, softcap=softcap))
    assert gluon_impl.bend(call) == pytest.approx(wanted)


def test_the_registers_of_a_block_are_those_of_an_sm() -> None:
    every = [one for choices in table().values() for _, one in choices] + [*CAPPED.values()]
    assert {one.workers for one in every} == {2, 3}
    for one in every:
        of_consumers, of_producer = one.registers
        assert 128 * (one.workers * of_consumers + of_producer) == 65536
        assert of_consumers % 8 == of_producer % 8 == 0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, (False, 8192)),
        ({"right": 0}, (True, 8192)),
        ({"left": 300, "right": 0}, (True, 301)),
        ({"left": 300, "right": 20}, (True, 321)),
        ({"left": 9000, "right": 0}, (True, 8192)),
    ],
)
def test_a_choice_is_asked_for_with_what_a_row_sees(
    options: dict[str, int], wanted: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    plain = gluon_impl.launch

    def noted(*args: Any, **how: Any) -> Launch:
        asked.append((args, how))
        return plain(*args, **how)

    monkeypatch.setattr(gluon_impl, "launch", noted)
    bound(monkeypatch, (1, 4, 8192, 128), **options)
    (((columns, *found), how),) = asked
    assert (columns, tuple(found)) == (128, wanted)
    wanted_how = {"window": "left" in options, "capped": False, "ragged": False}
    assert how == {**wanted_how, "chained": False}


@pytest.mark.parametrize(
    ("dim", "columns", "rest"),
    [
        *((16, 64, 0), (48, 64, 0), (64, 64, 0), (65, 128, 16), (72, 128, 16), (80, 128, 16)),
        *((88, 128, 32), (96, 128, 32), (104, 128, 0), (128, 128, 0), (136, 256, 16)),
        *((160, 256, 32), (192, 256, 64), (200, 256, 0), (256, 256, 0)),
    ],
)
def test_what_fills_little_more_than_half_a_tile_is_multiplied_in_two_parts(
    dim: int, columns: int, rest: int
) -> None:
    assert (gluon_impl.width(dim), gluon_impl.rest(dim)) == (columns, rest)
    multiplied = columns // 2 + rest if rest else columns
    assert dim <= multiplied


# --- the compile matrix --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_hopper() -> list[Wanted]:
    return [w for w in reach.reachable(["attention"], [90]) if w.backend == "gluon"]


def constants(wanted: Wanted) -> dict[str, Any]:
    return dict(wanted.request.constants)


def columns_of(wanted: Wanted) -> int:
    tiles = [a.block_shape for a in wanted.request.arguments if hasattr(a, "block_shape")]
    assert len(tiles) == 4
    return max(shape[3] for shape in tiles)


def launch_of(c: dict[str, Any]) -> Launch:
    names = ("WORKERS", "KEYS", "STAGES", "TURNS", "LAZY", "ORDER")
    found = Launch(*(c[name] for name in names))
    assert (c["REGISTERS"], c["FEW_REGISTERS"]) == found.registers
    return found


def test_every_choice_is_compiled(on_hopper: list[Wanted]) -> None:
    found: dict[str, set[Any]] = {}
    for wanted in on_hopper:
        c, columns = constants(wanted), columns_of(wanted)
        kinds = {"chained": c["REST"] or c["REST_OF_VALUES"], "ragged": c["RAGGED"]}
        kinds |= {"window": c["LEFT"], "capped": c["SOFTCAP"], "plain": True}
        kind = next(name for name, there in kinds.items() if there)
        found.setdefault(kind, set()).add((columns, c["LEFT"] or c["RIGHT"], launch_of(c)))
    listed = [(*key, one) for key, choices in table().items() for _, one in choices]
    assert found["plain"] == set(listed)
    assert found["capped"] == {(*key, one) for key, one in CAPPED.items()}
    for kind in ("ragged", "window"):
        may = {(n, b, choice(n, b, min(up_to, 2**30), **{kind: True})) for n, b, up_to in bounds()}
        assert found[kind] <= may
        assert {columns for columns, _, _ in found[kind]} == set(COLUMNS)
    assert {borders for _, borders, _ in found["ragged"]} == {False, True}
    assert {columns for columns, _, _ in found["chained"]} == {128, 256}
    assert {one.order for *_, one in found["chained"]} == {"pairs", "one", "queue"}
    assert all(one.turns for *_, one in found["chained"])


def bounds() -> Iterator[tuple[int, bool, float]]:
    for (columns, borders), choices in table().items():
        for up_to, _ in choices:
            yield columns, borders, up_to


def test_each_way_to_look_at_scores_is_compiled(on_hopper: list[Wanted]) -> None:
    every = [constants(w) for w in on_hopper]
    for name in ("LEFT", "RIGHT", "TAIL", "RAGGED", "SOFTCAP", "SCALED", "TURNS", "LAZY", "OWN"):
        assert {c[name] for c in every} == {False, True}, name
    assert {c["ORDER"] for c in every} == {"pairs", "one", "queue"}
    assert {c["QUEUE"] for c in every} == {1, 2}
    assert {c["REST"] for c in every} == {0, 16, 32, 64}
    assert {c["REST_OF_VALUES"] for c in every} == {0, 16, 32, 64}
    assert any(c["SOFTCAP"] and c["SCALED"] for c in every)
    assert {w.request.technology for w in on_hopper} == {"gluon"}
    assert {w.kernel for w in on_hopper} == {"_attend_on_hopper"}
    assert all(w.tensor_cores for w in on_hopper)


def test_it_is_compiled_for_hopper_alone() -> None:
    alone = replace(op.OP, backends=(GLUON,), autograd=None)
    names = {case.name for case in op.CASES}
    assert set(GLUON.compiled) <= names
    calls = list(reach._calls(alone))
    assert {only for *_, only in calls} == {None, "gluon"}
    for sm in reach.SMS:
        found = any(True for _ in reach._of_op(alone, calls, gpu.pretend(f"sm_{sm}")))
        assert found == (sm == 90), sm


# --- dispatch ------------------------------------------------------------------------------------


def explained(*tensors: torch.Tensor, on: str = "H200", **options: Any) -> Any:
    return tilewright.explain("attention", *tensors, gpu=on, **options)


def test_much_work_is_served_by_it() -> None:
    q = meta(2, 16, 8192, 128)
    told = explained(q, q, q, causal=True)
    assert (told.backend, told.asked_by) == ("gluon", "automatic")
    assert "_attend_on_hopper" in str(told)
    assert explained(q, q, q, on="H100").backend == "gluon"
    packed = meta(16_384, 16, 128)
    ends = meta(17, dtype=torch.int32)
    assert explained(packed, packed, packed, layout="thd", cu_seqlens_q=ends).backend == "gluon"


def test_its_backward_is_tritons() -> None:
    q = meta(2, 16, 8192, 128).requires_grad_()
    for backend in (None, "gluon"):
        told = explained(q, q, q, backend=backend)
        assert told.backend == "gluon" and "backward: triton" in str(told)


def test_few_rows_and_short_windows_are_left_to_triton() -> None:
    q, k = meta(64, 32, 1, 128), meta(64, 32, 32_768, 128)
    told = explained(q, k, k)
    assert told.backend == "triton" and "q has 1 tokens" in told.refused["gluon"]
    x = meta(2, 16, 8192, 128)
    assert explained(x, x, x, causal=True, window=4096).backend == "gluon"
    told = explained(x, x, x, causal=True, window=64)
    assert told.backend == "triton" and "16,777,216 at most" in told.refused["gluon"]
    # without a right border a row sees all keys that follow
    assert explained(x, x, x, window=(64, None)).backend == "gluon"


def test_few_scores_are_left_to_triton_unless_it_is_asked_for() -> None:
    q, k = meta(1, 64, 1024, 64), meta(1, 64, 1023, 64)
    assert gluon_impl.MUCH == 64 * 1024 * 1024
    assert explained(q, q, q).backend == "gluon"
    told = explained(q, k, k)
    assert told.backend == "triton"
    assert (
        told.refused["gluon"] == "it pays from 67,108,864 scores on; there are 67,043,328 at most"
    )
    named = explained(q, k, k, backend="gluon")
    assert (named.backend, named.asked_by) == ("gluon", "backend=")
    with tilewright.use_backend("gluon"):
        assert explained(q, k, k).backend == "gluon"


Q = (1, 16, 4096, 128)


def strided(step: int) -> torch.Tensor:
    strides = (16 * 4096 * step, 4096 * step, step, 1)
    return torch.empty_strided(Q, strides, dtype=torch.bfloat16, device="meta")


def refused() -> Iterator[tuple[str, list[torch.Tensor], dict[str, Any], str]]:
    """Calls, and what is said about them."""
    q = meta(*Q)
    yield "float32", [meta(*Q, dtype=torch.float32)] * 3, {}, "q is float32; it takes float16, bf"
    yield "bias", [q] * 3, {"bias": meta(1, 1, 4096, 4096)}, "it has no bias"
    slopes = meta(16, dtype=torch.float32)
    yield "alibi", [q] * 3, {"alibi_slopes": slopes}, "it has no alibi_slopes"
    wide = "q or v has heads of more than 256 elements"
    yield "wide", [meta(1, 16, 4096, 512)] * 3, {}, wide
    yield "wide values", [q, q, meta(1, 16, 4096, 264)], {}, wide
    yield "narrow", [meta(1, 16, 4096, 8)] * 3, {}, "q has heads of 8 elements"
    loose = "does not start at a multiple of 16 bytes"
    yield "odd queries", [strided(129), q, q], {}, loose
    yield "odd keys", [q, strided(132), q], {}, loose
    yield "odd values", [q, q, strided(130)], {}, loose
    shared = meta(1, 1, 4096, 128).expand(Q)
    yield "expanded keys", [q, shared, q], {}, "k has no tokens, or is expanded along a dim"
    yield "expanded values", [q, q, shared], {}, "v has no tokens, or is expanded along a dim"
    yield "expanded queries", [shared, q, q], {}, "q has no tokens, or is expanded along a dim"
    none = meta(1, 16, 0, 128)
    yield "no keys", [q, none, none], {}, "k has no tokens, or is expanded along a dim"


@pytest.mark.parametrize(("call", "options", "says"), [r[1:] for r in refused()],
                         ids=[r[0] for r in refused()])  # fmt: skip
def test_what_it_does_not_take_is_named(
    call: list[torch.Tensor], options: dict[str, Any], says: str
) -> None:
    told = explained(*call, **options)
    assert told.backend in ("triton", "torch") and says in told.refused["gluon"]
    with pytest.raises(UnsupportedError, match=f"backend 'gluon'.*{re.escape(says)}"):
        explained(*call, **options, backend="gluon")


def test_rows_of_whole_vectors_are_taken_as_they_lie() -> None:
    q, wide = meta(*Q), strided(136)
    assert explained(q, wide, wide).backend == "gluon"
    one = meta(1, 1, 4096, 128)  # one key head for all is not an expanded one
    assert explained(q, one, one).backend == "gluon"


@pytest.mark.parametrize(("on", "sm"), [("A100", 80), ("RTX 4090", 89), ("B200", 100)])
def test_other_gpus_do_not_have_it(on: str, sm: int) -> None:
    q = meta(2, 16, 8192, 128)
    told = explained(q, q, q, on=on)
    assert told.backend == "triton"
    assert "written for SM 90 to 90" in told.refused["gluon"]
    with pytest.raises(UnsupportedError, match=f"SM 90 to 90, and .* is SM {sm}"):
        explained(q, q, q, on=on, backend="gluon")


# --- what a block holds --------------------------------------------------------------------------


class Bound(NamedTuple):
    grid: int
    tensors: list[Any]
    scalars: dict[str, Any]
    constants: dict[str, Any]


def bound(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    *,
    keys: int | None = None,
    value_dim: int | None = None,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    counted: bool = False,
    ends: list[int] | None = None,
    longest: int = 0,
    top_left: bool = False,
    on: str = "H200",
) -> Bound:
    """What `bind` is asked for; with `ends` the shape's tokens are those of packed sequences."""
    batch, heads, rows, dim = shape
    cu = None if ends is None else meta(len(ends), dtype=torch.int32)
    counts = meta(batch, dtype=torch.int32) if counted else None

    def of(tokens: int, dim: int) -> torch.Tensor:
        return meta(batch, heads, tokens, dim) if ends is None else meta(tokens, heads, dim)

    keys, value_dim = keys or rows, value_dim or dim
    layout, most = ("bhsd", (rows, keys)) if ends is None else ("thd", (longest, longest))
    tensors = of(rows, dim), of(keys, dim), of(keys, value_dim)
    numbers = (layout, dim**-0.5, left, right, top_left, softcap, *most, "ieee")
    asked: list[Bound] = []

    def note(kernel: Any, grid: Any, given: Any, scalars: Any, named: Any, **_: Any) -> Any:
        names = kernel.arg_names
        assert len(names) == len(given) + len(scalars) + len(named)
        assert tuple(named) == tuple(names[-len(named) :])
        numbers = dict(zip(names[len(given) :], scalars, strict=False))
        asked.append(Bound(*grid, given, numbers, named))
        return lambda *_: None

    with monkeypatch.context() as patch:
        patch.setattr(gluon_impl, "bind", note)
        prepare = dispatch.load(GLUON.entry)
        prepare(gpu.pretend(on), *tensors, None, None, None, cu, cu, counts, *numbers)
    (found,) = asked
    return found


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "window": {"left": 200, "right": 3},
    "softcap": {"softcap": 30.0},
    "lengths": {"counted": True},
    "packed": {"ends": [0, 300, 9000], "longest": 8700, "right": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_block_holds_fits_into_shared_memory(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = (16, 24, 64, 72, 128, 136, 192, 256)
    for dim, value_dim, rows in itertools.product(dims, dims, (500, 1000, 2000, 4000, 9000)):
        shape = (1, 2, 9000 if way == "packed" else rows, dim)
        found = bound(monkeypatch, shape, value_dim=value_dim, **WAYS[way])
        c = found.constants
        assert sum(held(found).values()) <= SHARED - 1024, (dim, value_dim, c)  # and barriers
        o, q, v = (found.tensors[i].block[3] for i in (0, 3, 5))
        if not c["OWN"]:  # results lie where this tile's queries did, which have one place
            assert c["QUEUE"] == 1 and o == q
        assert c["QUEUE"] == 1 or c["ORDER"] != "one"  # there is no next tile
        assert o == v and q >= dim and v >= value_dim
        for index, name in enumerate("o.lqkv"):
            if name in "oqkv":
                lines = 64 if name in "oq" else c["KEYS"]
                width = q if name in "qk" else v
                assert found.tensors[index].block == (1, 1, lines, width)


def held(found: Bound) -> dict[str, int]:
    """Bytes of the tiles in shared memory."""
    c = found.constants
    q, v = found.tensors[3].block[3], found.tensors[5].block[3]
    return {
        "q": 2 * c["QUEUE"] * c["WORKERS"] * 64 * q,
        "k": 2 * c["STAGES"] * c["KEYS"] * q,
        "v": 2 * c["STAGES"] * c["KEYS"] * v,
        "o": 2 * c["WORKERS"] * 64 * v if c["OWN"] else 0,
    }


@pytest.mark.parametrize(("dim", "own", "queue"), [(64, True, 2), (128, True, 2), (256, False, 1)])
def test_queries_and_results_wait_where_there_is_room(
    dim: int, own: bool, queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = bound(monkeypatch, (1, 8, 1000, dim), right=0).constants
    assert (c["ORDER"], c["OWN"], c["QUEUE"]) == ("pairs", own, queue)


@pytest.mark.parametrize("keys", [1024, 1000])
def test_only_keys_that_fill_no_tile_have_a_tail(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = bound(monkeypatch, (1, 8, 1024, 128), keys=keys).constants
    assert c["TAIL"] == (keys == 1000) and not c["RAGGED"]
    c = bound(monkeypatch, (1, 8, 1024, 128), keys=keys, counted=True).constants
    assert c["TAIL"] and c["RAGGED"]


# --- which tiles a block computes ----------------------------------------------------------------


class Ends(NamedTuple):
    """A pointer to numbers."""

    numbers: list[int]
    place: int = 0

    def __add__(self, steps: int) -> Ends:  # type: ignore[override]
        return Ends(self.numbers, self.place + steps)

    def __call__(self) -> int:
        return self.numbers[self.place]


def on_the_host(kernel: Any, block: list[int]) -> SimpleNamespace:
    """A kernel's functions as plain Python: those that reckon with numbers alone can be called.

    `block`: which one of how many.
    """
    language = SimpleNamespace(
        where=lambda which, yes, no: yes if which else no,
        minimum=min,
        maximum=max,
        cdiv=lambda a, b: -(-a // b),
        load=lambda pointer: pointer(),
        program_id=lambda axis: block[axis],
        num_programs=lambda axis: block[axis + 1],
    )
    names: dict[str, Any] = {}
    left = [kernel]
    while left:
        for name, value in left.pop().fn.__globals__.items():
            if isinstance(value, gl.constexpr):
                names[name] = value.value
            elif hasattr(value, "fn") and name not in names:
                code, defaults = value.fn.__code__, value.fn.__defaults__
                names[name] = FunctionType(code, names, name, defaults)
                left.append(value)
    names |= {"gl": language, "tl": language}
    return SimpleNamespace(**names)


class Tile(NamedTuple):
    is_there: bool
    head: int
    batch: int
    first: int
    rows: int
    keys: int
    off: int
    first_row: int
    first_key: int


def tiles_of(
    found: Bound, ends: list[int] | None = None, counts: list[int] | None = None
) -> list[list[Tile]]:
    """What each block of the grid computes: `_produce`, with `_tile` as it stands there."""
    how = SimpleNamespace(**found.constants)
    cu, key_counts = (None if x is None else Ends(x) for x in (ends, counts))
    pointers = {"cu_q_ptr": cu, "cu_k_ptr": cu, "key_counts_ptr": key_counts}
    where = SimpleNamespace(**found.scalars, **pointers)
    dealt: list[list[Tile]] = []
    block = [0, found.grid]
    tile = on_the_host(hopper_kernels._attend_on_hopper, block)._tile
    for program in range(found.grid):
        block[0] = program
        if how.ORDER == "queue":  # the first block is the only one to ask the counter
            rest = range(found.grid, where.blocks * where.lines)
            steps = [program, *(rest if program == 0 else ())]
        else:
            steps = [s if how.ORDER == "pairs" else program for s in range(where.rounds)]
        found_here = [Tile(*tile(step, where, how)) for step in steps]
        dealt.append([one for one in found_here if one.is_there])
    return dealt


SHAPES = [
    (1, 1, 64),  # one tile
    (1, 3, 700),  # fewer than SMs
    (2, 5, 1023),
    (2, 40, 1024),  # more
    (3, 32, 1153),
    (1, 16, 9000),
    (2, 16, 4090),
]


@pytest.mark.parametrize("dim", COLUMNS)
@pytest.mark.parametrize("way", ["full", "causal", "window", "softcap", "lengths"])
def test_each_tile_is_computed_once(way: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parities, orders = set(), set()
    for batch, heads, rows in SHAPES:
        found = bound(monkeypatch, (batch, heads, rows, dim), **WAYS[way])
        order, tile = found.constants["ORDER"], 64 * found.constants["WORKERS"]
        counts = [rows - n for n in range(batch)] if way == "lengths" else None
        dealt = tiles_of(found, counts=counts)
        assert found.grid <= (2**31 if order == "one" else gpu.pretend("H200").sm_count)
        assert order == "pairs" or all(dealt)  # no block is started for nothing
        firsts = range(0, rows, tile)
        wanted = set(itertools.product(range(batch), range(heads), firsts))
        got = Counter((t.batch, t.head, t.first) for each in dealt for t in each)
        assert set(got) == wanted and set(got.values()) == {1}, (batch, heads, rows)
        for one in itertools.chain.from_iterable(dealt):
            assert (one.rows, one.first_row, one.first_key) == (rows, 0, 0)
            assert one.keys == (rows if counts is None else counts[one.batch])
        parities.add(len(firsts) % 2)
        orders.add(order)
    assert parities == {0, 1}
    assert orders <= {"window": {"one"}, "lengths": {"queue"}}.get(way, {"pairs", "one"})


@pytest.mark.parametrize("dim", COLUMNS)
@pytest.mark.parametrize(
    ("batch", "heads", "rows"),
    [
        (2, 40, 1024),
        (3, 32, 1153),
        (1, 16, 3800),
        (1, 3, 700),
        (7, 64, 640),  # the middle block of five is alone: it must not always meet the same SMs
    ],
)
def test_pairs_of_tiles_share_causal_work_evenly(
    batch: int, heads: int, rows: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bound(monkeypatch, (batch, heads, rows, dim), right=0)
    assert found.constants["ORDER"] == "pairs"
    tile, blocks = 64 * found.constants["WORKERS"], found.scalars["blocks"]
    dealt = [[1 + t.first // tile for t in each] for each in tiles_of(found)]
    work = [sum(each) for each in dealt]
    pair = blocks + 1  # of an odd number, one is alone
    assert max(work) - min(work) <= (pair if blocks % 2 == 0 else 3 * pair // 2)
    for each in dealt:  # what takes longest first, and its pair right after it
        assert 2 * each[0] > blocks
        if blocks % 2 == 0:
            for longer, shorter in zip(each[::2], each[1::2], strict=True):
                assert longer > shorter and longer + shorter == blocks + 1


PACKED = [
    [0, 6000, 9000, 9900, 10_000],
    [0, 2500, 5000, 7500, 10_000],
    [0, 0, 1, 1, 129, 257, 257, 4000, 4000],
    [0, 128, 256, 384],
    [5, 200, 3000],  # tokens before the first, too
]


@pytest.mark.parametrize("ends", PACKED)
@pytest.mark.parametrize("spare", [0, 333])
def test_each_row_of_packed_sequences_is_computed_once(
    ends: list[int], spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths the GPU alone knows, and behind them tokens that are nobody's."""
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    shape = (1, 3, ends[-1] + spare, 128)
    found = bound(monkeypatch, shape, ends=ends, longest=max(lengths), right=0)
    assert found.constants["ORDER"] == "queue" and found.constants["RAGGED"]
    got: Counter[tuple[int, int]] = Counter()
    for one in itertools.chain.from_iterable(tiles_of(found, ends)):
        assert one.batch == 0 and one.first_row == one.first_key and one.off == 0
        assert one.first_row in ends and one.first_row + one.rows in ends
        assert one.rows == one.keys
        last = min(one.first + 64 * found.constants["WORKERS"], one.rows)
        got.update((one.head, one.first_row + row) for row in range(one.first, last))
    assert got == Counter(itertools.product(range(3), range(ends[0], ends[-1])))


def test_a_span_of_tiles_holds_what_its_rows_see() -> None:
    """All of it, and no masked element in a tile that is taken for a whole one."""
    span = on_the_host(hopper_kernels._attend_on_hopper, [0, 1])._span
    sizes = [(0, 64), (64, 64), (128, 128), (192, 192)], (1, 64, 200, 448), (64, 128)
    sides = (-1, 0, 5, 70, 300), (-1, 0, 9, 100), (-60, 0, 150)
    for (first, rows), keys, step, left, right, off in itertools.product(*sizes, *sides):
        how = SimpleNamespace(KEYS=step, LEFT=left >= 0, RIGHT=right >= 0)
        bottom, top, cut_left, cut_right = span(
            first, keys, off, SimpleNamespace(left=left, right=right), how, rows
        )
        i = torch.arange(first, first + rows)[:, None] + off
        j = torch.arange(max(top * step, keys))[None, :]
        seen = (j < keys) & ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))
        assert bottom < top and not seen[:, : bottom * step].any()
        assert not seen[:, top * step :].any()
        whole = seen[:, (bottom + cut_left) * step : (top - cut_right) * step]
        assert whole.all(), (first, rows, keys, step, left, right, off)


# --- the binary ----------------------------------------------------------------------------------


def inner_loops(lines: list[str]) -> list[list[str]]:
    """The instructions of each loop that multiplies and holds no other that does: what is between
    a label and a conditional branch back to it. (The waits for a barrier lie apart from the rest,
    and return by an unconditional one.)"""
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    spans = []
    for n, line in enumerate(lines):
        branch = re.search(r"@!?U?P\d+ +BRA[.\w]* +(?:!?U?P\w+, *)?`\((\.L\w+)\)", line)
        if branch and labels[branch[1]] < n:
            first = labels[branch[1]]
            if any("HGMMA" in inside for inside in lines[first:n]):
                spans.append((first, n))
    inner = [
        (a, b)
        for a, b in spans
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)
    ]
    return [lines[a:b] for a, b in inner]


def test_its_loops_multiply_and_spill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not disassembler.exists():
        pytest.skip("this Triton does not bring nvdisasm along")
    (case,) = (c for c in op.CASES if c.name == "D128 T8192 causal")
    alone = replace(op.OP, backends=(GLUON,), autograd=None)
    (wanted,) = reach.of_cases([(alone, case, torch.bfloat16)], 90)
    cubins: list[bytes] = []
    usage = BUILD._usage
    monkeypatch.setattr(BUILD, "_usage", lambda cubin: cubins.append(cubin) or usage(cubin))
    built = matrix.build(wanted)
    assert not built.violation and built.spills == 0
    found = Bound(0, [], {}, constants(wanted))
    tiles = [getattr(a, "block_shape", None) for a in wanted.request.arguments]
    found.tensors.extend(SimpleNamespace(block=shape) for shape in tiles)
    assert 0 < built.shared - sum(held(found).values()) <= gluon_impl.RESERVED

    path = tmp_path / "attention.cubin"
    path.write_bytes(cubins[0])
    command = [str(disassembler), "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "UTMALDG" in text and "UTMASTG" in text
    loops = inner_loops(text.splitlines())
    assert len(loops) == 4  # two consumers, tiles with a mask and without
    for loop in loops:
        body = "\n".join(loop)
        assert body.count("HGMMA") == 16  # of k and v, 128 by 128, 16 a time
        assert "MUFU.EX2" in body
        assert not re.search(r"\b(LDL|STL)\b", body)
    selects = sorted("\n".join(loop).count("FSEL") for loop in loops)
    assert selects[1] < 16 and selects[2] >= 64  # a thread has 64 scores of a tile


@pytest.mark.drawn(seconds=8.6, family="slow")
def test_packed_sequences_find_their_tiles_and_end_without_delay() -> None:
    """A counter that orders memory would empty L1; a stride of unknown divisors stores halves."""
    (case,) = (c for c in op.CASES if c.name == "16 skewed lengths causal")
    alone = replace(op.OP, backends=(GLUON,), autograd=None)
    (wanted,) = reach.of_cases([(alone, case, torch.bfloat16)], 90)
    ptx = BUILD._triton(wanted.request, 90)[3]
    assert "atom.global.gpu.relaxed.add" in ptx
    assert not re.search(r"\batom\S*\.acq_rel|\bfence\.acq_rel", ptx)
    assert "st.global.v4.b32" in ptx
    assert not re.search(r"\bst\.global\.b16\b", ptx)


# --- descriptors ---------------------------------------------------------------------------------


def wrapped(launcher: Any) -> Any:
    """As Triton 3.6 encloses its C launcher."""

    def inner(*args: Any) -> Any:
        return launcher(*args)

    return inner


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(address, metadata) of every descriptor that is encoded."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_tensordesc_arg"):
        pytest.skip("this Triton encodes descriptors elsewhere")
    made: list[tuple[int, str]] = []

    def encode(descriptor: Any, about: str, *_: Any) -> list[Any]:
        made.append((descriptor.base.data_ptr(), about))
        return [f"{about} at {descriptor.base.data_ptr()}", *descriptor.shape]

    monkeypatch.setattr(driver, "make_tensordesc_arg", encode)
    return made


LOW_LEVEL = object()
DESCRIBED = {
    2: SimpleNamespace(base=None, shape=[7]),  # in any order
    0: SimpleNamespace(base=None, shape=[4, 8]),
}
COMPILED = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=["first", "second"]))


def test_a_descriptor_is_encoded_once_for_an_address(encodings: list[tuple[int, str]]) -> None:
    found = launching._encoding(COMPILED, wrapped(LOW_LEVEL), DESCRIBED)
    assert found is not None
    raw, encoded = found
    assert raw is LOW_LEVEL
    x, y, z = (torch.empty(4, 8) for _ in range(3))
    a, b, c = (t.data_ptr() for t in (x, y, z))
    given = encoded((x, y, z, None))
    assert given == [f"first at {a}", 4, 8, b, f"second at {c}", 7, None]
    assert encodings == [(a, "first"), (c, "second")]
    assert encoded((x, z, z.view(-1), None)) == [f"first at {a}", 4, 8, c, *given[4:]]
    assert len(encodings) == 2  # a view of the same place is the same
    assert encoded((x, None, x, y))[3:] == [None, f"second at {a}", 7, b]
    assert encodings[2:] == [(a, "second")]  # what is known of one place is not of another
    assert encoded((y, x, x, None))[0] == f"first at {b}"
    assert encodings[3:] == [(b, "first")]
    assert all(one.base is None for one in DESCRIBED.values())  # they hold on to no tensor


def test_addresses_are_not_remembered_for_ever(
    encodings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MAX_ADDRESSES", 3)
    found = launching._encoding(COMPILED, wrapped(LOW_LEVEL), DESCRIBED)
    assert found is not None
    x, tensors = torch.empty(1), [torch.empty(1) for _ in range(8)]
    for each in (*tensors, tensors[0]):
        assert found[1]((each, None, x))[0] == f"first at {each.data_ptr()}"
    assert len(encodings) == 1 + 9


def test_a_launcher_that_is_made_otherwise_is_left_alone(
    encodings: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_one(*args: Any) -> None:
        return None

    def other(thing: Any) -> Any:
        return lambda *args: thing(*args)

    for launcher in (open_one, LOW_LEVEL, other(LOW_LEVEL), print):
        assert launching._encoding(COMPILED, launcher, DESCRIBED) is None
    for about in (["first"], ["first", "second", "third"], None):
        compiled = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=about))
        assert launching._encoding(compiled, wrapped(LOW_LEVEL), DESCRIBED) is None
    assert launching._encoding(SimpleNamespace(), wrapped(LOW_LEVEL), DESCRIBED) is None
    monkeypatch.delattr("triton.backends.nvidia.driver.make_tensordesc_arg")
    assert launching._encoding(COMPILED, wrapped(LOW_LEVEL), DESCRIBED) is None
    assert not encodings


# --- Gluon's names -------------------------------------------------------------------------------


def test_a_record_keeps_its_fields_in_order() -> None:
    fields = {"Z": gl.constexpr, "a": gl.tensor | gl.constexpr, "M": object}
    made = gluon_compat.record(type("Made", (), {"__annotations__": fields}))
    value = gl.tensor(None, gl.int32)
    one = made(3, value, None)
    assert one.a is value
    for found, wanted in ((one.Z, 3), (one.M, None), (made(1, 2.5, "x").a, 2.5)):
        assert isinstance(found, gl.constexpr) and found.value == wanted
    for fields_given in ((1, 2), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match="zip"):
            made(*fields_given)


def test_what_a_binary_is_made_for_reaches_the_field_of_its_name() -> None:
    """A record is filled by places alone."""
    tree = ast.parse(Path(hopper_kernels.__file__).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "How"]
    (how,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "How")
    fields = [ast.unparse(n.target) for n in how.body if isinstance(n, ast.AnnAssign)]
    (call,) = calls
    assert [ast.unparse(n) for n in call.args] == fields


@pytest.mark.parametrize(
    ("ours", "before", "since"),
    [
        ("tma_load", "async_copy_global_to_shared", "async_load"),
        ("tma_store", "async_copy_shared_to_global", "async_store"),
    ],
)
def test_tma_has_the_names_of_this_triton(ours: str, before: str, since: str) -> None:
    """3.9 has the old ones too: they only say that they are gone."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version not in ((3, 6), (3, 9)):
        pytest.skip(f"nobody has looked at Triton {triton.__version__}")
    name = before if version == (3, 6) else since
    assert getattr(gluon_compat, ours) is getattr(gluon_compat.tma, name)
