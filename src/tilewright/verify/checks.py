"""The checks of `tilewright verify`, each generic over an op's declaration.

A check lists its parts: `(Context) -> iterator of Part`. They import neither pytest nor hypothesis:
the tests stand on them, not the other way round.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tilewright.library import call
from tilewright.spec import FLOATS, Args, Case, as_tuple
from tilewright.verify import compare, features, layouts
from tilewright.verify.compare import Verdict
from tilewright.verify.context import Check, Context, Part, both_phases, edge_cases
from tilewright.verify.layout_checks import hostile_layouts, in_place, offsets
from tilewright.verify.record import Result
from tilewright.verify.repeat_checks import capture, large, repeat, streams


def cases(c: Context) -> Iterator[Part]:
    """Every edge case the op declares, in every dtype."""
    for case, dtype in itertools.product(edge_cases(c), FLOATS):
        yield Part(case.name, dtype, partial(_case, c, case, dtype))


def _case(c: Context, case: Case, dtype: torch.dtype) -> Iterator[Result]:
    args = c.inputs(case.dims, dtype, c.seed)
    yield from both_phases(c, "cases", case.name, dtype, args, c.seed)


def launches(c: Context) -> Iterator[Part]:
    """Every edge case in every launch that a table may name: right, whether it names it or not."""
    if c.op.tuning is None:
        return
    for case, dtype in itertools.product(edge_cases(c), (torch.float16, torch.float32)):
        yield Part(case.name, dtype, partial(_launches, c, case, dtype))


def _launches(c: Context, case: Case, dtype: torch.dtype) -> Iterator[Result]:
    times = 20 if c.device == "cuda" else 1
    args = c.inputs(case.dims, dtype, c.seed)
    found = c.launches(args) if c.serves(args) else []
    truths = compare.forward_truth(c.op, args, interpreted=c.interpreted) if found else []
    for choice in found:
        verdict, _ = compare.launched(c.op, args, choice, truths, times)
        yield c.result("launches", f"{case.name} {choice}", dtype, "forward", verdict)


# --- by seed -------------------------------------------------------------------------------------

FAR, REDRAWS = 10**6, 200


def random_cases(c: Context) -> Iterator[Part]:
    """Random dims, dtypes and layouts; the seed makes the whole case."""
    for seed in range(c.seed, c.seed + c.cases):
        yield Part("", None, partial(_random, c, seed))


def _random(c: Context, first: int) -> Iterator[Result]:
    """What this backend's declaration refuses is drawn anew, from seeds far beyond."""
    for seed in range(first, first + REDRAWS * FAR, FAR):
        dims, dtype, args = _draw(c, seed)
        if c.serves(args):
            yield from both_phases(c, "random", str(dims["shape"]), dtype, args, seed)
            return
    never = Verdict(message=f"none of {REDRAWS} draws is served")
    yield c.result("random", "", None, "forward", never, first)


def _draw(c: Context, seed: int) -> tuple[Any, torch.dtype, Args]:
    assert c.op.sample is not None
    rng = random.Random(seed)
    dims, dtype = c.op.sample(rng), rng.choice(FLOATS)
    return dims, dtype, tuple(_relaid(a, rng) for a in c.inputs(dims, dtype, seed))


def _relaid(a: Any, rng: random.Random) -> Any:
    if not isinstance(a, torch.Tensor) or a.dim() < 2 or not a.is_floating_point():
        return a
    if rng.random() < 0.4:
        return a
    return layouts.LAYOUTS[rng.choice(layouts.SAME_VALUES)](a)


def feature_calls(c: Context) -> Iterator[Part]:
    """Every two options of the op together, on a GPU every three; the seed is a call's number."""
    calls = features.calls(c.op.name, c.device, c.backend)
    for number, call_ in list(enumerate(calls))[c.seed : c.seed + c.cases]:
        yield Part("", None, partial(_feature_call, c, number, *call_))


def _feature_call(
    c: Context, number: int, levels: str, dims: dict[str, Any], dtype: torch.dtype
) -> Iterator[Result]:
    args = c.inputs(dims, dtype, number)
    yield from both_phases(c, "features", levels, dtype, args, number)


def exact(c: Context) -> Iterator[Part]:
    """Inputs whose result is exact in any order of arithmetic: tolerance 0."""
    if c.op.exact_inputs is None or c.op.sample is None:
        return
    for seed in range(c.seed, c.seed + c.cases):
        yield Part("", None, partial(_exact, c, seed))


