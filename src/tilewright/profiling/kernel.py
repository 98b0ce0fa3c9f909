"""What a profiler saw of one kernel. None is "not measured": a counter this GPU does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """Medians over the launches of one kernel with one grid."""

    name: str
    launches: int
    duration_us: float | None = None
    sm_pct: float | None = None  # speed of light: the busiest part of the SMs, of its peak
    memory_pct: float | None = None  # and of the memory system: L1, L2 or DRAM
    dram_pct: float | None = None
    dram_read: float | None = None  # bytes
    dram_written: float | None = None  # bytes; what is left in L2 at the end is not among them
    l2_hit_pct: float | None = None
    occupancy_pct: float | None = None  # achieved: warps on an SM over the most it can hold
    theoretical_occupancy_pct: float | None = None  # what registers and shared memory allow
    registers: int | None = None  # of a thread
    tensor_pct: float | None = None
    stalls: Mapping[str, float] = field(default_factory=dict)  # reason -> warps, the most first


@dataclass(frozen=True)
class Timing:
    """What a tracing profiler saw of one kernel: how often, and how long in all."""

    name: str
    launches: int
    total_us: float

    @property
    def mean_us(self) -> float:
        return self.total_us / self.launches


def short_name(name: str) -> str:
    """A C++ kernel without namespaces, template arguments and parameters; others as they are."""
    depth, kept = 0, ""
    for letter in name.replace("(anonymous namespace)::", ""):
        if letter == "(" and not depth:
            break
        depth += letter == "<"
        kept += "" if depth else letter
        depth -= letter == ">" and depth > 0
    return kept.split("::")[-1].removeprefix("void ").strip() or name


def times_per_call(kernel: Kernel, calls: int) -> int:
    """How often one call launches it; whole, because a launch that was lost is no fraction."""
    return max(1, round(kernel.launches / calls))


def per_call(kernels: Sequence[Kernel], number: str, calls: int) -> float | None:
    """The sum of a number over the launches of one call; None if it was not measured for all."""
    total = 0.0
    for kernel in kernels:
        value = getattr(kernel, number)
        if value is None:
            return None
        total += value * times_per_call(kernel, calls)
    return total


def ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None
