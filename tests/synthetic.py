"""Records of a run that never took place: plausible times, and every kind of row that there is.

A contender's true time depends on the case alone. The seed decides what a run adds to it: noise
from sample to sample, drift from pass to pass and from run to run. Two seeds are therefore two runs
of the same kernels, and `slow` makes a third in which ours became slower.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.bench.record import SCHEMA, Record, Roof, Row, Stats, Writer

LAUNCH_US = 1.9
GBPS = 4200.0
TFLOPS = {"fp32": 60.0, "bf16": 790.0}
SAMPLES = 40  # a pass

# op: (contenders of ours with their part of the roof, flops per element)
OURS: dict[str, tuple[dict[str, float], float]] = {
    "relu": ({"triton": 0.96}, 0.0),
    "softmax": ({"triton": 0.95, "cuda_v1": 0.62, "cuda_v2": 0.93}, 5.0),
    "rms_norm": ({"triton": 0.94, "cuda": 0.95}, 4.0),
}
RIVALS = {"eager": 0.48, "compile": 0.91, "vendor": 0.89, "liger": 0.86}
SHAPES = {
    "decode": (64, 4096),
    "prompt": (2048, 4096),
    "wide": (512, 65_536),
    "big": (32_768, 4096),
}
BYTES = {"bfloat16": 2, "float32": 4}
MATMULS = {"square": (4096, 4096, 4096), "narrow": (64, 4096, 14_336)}


def rows(seed: int, *, slow: float = 1.0, noise: float = 0.01, drift: float = 0.005) -> list[Row]:
    """One run's rows; ours take `slow` times as long, rivals do not."""
    rng = random.Random(seed)
    run = 1 + rng.gauss(0, drift)
    found: list[Row] = []

    def add(true_us: float, **facts: Any) -> None:
        us = true_us * run * (slow if facts["ours"] else 1.0)
        found.append(_row(us, rng, noise, drift, facts))

    for op, (ours, flops_each) in OURS.items():
        for phase in ("forward", "backward"):
            for case, shape in SHAPES.items():
                for dtype, width in BYTES.items():
                    count = shape[0] * shape[1]
                    facts: dict[str, Any] = {
                        **{"op": op, "case": case, "dims": {"shape": list(shape)}},
                        **{"dtype": dtype, "phase": phase, "flops": flops_each * count},
                        "bytes_read": count * width * (1 if phase == "forward" else 2),
                        "bytes_written": count * width,
                    }
                    moved = facts["bytes_read"] + facts["bytes_written"]
                    floor = max(LAUNCH_US, moved / GBPS / 1e3)
                    near = {"roof_us": floor, "roof": "bandwidth 1:1 at this size"}
                    near["bound"] = "launch" if floor == LAUNCH_US else "bandwidth"
                    for name, part in {**ours, **RIVALS}.items():
                        # a launch takes its time whatever the size; wide rows suit us less
                        handicap = 0.8 if case == "wide" and name == "triton" else 1.0
                        true_us = floor / part / handicap + 0.4
                        add(true_us, contender=name, ours=name in ours, **facts, **near)
    for case, (m, n, k) in MATMULS.items():
        moved = 2 * (m * k + k * n + m * n)
        floor = max(2 * m * n * k / TFLOPS["bf16"] / 1e6, moved / GBPS / 1e3)
        bound = "compute" if case == "square" else "bandwidth"
        facts = {"op": "matmul", "case": case, "dims": {"m": m, "n": n, "k": k}}
        facts |= {"dtype": "bfloat16", "phase": "forward", "flops": 2.0 * m * n * k}
        facts |= {"bytes_read": 2 * (m * k + k * n), "bytes_written": 2 * m * n}
        facts |= {"unit": "bf16", "roof_us": floor, "roof": "mma bf16", "bound": bound}
        for name, part in {"triton": 0.78, "eager": 0.86, "compile": 0.84, "vendor": 0.88}.items():
            add(floor / part, contender=name, ours=name == "triton", **facts)
    return [_special(row) for row in found]


def _row(us: float, rng: random.Random, noise: float, drift: float, facts: dict[str, Any]) -> Row:
    passes = [us * (1 + rng.gauss(0, drift)) for _ in range(2)]
    samples = [each * (1 + abs(rng.gauss(0, noise))) for each in passes for _ in range(SAMPLES)]
    graph = _stats(samples)
    moved = facts["bytes_read"] + facts["bytes_written"]
    return Row(
        **facts,
        state="ok",
        ran=facts["contender"],
        kernels=(f"_{facts['op']}_kernel",),
        method="graph",
        us=graph.median,
        gbps=moved / graph.median / 1e3,
        tflops=facts["flops"] / graph.median / 1e6,
        of_roof=facts["roof_us"] / graph.median,
        error=round(rng.uniform(0.2, 0.98), 3),
        cold=_stats([s + 1.5 for s in samples]),
        graph=graph,
        host=_stats([s + 6.0 for s in samples]),
        cpu=_stats([6.5 * (1 + abs(rng.gauss(0, noise))) for _ in samples]),
        samples=tuple(samples),
    )


