"""Roofs, measured: what this GPU does at best, in this run, at the size in question.

Bandwidth depends on the mix of reads and writes and on the size, so a case is held against a stream
kernel that moves as many bytes in its own mix, timed in rotation with the contenders and in the
same way. Tensor cores are measured by a loop that touches no memory, not by a vendor's matmul: a
good kernel may beat that. Below both lies the launch of a kernel that does nothing.

    compute-sanitizer --tool memcheck python -m tilewright.bench.roofs

runs each roof kernel once, for a sanitizer to watch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.bench.record import Roof
from tilewright.bench.timing import Call, Clock, stats
from tilewright.gpu import Gpu, detect
from tilewright.spec import Cost, Traffic

# tiles read, written
MIXES = {"read": (1, 0), "2:1": (2, 1), "3:2": (3, 2), "1:1": (1, 1), "1:2": (1, 2)}
EMPTY = "empty launch"
SURVEY_BYTES = 2**30
SURVEY_ROUNDS = 30
SURVEY_US = 1000.0  # how long a compute loop runs: below, its launch shows
SHORTEST_LOOP_US = 20.0  # below, the launch and the first loads of the loop would count as flops
# Words per program and warps. Of twenty tried on an H200 (2026-11) one of these was the fastest at
# 1:1 and 2:1 from 128 MiB on. At a few MiB another shape may be faster; rows above 1.03 show it.
STREAMS = ((512, 4), (1024, 8), (2048, 8), (8192, 16))
UNITS = {
    "fp16": (torch.float16, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
    "tf32": (torch.float32, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.float32),
    "int8": (torch.int8, torch.int32),
}


def mix_of(traffic: Traffic) -> str:
    """The mix whose part of reads is nearest to the call's own."""
    share = traffic.read / max(traffic.total, 1)
    return min(MIXES, key=lambda name: abs(MIXES[name][0] / sum(MIXES[name]) - share))


@dataclass(frozen=True)
class RoofCall:
    """A roof as a contender: `bind(i)` gives the call on the i-th set of buffers."""

    name: str
    kind: str  # "launch", "bandwidth" or "compute"
    bind: Callable[[int], Call]
    scale: float = 1.0  # what was asked for over what it does: the sizes are rounded to tiles


class DeviceRoofs:
    """Roofs of a CUDA device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.arena = Arena()
        self.rates: dict[str, float] = {}  # unit -> flops per second, from the survey
        self.bandwidths: dict[str, float] = {}  # mix -> bytes per second at SURVEY_BYTES

    def beside(self, traffic: Traffic, cost: Cost, sets: int) -> list[RoofCall]:
        """What to time in rotation with a case: the launch, its bytes, and its flops if they
        could matter."""
        found = [RoofCall(EMPTY, "launch", lambda i: _empty_call())]
        mix = mix_of(traffic)
        found += [stream(self.arena, mix, traffic.total, sets, *shape) for shape in STREAMS]
        if cost.unit in UNITS and self.compute_us(cost) > max(
            self.bandwidth_us(traffic) / 4, SHORTEST_LOOP_US
        ):
            found.append(mma(cost.unit, cost.flops, self.gpu))
        return found

    def compute_us(self, cost: Cost) -> float:
        rate = self.rates.get(cost.unit)
        return cost.flops / rate * 1e6 if rate else 0.0

    def bandwidth_us(self, traffic: Traffic) -> float:
        """At the rate of a large transfer: what the bytes alone would take."""
        rate = self.bandwidths.get(mix_of(traffic))
        return traffic.total / rate * 1e6 if rate else 0.0

    def survey(self, clock: Clock) -> list[Roof]:
        """The roofs of this GPU, whatever the op: for the record, and to tell bounds."""
        roofs = []
        empty = {EMPTY: _empty_call()}
        launch = {
            "cold": clock.cold(empty, SURVEY_ROUNDS)[EMPTY],
            "graph": clock.graph(
                {EMPTY: lambda: [_empty_call()] * 64}, SURVEY_ROUNDS, lambda name, results: None
            )[EMPTY],
        }
        for method, samples in launch.items():
            roofs.append(Roof(f"{EMPTY}, {method}", "us", stats(samples).median))
        room = min(SURVEY_BYTES, self.gpu.memory_bytes // 8)
        for mix in MIXES:
            calls = [stream(self.arena, mix, room, 1, *shape) for shape in STREAMS]
            taken = clock.cold({c.name: c.bind(0) for c in calls}, SURVEY_ROUNDS)
            best = min(stats(taken[c.name]).median * c.scale for c in calls)
            self.bandwidths[mix] = room / best * 1e6
            peak = self.gpu.bandwidth / 1e9 if self.gpu.bandwidth else None
            note = f"{room >> 20} MiB"
            roofs.append(Roof(f"bandwidth {mix}", "GB/s", room / best / 1e3, peak, note))
        for unit in ("fp32", *UNITS):
            rate = self._compute_rate(clock, unit)
            if rate is not None:
                self.rates[unit] = rate
                peak = self.gpu.peaks.get(unit)
                name = "fma fp32" if unit == "fp32" else f"mma {unit}"
                roofs.append(Roof(name, "TFLOP/s", rate / 1e12, peak / 1e12 if peak else None))
        return roofs

    def _compute_rate(self, clock: Clock, unit: str) -> float | None:
        if unit != "fp32" and not self.gpu.supports(unit):
            return None
        flops = SURVEY_US * 1e-6 * self.gpu.peaks.get(unit, 1e14)
        loop = fma(flops, self.gpu) if unit == "fp32" else mma(unit, flops, self.gpu)
        try:
            us = stats(clock.cold({loop.name: loop.bind(0)}, SURVEY_ROUNDS)[loop.name]).median
        except Exception:  # a unit that this Triton cannot reach has no roof here
            return None
        return flops / (us * loop.scale) * 1e6


class Arena:
    """The memory that streams run over, kept from case to case and grown when it is too small."""

    def __init__(self) -> None:
        self._words = torch.empty(0, dtype=torch.int32)

    def words(self, count: int) -> torch.Tensor:
        """Random bits: memory draws less power on zeros."""
        if self._words.numel() < count:
            self._words = torch.empty(0, dtype=torch.int32)
            made = torch.empty(count, dtype=torch.int32, device="cuda")
            self._words = made.random_(generator=_rng())
        return self._words[:count]


def stream(arena: Arena, mix: str, size: int, sets: int, words: int, warps: int) -> RoofCall:
    """Moves about `size` bytes in this mix; `sets` calls in a row find nothing of theirs in L2."""
    from tilewright.bench.roof_kernels import _stream

    reads, writes = MIXES[mix]
    per_program = (reads + writes) * words * 4
    tiles = max(round(size / per_program), 1)
    taken, given = reads * tiles * words, max(writes * words, 1) * tiles
    given += -given % 4  # the next set starts on 16 bytes
    memory = arena.words(sets * (taken + given)).view(sets, taken + given)

    def bind(i: int) -> Call:
        source, target = memory[i % sets].split([taken, given])
        return lambda: _stream[(tiles,)](
            target, source, tiles, READS=reads, WRITES=writes, BLOCK=words, num_warps=warps
        )

    scale = size / (tiles * per_program) if tiles > 1 else 1.0
    return RoofCall(f"bandwidth {mix}, {words} words", "bandwidth", bind, scale)


@cache
def _rng() -> torch.Generator:
    """One of our own: a failed capture leaves torch's default one unusable."""
    return torch.Generator("cuda").manual_seed(0)


