"""Time on a CUDA device.

Cold: before each call a buffer of twice the L2 is *read*. Writing it, as is common, would leave
dirty lines that the timed call has to write back. The GPU is kept busy while the host prepares the
call, or the events would time the host; whether it was is seen, and a late sample is taken again.

Graph: small calls take less time than it takes to launch them, so many are captured into one CUDA
graph, each on its own tensors. L2 is flushed before a replay too: no call finds its inputs there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.bench.timing import Bind, Call, Check, Samples, entered, interleaved
from tilewright.gpu import Gpu

BURST = 20  # calls between two synchronisations when the host is timed
LEAD = 1.5  # how much longer than the host's part the GPU is kept busy before a timed call
LONGEST_SPIN = 2e3  # microseconds
PATIENCE = 8  # tries to get a sample for which the host was in time


class CudaClock:
    def __init__(self, gpu: Gpu) -> None:
        self._flusher = torch.zeros(max(2 * gpu.l2_bytes, 2**26) // 4, device="cuda")
        self._sink = torch.zeros((), device="cuda")
        self._flush_us = self._device_us(self._flush)
        self._cycles = 1e6 / self._device_us(lambda: torch.cuda._sleep(1_000_000))  # per us

    def cold(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        return self._flushed(calls, rounds, dict.fromkeys(calls, 1))

    def graph(self, calls: Mapping[str, Bind], rounds: int, check: Check) -> Samples:
        """Contenders that cannot be captured are left out."""
        graphs: dict[str, Captured] = {}
        for name, bind in calls.items():
            captured = capture(bind)
            if captured is not None:
                graphs[name] = captured
        replays = {name: found.graph.replay for name, found in graphs.items()}
        counts = {name: len(found.calls) for name, found in graphs.items()}
        samples = self._flushed(replays, rounds, counts)
        for name, found in graphs.items():
            check(name, found.results[-1])
        return samples

    def _flushed(
        self, calls: Mapping[str, Call], rounds: int, counts: Mapping[str, int]
    ) -> Samples:
        needed = {name: self._spin_us(call) for name, call in calls.items()}
        # None at first: behind long calls the host is ahead anyway, and a pause cools the GPU. When
        # somebody needs one everybody gets it: whoever rests longer runs at a higher clock.
        spin = 0.0

        def take(name: str) -> Callable[[], float]:
            nonlocal spin
            with entered(calls[name]) as call:
                for _ in range(PATIENCE):
                    if spin:
                        torch.cuda._sleep(int(spin * self._cycles))
                    self._flush()
                    reading, late = _between_events(call)
                    if not late:
                        return lambda: reading() / counts[name]
                    # the GPU had reached the start before the call was there: that timed the host
                    spin = min(max(1.5 * spin, needed[name]), LONGEST_SPIN)
            return lambda: math.nan  # it waits for the GPU inside

        found = _read(calls, rounds, take)
        return {name: [t for t in times if not math.isnan(t)] for name, times in found.items()}

    def host(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        def take(name: str) -> Callable[[], float]:
            with entered(calls[name]) as call:
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                for _ in range(BURST):
                    call()
                torch.cuda.synchronize()
                taken = (time.perf_counter_ns() - start) / 1e3 / BURST
            return lambda: taken

        return interleaved(list(calls), -(-rounds // BURST), take)

    def cpu(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        """A median of a burst is one sample: a single call's time has the clock's own noise."""
        clock = time.perf_counter_ns

        def take(name: str) -> Callable[[], float]:
            taken = []
            with entered(calls[name]) as call:
                torch.cuda.synchronize()
                call()  # the first call after a wait pays for it
                for _ in range(BURST):
                    start = clock()
                    call()
                    taken.append(clock() - start)
            middle = sorted(taken)[BURST // 2] / 1e3
            return lambda: middle

        return interleaved(list(calls), -(-rounds // BURST), take)

    def _flush(self) -> None:
        torch.sum(self._flusher, dim=0, out=self._sink)

    def _spin_us(self, call: Call) -> float:
        """Microseconds of spinning that let the host get ahead: as long as it takes to launch."""
        taken = []
        for _ in range(4):  # the first may compile
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            self._flush()
            _between_events(call)
            taken.append((time.perf_counter_ns() - start) / 1e3)
        return min(max(LEAD * sorted(taken)[1] - self._flush_us, 0.0) + 20, LONGEST_SPIN)

    def _device_us(self, call: Call) -> float:
        for _ in range(3):
            call()
        readings = [_between_events(call)[0] for _ in range(10)]
        torch.cuda.synchronize()
        return sorted(reading() for reading in readings)[5]


def _read(
    calls: Mapping[str, Any], rounds: int, take: Callable[[str], Callable[[], float]]
) -> Samples:
    """Interleave and wait once: the readings of events are there only then."""
    waited = False

    def once(reading: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            nonlocal waited
            if not waited:
                torch.cuda.synchronize()
                waited = True
            return reading()

        return read

    return interleaved(list(calls), rounds, lambda name: once(take(name)))


def _between_events(call: Call) -> tuple[Callable[[], float], bool]:
    """How to read the time of one call, and whether the GPU was waiting for it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    late = start.query()
    end.record()
    return lambda: start.elapsed_time(end) * 1e3, late


class Captured(NamedTuple):
    graph: Any
    calls: Sequence[Call]
    results: Sequence[Any]  # they live as long as the graph, each in memory of its own: calls that
    # wrote over the same memory would find it in L2


def capture(bind: Bind, *, keep_graph: bool = False) -> Captured | None:
    """One graph of the calls that `bind` makes, or None if they cannot be captured.

    The calls are made on the stream that is captured, because autograd runs a backward on the
    stream of its forward. Each capture has a stream of its own: a failed one leaves traces there.
    """
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    results: list[Any] = []
    with torch.cuda.stream(stream):
        try:
            calls = bind()
            for call in calls[:2]:
                call()
        except Exception:
            return None
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        failed = False
        try:
            results += [call() for call in calls]
        except Exception:
            failed = True
        try:
            graph.capture_end()
        except RuntimeError:
            failed = True
    torch.cuda.synchronize()
    return None if failed else Captured(graph, calls, results)
