"""One call against float64, on the rounded inputs, within a bound that theory gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from tilewright import dispatch, tuned
from tilewright.library import call
from tilewright.spec import Args, Choice, Op, Rounding, as_tuple, on_meta
from tilewright.toolkit import memory

FLOAT32 = (torch.float32, torch.float32)  # of results and arguments


@dataclass(frozen=True)
class Verdict:
    """Worst error of a call over its tolerance, or what else was wrong."""

    ratio: float = 0.0
    error: float = 0.0
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message and self.ratio <= 1.0

    def worst(self, other: Verdict) -> Verdict:
        if self.message or other.message:
            return self if self.message else other
        return other if other.ratio > self.ratio or math.isnan(other.ratio) else self


def numbers(*values: torch.Tensor) -> list[float]:
    """Values of one element each, in one transfer.

    Processes that verify side by side share a GPU, and each wait for it may last as long as the
    others' turns: waits are most of what a check costs.
    """
    return torch.stack([v.double() for v in values]).tolist() if values else []


def in_float64(args: Sequence[Any]) -> list[Any]:
    def wide(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return a.detach().double() if a.is_floating_point() else a
        return torch.float64 if isinstance(a, torch.dtype) else a

    return [wide(a) for a in args]


def roundings(outputs: Sequence[torch.Tensor], args: Sequence[Any], interpreted: bool) -> Any:
    """A Rounding per output: of its own dtype, and of the coarsest input's."""
    floats = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    coarsest = max(floats, key=lambda d: torch.finfo(d).eps)
    return [Rounding.of(o.dtype, coarsest, interpreted=interpreted) for o in outputs]