def mma(unit: str, flops: float, gpu: Gpu) -> RoofCall:
    """About `flops` on the tensor cores, from registers and shared memory alone."""
    import triton.language as tl

    from tilewright.bench.roof_kernels import _mma

    dtype, acc = UNITS[unit]
    size = torch.empty((), dtype=dtype).element_size()
    m, n, k = (128, 256, 128 // size) if gpu.sm >= 90 else (128, 128, 64 // size)
    programs = gpu.sm_count
    steps = max(round(flops / (2 * m * n * k * programs)), 1)
    a, b = (_operand(rows, k, dtype) for rows in (m, n))
    out = torch.empty(programs, n, dtype=acc, device="cuda")
    kind = tl.int32 if acc == torch.int32 else tl.float32

    def bind(i: int) -> Call:
        return lambda: _mma[(programs,)](
            out, a, b, steps, ACC=kind, M=m, N=n, K=k, num_warps=8, num_stages=2
        )

    return RoofCall(f"mma {unit}", "compute", bind, flops / (2.0 * m * n * k * programs * steps))


def _operand(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, k), dtype=dtype, device="cuda", generator=_rng())
    return torch.randn(rows, k, device="cuda", generator=_rng()).to(dtype)


def fma(flops: float, gpu: Gpu) -> RoofCall:
    """About `flops` of fused multiply-adds in float32."""
    from tilewright.bench.roof_kernels import _fma

    block, inner, programs = 4096, 16, gpu.sm_count * 4
    steps = max(round(flops / (2 * block * inner * programs)), 1)
    inp = torch.rand(programs * block, device="cuda", generator=_rng()) * 0.5
    out = torch.empty_like(inp)

    def bind(i: int) -> Call:
        return lambda: _fma[(programs,)](out, inp, steps, BLOCK=block, num_warps=4)

    return RoofCall("fma fp32", "compute", bind, flops / (2.0 * block * inner * programs * steps))


def _empty_call() -> Call:
    from tilewright.bench.roof_kernels import _empty

    out: Any = torch.empty(1, dtype=torch.int32, device="cuda")
    return lambda: _empty[(1,)](out, num_warps=1)


def sets_for(traffic: Traffic, l2_bytes: int, least: int = 16, most: int = 128) -> int:
    """How many sets of tensors a graph walks over: more than L2 holds, within reason."""
    return max(min(math.ceil(2 * l2_bytes / max(traffic.total, 1)), most), least)


def touch(gpu: Gpu) -> int:
    """Every roof kernel, on little memory and for few steps. Returns how many ran."""
    calls = [stream(Arena(), mix, 2**20, 2, *shape) for mix in MIXES for shape in STREAMS]
    calls += [mma(unit, 1e9, gpu) for unit in UNITS if gpu.supports(unit)]
    calls += [fma(1e9, gpu), RoofCall(EMPTY, "launch", lambda i: _empty_call())]
    for call in calls:
        call.bind(0)()
        call.bind(1)()  # the last set ends where the memory ends
    torch.cuda.synchronize()
    return len(calls)


def main() -> None:
    here = detect()
    if here is None:
        raise SystemExit("roofs: there is no GPU here, and nothing to run")
    print(f"roofs: {touch(here)} kernels")


if __name__ == "__main__":
    main()
