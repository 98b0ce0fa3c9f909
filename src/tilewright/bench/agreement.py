"""python -m tilewright.bench.agreement: our clock beside Triton's, on the same calls.

`triton.testing.do_bench` is the clock that most kernel authors know. Both must agree on large
copies and large matrix products. Each call is compared twice: clock against clock, in turns so
short that both see the same state of the GPU; and what `bench` prints for it, with roofs, checks
and all, against `do_bench` as people call it, one after the other. `do_bench` flushes L2 by
writing, and the timed call writes those lines back. As a control it runs once more with a flush
that reads: what is left then is a difference of clocks.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

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
REPEATS = 9  # of bench and do_bench


def compare(subject: Subject, bench: Bench) -> dict[str, Any]:
    """Medians of one yardstick, in microseconds."""
    call = next(c for c in subject.contenders if c.name == "vendor").bind(subject.make(0))
    clock_us, in_turns_us = _clocks(call, bench)
    bench_us, do_bench_us, reading_us = _figures(subject, call, bench)
    return {
        "case": subject.title,
        **{"clock_us": clock_us, "in_turns_us": in_turns_us, "clock_ratio": clock_us / in_turns_us},
        **{"bench_us": bench_us, "do_bench_us": do_bench_us, "bench_ratio": bench_us / do_bench_us},
        **{"reading_us": reading_us, "reading_ratio": bench_us / reading_us},
    }


def _clocks(call: Call, bench: Bench) -> tuple[float, float]:
    ours, theirs = [], []
    rounds = round(TURN_MS * 1e3 / do_bench(call, warmup=HEAT_MS, rep=TURN_MS))
    for _ in range(TURNS):
        ours.append(stats(bench.clock.cold({"call": call}, rounds)["call"]).median)
        theirs.append(do_bench(call, warmup=1, rep=TURN_MS))
    return median(ours), median(theirs)


def _figures(subject: Subject, call: Call, bench: Bench) -> tuple[float, float, float]:
    ours, theirs, reading = [], [], []
    for _ in range(REPEATS):
        row = next(row for row in measure(subject, bench) if row.contender == "vendor")
        if row.us is None:
            raise SystemExit(f"agreement: {subject.title} has no time: {row.reason or row.flags}")
        ours.append(row.us)
        theirs.append(do_bench(call))
        with _reading_flush():
            reading.append(do_bench(call))
    return median(ours), median(theirs), median(reading)


def do_bench(call: Call, **options: Any) -> float:
    """Triton's median, in microseconds."""
    from triton import testing

    return float(testing.do_bench(call, return_mode="median", **options)) * 1e3


def _reading_flush() -> AbstractContextManager[Any]:
    from triton import runtime

    sink = torch.zeros((), device="cuda")

    def clear(cache: torch.Tensor) -> None:
        torch.sum(cache.view(torch.float32), dim=0, out=sink)

    return mock.patch.object(runtime.driver.active, "clear_cache", clear)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our clock beside triton.testing.do_bench")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():  # said before the work, not after it
        parser.error(f"--json: {options.json.parent} is no folder. Name a file in one that is.")
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
            f"do_bench {row['do_bench_us']:8.1f}: {row['bench_ratio']:.3f}, reading "
            f"{row['reading_us']:8.1f}: {row['reading_ratio']:.3f}"
        )
    if options.json:
        record = {"environment": doctor.environment(), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
