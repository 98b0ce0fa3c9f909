"""The checks of `tilewright verify`, each generic over an op's declaration.

A check is a function `(Context) -> iterator of Result`. They import neither pytest nor hypothesis:
the tests stand on them, not the other way round.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright import dispatch
from tilewright.errors import UnsupportedError
from tilewright.library import call
from tilewright.spec import FLOATS, Args, Case, Choice, Op, as_tuple, on_meta
from tilewright.toolkit import memory
from tilewright.verify import compare, features, layouts
from tilewright.verify import offsets as sparse_offsets
from tilewright.verify.compare import Verdict
from tilewright.verify.record import Result

FEW_ROWS = 40  # a kernel may be for few


@dataclass(frozen=True)
class Context:
    """What one check runs on."""

    op: Op
    backend: str
    device: str  # "cpu" or "cuda"
    full: bool
    cases: int  # random cases
    seed: int
    case: str = ""  # this edge case alone

    def by_name(self) -> tuple[str, str, str, bool, int, int, str]:
        """The fields, with the op's name for the op."""
        return self.op.name, self.backend, self.device, self.full, self.cases, self.seed, self.case

    @property
    def brief(self) -> bool:
        """Whether one dtype stands for all: the interpreter takes as long for each."""
        return self.device == "cpu" and not self.full

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu" and self.backend != "torch"

    def serves(self, args: Args) -> bool:
        """Skipping is asking: the declaration says what a backend takes."""
        try:
            dispatch.choose(self.op, args, backend=self.backend)
        except UnsupportedError:
            return False
        return True

    def launches(self, args: Args) -> list[Choice]:
        """What a table may name, for a call that is served."""
        on = dispatch.choose(self.op, args, backend=self.backend).gpu
        return dispatch.launches(self.op, self.backend, args, on)

    def result(
        self, check: str, case: str, dtype: Any, phase: str, v: Verdict, seed: int | None = None
    ) -> Result:
        name = str(dtype).removeprefix("torch.")
        return Result(
            self.op.name, check, self.backend, case, name, phase, v.passed, v.ratio, v.error,
            v.message, self.seed if seed is None else seed,
        )  # fmt: skip

    def inputs(self, dims: Any, dtype: torch.dtype, seed: int) -> Args:
        assert self.op.inputs is not None
        rng = torch.Generator().manual_seed(seed)
        return tuple(self.op.inputs(dims, dtype, self.device, rng))


Check = Callable[[Context], Iterator[Result]]


def _both(c: Context, check: str, case: str, dtype: Any, args: Args, seed: int) -> Iterator[Result]:
    """Forward and backward of one call."""
    if not c.serves(args):
        return
    verdict, _ = compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
    yield c.result(check, case, dtype, "forward", verdict, seed)
    # without a backward of its own, a backend's gradients are another's, which is checked too
    if c.op.autograd is not None and c.op.autograd.op.backend(c.backend) is not None:
        verdict, _ = compare.backward(c.op, args, c.backend, seed, interpreted=c.interpreted)
        yield c.result(check, case, dtype, "backward", verdict, seed)


def served(
    c: Context, case: str, made: Callable[[torch.dtype], Args], one: bool
) -> Iterator[tuple[torch.dtype, Args]]:
    """A case in every dtype that is served, or in one, which its name draws."""
    first = zlib.crc32(f"{c.op.name} {case}".encode()) % len(FLOATS)
    for dtype in FLOATS[first:] + FLOATS[:first]:
        args = made(dtype)
        if c.serves(args):
            yield dtype, args
            if one:
                return


def cases(c: Context) -> Iterator[Result]:
    """Every edge case the op declares."""
    for case in edge_cases(c):
        made = partial(c.inputs, case.dims, seed=c.seed)
        one = c.brief and not case.is_of_numbers
        for dtype, args in served(c, case.name, made, one):
            yield from _both(c, "cases", case.name, dtype, args, c.seed)


