"""Instruments that say what a test wants: a clock, roofs and a witness without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright import gpu as gpus
from tilewright.bench.measure import Bench
from tilewright.bench.record import Roof
from tilewright.bench.roofs import RoofCall
from tilewright.bench.subject import Contender, Subject, Wish, of_op
from tilewright.ops import registry
from tilewright.spec import Case, Cost, Traffic

H200 = gpus.pretend("h200")
GBPS = 4000.0  # the fake roof
LAUNCH_US = 1.0


class Clock:
    """Times by name. Every call is made, so that whoever cheats while being timed does."""

    def __init__(self, us: Mapping[str, float], second_pass: Mapping[str, float] | None = None):
        self.us, self.second = dict(us), dict(second_pass or {})
        self.passes: dict[str, int] = {}
        self.order: list[tuple[str, str]] = []
        self.last: dict[str, Any] = {}

    def _samples(self, way: str, calls: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
        self.passes[way] = self.passes.get(way, 0) + 1
        found = {}
        for name, call in calls.items():
            self.order.append((way, name))
            for each in call() if way == "graph" else [call]:
                self.last[name] = each()
            us = self.us.get(name, 50.0)
            if self.passes[way] > 1:
                us = self.second.get(name, us)
            found[name] = [us * (1 + 0.001 * (i % 3 - 1)) for i in range(rounds)]
        return found

    def cold(self, calls: Any, rounds: int) -> Any:
        return self._samples("cold", calls, rounds)

    def graph(self, calls: Any, rounds: int, check: Any) -> Any:
        samples = self._samples("graph", calls, rounds)
        for name in calls:
            check(name, self.last[name])
        return samples

    def host(self, calls: Any, rounds: int) -> Any:
        return self._samples("host", calls, rounds)

    def cpu(self, calls: Any, rounds: int) -> Any:
        return self._samples("cpu", calls, rounds)


class Roofs:
    """GBPS and LAUNCH_US, whatever the case."""

    def __init__(self, compute_us: float = 0.0) -> None:
        self.compute = compute_us

    def beside(self, traffic: Traffic, cost: Cost, sets: int) -> list[RoofCall]:
        nothing: Callable[[int], Any] = lambda i: lambda: None  # noqa: E731
        found = [
            RoofCall("empty launch", "launch", nothing),
            RoofCall("stream", "bandwidth", nothing),
            RoofCall("slow stream", "bandwidth", nothing),  # the faster one is the roof
        ]
        return [*found, RoofCall("mma bf16", "compute", nothing)] if self.compute else found

    def compute_us(self, cost: Cost) -> float:
        return self.compute

    def bandwidth_us(self, traffic: Traffic) -> float:
        return traffic.total / GBPS / 1e3

    def survey(self, clock: Any) -> list[Roof]:
        return [Roof("bandwidth 1:1", "GB/s", GBPS, 4800.0)]


def subject(
    op: str = "softmax", shape: tuple[int, ...] = (64, 512), phase: str = "forward"
) -> Subject:
    """A declared op on the CPU, with eager torch and the vendor's function as rivals."""
    wish = Wish(backends=(), baselines=("eager", "vendor"))
    case = Case("a case", {"shape": shape})
    return of_op(registry()[op], case, torch.float32, phase, "cpu", H200, wish)


def ours(call: Callable[..., Any], name: str = "triton", launches: Any = ("_k",)) -> Contender:
    """A kernel of ours that computes whatever `call` does."""
    return Contender(name, True, lambda args: lambda: call(*args), tuple(launches))


def stream_us(traffic: Traffic) -> float:
    return traffic.total / GBPS / 1e3 + LAUNCH_US


def bench(
    of: Subject,
    us: Mapping[str, float],
    *,
    launched: Any = ("_k",),
    second: Mapping[str, float] | None = None,
    **settings: Any,
) -> Bench:
    roofs = {"roof: stream": stream_us(of.traffic), "roof: empty launch": LAUNCH_US}
    roofs["roof: slow stream"] = 1.4 * roofs["roof: stream"]
    clock = Clock({**roofs, **us}, {**roofs, **(second or {})} if second else None)
    witness = launched if callable(launched) else lambda bind: launched
    facts = {"warmup": 2, "iters": 20, **settings}
    return Bench(H200, clock, settings.pop("roofs", Roofs()), witness, **facts)
