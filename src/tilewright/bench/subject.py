"""What is to be measured: one op, case, dtype and phase, with everybody who competes in it.

A `Subject` knows how to make arguments, what float64 says about them, how many bytes and flops a
call needs, and its contenders. It knows nothing of clocks. `of_op` makes one from a declaration;
`yardsticks` makes others that are no ops of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import dispatch
from tilewright.bench import rivals
from tilewright.dims import meta_inputs
from tilewright.errors import TilewrightError
from tilewright.explain import kernels as kernels_of
from tilewright.gpu import Gpu
from tilewright.spec import Args, Case, Cost, Op, Traffic, as_tuple, on_meta
from tilewright.verify import compare
from tilewright.verify.compare import Truth

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """Somebody who computes the subject. `bind` does on the arguments all that is not timed."""

    name: str
    ours: bool
    bind: Callable[[Args], Call]
    launches: tuple[str, ...] = ()  # kernels that must be seen when it runs
    automatic: bool = False  # what a call takes that names no backend
    missing: str = ""  # why it cannot compete; then it is only listed


@dataclass(frozen=True)
class Subject:
    op: str
    case: str
    dims: Mapping[str, Any]
    dtype: torch.dtype
    phase: str  # "forward" or "backward"
    make: Callable[[int], Args]  # seed -> fresh arguments
    truth: Callable[[Args], list[Truth]]
    traffic: Traffic
    least: Traffic  # what anybody must move, whatever they saved for the backward
    cost: Cost
    contenders: tuple[Contender, ...]

    @property
    def title(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.phase}, {self.case}, {dtype}"


@dataclass(frozen=True)
class Wish:
    """Which contenders somebody asked for; None: all there are."""

    backends: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None

    def backend(self, name: str) -> bool:
        return self.backends is None or name in self.backends

    def baseline(self, name: str) -> bool:
        return self.baselines is None or name in self.baselines


def of_op(
    op: Op, case: Case, dtype: torch.dtype, phase: str, device: str, gpu: Gpu | None, wish: Wish
) -> Subject:
    """A subject made from a declaration."""
    assert op.inputs is not None
    inputs = op.inputs

    def arguments(seed: int) -> Args:
        rng = torch.Generator(device).manual_seed(seed)
        return tuple(inputs(case.dims, dtype, device, rng))

    meta = meta_inputs(op, case.dims, dtype)
    forward = phase == "forward"
    count = len(op.arguments)

    asked = _as_returned(op)

    def with_gradients(seed: int) -> Args:
        """The op's arguments, then a gradient for each output that a user gets."""
        args = arguments(seed)
        rng = torch.Generator(device).manual_seed(seed + 1)
        outputs = as_tuple(asked.outputs(*on_meta(args)))
        return (
            *args,
            *(torch.randn(o.shape, generator=rng, device=device).to(o.dtype) for o in outputs),
        )

    def backward_truth(both: Args) -> list[Truth]:
        return compare.backward_truth(op, both[:count], both[count:])

    running, its_args = op.in_phase(meta, phase)
    traffic, least = running.traffic(its_args), asked.traffic(meta)
    if not forward:  # gradients in, gradients out
        least = Traffic(least.written, traffic.written)
    return Subject(
        op.name,
        case.name,
        case.dims,
        dtype,
        phase,
        arguments if forward else with_gradients,
        (lambda args: compare.forward_truth(asked, args)) if forward else backward_truth,
        traffic,
        least,
        op.cost_in(case.dims, dtype, phase),
        (*_ours(op, meta, phase, gpu, wish), *_rivals(op, meta, phase, wish)),
    )


def _as_returned(op: Op) -> Op:
    """The op without the outputs that its public function keeps to itself."""
    count = op.returned
    if count is None:
        return op
    return replace(op, outputs=lambda *args: as_tuple(op.outputs(*args))[:count])


def _ours(op: Op, meta: Args, phase: str, gpu: Gpu | None, wish: Wish) -> list[Contender]:
    found = []
    plain = dispatch.choose(op, meta, gpu=gpu).backend.name
    running, args = op.in_phase(meta, phase)
    for backend in op.backends:
        if backend.technology == "torch" or not wish.backend(backend.name):
            continue
        if running.backend(backend.name) is None:
            continue  # its gradient comes from another backend, which has a row of its own
        try:
            choice = dispatch.choose(running, args, backend=backend.name, gpu=gpu)
            launches, missing = kernels_of(choice, args), ""
        except TilewrightError as e:
            launches, missing = (), str(e)
        call = _as_called(op, backend.name)
        bind, first = _binder(op, call, phase), backend.name == plain
        found.append(Contender(backend.name, True, bind, launches, first, missing))
    return found


def _rivals(op: Op, meta: Args, phase: str, wish: Wish) -> list[Contender]:
    found = []
    for name, rival in rivals.of(op).items():
        if wish.baseline(name):
            missing = rival.missing or rival.refuses(*meta)
            bind = rival.bind if phase == "forward" else _binder(op, rival, phase)
            found.append(Contender(name, False, bind, missing=missing))
    return found


def _as_called(op: Op, backend: str) -> Callable[..., Any]:
    spelled = op.as_called
    assert spelled is not None
    return lambda *args: spelled(backend, *args)


def _binder(op: Op, function: Callable[..., Any], phase: str) -> Callable[[Args], Call]:
    if phase == "forward":
        return lambda args: lambda: function(*args)
    count = len(op.arguments)

    def bind(both: Args) -> Call:
        args, grads = list(both[:count]), both[count:]
        places = compare.gradient_places(op, tuple(args))
        for i in places:
            args[i] = args[i].detach().requires_grad_()
        with torch.enable_grad():
            outputs = as_tuple(function(*args))
        leaves = [args[i] for i in places]
        return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return bind


def judge(truths: Sequence[Truth], results: Any) -> compare.Verdict:
    """The worst of a call's results."""
    got = as_tuple(results)
    if len(got) != len(truths):
        return compare.Verdict(message=f"{len(got)} results where there should be {len(truths)}")
    verdict = compare.Verdict()
    for result, (what, wanted, bound) in zip(got, truths, strict=True):
        verdict = verdict.worst(compare.within(result, wanted, bound, what))
    return verdict