GROUPS = {"cpu": ("edge",), "cuda": ("edge", "plan")}  # of cases, by device


def edge_cases(c: Context) -> list[Case]:
    edge = [
        case for case in c.op.cases if case.group in GROUPS[c.device] and c.case in ("", case.name)
    ]
    if c.full or c.case or c.device == "cuda":
        return edge
    # a quick run on a CPU keeps the sizes around the tile borders and the first wide one
    wide = [case for case in edge if max(case.dims["shape"]) > 32_768]
    return [case for case in edge if case not in wide[1:]]


def random_cases(c: Context) -> Iterator[Result]:
    """Random dims, dtypes and layouts; the seed makes the whole case.

    What this backend's declaration refuses is drawn anew, from seeds far beyond.
    """
    for first in range(c.seed, c.seed + c.cases):
        for seed in range(first, first + REDRAWS * FAR, FAR):
            dims, dtype, args = _draw(c, seed)
            if c.serves(args):
                yield from _both(c, "random", str(dims["shape"]), dtype, args, seed)
                break
        else:
            never = Verdict(message=f"none of {REDRAWS} draws is served")
            yield c.result("random", "", None, "forward", never, first)


FAR, REDRAWS = 10**6, 200


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


def launches(c: Context) -> Iterator[Result]:
    """Every edge case in every launch that a table may name: right, whether it names it or not."""
    times = 20 if c.device == "cuda" else 1
    for case, dtype in itertools.product(edge_cases(c), (torch.float16, torch.float32)):
        args = c.inputs(case.dims, dtype, c.seed)
        if not c.serves(args):
            continue
        found = c.launches(args)
        truths = compare.forward_truth(c.op, args, interpreted=c.interpreted) if found else []
        for choice in found:
            verdict, _ = compare.launched(c.op, args, choice, truths, times)
            yield c.result("launches", f"{case.name} {choice}", dtype, "forward", verdict)


def feature_calls(c: Context) -> Iterator[Result]:
    """Every two options of the op together, on a GPU every three; the seed is a call's number."""
    calls = features.calls(c.op.name, c.device, c.backend)
    for seed, (levels, dims, dtype) in enumerate(calls):
        if c.seed <= seed < c.seed + c.cases:
            args = c.inputs(dims, dtype, seed)
            yield from _both(c, "features", levels, dtype, args, seed)


