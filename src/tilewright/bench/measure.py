"""One subject, measured: checked, timed interleaved with its rivals and roofs, checked again.

A contender whose result is wrong before or after gets no number. The second check is on fresh
values in the very tensors that were timed: whoever remembers a result gives the old one.

Work that is bound by arithmetic drives a GPU to its power limit, where neighbours in a rotation set
the clock for each other: beside a roof that draws less, a matrix product runs faster than it ever
will in a program. Such a case is timed once more, its contenders among themselves, after a rest and
a spell of full load. That is its time; what part of the roof it reaches is taken from the rotation,
at equal clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from tilewright.bench import guard, timing, witness
from tilewright.bench.guard import Floor
from tilewright.bench.record import MOST, WAYS, Roof, Row, Stats
from tilewright.bench.roofs import RoofCall, mix_of, sets_for
from tilewright.bench.subject import Call, Contender, Subject, judge
from tilewright.errors import TilewrightError
from tilewright.gpu import Gpu
from tilewright.spec import Args, Cost, Traffic, as_tuple
from tilewright.verify.compare import Verdict

SMALL = 64 * 2**20  # bytes moved below which a call is timed in a graph as well
REPLAYS = 10  # a graph is replayed once for so many iterations: each is a mean over many calls
REST_S = 0.3  # before a sustained time: whatever ran before, it starts from the same state
SUSTAIN_US = 50e3  # of work at full power, before a sustained time counts and while it does
LOOSE = 16.0  # a rival may round more often than we allow ourselves, up to so many tolerances


class Roofs(Protocol):
    def beside(self, traffic: Traffic, cost: Cost, sets: int) -> list[RoofCall]: ...
    def compute_us(self, cost: Cost) -> float: ...
    def bandwidth_us(self, traffic: Traffic) -> float: ...
    def survey(self, clock: timing.Clock) -> list[Roof]: ...


@dataclass(frozen=True)
class Bench:
    """The instruments: on a GPU the real ones, in a test whatever tells the lie in question."""

    gpu: Gpu
    clock: timing.Clock
    roofs: Roofs
    launched: Callable[[Callable[[], Call]], tuple[str, ...] | None] = witness.launched
    warmup: int = 50
    iters: int = 200
    seed: int = 0


def measure(subject: Subject, bench: Bench) -> list[Row]:
    """A row for every contender, ours first; those without a number say why."""
    found = {c.name: _Candidate(c) for c in subject.contenders}
    with torch.set_grad_enabled(subject.phase == "backward"):
        args = subject.make(bench.seed)
        _check(subject, args, found, "before")
        _warm(found, bench.warmup)
        times = _time(subject, bench, args, found)
        for one in _alive(found):
            one.kernels = bench.launched(partial(one.contender.bind, args))
        for one in _alive(found):
            one.call = None  # what it saved for a backward is large, and so is the truth
        _refill(args, subject.make(bench.seed + 1))
        _check(subject, args, found, "after")
    floor = {method: _floor(subject, bench, times, method) for method in ("cold", "graph")}
    floor["sustained"] = floor["cold"]
    rows = [_row(subject, bench, one, times, floor) for one in found.values()]
    return sorted(rows, key=lambda row: not row.ours)


@dataclass
class _Candidate:
    """A contender on its way through the run."""

    contender: Contender
    call: Any = None
    error: float = 0.0  # over its tolerance
    largest_error: float = 0.0
    state: str = "ok"
    reason: str = ""
    flags: tuple[str, ...] = ()
    kernels: tuple[str, ...] | None = None

    def drop(self, state: str, reason: str) -> None:
        self.state, self.reason, self.call = state, reason, None


def _alive(found: Mapping[str, _Candidate]) -> list[_Candidate]:
    return [one for one in found.values() if one.state == "ok"]


def _check(subject: Subject, args: Args, found: Mapping[str, _Candidate], when: str) -> None:
    truths = None
    for one in found.values():
        if one.contender.missing:
            one.drop("unavailable", one.contender.missing)
        if one.state != "ok":
            continue
        if truths is None:
            truths = subject.truth(args)
        try:
            one.call = one.contender.bind(args)
            _soil(one.call(), args)
            results = one.call()
            verdict = judge(truths, results)
            _soil(results, args)
        except TilewrightError as e:
            one.drop("unavailable", str(e))
            continue
        except Exception as e:
            one.drop("refused", f"{when} timing it raised {type(e).__name__}: {str(e)[:300]}")
            continue
        _take_verdict(one, verdict, when)


def _take_verdict(one: _Candidate, verdict: Verdict, when: str) -> None:
    one.error = max(one.error, verdict.ratio)
    one.largest_error = max(one.largest_error, verdict.error)
    allowed = 1.0 if one.contender.ours else LOOSE
    if verdict.message:
        one.drop("refused", f"wrong {when} timing: {verdict.message}")
    elif not verdict.ratio <= allowed:
        one.drop("refused", f"wrong {when} timing: its error is {verdict.ratio:.2g}x the tolerance")
    elif verdict.ratio > 1:
        flag = "less accurate than our tolerance allows us"
        one.flags = tuple(dict.fromkeys((*one.flags, flag)))


def _soil(results: Any, args: Args) -> None:
    """Leave no right result in memory that is about to be free: what the next call does not write
    must show. All bits set is NaN in every floating-point format. Whoever returns what it keeps
    is hurt, and refused: a cache, or a backward that gives away a tensor it has saved."""
    inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
    for result in as_tuple(results):
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in inputs:
                torch.empty(0, dtype=torch.uint8, device=result.device).set_(storage).fill_(0xFF)


def _warm(found: Mapping[str, _Candidate], count: int) -> None:
    for one in _alive(found):
        try:
            for _ in range(count):
                one.call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as e:
            one.drop("refused", f"it raised {type(e).__name__} when repeated: {str(e)[:300]}")


@dataclass(frozen=True)
class _Times:
    """Two passes of each way of timing, by way and contender; roofs are contenders as well."""

    roofs: Sequence[RoofCall] = ()
    passes: Sequence[Mapping[str, timing.Samples]] = ()

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(self.passes[0]) if self.passes else ()

    def of(self, way: str, name: str) -> list[list[float]]:
        return [one[way][name] for one in self.passes if one.get(way, {}).get(name)]

    def stats(self, way: str, name: str) -> Stats | None:
        both = self.of(way, name)
        return timing.stats(*both) if both else None


def _time(subject: Subject, bench: Bench, args: Args, found: Mapping[str, _Candidate]) -> _Times:
    """Two passes of every way of timing, each with all contenders and roofs in rotation."""
    alive = {one.contender.name: one for one in _alive(found)}
    if not alive:
        return _Times()
    small = subject.traffic.total < SMALL
    truths = subject.truth(args) if small else []

    def check(name: str, results: Any) -> None:
        """What the last call of a graph left behind, on its own copy of the arguments."""
        if name in alive:
            _take_verdict(alive[name], judge(truths, results), "while")

    sets = sets_for(subject.traffic, bench.gpu.l2_bytes) if small else 1
    roofs = bench.roofs.beside(subject.traffic, subject.cost, sets)
    calls: dict[str, Call] = {name: one.call for name, one in alive.items()}
    plain = dict(calls)
    calls |= {_roof(r): r.bind(0) for r in roofs}
    ways: dict[str, Callable[[], timing.Samples]] = {
        "cold": lambda: bench.clock.cold(calls, -(-bench.iters // 2)),
        "host": lambda: bench.clock.host(plain, -(-bench.iters // 2)),
        "cpu": lambda: bench.clock.cpu(plain, -(-bench.iters // 2)),
    }
    if small:
        copies = [args, *(_copy(args) for _ in range(sets - 1))]
        many = {name: partial(_bind_all, one.contender, copies) for name, one in alive.items()}
        many |= {_roof(r): partial(_bind_roof, r, sets) for r in roofs}
        replays = max(-(-bench.iters // 2) // REPLAYS * 2, 4)
        ways["graph"] = lambda: bench.clock.graph(many, replays, check)
    elif bench.roofs.compute_us(subject.cost) > bench.roofs.bandwidth_us(subject.traffic):
        ways["sustained"] = lambda: _sustained(subject, bench, plain)
    try:
        return _Times(roofs, [{way: take() for way, take in ways.items()} for _ in range(2)])
    except timing.Broken as e:
        if e.name not in alive:
            raise
        alive[e.name].drop("refused", f"while it was timed it raised {e}")
        return _time(subject, bench, args, found)  # once more, without it


def _sustained(subject: Subject, bench: Bench, calls: Mapping[str, Call]) -> timing.Samples:
    """Contenders among themselves; the first samples are the spell of full load."""
    round_us = bench.roofs.compute_us(subject.cost) * len(calls)
    heating = -(-int(SUSTAIN_US) // max(int(round_us), 1))
    time.sleep(REST_S)
    found = bench.clock.cold(calls, heating + max(heating, -(-bench.iters // 2)))
    return {name: samples[heating:] for name, samples in found.items()}


def _bind_all(contender: Contender, copies: Sequence[Args]) -> list[Call]:
    return [contender.bind(args) for args in copies]


def _bind_roof(roof: RoofCall, sets: int) -> list[Call]:
    return [roof.bind(i) for i in range(sets)]


def _roof(roof: RoofCall) -> str:
    return f"roof: {roof.name}"


def _copy(args: Args) -> Args:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def _refill(args: Args, fresh: Args) -> None:
    with torch.no_grad():
        for a, b in zip(args, fresh, strict=True):
            if isinstance(a, torch.Tensor):
                a.copy_(b)


def _floor(subject: Subject, bench: Bench, times: _Times, method: str) -> Floor | None:
    if method not in times.ways:
        return None
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for roof in times.roofs:
        found = times.stats(method, _roof(roof))
        if found is not None:
            by_kind.setdefault(roof.kind, []).append((found.median * roof.scale, roof.name))
    stream, _ = min(by_kind.get("bandwidth", [(0.0, "")]))
    compute, compute_name = min(
        by_kind.get("compute", [(bench.roofs.compute_us(subject.cost), subject.cost.unit)])
    )
    return Floor(
        launch=min(by_kind.get("launch", [(0.0, "")]))[0],
        stream=stream,
        compute=compute,
        bytes_alone=bench.roofs.bandwidth_us(subject.traffic),
        stream_name=f"bandwidth {mix_of(subject.traffic)} at this size",
        compute_name=compute_name,
    )


def _row(
    subject: Subject,
    bench: Bench,
    one: _Candidate,
    times: _Times,
    floors: Mapping[str, Floor | None],
) -> Row:
    name = one.contender.name
    row = Row(
        op=subject.op,
        case=subject.case,
        dims=dict(subject.dims),
        dtype=str(subject.dtype).removeprefix("torch."),
        phase=subject.phase,
        contender=name,
        ours=one.contender.ours,
        automatic=one.contender.automatic,
        state=one.state,
        reason=one.reason,
        flags=one.flags,
        bytes_read=subject.traffic.read,
        bytes_written=subject.traffic.written,
        flops=subject.cost.flops,
        unit=subject.cost.unit,
        kernels=one.kernels or (),
    )
    if one.state == "unavailable":
        return row
    largest = min(one.largest_error, MOST)
    row = replace(row, error=min(one.error, MOST), largest_error=largest)
    if one.state == "ok" and one.contender.launches:
        row = _with_witness(row, one)
    if row.state != "ok":
        return row
    if not one.contender.launches:
        row = replace(row, ran=name)
    return _with_times(row, subject, bench, times, floors)


def _with_witness(row: Row, one: _Candidate) -> Row:
    """Asked for one backend and seen to run something else is a fallback, and a silent one."""
    if one.kernels is None:
        flag = "what it launched could not be read: it cannot be captured in a CUDA graph"
        return replace(row, flags=(*row.flags, flag))
    if witness.saw(one.contender.launches, one.kernels):
        others = ", ".join(witness.strangers(one.contender.launches, one.kernels))
        flags = (f"launches what it does not declare: {others}",) if others else ()
        return replace(row, ran=one.contender.name, flags=(*row.flags, *flags))
    wanted, seen = ", ".join(one.contender.launches), ", ".join(one.kernels) or "nothing"
    reason = f"fell back silently: {row.contender} should launch {wanted}, and launched {seen}"
    return replace(row, state="refused", reason=reason, ran="not " + row.contender)


def _with_times(
    row: Row,
    subject: Subject,
    bench: Bench,
    times: _Times,
    floors: Mapping[str, Floor | None],
) -> Row:
    name, flags = row.contender, list(row.flags)
    method = next(way for way in ("graph", "sustained", "cold") if way in times.ways)
    by_way: dict[str, Any] = {way: times.stats(way, name) for way in times.ways}
    row = replace(row, **by_way)
    found, floor = by_way[method], floors[method]
    if found is None or floor is None:
        flags.append("no device time: it waits for the GPU inside, or cannot be captured")
        return replace(row, flags=tuple(flags))
    if method == "sustained" and row.cold:
        floor = floor.slowed(max(found.median / row.cold.median, 1.0))
    if timing.is_noisy(found):
        flags.append(f"noisy: two passes differ by {found.spread:.1%}")
    if len(found.passes) < 2 or (method != "graph" and found.n < bench.iters / 2):
        flags.append(f"noisy: only {found.n} samples in {len(found.passes)} passes")
    seen = None if row.kernels == () and row.ran == "" else len(row.kernels)
    least = subject.traffic if row.ours else subject.least
    call = guard.Timed(found.median, subject.traffic, least, subject.cost, seen)
    verdict = guard.judge(call, floor, bench.gpu)
    if verdict.refused:
        no_times: dict[str, Any] = dict.fromkeys(WAYS)
        return replace(row, state="refused", reason=verdict.refused, **no_times)
    return replace(
        row,
        method=method,
        us=found.median,
        gbps=verdict.gbps,
        tflops=verdict.tflops,
        roof_us=floor.us,
        roof=floor.name,
        of_roof=verdict.of_roof,
        of_peak=verdict.of_peak,
        bound=floor.bound,
        flags=(*flags, *verdict.flags),
        samples=tuple(t for one in times.of(method, name) for t in one),
    )
