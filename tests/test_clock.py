"""The clock on a pretended device: what happens around a timed call, and in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tilewright import gpu as gpus
from tilewright.bench import clock as clocks
from tilewright.bench.clock import CudaClock
from tilewright.bench.timing import Within


class Device:
    """Remembers what was asked of it; events answer `late` as the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: Callable[[int], bool]) -> None:
        self.log: list[str] = []
        self.starts = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                device.log.append("event")

            def query(self) -> bool:
                device.log.append("query")
                device.starts += 1
                return late(device.starts)

            def elapsed_time(self, end: Any) -> float:
                return 0.005  # milliseconds

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda n: self.log.append("spin"))
        self.clock = CudaClock.__new__(CudaClock)
        self.clock._flusher = torch.arange(64.0)
        self.clock._sink = torch.zeros(())
        self.clock._flush_us, self.clock._cycles = 10.0, 1.0
        flush = self.clock._flush
        monkeypatch.setattr(self.clock, "_flush", lambda: (self.log.append("flush"), flush())[1])
        # what a call costs the host is not what is tested here
        monkeypatch.setattr(self.clock, "_spin_us", lambda call: 50.0)

    def call(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)


def test_a_sample_is_flushed_timed_and_seen_to_be_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lambda n: False)
    found = device.clock.cold({"a": device.call("a"), "b": device.call("b")}, 2)
    assert found == {"a": [5.0, 5.0], "b": [5.0, 5.0]}
    one = ["flush", "event", "{}", "query", "event"]
    wanted = [word.format(name) for name in "abba" for word in one]
    assert device.log == [*wanted, "wait"]  # nobody spins, and the host waits once, at the end


@pytest.mark.parametrize("name", ["h200", "l4", "t4"])
def test_the_flush_is_twice_the_l2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda *size, device: made.append(math.prod(size) * 4))
    monkeypatch.setattr(CudaClock, "_device_us", lambda self, call: 1.0)
    gpu = gpus.pretend(name)
    CudaClock(gpu)
    assert made[0] == max(2 * gpu.l2_bytes, 2**26)


def test_the_flush_reads_and_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lambda n: False)
    before = device.clock._flusher.clone()
    version = device.clock._flusher._version
    device.clock.cold({"a": device.call("a")}, 3)
    assert torch.equal(device.clock._flusher, before)
    assert device.clock._flusher._version == version
    assert float(device.clock._sink) == float(before.sum())  # every word was read


def test_a_late_sample_is_dropped_and_taken_again_behind_a_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, lambda n: n == 1)
    found = device.clock.cold({"a": device.call("a")}, 2)
    assert len(found["a"]) == 2
    assert device.log.count("a") == 3
    first_spin = device.log.index("spin")
    assert device.log[:first_spin].count("a") == 1
    assert device.log.count("spin") == 2  # the second try, and the next sample


def test_when_one_needs_a_spin_everybody_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lambda n: n == 1)
    device.clock.cold({"a": device.call("a"), "b": device.call("b")}, 3)
    after = device.log[device.log.index("spin") :]
    assert after.count("spin") == after.count("flush")


def test_who_is_always_late_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lambda n: True)
    assert device.clock.cold({"a": device.call("a")}, 2) == {"a": []}
    assert device.log.count("a") == 2 * clocks.PATIENCE


def test_a_graph_is_divided_by_its_calls_and_its_results_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, lambda n: False)

    class Graph:
        replay = staticmethod(device.call("replay"))

    def capture(bind: Any) -> Any:
        calls = bind()
        if calls is None:
            return None
        return clocks.Captured(Graph, calls, [f"result {i}" for i in range(len(calls))])

    monkeypatch.setattr(clocks, "capture", capture)
    seen: list[tuple[str, Any]] = []
    calls = {"a": lambda: [device.call("x")] * 5, "b": lambda: None}
    found = device.clock.graph(calls, 3, lambda name, result: seen.append((name, result)))
    assert found == {"a": [1.0, 1.0, 1.0]}  # b cannot be captured and is left out
    assert seen == [("a", "result 4")]
    assert device.log.count("flush") == 3


@pytest.mark.parametrize("way", ["host", "cpu"])
def test_host_times_come_from_bursts_on_an_empty_queue(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    device = Device(monkeypatch, lambda n: False)
    found = getattr(device.clock, way)({"a": device.call("a"), "b": device.call("b")}, 40)
    assert {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}
    assert min(found["a"]) > 0
    assert device.log[0] == "wait"
    assert device.log.count("a") >= 2 * clocks.BURST
    if way == "host":  # the kernels are awaited inside what is timed
        assert device.log[clocks.BURST + 1] == "wait"


@pytest.mark.parametrize("way", ["cold", "host", "cpu"])
def test_a_setting_is_entered_before_what_is_timed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program enters it once, around all its calls: it is no part of a call."""
    device = Device(monkeypatch, lambda n: False)

    @contextmanager
    def setting() -> Iterator[None]:
        device.log.append("enter")
        yield
        device.log.append("leave")

    getattr(device.clock, way)({"a": Within(setting, device.call("a"))}, 2)
    words = device.log
    first, last = words.index("a"), len(words) - 1 - words[::-1].index("a")
    entries = 2 if way == "cold" else 1  # of samples that are one call, or many
    assert (words.count("enter"), words.count("leave")) == (entries, entries)
    assert words.index("enter") < first
    assert last < len(words) - 1 - words[::-1].index("leave")
    if way == "cold":
        assert words[:6] == ["enter", "flush", "event", "a", "query", "event"]


def test_a_setting_is_left_after_every_call_that_nobody_times() -> None:
    log: list[str] = []

    @contextmanager
    def setting() -> Iterator[None]:
        log.append("enter")
        yield
        log.append("leave")

    call = Within(setting, lambda: log.append("call"))
    call()
    call()
    assert log == ["enter", "call", "leave"] * 2
