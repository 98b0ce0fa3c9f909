"""The physics guard: a number that cannot be is not printed, one that hardly can be is flagged.

No GPU in here: times, bytes and roofs go in, a judgement comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.bench.record import Row
from tilewright.gpu import Gpu
from tilewright.spec import Cost, Traffic

ABOVE = 1.03  # a row faster than its roof by more is flagged
REFUSED, FLAGGED = "above physics: ", "x of its roof: "


@dataclass(frozen=True)
class Floor:
    """What a case takes at least, by each roof, timed as the case was. In microseconds."""

    launch: float  # a kernel that does nothing
    stream: float  # as many bytes in the same mix, launch included
    compute: float = 0.0  # as many flops; 0 where they are few
    bytes_alone: float = 0.0  # the bytes at the rate of a large transfer
    stream_name: str = "bandwidth"
    compute_name: str = "compute"

    @property
    def us(self) -> float:
        return max(self.launch, self.stream, self.compute)

    @property
    def name(self) -> str:
        named = {
            self.compute_name: self.compute,
            self.stream_name: self.stream,
            "empty launch": self.launch,
        }
        return max(named, key=lambda name: named[name])

    def slowed(self, by: float) -> Floor:
        """At a clock that is slower by this factor: memory has a clock of its own."""
        return replace(self, compute=self.compute * by)

    @property
    def bound(self) -> str:
        """What a case of this size waits for: the stream kernel's time holds a launch as well, so
        the bytes are taken at the rate of a large transfer."""
        times = {
            "compute": self.compute,
            "bandwidth": self.bytes_alone,
            "launch": self.launch,
        }
        return max(times, key=lambda name: times[name])


def is_suspect(row: Row) -> bool:
    """Above its roof, flagged or refused: what --strict fails on."""
    return row.reason.startswith(REFUSED) or any(FLAGGED in flag for flag in row.flags)


@dataclass(frozen=True)
class Timed:
    """A call's time, and what it is held against."""

    us: float
    traffic: Traffic  # by our own count
    least: Traffic  # what anybody must move: a rival's backward may have saved less than ours
    cost: Cost
    kernels: int | None = None  # how many were seen to be launched; None: it could not be seen


@dataclass(frozen=True)
class Judgement:
    gbps: float | None  # None: our count of bytes is not this contender's
    tflops: float
    of_roof: float | None  # likewise
    of_peak: float | None = None  # the larger part of the datasheet's peaks; None: it has none
    flags: tuple[str, ...] = ()
    refused: str = ""


def judge(call: Timed, floor: Floor, gpu: Gpu) -> Judgement:
    """Rates and the part of the roof, or why there can be none."""
    us = call.us
    if not us > 0:
        return Judgement(0.0, 0.0, 0.0, refused=f"{us} us is no time")
    gbps, tflops = call.traffic.total / us / 1e3, call.cost.flops / us / 1e6
    of_roof = floor.us / us
    refused = ""
    peak = (gpu.bandwidth or float("inf")) / 1e9
    rate = gpu.peaks.get(call.cost.unit, float("inf"))
    if call.least.total / us / 1e3 > peak:
        refused = f"{gbps:,.0f} GB/s, and the datasheet's peak is {peak:,.0f}"
    elif tflops * 1e12 > rate:
        refused = f"{tflops:,.0f} TFLOP/s, and the datasheet's peak is {rate / 1e12:,.0f}"
    if refused:
        return Judgement(gbps, tflops, of_roof, refused=f"{REFUSED}{refused}")
    of_bytes, of_flops = gbps / peak, tflops * 1e12 / rate
    of_peak = max(of_bytes, of_flops) or None  # no peak is known: infinite
    if of_roof <= ABOVE:
        return Judgement(gbps, tflops, of_roof, of_peak)
    if call.least.total < call.traffic.total and us * ABOVE >= _least_us(call, floor):
        flag = "moves fewer bytes than our count: it saved less for its backward"
        return Judgement(None, tflops, None, of_flops or None, (flag,))
    flag = f"{of_roof:.2f}{FLAGGED}{_likely(call, floor, gpu)}"
    return Judgement(gbps, tflops, of_roof, of_peak, (flag,))


def _least_us(call: Timed, floor: Floor) -> float:
    """What the bytes take that nobody can do without."""
    stream = floor.stream * call.least.total / max(call.traffic.total, 1)
    return replace(floor, stream=stream).us


def _likely(call: Timed, floor: Floor, gpu: Gpu) -> str:
    if call.kernels == 0:
        return "work skipped: it launches nothing"
    if call.us * ABOVE < floor.launch:
        return "work skipped: faster than a kernel that does nothing"
    if floor.us == floor.compute:
        return "work skipped, or more flops declared than done"
    if call.traffic.total <= gpu.l2_bytes:
        size, l2 = call.traffic.total / 2**20, gpu.l2_bytes / 2**20
        return f"L2-resident: its {size:.1f} MiB fit into the {l2:.0f} MiB of L2"
    return "wrong byte count, or work skipped: more bytes counted than moved"
