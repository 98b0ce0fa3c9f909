"""The PTX of attention on Hopper, run as text: a warp of 32 lanes in numpy, a statement at a time.

Registers hold bits. Operands that constraints tie are one register, and an output that is neither
tied nor early (&) lies where an input is, as a compiler may have it. Only whole warps may branch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tilewright.toolkit import gluon_attention
from tilewright.toolkit.gluon_attention import FAR, NEAR

Array = npt.NDArray[Any]
Ptx = tuple[str, str]

INF, ULP = np.inf, 2.0**-23
LANES = np.arange(32, dtype=np.uint32)
CAPPED, SCALE = gluon_attention._capped(32), gluon_attention._unless_all_are_one(32)
WITHIN = {(n, left): gluon_attention._within(n, left) for n in (32, 64) for left in (False, True)}
FOLLOW = {lazy: gluon_attention._follow(lazy) for lazy in (False, True)}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf and NaN are among the cases

# --- a warp --------------------------------------------------------------------------------------

TYPES: dict[str, Any] = {"f32": np.float32, "s32": np.int32}
TYPES |= dict.fromkeys(("u32", "b32", "pred"), np.uint32)
OPCODES: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a, "abs": np.abs, "neg": np.negative, "max": np.fmax, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "shl": np.left_shift,
    "fma.rn": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "selp": lambda a, b, p: np.where(p, a, b),
    "vote.sync.all": lambda p, mask: np.full(32, p.all()),
    "vote.sync.any": lambda p, mask: np.full(32, p.any()),
    "shfl.sync.bfly": lambda a, distance, clamp, mask: a[LANES ^ distance],
}  # fmt: skip
ORDERS = {"lt": np.less, "le": np.less_equal, "eq": np.equal, "ge": np.greater_equal}
for name, order in {**ORDERS, "gt": np.greater}.items():
    OPCODES[f"setp.{name}"] = order
    OPCODES[f"setp.{name}.and"] = lambda a, b, p, order=order: order(a, b) & p
    OPCODES[f"setp.{name}.or"] = lambda a, b, p, order=order: order(a, b) | p


def approximate(of: Callable[[Array], Array], error: float) -> Callable[[Array], Array]:
    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float32)

    return lambda x: flushed(of(flushed(x).astype(np.float64)) * (1 + error))


@functools.cache
def parsed(code: str) -> tuple[set[str], list[tuple[str, str, list[str]]], dict[str, int]]:
    """Names of registers, statements as (guard, opcode, operands), and where labels are."""
    names = {x for found in re.findall(r"\.reg \.\w+ (.*?);", code) for x in found.split(", ")}
    statements: list[tuple[str, str, list[str]]] = []
    labels = {}
    for text in re.sub(r"\.reg .*?;", "", code.strip("{} ")).split(";"):
        found = re.fullmatch(r"\s*(?:(\w+):)?\s*(?:@(!?\w+) )?(?:([\w.]+) (.*))?", text)
        assert found, text
        label, guard, opcode, operands = (group or "" for group in found.groups())
        labels[label] = len(statements)
        statements.append((guard, opcode, operands.split(", ")))
        assert ".sync." not in opcode or operands.endswith(", 0xffffffff"), text
    return names, statements, labels


def places(constraints: list[str]) -> list[str]:
    """The register of each operand."""
    registers = [f"${k if k.isdigit() else i}" for i, k in enumerate(constraints)]
    inputs = [register for register, k in zip(registers, constraints) if k == "f"]
    for i, kind in enumerate(constraints):
        if kind == "=f" and str(i) not in constraints:
            registers[i] = inputs.pop()
    return registers


def run(
    ptx: Ptx, *inputs: Array, ex2: float = 0.0, rcp: float = 0.0, ran: list[str] | None = None
) -> Array:
    """Bits of the outputs, [count, 32]. `ex2` and `rcp` are relative errors of these instructions;
    `ran` gets the opcodes that were run."""
    inexact = {"ex2.approx.ftz": (np.exp2, ex2), "rcp.approx.ftz": (np.reciprocal, rcp)}
    opcodes = OPCODES | {name: approximate(*how) for name, how in inexact.items()}
    names, statements, labels = parsed(ptx[0])
    place = places(ptx[1].split(","))
    outputs = ptx[1].count("=")
    given = [lanes for x in inputs for lanes in x.view(np.uint32)]
    held: dict[str, Array] = {"%laneid": LANES, **dict(zip(place[outputs:], given, strict=True))}

    def read(operand: str, kind: str) -> Array:
        if operand[0].isdigit():
            number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
            value = np.full(32, number, np.uint32)
        else:
            value = held[place[int(operand[1:])] if operand.startswith("$") else operand]
        return value if value.dtype == np.bool_ else value.view(TYPES[kind])

    at = 0
    while at < len(statements):
        guard, opcode, (to, *sources) = statements[at]
        at += 1
        if ran is not None:
            ran.append(opcode)
        if opcode == "bra":
            taken = held[guard.lstrip("!")] != guard.startswith("!") if guard else np.True_
            assert taken.all() or not taken.any(), "the lanes of a warp part"
            at = labels[to] if taken.all() else at
        elif opcode:
            assert not guard and (to in names or to.startswith("$")), statements[at - 1]
            name, _, kind = opcode.rpartition(".")
            value = opcodes[name](*(read(source, kind) for source in sources))
            value = value if value.dtype == np.bool_ else value.view(np.uint32)
            assert value.shape == (32,), opcode
            held[place[int(to[1:])] if to.startswith("$") else to] = value
    return np.array([held[register] for register in place[:outputs]])


def test_an_unknown_instruction_is_an_error() -> None:
    with pytest.raises(KeyError, match="tanh"):
        run(("{ tanh.approx.f32 $0, $1; }", "=f,f"), np.ones((1, 32), np.float32))


# --- tanh(k s) / k -------------------------------------------------------------------------------

KS = (0.0883 / 50, -0.1 / 30, 1e-3, 0.5, 20.0, 1e9, 2.0**31, 2.0**40, -1e-9, 1e-30)
# The largest |k s| of a warp is between the first two. Errors of tanh in 2^-23: the largest, that
# with ex2 off by 2^-22 and rcp by 2^-23, and the largest relative one where it is a polynomial.
RANGES = {
    "near": (0.0, NEAR, 1.0, 1.0, 3.0),
    "beyond": (NEAR, FAR, 0.5, 0.5, 1.0),
    "far": (FAR, 4.0, 2.5, 4.5, 1.0),
    "farther": (4.0, 100.0, 2.5, 4.5, 1.0),
}
WORST = [{"ex2": a * 2 * ULP, "rcp": b * ULP} for a in (-1, 1) for b in (-1, 1)]


def scores(k: float, least: float, most: float, seed: int) -> Array:
    """[32, 32], of all sizes; the largest |k s| is between `least` and `most`."""
    rng = np.random.default_rng(seed)
    x = 0.9999 * most * rng.uniform(-1, 1, (32, 32))
    x[:, ::4] *= 2.0 ** rng.uniform(-40, 0, (32, 8))
    x[rng.integers(32), rng.integers(32)] = (least + most) / 2
    return (x / k).astype(np.float32)


def bent(ptx: Ptx, s: Array, k: float, **how: Any) -> Array:
    return run(ptx, s, np.full_like(s, k), **how).view(np.float32)


def errors(ptx: Ptx, s: Array, k: float, **how: Any) -> tuple[float, float]:
    """Absolute, and relative where tanh is a polynomial."""
    wanted = np.tanh(s * np.float64(np.float32(k)))
    out = bent(ptx, s, k, **how) * np.float64(np.float32(k))
    assert np.array_equal(np.isnan(out), np.isnan(s))
    error = np.abs(out - wanted) / ULP
    short = (wanted != 0) & (np.abs(s * np.float32(k)) < FAR)
    return np.nanmax(error), np.max(error[short] / np.abs(wanted[short]), initial=0)


@pytest.mark.parametrize("where", RANGES)
@pytest.mark.parametrize("k", KS)
def test_a_cap_bends(k: float, where: str, ptx: Ptx = CAPPED) -> None:
    least, most, bound, at_worst, of_short = RANGES[where]
    for seed in range(8):
        s = scores(k, least, most, seed)
        for limit, how in ((bound, {}), (at_worst, WORST[seed % 4])):
            absolute, relative = errors(ptx, s, k, **how)
            assert absolute < limit and relative < of_short, (absolute, relative)


def test_a_slope_of_0_leaves_scores() -> None:
    s = scores(1.0, 0.0, 1.0, 0) * np.logspace(0, 38, 32, dtype=np.float32)
    assert np.array_equal(bent(CAPPED, s, 0.0), s)


def test_the_largest_score_decides(ptx: Ptx = CAPPED) -> None:
    """What a warp does is the same whichever lane and register has its largest score."""
    k, lengths = -0.1, []
    for most in (0.2, -0.4, 10.0, -INF):
        taken = set()
        for register in range(32):
            s = scores(k, 0.0, 0.2, register)
            s[register, (7 * register) % 32] = most / k
            s[register - 1, register] = np.nan
            ran: list[str] = []
            absolute, relative = errors(ptx, s, k, ran=ran)
            assert absolute < 2.5 and relative < 3
            taken.add(len(ran))
        (length,) = taken
        lengths.append(length)
    assert lengths[0] < lengths[1] < lengths[2] == lengths[3]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("odd", [INF, -INF, np.nan, 1e30, -1e30])
def test_odd_scores_leave_the_others_alone(odd: float, k: float) -> None:
    s = scores(k, 0.0, 0.2, 0)
    s[3, 5] = odd
    absolute, relative = errors(CAPPED, s, k)
    assert absolute < 2.5 and relative < 3
    if np.isinf(odd):
        assert bent(CAPPED, s, k)[3, 5] == np.float32(np.sign(odd)) / np.abs(np.float32(k))


# --- peaks, bounds, factors ----------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True])
def test_peaks_follow(lazy: bool, ptx: Ptx | None = None) -> None:
    rng = np.random.default_rng(0)
    for rises in ([-20, -1, 0, 7, 8], [-INF, np.nan, 0, 8], [-9, 0, 8, 9, 30, np.nan]) * 50:
        peak = rng.choice([-INF, -40, -8, 3, 100], (2, 8, 1)).repeat(4, 2)
        base = np.where(np.isinf(peak), rng.choice([-INF, -60], peak.shape, p=[0.97, 0.03]), peak)
        high = base + rng.choice(rises, peak.shape)
        alone = rng.integers(2), rng.integers(8), rng.integers(4)
        high[alone] = rng.choice([high[alone], peak[alone] + 8 + 2.0**-15, 200])
        highest = np.fmax.reduce(high, 2, keepdims=True)
        grown = np.where(highest > peak + 8, highest, peak) if lazy else np.fmax(highest, peak)
        ran: list[str] = []
        lanes = [x.astype(np.float32).reshape(2, 32) for x in (high, peak)]
        out = run(ptx or FOLLOW[lazy], *lanes, ran=ran)
        assert np.array_equal(out.view(np.float32).reshape(grown.shape), grown)
        assert ("shfl.sync.bfly.b32" in ran) == (not lazy or bool((high > peak + 8).any()))


def held_by(count: int) -> tuple[Array, Array]:
    """Row and column of a thread's numbers, [count, 32]."""
    register = np.arange(count)[:, None]
    row, column = LANES // 4 + 4 * (register & 2), 2 * (LANES % 4) + register % 2
    return row, column + 8 * (register // 4)


@pytest.mark.parametrize(("count", "left"), WITHIN)
def test_scores_are_masked(count: int, left: bool, ptx: Ptx | None = None) -> None:
    rng = np.random.default_rng(0)
    row, column = held_by(count)
    for first in range(-4, 2 * count + 4):
        s = rng.normal(size=row.shape).astype(np.float32).view(np.uint32)
        s[rng.random(s.shape) < 0.1] = 0x7FFFFFFF  # as tensor cores have it
        s[1:][rng.random(s[1:].shape) < 0.1] = 0x7FABCDEF  # moves bounds if it is the first
        some = (first + 4 + 5 * np.arange(16)) % (2 * count + 8) - 4
        for begin, last in ((some - 2**30, some), (some, some + 2**30), (some, some[::-1])):
            inside = (column <= last[row]) & (begin[row] <= column if left else True)
            bounds = [x[row].astype(np.int32) for x in ([last, begin] if left else [last])]
            out = run(ptx or WITHIN[count, left], s, *bounds)
            assert np.array_equal(out, np.where(inside, s, np.uint32(0xFF800000)))


def test_rows_are_rescaled(ptx: Ptx = SCALE) -> None:
    rng = np.random.default_rng(0)
    row, _ = held_by(32)
    acc, ones = rng.normal(size=row.shape).astype(np.float32), np.ones(16, np.float32)
    acc.view(np.uint32)[:4, 5:9] = [[0x80000000], [0x7F812345], [0xFFC12345], [1]]  # -0, NaN
    assert np.array_equal(run(ptx, acc, ones[row]), acc.view(np.uint32))
    for changed in range(16):
        for factor in (0.0, 1 - ULP, 1.5, np.nan):
            factors = np.where(np.arange(16) == changed, np.float32(factor), ones)
            out = run(ptx, acc, factors[row]).view(np.float32)
            assert np.array_equal(out, acc * factors[row], equal_nan=True)


# --- planted faults ------------------------------------------------------------------------------

VOTE = "vote.sync.all.pred all, p, 0xffffffff"
FAULTS: list[tuple[Callable[..., None], tuple[Any, ...], Ptx, str, str]] = [
    (test_a_cap_bends, (0.5, "near"), CAPPED, "0f3E04E461", "0f3E088889"),
    (test_a_cap_bends, (1e-30, "near"), CAPPED, "setp.gt.and.f32 p, kk, 0f30800000, p;", ""),
    (test_a_cap_bends, (2.0**40, "near"), CAPPED, "setp.lt.f32 p, kk,", "setp.gt.f32 p, kk,"),
    (test_a_cap_bends, (0.5, "beyond"), CAPPED, VOTE, "mov.pred all, p"),
    (test_a_cap_bends, (0.7, "far"), CAPPED, "fma.rn.f32 kk, e, kk, kk;", ""),
    (test_the_largest_score_decides, (), CAPPED, "abs.f32 x, $55;", "mov.f32 x, $55;"),
    (test_peaks_follow, (True,), FOLLOW[True], "setp.gt.or.f32 p, $3, limit, p;", ""),
    (test_peaks_follow, (True,), FOLLOW[True], "setp.gt.f32 p, high", "setp.ge.f32 p, high"),
    (test_peaks_follow, (True,), FOLLOW[True], "=&f", "=f"),
    (test_peaks_follow, (False,), FOLLOW[False], "other, high, 2,", "other, high, 4,"),
    (test_scores_are_masked, (32, True), WITHIN[32, True], "setp.le.and", "setp.lt.and"),
    (test_scores_are_masked, (64, False), WITHIN[64, False], "lane, lane, 3;", "lane, lane, 7;"),
    (test_rows_are_rescaled, (), SCALE, "setp.eq.and.f32 one, $66, 0f3F800000, one;", ""),
    (test_rows_are_rescaled, (), SCALE, "@all bra DONE;", ""),
    (test_rows_are_rescaled, (), SCALE, ",31,", ",f,"),
]


@pytest.mark.parametrize(("check", "given", "ptx", "find", "replace"), FAULTS)
def test_a_planted_fault_is_seen(
    check: Callable[..., None], given: tuple[Any, ...], ptx: Ptx, find: str, replace: str
) -> None:
    code, constraints = (part.replace(find, replace) for part in ptx)
    assert (code, constraints) != ptx
    with pytest.raises(AssertionError):
        check(*given, ptx=(code, constraints))
