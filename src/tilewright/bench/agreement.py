"""python -m tilewright.bench.agreement: our clock beside Triton's, on the same calls.

`triton.testing.do_bench` is the clock that most kernel authors know. Both must agree on large
copies and large matrix products. Each call is compared twice: clock against clock, in turns so
short that both see the same state of the GPU; and what `bench` prints for it, with roofs, checks
and all, against `do_bench` as people call it, one after the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilewright import doctor, gpu
from tilewright.bench import yardsticks
from tilewright.bench.measure import Bench, measure
from tilewright.bench.run import instruments
from tilewright.bench.subject import Subject
from tilewright.bench.timing import Call, stats

COPIES = (256, 1024)  # MiB
SQUARES = (4096, 8192)
HEAT_MS = 500  # of calls before the first turn: a GPU at its power limit slows down within that
TURNS = 12  # of each clock, one after the other
TURN_MS = 60  # short, so that neither has a clock rate of its own
REPEATS = 5  # of bench and do_bench


def compare(subject: Subject, bench: Bench) -> dict[str, Any]:
    """Medians of one yardstick, in microseconds."""
    call = next(c for c in subject.contenders if c.name == "vendor").bind(subject.make(0))
    clock_us, in_turns_us = _clocks(call, bench)
    bench_us, do_bench_us = _figures(subject, call, bench)
    return {
        "case": subject.title,
        **{"clock_us": clock_us, "in_turns_us": in_turns_us, "clock_ratio": clock_us / in_turns_us},
        **{"bench_us": bench_us, "do_bench_us": do_bench_us, "bench_ratio": bench_us / do_bench_us},
    }


def _clocks(call: Call, bench: Bench) -> tuple[float, float]:
    from triton.testing import do_bench

    ours, theirs = [], []
    once = do_bench(call, warmup=HEAT_MS, rep=TURN_MS, return_mode="median")
    for _ in range(TURNS):
        ours.append(stats(bench.clock.cold({"call": call}, round(TURN_MS / once))["call"]).median)
        theirs.append(do_bench(call, warmup=1, rep=TURN_MS, return_mode="median") * 1e3)
    return median(ours), median(theirs)


def _figures(subject: Subject, call: Call, bench: Bench) -> tuple[float, float]:
    from triton.testing import do_bench

    ours, theirs = [], []
    for _ in range(REPEATS):
        row = next(row for row in measure(subject, bench) if row.contender == "vendor")
        if row.us is None:
            raise SystemExit(f"agreement: {subject.title} has no time: {row.reason or row.flags}")
        ours.append(row.us)
        theirs.append(do_bench(call, return_mode="median") * 1e3)
    return median(ours), median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our clock beside triton.testing.do_bench")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = gpu.detect()
    if here is None or not torch.cuda.is_available():
        raise SystemExit("agreement: there is no GPU here, and nothing to compare")
    bench = instruments(here, warmup=50, iters=200, seed=0)
    bench.roofs.survey(bench.clock)
    subjects = [yardsticks.copy(mib, "cuda") for mib in COPIES]
    subjects += [yardsticks.matmul(n, torch.bfloat16, "cuda") for n in SQUARES]
    rows = []
    for subject in subjects:
        rows.append(row := compare(subject, bench))
        print(
            f"{row['case']:46s} clock {row['clock_us']:8.1f} us, in turns with do_bench's "
            f"{row['in_turns_us']:8.1f}: {row['clock_ratio']:.3f}; bench {row['bench_us']:8.1f}, "
            f"do_bench {row['do_bench_us']:8.1f}: {row['bench_ratio']:.3f}"
        )
    if options.json:
        record = {"environment": doctor.environment(), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