def _stats(samples: list[float]) -> Stats:
    cuts = statistics.quantiles(samples, n=10)
    half = len(samples) // 2
    passes = (statistics.median(samples[:half]), statistics.median(samples[half:]))
    return Stats(statistics.median(samples), cuts[1], cuts[7], len(samples), passes)


def _special(row: Row) -> Row:
    """One row of each kind that is not simply a number."""
    facts = asdict(row)
    place = (row.op, row.case, row.dtype, row.phase, row.contender)
    unmeasured = {
        **dict.fromkeys(("us", "gbps", "tflops", "of_roof", "cold", "graph", "host", "cpu")),
        **{"method": "", "samples": (), "kernels": (), "ran": "", "error": None},
    }
    if row.op == "relu" and row.contender in ("vendor", "liger"):
        facts |= unmeasured
        facts |= {"state": "unavailable", "reason": "no library has a relu of its own"}
    elif place == ("softmax", "wide", "bfloat16", "forward", "cuda_v1"):
        # measured, and still it must get no number
        reason = "its result is wrong: 3.2 times the tolerance after timing"
        facts |= {"state": "refused", "reason": reason, "error": 3.2}
    elif place == ("rms_norm", "prompt", "float32", "backward", "vendor"):
        facts |= unmeasured
        facts |= {"state": "refused", "reason": "it ran another kernel than it was asked for"}
    elif place == ("softmax", "prompt", "bfloat16", "forward", "triton"):
        facts |= {
            "flags": ("noisy: two passes differ by 4.0%", "1.04x of its roof: wrong byte count")
        }
    else:
        return row
    for name in ("cold", "graph", "host", "cpu"):
        facts[name] = getattr(row, name) if facts[name] else None
    return Row(**facts)


ROOFS = [
    Roof("empty launch, cold", "us", 2.4),
    Roof("empty launch, graph", "us", LAUNCH_US),
    Roof("bandwidth read", "GB/s", 4420.0, 4800.0, "1024 MiB"),
    Roof("bandwidth 2:1", "GB/s", 4290.0, 4800.0, "1024 MiB"),
    Roof("bandwidth 1:1", "GB/s", GBPS, 4800.0, "1024 MiB"),
    Roof("bandwidth 1:2", "GB/s", 4080.0, 4800.0, "1024 MiB"),
    Roof("fma fp32", "TFLOP/s", TFLOPS["fp32"], 67.0),
    Roof("mma fp16", "TFLOP/s", 801.0, 989.0),
    Roof("mma bf16", "TFLOP/s", TFLOPS["bf16"], 989.0),
    Roof("mma fp8", "TFLOP/s", 1530.0),
]


def run(gpu: str = "NVIDIA H200", seed: int = 0) -> dict[str, Any]:
    """The first line of a record."""
    return {
        "schema": SCHEMA,
        "started": "2026-11-15T08:17:00+00:00",
        "environment": {
            **{"tilewright": "0.1.0", "source": "3ffad0e4572874b6", "python": "3.12.3"},
            **{"torch": "2.13.0", "triton": "3.9.0", "gpu": gpu, "sm": 90, "cores": 16},
        },
        "settings": {"seed": seed, "iters": 2 * SAMPLES, "warmup": 50},
        "machine": {
            **{"driver": "580.95.05", "sm_mhz": 1980.0, "memory_mhz": 3201.0, "power_w": 121.5},
            **{"temperature_c": 31.0, "limited_by": [], "locked": False},
        },
    }


END = {
    **{"seconds": 71.3, "complete": True, "ended_by": ""},
    "machine": {"sm_mhz": 1965.0, "temperature_c": 48.0, "limited_by": ["power cap"]},
}


def record(seed: int = 0, *, gpu: str = "NVIDIA H200", **how: float) -> Record:
    """A run in memory; `how` as for `rows`."""
    path = Path(f"synthetic-{seed}.jsonl")
    return Record(path, run(gpu, seed), list(ROOFS), rows(seed, **how), dict(END))


def write(path: Path, rows: Iterable[Row], gpu: str = "NVIDIA H200") -> Path:
    """A record file of `rows`, written as a run would."""
    writer = Writer(path)
    writer.write("run", run(gpu))
    for roof in ROOFS:
        writer.write("roof", asdict(roof))
    writer.rows(rows)
    writer.write("end", END)
    return path
