"""One line of advice per kernel, from its numbers, by the thresholds that stand here.

They are rules of thumb, of percentages of a theoretical peak. ROOF is where DRAM stops rewarding
work: no kernel holds its bus busy all the time, and a short one less so. LATENCY is Nsight
Compute's own line: a kernel that keeps neither the SMs nor the memory 60 % busy is waiting.
"""

from __future__ import annotations

from tilewright.profiling.kernel import Kernel

ROOF = 85.0  # % of a peak, from which a kernel is at it
LATENCY = 60.0  # % of SM and of memory, below which neither is the limit
SHORT_US = 5.0  # a kernel shorter than this is mostly its own start and end
MORE_BYTES = 1.15  # measured over predicted bytes, from which the difference is worth a look
SECOND_PASS = 1.7  # and from which a whole further pass is the likely reason
LESS_BYTES = 0.85  # of the reads, below which part of the input came out of L2
FEW_WARPS = 50.0  # % theoretical occupancy, below which registers or shared memory hold warps back
UNEVEN = 0.75  # achieved over theoretical occupancy, below which the grid is the reason
MAIN_STALL = 0.3  # of all waiting warps, from which a stall reason is worth naming

# reason -> what the warps wait for, and what helps; metric names as Nsight Compute spells them
STALLS: dict[str, tuple[str, str]] = {
    "long_scoreboard": ("for loads from L2 or DRAM", "issue more of them at once, or earlier"),
    "short_scoreboard": (
        "for shared memory or a special function",
        "look for bank conflicts, fewer exponentials and divisions",
    ),
    "barrier": ("for other warps at a barrier", "fewer barriers, or fewer warps behind each"),
    "wait": ("out the fixed latency of the instruction before", "more independent work per thread"),
    "math_pipe_throttle": ("for a busy arithmetic pipe", "fewer instructions, or another mix"),
    "lg_throttle": ("in the queue to global memory", "fewer and wider loads and stores"),
    "mio_throttle": ("in the queue to shared memory", "fewer and wider shared accesses"),
    "tex_throttle": ("in the queue to L1", "fewer and wider loads"),
    "not_selected": ("although they could run", "there are warps enough; fewer instructions help"),
    "drain": ("for their last stores to leave", "store less at the end, or in wider pieces"),
    "membar": ("at a memory fence", "fewer fences and atomics"),
    "branch_resolving": ("for the target of a branch", "fewer branches, longer loop bodies"),
    "no_instruction": ("for instructions to be fetched", "shorter code, less unrolling"),
    "imc_miss": ("for a constant to be fetched", "fewer distinct constants and arguments"),
    "dispatch_stall": ("for the dispatcher", "seldom the first thing to mend"),
    "sleeping": ("asleep, as the kernel told them to", "shorter sleeps"),
    "gmma": ("for tensor-core products under way", "more of them in flight, or larger tiles"),
    "misc": ("for something without a name", "look at the source view of a .ncu-rep"),
}


def of_kernel(kernel: Kernel, read: float | None = None, written: float | None = None) -> str:
    """`read` and `written`: measured over predicted bytes, where this kernel is the whole call."""
    bound, at_roof = _bound(kernel)
    parts = [bound, *_bytes(read, written)]
    if not at_roof:
        parts.append(_main_stall(kernel))
    return "; ".join(part for part in parts if part) or "too little was measured to say"


def of_call(kernels: int, read: float | None, written: float | None) -> str:
    """Of a call that launches several kernels: what they move between them."""
    if read is None or written is None:
        return "too little was measured to say"
    if max(read, written) < MORE_BYTES:
        return f"{kernels} kernels, and no more bytes than one would need"
    return (
        f"{kernels} kernels read {read:.1f}x and write {written:.1f}x the bytes that one would "
        "need: fuse them"
    )


def _bound(kernel: Kernel) -> tuple[str, bool]:
    """What limits the kernel, and whether it is as fast as that limit allows."""
    sm, memory, dram = kernel.sm_pct, kernel.memory_pct, kernel.dram_pct
    if kernel.duration_us is not None and kernel.duration_us < SHORT_US:
        us = kernel.duration_us
        return f"{us:.1f} us: too short to judge, take a larger shape", True
    if dram is not None and dram >= ROOF:
        return f"DRAM {dram:.0f} % busy: at the roof", True
    if kernel.tensor_pct is not None and kernel.tensor_pct >= ROOF:
        return f"tensor pipe {kernel.tensor_pct:.0f} % busy: at the roof", True
    if sm is None or memory is None:
        return "", False
    if sm >= ROOF:
        return f"SM {sm:.0f} % busy: bound by instructions; fewer per byte help", True
    if memory >= ROOF:
        return f"L1 or L2 {memory:.0f} % busy, DRAM not: reuse more in registers", True
    if max(sm, memory) < LATENCY:
        return f"SM {sm:.0f} %, memory {memory:.0f} %: latency; {_more_in_flight(kernel)}", False
    if memory >= sm:
        why = "hold the time against the roof that bench measures, which lies below the peak; then"
        return f"memory {memory:.0f} % busy: {why} more bytes in flight", False
    return f"SM {sm:.0f} % busy: short of the peak; fewer or more independent instructions", False


def _more_in_flight(kernel: Kernel) -> str:
    achieved, allowed = kernel.occupancy_pct, kernel.theoretical_occupancy_pct
    if achieved is not None and allowed and achieved / allowed < UNEVEN:
        return (
            f"occupancy {achieved:.0f} % of {allowed:.0f} % allowed: the grid is too small or "
            "uneven"
        )
    if allowed is not None and allowed < FEW_WARPS:
        registers = f" ({kernel.registers} registers)" if kernel.registers is not None else ""
        return f"occupancy held at {allowed:.0f} %{registers}: fewer, or more loads in flight"
    return "raise occupancy or loads in flight"


def _bytes(read: float | None, written: float | None) -> list[str]:
    found = []
    if read is not None and read >= MORE_BYTES:
        why = "a second pass over the input" if read >= SECOND_PASS else "part is read again"
        found.append(f"reads {read:.1f}x the bytes it must: {why}")
    if read is not None and read < LESS_BYTES:
        found.append(f"reads {read:.1f}x the bytes: the rest came out of L2")
    # fewer written bytes are no finding: what is left in L2 at the end was never counted
    if written is not None and written >= MORE_BYTES:
        found.append(f"writes {written:.1f}x the bytes it must: partial sectors or a side result")
    return found


def _main_stall(kernel: Kernel) -> str:
    if not kernel.stalls:
        return ""
    reason, warps = next(iter(kernel.stalls.items()))
    if warps < MAIN_STALL * sum(kernel.stalls.values()):
        return ""
    why, help_ = STALLS.get(reason, (f"by {reason}", "look it up in Nsight Compute's guide"))
    return f"warps wait {why} ({reason}): {help_}"