def exact(c: Context) -> Iterator[Result]:
    """Inputs whose result is exact in any order of arithmetic: tolerance 0."""
    if c.op.exact_inputs is None or c.op.sample is None:
        return
    for first in range(c.seed, c.seed + max(c.cases // 2, 1)):
        for seed in range(first, first + REDRAWS * FAR, FAR):
            dims, dtype, args = _exact_draw(c, seed)
            if c.serves(args):
                break
        else:
            continue  # an op may have no exact inputs that this backend takes
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


def bits(c: Context) -> Iterator[Result]:
    """Calls that the op names: the reference's bits, of the same dtype, on the same device.

    A CPU runs them too, but there the interpreter stands in for the instructions of a GPU.
    """
    if c.op.bit_inputs is None:
        return
    for name, args in c.op.bit_inputs(c.device):
        if not c.serves(args):
            continue
        verdict, got = compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
        if verdict.passed and not compare.same_bits(got, as_tuple(c.op.reference(*args))):
            verdict = Verdict(message="not the bits of the reference")
        yield c.result("bits", name, args[0].dtype, "forward", verdict)


BEHIND = 64  # elements after what is written in place
BASE = (3, 2, 128)  # what is laid out: small, with two leading dims and whole 16-byte vectors


def hostile_layouts(c: Context) -> Iterator[Result]:
    """Eight layouts: the bits of the contiguous path of the same alignment class, and right."""
    judge = partial(_judge, c)
    for variant, name in itertools.product(c.op.variants, layouts_of(c.op)):
        case = _case(name, variant)
        made = partial(_laid_out, c, variant, layouts.LAYOUTS[name])
        for dtype, args in served(c, case, made, c.brief):
            twins = _contiguous(c, args)
            for phase in ("forward", "backward") if c.op.autograd else ("forward",):
                verdict, got = judge(phase, args)
                _, bits = judge(phase, twins)
                if verdict.passed and not compare.same_bits(got, bits):
                    verdict = Verdict(message="not the bits of the contiguous path")
                yield c.result("layouts", case, dtype, phase, verdict)
            # the incoming gradient takes the layout as well
            if c.op.autograd and name in layouts.SAME_VALUES:
                plain = compare.random_like(as_tuple(c.op.outputs(*twins)), c.seed)
                verdict, _ = judge("backward", twins, [layouts.LAYOUTS[name](g) for g in plain])
                yield c.result("layouts", f"{case}, gradient", dtype, "backward", verdict)


def _case(name: str, variant: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{k}={v}" for k, v in variant.items())])


def layouts_of(op: Op) -> list[str]:
    """The layouts whose number of dims the op takes."""
    base = torch.empty(BASE)
    return [n for n, lay in layouts.LAYOUTS.items() if not op.ranks or lay(base).dim() in op.ranks]


def _laid_out(c: Context, variant: Any, layout: layouts.Layout, dtype: torch.dtype) -> Args:
    """Arguments of which the layout argument is laid out so."""
    place = c.op.arguments.index(c.op.layout_argument)
    hostile = layout(c.inputs({"shape": BASE}, dtype, c.seed)[place])
    # the other tensors of the call take the hostile one's shape
    plain = c.inputs({"shape": tuple(hostile.shape), **variant}, dtype, c.seed)
    return (*plain[:place], hostile, *plain[place + 1 :])


def _contiguous(c: Context, args: Args) -> Args:
    place = c.op.arguments.index(c.op.layout_argument)
    return (*args[:place], _twin(args[place]), *args[place + 1 :])


def _twin(laid: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, as aligned as the tensor: another binary may contract products to fused
    multiply-adds otherwise, and float32 shows it."""
    twin = laid.contiguous().clone()
    return twin if layouts.is_aligned(laid) else layouts.misaligned(twin)


def _judge(c: Context, phase: str, args: Args, grads: Any = None) -> tuple[Verdict, Any]:
    if phase == "forward":
        return compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
    return compare.backward(c.op, args, c.backend, c.seed, interpreted=c.interpreted, grads=grads)


def in_place(c: Context) -> Iterator[Result]:
    """Written over its input, in every layout without overlap: the bits of the forward, no more."""
    if c.op.in_place is None:
        return
    for variant, name in itertools.product(c.op.variants, layouts_of(c.op)):
        if name == "expanded":
            continue
        case = _case(name, variant)
        made = partial(_laid_out, c, variant, layouts.LAYOUTS[name])
        for dtype, args in served(c, case, made, c.brief):
            yield c.result("in place", case, dtype, "forward", _written_in_place(c, args))


def _written_in_place(c: Context, args: Args) -> Verdict:
    """Whether the arguments, written over, hold the forward's bits, and nothing else is touched."""
    assert c.op.in_place is not None
    count = len(as_tuple(c.op.outputs(*on_meta(args))))  # its first arguments are written
    rooms, targets = zip(*map(_in_a_room, args[:count]), strict=True)
    starts = [room.clone() for room in rooms]
    with torch.no_grad():
        with memory.guarded() as guard:
            copies = map(_twin, targets)
            wanted = as_tuple(call(c.op, (*copies, *args[count:]), c.backend))
        verdict = Verdict(message="; ".join(guard.faults()))
        wanted_rooms = [start.clone() for start in starts]
        for room, target, values in zip(wanted_rooms, targets, wanted, strict=True):
            geometry = (target.shape, target.stride(), target.storage_offset())
            room.as_strided(*geometry).copy_(values)
        for _ in range(3):  # the dispatcher's way, the short way, and once more
            for room, start in zip(rooms, starts, strict=True):
                room.copy_(start)
            call(c.op.in_place, (*targets, *args[count:]), c.backend)
            if not compare.same_bits(rooms, wanted_rooms):
                verdict = Verdict(message="not the bits of the forward, or more than those")
    return verdict


def _in_a_room(laid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All the memory that a tensor is a view of, and some behind it; and the view."""
    geometry = (laid.shape, laid.stride(), laid.storage_offset())
    values = laid.new_empty(0).set_(laid.untyped_storage())
    behind = values.new_full((BEHIND,), -1.0)  # what reaches past the end must show there
    room = torch.cat((values, behind))
    room[room.isnan()] = -1.0  # what lies around the view must stay, and a NaN would anyway
    return room, room.as_strided(*geometry)


def empty(c: Context) -> Iterator[Result]:
    """Every subset of dims set to zero: empty results, and zero gradients for weights."""
    shape = (2, 3, 16)
    subsets = [s for r in (1, 2, 3) for s in itertools.combinations(range(3), r)]
    for zeros in subsets:
        sizes = tuple(0 if i in zeros else n for i, n in enumerate(shape))
        args = c.inputs({"shape": sizes}, torch.float16, c.seed)
        yield from _both(c, "empty", str(sizes), torch.float16, args, c.seed)


def nan(c: Context) -> Iterator[Result]:
    """A NaN or an infinity does to its row what float64 says; the other rows keep their bits."""
    others = [0, 1, 3, 4]
    bads = (float("nan"), float("inf"), float("-inf"))
    for bad, n in itertools.product(bads, (33, 1024)):
        case, made = f"{bad} of {n}", partial(c.inputs, {"shape": (5, n)}, seed=c.seed)
        for dtype, args in served(c, case, made, c.brief):
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
            yield c.result("nan", case, dtype, "forward", verdict)


def repeat(c: Context) -> Iterator[Result]:
    """The same call gives the same bits, forward and backward."""
    times = 250 if c.device == "cuda" else 2
    columns = (48, 1000, 20_000) if c.device == "cuda" else (48, 1000)
    rows = (300, FEW_ROWS) if c.device == "cuda" else (FEW_ROWS,)
    calls = []
    for dtype, n in itertools.product(FLOATS, columns):
        named = [(f"{m} x {n}", {"shape": (m, n)}, dtype) for m in rows]
        calls += [one for one in named if c.serves(c.inputs(*one[1:], c.seed))][:1]
    if c.device == "cuda":  # and some with options
        calls += features.calls(c.op.name, c.device, c.backend)[::8]
    for name, dims, dtype in calls:
        args = c.inputs(dims, dtype, c.seed)
        if not c.serves(args):
            continue
        upstream = compare.random_like(as_tuple(c.op.outputs(*args)), c.seed)
        first = _outputs_and_grads(c, args, upstream)
        again = (_outputs_and_grads(c, args, upstream) for _ in range(times))
        same = all(compare.same_bits(first, other) for other in again)
        verdict = Verdict() if same else Verdict(message="bits differ from run to run")
        yield c.result("repeat", name, dtype, "", verdict)


def _outputs_and_grads(c: Context, args: Args, upstream: Any = None) -> list[torch.Tensor]:
    if c.op.autograd is None:
        return list(as_tuple(call(c.op, args, c.backend)))
    leaves, wanted = compare.with_leaves(c.op, args)
    outputs = as_tuple(call(c.op, leaves, c.backend))
    upstream = upstream or compare.random_like(outputs, c.seed)
    grads = torch.autograd.grad(outputs, wanted, upstream)
    return [*(o.detach() for o in outputs), *grads]


def streams(c: Context) -> Iterator[Result]:
    """On a stream of its own, behind work that is late: a launch elsewhere reads old values."""
    if c.device != "cuda":
        return
    for dtype in FLOATS:
        args, fresh, upstream = _twice(c, dtype)
        if not c.serves(args):
            continue
        wanted = _outputs_and_grads(c, fresh, upstream)
        _outputs_and_grads(c, args, upstream)  # compiles, so that nothing below waits for that
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
            _copy(args, fresh)
            got = _outputs_and_grads(c, args, upstream)
        stream.synchronize()
        same = compare.same_bits(got, wanted)
        verdict = Verdict() if same else Verdict(message="not launched on the current stream")
        yield c.result("streams", "37 x 1000", dtype, "", verdict)


def capture(c: Context) -> Iterator[Result]:
    """A CUDA graph captured after a warm call, replayed on other values, gives their bits."""
    if c.device != "cuda":
        return
    for dtype in FLOATS:
        args, fresh, upstream = _twice(c, dtype)
        if not c.serves(args):
            continue
        wanted = _outputs_and_grads(c, fresh, upstream)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _outputs_and_grads(c, args, upstream)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = _outputs_and_grads(c, args, upstream)
        _copy(args, fresh)
        graph.replay()
        same = compare.same_bits(got, wanted)
        verdict = Verdict() if same else Verdict(message="the replay gives other bits")
        yield c.result("capture", "37 x 1000", dtype, "", verdict)


def _twice(c: Context, dtype: torch.dtype) -> tuple[Args, Args, list[torch.Tensor]]:
    """Arguments, the same with other values, and an incoming gradient."""
    args, fresh = (c.inputs({"shape": (37, 1000)}, dtype, c.seed + i) for i in range(2))
    return args, fresh, compare.random_like(as_tuple(c.op.outputs(*args)), c.seed)


def _copy(to: Args, values: Args) -> None:
    for a, b in zip(to, values, strict=True):
        if isinstance(a, torch.Tensor):
            a.copy_(b)


def errors(c: Context) -> Iterator[Result]:
    """Every bad input raises what the declaration says, in words that help."""
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


def offsets(c: Context) -> Iterator[Result]:
    """Strides that take offsets past 2^31, in a process: a 32-bit offset may crash it."""
    for number, variant in enumerate(c.op.variants):
        shape = sparse_offsets.ROWS, sparse_offsets.COLUMNS
        if not c.serves(c.inputs({"shape": shape, **variant}, torch.float16, c.seed)):
            continue
        message = sparse_offsets.wrong(c.op.name, c.backend, c.device, number)
        case = _case("stride 2^24 x 130 rows", variant)
        yield c.result("offsets", case, torch.float16, "", Verdict(message=message))


def large(c: Context) -> Iterator[Result]:
    """More than 2^31 elements for real; the last rows are the ones a 32-bit offset gets wrong."""
    if c.device == "cuda" and c.full:
        yield from last_rows(c, 2**31 // 4096 + 3, 4096)


def last_rows(c: Context, rows: int, n: int) -> Iterator[Result]:
    """The first and the last of many rows give the bits of a call with those four alone. Of an op
    that is tuned by shape few rows may be added in another order: there sums are exact."""
    inputs = c.op.exact_inputs if c.op.tuning else c.op.inputs
    assert inputs is not None
    rng = torch.Generator().manual_seed(c.seed)
    few = tuple(inputs({"shape": (4, n)}, torch.float16, c.device, rng))
    if not c.serves(few):
        return
    ends = torch.tensor([0, 1, rows - 2, rows - 1], device=c.device)
    many = tuple(
        torch.zeros((rows, *a.shape[1:]), dtype=a.dtype, device=a.device).index_copy_(0, ends, a)
        if isinstance(a, torch.Tensor) and a.dim() > 1 and len(a) == 4
        else a
        for a in few
    )
    if not c.serves(many):
        return
    with torch.no_grad():
        got = [torch.cat((g[:2], g[-2:])) for g in as_tuple(call(c.op, many, c.backend))]
        wanted = as_tuple(call(c.op, few, c.backend))
    message = "" if compare.same_bits(got, wanted) else "the last rows are wrong"
    yield c.result("large", f"{rows} x {n}", torch.float16, "forward", Verdict(message=message))


CHECKS: dict[str, Check] = {
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