def _exact(c: Context, first: int) -> Iterator[Result]:
    for seed in range(first, first + REDRAWS * FAR, FAR):
        dims, dtype, args = _exact_draw(c, seed)
        if c.serves(args):
            break
    else:
        return  # an op may have no exact inputs that this backend takes
    verdict, got = compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
    wanted = as_tuple(c.op.reference(*compare.in_float64(args)))
    if not verdict.message:
        for g, w in zip(got, wanted, strict=True):
            if not torch.equal(g.double(), w.double()):
                wrong = (g.double() - w.double()).abs().max()
                verdict = Verdict(float("inf"), float(wrong), "not exact")
    yield c.result("exact", str(dims["shape"]), dtype, "forward", verdict, seed)


def _exact_draw(c: Context, seed: int) -> tuple[Any, torch.dtype, Args]:
    assert c.op.sample is not None
    assert c.op.exact_inputs is not None
    rng = random.Random(seed)
    dims, dtype = {**c.op.sample(rng), "dtype": None}, rng.choice(FLOATS)
    generator = torch.Generator().manual_seed(seed)
    return dims, dtype, tuple(c.op.exact_inputs(dims, dtype, c.device, generator))


# --- special values ------------------------------------------------------------------------------


def bits(c: Context) -> Iterator[Part]:
    """Calls that the op names: the reference's bits, of the same dtype, on the same device.

    A CPU runs them too, but there the interpreter stands in for the instructions of a GPU.
    """
    if c.op.bit_inputs is not None:
        yield Part("named", None, partial(_bits, c))


def _bits(c: Context) -> Iterator[Result]:
    assert c.op.bit_inputs is not None
    for name, args in c.op.bit_inputs(c.device):
        if not c.serves(args):
            continue
        verdict, got = compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
        if verdict.passed and not compare.same_bits(got, as_tuple(c.op.reference(*args))):
            verdict = Verdict(message="not the bits of the reference")
        yield c.result("bits", name, args[0].dtype, "forward", verdict)


def empty(c: Context) -> Iterator[Part]:
    """Every subset of dims set to zero: empty results, and zero gradients for weights."""
    shape = (2, 3, 16)
    for zeros in [s for r in (1, 2, 3) for s in itertools.combinations(range(3), r)]:
        sizes = tuple(0 if i in zeros else n for i, n in enumerate(shape))
        yield Part(str(sizes), torch.float16, partial(_empty, c, sizes))


def _empty(c: Context, sizes: tuple[int, ...]) -> Iterator[Result]:
    args = c.inputs({"shape": sizes}, torch.float16, c.seed)
    yield from both_phases(c, "empty", str(sizes), torch.float16, args, c.seed)


def nan(c: Context) -> Iterator[Part]:
    """A NaN or an infinity does to its row what float64 says; the other rows keep their bits."""
    bads = (float("nan"), float("inf"), float("-inf"))
    for bad, n, dtype in itertools.product(bads, (33, 1024), FLOATS):
        yield Part(f"{bad} of {n}", dtype, partial(_nan, c, bad, n, dtype))


def _nan(c: Context, bad: float, n: int, dtype: torch.dtype) -> Iterator[Result]:
    others = [0, 1, 3, 4]
    args = c.inputs({"shape": (5, n)}, dtype, c.seed)
    if not c.serves(args):
        return
    x = args[0].clone()
    x[2].view(-1)[n // 2] = bad
    changed = (x, *args[1:])
    verdict, got = compare.forward(c.op, changed, c.backend, interpreted=c.interpreted)
    with torch.no_grad():
        clean = as_tuple(call(c.op, args, c.backend))
    if verdict.passed and not compare.same_bits(
        [g[others] for g in got], [k[others] for k in clean]
    ):
        verdict = Verdict(message="another row changed")
    yield c.result("nan", f"{bad} of {n}", dtype, "forward", verdict)


def errors(c: Context) -> Iterator[Part]:
    """Every bad input raises what the declaration says, in words that help."""
    yield Part("all", None, partial(_errors, c))


def _errors(c: Context) -> Iterator[Result]:
    function = c.op.public
    assert function is not None
    for bad in c.op.errors:
        message = ""
        try:
            bad.call(function, c.device)
            message = "nothing was raised"
        except Exception as e:
            missing = [word for word in bad.says if word not in str(e)]
            if not isinstance(e, bad.raises):
                message = f"raised {type(e).__name__}, not {bad.raises.__name__}: {e}"
            elif missing:
                message = f"the message lacks {missing}: {e}"
        yield c.result("errors", bad.name, "", "", Verdict(message=message))


PARTS: dict[str, Callable[[Context], Iterator[Part]]] = {
    "cases": cases,
    "launches": launches,
    "random": random_cases,
    "features": feature_calls,
    "exact": exact,
    "bits": bits,
    "layouts": hostile_layouts,
    "in place": in_place,
    "empty": empty,
    "nan": nan,
    "repeat": repeat,
    "streams": streams,
    "capture": capture,
    "errors": errors,
    "offsets": offsets,
    "large": large,
}
CHECKS = {name: Check(parts) for name, parts in PARTS.items()}
