"""python -m tilewright.bench.agreement: our clock beside Triton's, on the same calls.

`triton.testing.do_bench` is the clock that most kernel authors know. Where both must agree, on
large copies and large matrix products, they run in turns, and the ratio of medians is recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from tilewright import doctor, gpu
from tilewright.bench import yardsticks
from tilewright.bench.clock import CudaClock
from tilewright.bench.subject import Subject
from tilewright.bench.timing import stats

COPIES = (256, 1024)  # MiB
SQUARES = (4096, 8192)
HEAT_MS = 500  # of calls before the first turn: a GPU at its power limit slows down within that
TURNS = 12  # of each clock, one after the other
TURN_MS = 60  # short, so that neither has a clock rate of its own


def compare(subject: Subject, clock: CudaClock) -> dict[str, Any]:
    """Medians of both clocks for one yardstick, in microseconds."""
    from triton.testing import do_bench

    call = next(c for c in subject.contenders if c.name == "vendor").bind(subject.make(0))
    ours, theirs = [], []
    once = do_bench(call, warmup=HEAT_MS, rep=TURN_MS, return_mode="median")
    for _ in range(TURNS):
        ours.append(stats(clock.cold({"call": call}, round(TURN_MS / once))["call"]).median)
        theirs.append(do_bench(call, warmup=1, rep=TURN_MS, return_mode="median") * 1e3)
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {"case": subject.title, "ours_us": mine, "do_bench_us": other, "ratio": mine / other}


def main() -> None:
    parser = argparse.ArgumentParser(description="Our clock beside triton.testing.do_bench")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = gpu.detect()
    if here is None or not torch.cuda.is_available():
        raise SystemExit("agreement: there is no GPU here, and nothing to compare")
    clock = CudaClock(here)
    subjects = [yardsticks.copy(mib, "cuda") for mib in COPIES]
    subjects += [yardsticks.matmul(n, torch.bfloat16, "cuda") for n in SQUARES]
    rows = [compare(subject, clock) for subject in subjects]
    for row in rows:
        print(
            f"{row['case']:48s} {row['ours_us']:10.1f} us, do_bench {row['do_bench_us']:10.1f} us, "
            f"ratio {row['ratio']:.3f}"
        )
    if options.json:
        record = {"environment": doctor.environment(), "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
