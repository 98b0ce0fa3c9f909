"""One bucket, measured: every choice checked, timed among the others, and checked again.

As in `bench`: whoever is wrong before or after gets no number, and the second check is on fresh
values in the very tensors that were timed. The clock is the same; one way of timing is enough here,
the one that `bench` believes at this size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright import dispatch, tuned
from tilewright.bench import timing
from tilewright.bench.measure import SMALL
from tilewright.bench.roofs import sets_for
from tilewright.errors import TilewrightError
from tilewright.gpu import Gpu
from tilewright.spec import Args, Choice, Op, as_tuple
from tilewright.tuned.file import Bucket, Timed
from tilewright.tuning import judge
from tilewright.tuning.plan import Job

NOISE = 0.02  # times of one run that are closer than this are equal: the first in order wins
REPLAYS = 12  # of a graph of calls
SETS = (8, 64)  # of tensors that a graph walks over, at least and at most
ROUNDS = (8, 40)  # of large calls, one by one
BUDGET_US = 400e3  # for the rounds of all choices, by the model
HEAT_US = 50e3  # before samples count: large products run into the power limit

Run = Callable[..., Any]


def prepared(op: Op, args: Args, choice: Choice) -> Run:
    """`run(*args)` with this choice, past the plans that the library keeps."""
    with tuned.forcing(choice):
        run = dispatch.prepare(op, args, choice.backend)
    return lambda *args: run(*args, choice.backend)


@dataclass(frozen=True)
class Tools:
    """On a GPU the real ones, in a test whatever tells the lie in question."""

    gpu: Gpu
    clock: timing.Clock
    device: str = "cuda"
    prepare: Callable[[Op, Args, Choice], Run] = prepared
    checker: Callable[[Job, Args, int], judge.Checker] = judge.checker
    seed: int = 0


@dataclass(frozen=True)
class Found:
    bucket: Bucket
    wrong: tuple[Choice, ...]  # of the refused, those that gave a wrong result or none


@dataclass
class _Candidate:
    """A choice on its way through the run."""

    choice: Choice
    expected: float
    run: Run | None = None
    refused: str = ""
    wrong: bool = False

    def drop(self, why: str, *, wrong: bool = True) -> None:
        self.refused, self.wrong, self.run = " ".join(why.split())[:300], wrong, None


def measure(job: Job, tools: Tools, before: Bucket | None = None) -> Found:
    """`before` is what an earlier run found here."""
    args = job.make(tools.seed, tools.device)
    models = job.expected(tools.gpu, args)
    found = [_Candidate(choice, model) for choice, model in models.items()]
    with torch.no_grad():
        _prepare(job, tools, args, found)
        _check(found, args, tools.checker(job, args, tools.seed), "before timing")
        _check_exactly(job, tools, found)
        times = _time(job, tools, args, found)
        if before and _is_beaten(before.choice, times, found):
            times = _time(job, tools, args, found)  # noise comes and goes: the second time counts
        _refill(args, job.make(tools.seed + 1, tools.device))
        _check(found, args, tools.checker(job, args, tools.seed + 1), "after timing")
    winner = _winner(times, found, before)
    now = {choice: _short(us) for choice, us in _by_choice(times, found).items()}
    us = {choice: _settled(time, choice, before) for choice, time in now.items()}
    if us and tuned.first(us, NOISE, winner) != winner:
        us = now  # old numbers beside new ones speak against the winner
    admitted = {one.choice: Timed(us[one.choice], _short(one.expected)) for one in _alive(found)}
    refused = {one.choice: one.refused for one in found if one.refused}
    kind, coordinates = job.place(args)
    bucket = Bucket(job.dims, job.dtype_name, kind, coordinates, winner, admitted, refused)
    return Found(bucket, tuple(one.choice for one in found if one.wrong))


def _by_choice(times: Mapping[str, float], found: Sequence[_Candidate]) -> dict[Choice, float]:
    return {one.choice: times[str(one.choice)] for one in _alive(found)}


def _winner(
    times: Mapping[str, float], found: Sequence[_Candidate], before: Bucket | None
) -> Choice | None:
    us = _by_choice(times, found)
    return tuned.first(us, NOISE, before.choice if before else None) if us else None


def _is_beaten(
    choice: Choice | None, times: Mapping[str, float], found: Sequence[_Candidate]
) -> bool:
    us = _by_choice(times, found)
    return choice in us and tuned.first(us, NOISE, choice) != choice


def _alive(found: Sequence[_Candidate]) -> list[_Candidate]:
    return [one for one in found if one.run is not None]


def _prepare(job: Job, tools: Tools, args: Args, found: Sequence[_Candidate]) -> None:
    for one in found:
        try:
            one.run = tools.prepare(job.op, args, one.choice)
        except TilewrightError as e:
            one.drop(f"cannot serve it: {e}", wrong=False)
        except Exception as e:
            one.drop(f"raised {type(e).__name__}: {e}")


def _check(found: Sequence[_Candidate], args: Args, wrong: judge.Checker, when: str) -> None:
    for one in _alive(found):
        assert one.run is not None
        try:
            _soil(one.run(*args), args)
            results = one.run(*args)
            why = wrong(results)
            _soil(results, args)
        except Exception as e:
            why = f"raised {type(e).__name__}: {e}"
        if why:
            one.drop(f"wrong {when}: {why}")


def _check_exactly(job: Job, tools: Tools, found: Sequence[_Candidate]) -> None:
    """Where the op has inputs whose result is exact: no bound hides a term that is left out."""
    inputs = judge.exact(job, tools.device, tools.seed)
    if inputs is None:
        return
    args, wrong = inputs
    for one in _alive(found):
        try:
            why = wrong(tools.prepare(job.op, args, one.choice)(*args))
        except Exception as e:
            why = f"raised {type(e).__name__}: {e}"
        if why:
            one.drop(f"wrong on exact inputs: {why}")


def _soil(results: Any, args: Args) -> None:
    """Leave no right result in memory that is about to be free, where a call that writes nothing
    would find it. All bits set is NaN."""
    inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    for result in as_tuple(results):
        storage = result.untyped_storage()
        if storage.data_ptr() not in inputs:
            torch.empty(0, dtype=torch.uint8, device=result.device).set_(storage).fill_(0xFF)


def _time(job: Job, tools: Tools, args: Args, found: Sequence[_Candidate]) -> Mapping[str, float]:
    """Medians in microseconds by choice; who cannot be timed is dropped."""
    alive = {str(one.choice): one for one in _alive(found)}
    if not alive:
        return {}
    try:
        samples = _samples(job, tools, args, alive)
    except timing.Broken as e:
        alive[e.name].drop(f"wrong while it was timed: it raised {e}")
        return _time(job, tools, args, found)  # once more, without it
    for name, one in alive.items():
        if one.run is not None and not samples.get(name):
            one.drop("has no device time: it waits for the GPU inside", wrong=False)
    return {name: statistics.median(found) for name, found in samples.items() if found}


def _samples(job: Job, tools: Tools, args: Args, alive: Mapping[str, _Candidate]) -> timing.Samples:
    traffic = job.op.traffic(args)
    calls = {name: _bound(one, args) for name, one in alive.items()}
    if traffic.total < SMALL:
        wrong = tools.checker(job, args, tools.seed)

        def check(name: str, results: Any) -> None:
            why = wrong(results)
            if why:
                alive[name].drop(f"wrong while it was timed: {why}")

        sets = sets_for(traffic, tools.gpu.l2_bytes, *SETS)
        copies = [args, *(_copy(args) for _ in range(sets - 1))]
        many = {name: partial(_bound_all, one, copies) for name, one in alive.items()}
        samples = tools.clock.graph(many, REPLAYS, check)
        if all(samples.get(name) for name in alive):
            return samples
        calls = {name: call for name, call in calls.items() if alive[name].run is not None}
    round_us = max(sum(one.expected for one in alive.values()), 1.0)
    least, most = ROUNDS
    rounds = min(max(int(BUDGET_US / round_us), least), most)
    heating = min(int(HEAT_US / round_us) + 1, most)
    samples = tools.clock.cold(calls, heating + rounds)
    return {name: times[heating:] for name, times in samples.items()}


def _bound(one: _Candidate, args: Args) -> timing.Call:
    run = one.run
    assert run is not None
    return lambda: run(*args)


def _bound_all(one: _Candidate, copies: Sequence[Args]) -> list[timing.Call]:
    return [_bound(one, args) for args in copies]


def _copy(args: Args) -> Args:
    """With the same strides: the calls were prepared for them."""
    return tuple(
        _memory(a).clone().as_strided(a.shape, a.stride(), 0) if isinstance(a, torch.Tensor) else a
        for a in args
    )


def _refill(args: Args, fresh: Args) -> None:
    for a, b in zip(args, fresh, strict=True):
        if isinstance(a, torch.Tensor):
            _memory(a).copy_(_memory(b))


def _memory(t: torch.Tensor) -> torch.Tensor:
    """All that lies between the first and the last element: slices and expanded dims keep it."""
    extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((extent,), (1,))


def _settled(us: float, choice: Choice, before: Bucket | None) -> float:
    """The stored number if the new one is no other: a table changes where times did."""
    stored = before.times.get(choice) if before else None
    if stored is not None and abs(us / stored.us - 1) <= tuned.STAY:
        return stored.us
    return us


def _short(us: float) -> float:
    return float(f"{us:.4g}")