def within(
    got: torch.Tensor,
    wanted: torch.Tensor,
    bound: torch.Tensor,
    what: str,
    *,
    truncates: bool = False,
) -> Verdict:
    """|got - wanted| <= bound everywhere; NaN and infinities must stand where float64 has them.

    What the result's dtype cannot hold becomes infinity; where it `truncates`, as Triton's
    interpreter does to bfloat16, the largest number.
    """
    if got.shape != wanted.shape:
        return Verdict(message=f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
    if not got.numel():
        return Verdict()
    wide = got.detach().double()
    kind = torch.finfo if got.is_floating_point() else torch.iinfo
    limit = kind(got.dtype).max
    may_overflow = wanted.abs() + bound > limit
    infinite = (wide == wanted.sign() * math.inf) & (may_overflow | wanted.isinf())
    odd = (wide.isnan() != wanted.isnan()) | (~infinite & (wide.isinf() | wanted.isinf()))
    plain = ~infinite & ~wanted.isnan()
    aim = wanted.clamp(-limit, limit) if truncates else wanted
    error = torch.where(plain, (wide - aim).abs(), 0.0)
    allowed = torch.where(plain, bound.expand_as(wanted), 1.0)
    ratio = torch.where(error > 0, error / allowed, 0.0)  # a zero bound allows no error: inf
    is_odd, worst_ratio, worst_error = numbers(odd.any(), ratio.max(), error.max())
    if is_odd:
        at = tuple(odd.nonzero()[0].tolist())
        return Verdict(
            message=f"{what}: {float(wide[at])} at {at} where float64 has {float(wanted[at])}"
        )
    return Verdict(worst_ratio, worst_error)


def like_torch(
    got: torch.Tensor,
    wanted: torch.Tensor,
    torchs: torch.Tensor,
    u_out: float,
    arithmetic: torch.Tensor | None = None,
    *,
    times: float = 2,
    truncates: bool = False,
) -> Verdict:
    """FlashAttention's rule: at most so many times torch's own error in this dtype, above a floor.

    The floor is one rounding of the result and the two ulps each that a GPU's division and exp2 may
    be off: below it the rule would compare luck. `arithmetic` raises it to a bound of what is
    computed in float32, where terms may cancel. `truncates`: what torch rounds to nearest on the
    way is truncated here (bfloat16 in Triton's interpreter), which errs twice as much.
    """
    finite = wanted.isfinite() & torchs.isfinite() & got.isfinite()
    if not got.numel():
        return Verdict()

    def largest(values: torch.Tensor) -> torch.Tensor:
        return torch.where(finite, values.abs(), 0.0).max()

    ours, theirs, size = numbers(
        largest(got.double() - wanted), largest(torchs.double() - wanted), largest(wanted)
    )
    floor = (u_out + 4 * 2.0**-24) * size + torch.finfo(got.dtype).tiny
    if arithmetic is not None:
        floor += numbers(largest(arithmetic))[0]
    return Verdict(ours / (times * (2 if truncates else 1) * theirs + floor), ours)


def rounds_like(got: torch.Tensor, torchs: torch.Tensor, what: str) -> Verdict:
    """The reference's roundings on the way: with another one, a good part of the results differ.

    float32 arithmetic in another order moves a result by far less than 2^-14 of itself, and so over
    a rounding border of the half-precision types once in a thousand elements; a rounding left out
    on the way moves every third. No bound on the error can tell: fewer roundings err less.
    """
    ours, theirs = got.double(), torchs.double()
    finite = ours.isfinite() & theirs.isfinite()
    apart = (ours - theirs).abs() > 2.0**-14 * theirs.abs() + torch.finfo(got.dtype).tiny
    count, total = map(int, numbers((apart & finite).sum(), finite.sum()))
    if count > max(4, total // 10):
        return Verdict(message=f"{what}: {count} of {total} are not rounded as the reference's")
    return Verdict()


def judged(call: Callable[..., tuple[Verdict, Any]]) -> Callable[..., tuple[Verdict, Any]]:
    """An exception is a verdict too: the run goes on and the report names it."""

    @wraps(call)
    def judge(*args: Any, **kwargs: Any) -> tuple[Verdict, Any]:
        try:
            return call(*args, **kwargs)
        except Exception as e:
            return Verdict(message=f"raised {type(e).__name__}: {e}"), ()

    return judge


MANY = 1024  # elements of result and gradient, below which the largest errors would compare luck


class Truth(NamedTuple):
    """One result in float64, and how far from it a kernel may be."""

    what: str
    wanted: torch.Tensor
    bound: torch.Tensor


def forward_truth(op: Op, args: Args, *, interpreted: bool = False) -> list[Truth]:
    """What each output should be."""
    wide = in_float64(args)
    wanted = tuple(w.double() for w in as_tuple(op.reference(*wide)))  # fp8 has no arithmetic
    declared = as_tuple(op.outputs(*on_meta(args)))
    return [
        Truth(f"output {i}", wanted[i], op.tolerance(r, wanted, *wide)[i])
        for i, r in enumerate(roundings(declared, args, interpreted))
    ]


def gradient_places(op: Op, args: Args) -> list[int]:
    """Which arguments get a gradient: those the backward names, where they are given."""
    assert op.autograd is not None
    names = [n for names in op.autograd.gradients for n in names]
    return [i for i, n in enumerate(op.arguments) if n in names and args[i] is not None]


def with_leaves(op: Op, args: Args) -> tuple[list[Any], list[torch.Tensor]]:
    """The arguments, with leaves of a graph for those that get a gradient, and these leaves."""
    found, places = list(args), gradient_places(op, args)
    for i in places:
        found[i] = args[i].detach().requires_grad_()
    return found, [found[i] for i in places]


class Gradients(NamedTuple):
    """What the gradient of each argument should be, by name, and the backward's own arguments."""

    op: Op
    wanted: dict[str, torch.Tensor]
    call: Args

    def bound(self, name: str, rounding: Rounding) -> torch.Tensor:
        rule = self.op.autograd
        assert rule is not None
        place = next(i for i, names in enumerate(rule.gradients) if name in names)
        nothing = self.call[0].new_empty(0)
        results = tuple(self.wanted.get(names[0], nothing) for names in rule.gradients)
        return rule.op.tolerance(rounding, results, *self.call)[place]


def true_gradients(op: Op, args: Args, grads: Sequence[torch.Tensor]) -> Gradients:
    """Of the arguments of `gradient_places`, by autograd through the reference in float64.

    Fewer gradients than outputs: nobody used the last ones.
    """
    places = gradient_places(op, args)
    wide, wide_grads = in_float64(args), in_float64(grads)
    for i in places:
        wide[i].requires_grad_()
    outputs = as_tuple(op.reference(*wide))
    used = outputs[: len(grads)]
    found = torch.autograd.grad(used, [wide[i] for i in places], wide_grads)
    assert op.autograd is not None
    may_lack = op.autograd.op.optional
    for i in range(len(used), len(outputs)):  # as autograd hands them on
        wide_grads.append(None if may_lack[i] else torch.zeros_like(outputs[i]))
    wanted = {op.arguments[i]: g for i, g in zip(places, found, strict=True)}
    plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in wide)
    needs = dict.fromkeys(wanted, True)
    call = op.backward_call(plain, tuple(o.detach() for o in outputs), tuple(wide_grads), needs)
    return Gradients(op, wanted, call)


def backward_truth(
    op: Op, args: Args, grads: Sequence[torch.Tensor], *, interpreted: bool = False
) -> list[Truth]:
    """What the gradient of each argument should be, for the arguments of `gradient_places`."""
    return _truths(true_gradients(op, args, grads), args, grads, interpreted)


def _truths(
    true: Gradients, args: Args, grads: Sequence[torch.Tensor], interpreted: bool
) -> list[Truth]:
    given = [args[i] for i in gradient_places(true.op, args)]
    return [
        Truth(f"gradient of {name}", wanted, true.bound(name, r))
        for (name, wanted), r in zip(
            true.wanted.items(), roundings(given, (*args, *grads), interpreted), strict=True
        )
    ]


def misbehaved(
    op: Op, before: Sequence[Any], args: Args, got: Sequence[torch.Tensor], guard: memory.Guard
) -> str:
    """What a call did beside computing: wrote elsewhere, or returned what was not declared."""
    faults = guard.faults()
    if faults:
        return faults[0]
    spoiled = changed(op.arguments, before, args)
    if spoiled:
        return f"argument {spoiled[0]} was changed"
    expected = as_tuple(op.outputs(*on_meta(args)))
    for o, e in zip(got, expected, strict=True):
        if (o.dtype, o.shape, _real_strides(o)) != (e.dtype, e.shape, _real_strides(e)):
            return f"output is {o.dtype} {o.stride()}, declared {e.dtype} {e.stride()}"
    return ""


@judged
def forward(op: Op, args: Args, backend: str, *, interpreted: bool) -> tuple[Verdict, Any]:
    """Run the op in poisoned memory and judge every output. Returns the outputs too."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with memory.guarded() as guard, torch.no_grad():
        got = as_tuple(call(op, args, backend))
    wrong = misbehaved(op, before, args, got, guard)
    if wrong:
        return Verdict(message=wrong), got
    if got[0].is_cuda:
        # the first makes the plan, the second takes the short way, the third the launch it left
        ways = ("dispatcher", "short way", "ready launch")
        with torch.no_grad():
            again = [as_tuple(call(op, args, backend)) for _ in ways]
        names = [way for way in ways for _ in got]
        strange = changed(names, got * len(ways), [o for each in again for o in each])
        if strange:
            return Verdict(message=f"the {strange[0]} gives other bits"), got
    torchs = as_tuple(op.reference(*args))
    tensors = [a for a in (*args, *got) if isinstance(a, torch.Tensor)]
    truncates = interpreted and any(t.dtype == torch.bfloat16 for t in tensors)
    truths = forward_truth(op, args, interpreted=interpreted)
    comparable = op.beside_torch is None or op.beside_torch(*args)
    verdict = Verdict()
    for ours, theirs, truth, r in zip(
        got, torchs, truths, roundings(got, args, interpreted), strict=True
    ):
        what, wanted, bound = truth
        verdict = verdict.worst(within(ours, wanted, bound, what, truncates=truncates))
        if comparable and ours.element_size() > 1:  # fp8 is right or a step off: luck
            verdict = verdict.worst(like_torch(ours, wanted, theirs, r.u_out, truncates=truncates))
        if op.rounds_as_reference and not truncates:
            verdict = verdict.worst(rounds_like(ours, theirs, what))
    return verdict, got


@judged
def launched(
    op: Op, args: Args, choice: Choice, truths: Sequence[Truth], times: int
) -> tuple[Verdict, Any]:
    """Run the op as a table may want it, in poisoned memory, and so many times more: same bits."""

    def run() -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), tuned.forcing(choice):
            made = dispatch.prepare(op, args, choice.backend)
            return as_tuple(made(*args, choice.backend))

    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    with memory.guarded() as guard:
        got = run()
    wrong = misbehaved(op, before, args, got, guard)
    if wrong:
        return Verdict(message=wrong), got
    verdict = Verdict()
    for ours, (what, wanted, bound) in zip(got, truths, strict=True):
        verdict = verdict.worst(within(ours, wanted, bound, what))
    if verdict.passed and not all(same_bits(got, run()) for _ in range(times)):
        verdict = Verdict(message="bits differ from run to run")
    return verdict, got


@judged
def backward(
    op: Op, args: Args, backend: str, seed: int, *, interpreted: bool, grads: Any = None
) -> tuple[Verdict, Any]:
    """Gradients through autograd, against float64 autograd of the reference."""
    args_with_leaves, leaves = with_leaves(op, args)
    with memory.guarded() as guard:
        outputs = as_tuple(call(op, args_with_leaves, backend))
        grads = grads or random_like(outputs, seed)
        before = [g.clone() for g in grads]
        got = torch.autograd.grad(outputs, leaves, grads)
    faults = guard.faults()
    if faults:
        return Verdict(message=faults[0]), got
    if not same_bits(grads, before):
        return Verdict(message="the incoming gradient was changed"), got

    truncates = interpreted and any(t.dtype == torch.bfloat16 for t in (*got, *outputs))
    verdict = Verdict()
    true = true_gradients(op, args, grads)
    truths = _truths(true, args, grads, interpreted)
    for ours, (what, wanted, bound) in zip(got, truths, strict=True):
        verdict = verdict.worst(within(ours, wanted, bound, what, truncates=truncates))
    many = outputs[0].numel() >= MANY
    if op.backward_times_torch is not None and args[0].element_size() == 2 and many:
        torchs = torch.autograd.grad(as_tuple(op.reference(*args_with_leaves)), leaves, grads)
        # what cancels in one way of computing and not in another is as large as its arithmetic errs
        floors = [true.bound(name, Rounding.of(*FLOAT32)) for name in true.wanted]
        rule = partial(like_torch, times=op.backward_times_torch, truncates=truncates)
        u_outs = [r.u_out for r in roundings(got, (*args, *grads), interpreted)]
        for ours, theirs, truth, *rest in zip(got, torchs, truths, u_outs, floors, strict=True):
            if ours.numel() >= MANY:
                verdict = verdict.worst(rule(ours, truth.wanted, theirs, *rest))
    return verdict, got


def _real_strides(t: torch.Tensor) -> list[int]:
    """Strides that matter: those of dims longer than one."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def random_like(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=rng).to(o.dtype).to(o.device) for o in outputs]


def same_bits(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return not changed([""] * len(a), a, b)


def changed(names: Sequence[str], before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """The names of the tensors whose bits, shape or dtype differ; other arguments do not count."""
    pairs = zip(names, before, after, strict=True)
    tensors = [
        (name, a, b)
        for name, a, b in pairs
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
    ]
    differ = numbers(*(_differ(a, b) for _, a, b in tensors))
    return [name for (name, _, _), d in zip(tensors, differ, strict=True) if d]


def _differ(a: Any, b: Any) -> torch.Tensor:
    """Whether they do, on their device."""
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not both or (a.shape, a.dtype) != (b.shape, b.dtype):
        return torch.ones((), device=(a if isinstance(a, torch.Tensor) else b).device)
    return (_bits(a) != _bits(b)).any()


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: NaN equals itself, and -0 differs from 0."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.detach().contiguous().view(kinds[t.element_size()])
