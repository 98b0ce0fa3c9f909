"""Hold matmul's routes against measurement, at shapes that are in no table.

    python scripts/check_routes.py --record results/h200/routes-matmul.jsonl

For 40 numbers of rows, log-uniform in 1 ... 8192, and 10 layers of models that `tilewright tune`
does not measure, all choices are checked and timed as `tune` does it. A line of the record has the
times of all, what the table decides for the call, and what part of the quickest one's speed that
reaches. On an H200 this takes some three minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tilewright import doctor, gpu, tuned
from tilewright.ops import registry
from tilewright.ops.matmul.op import GRID_LAYERS
from tilewright.spec import Case
from tilewright.tuning.measure import measure
from tilewright.tuning.plan import Job
from tilewright.tuning.run import instruments

ROWS, MOST_ROWS = 40, 8192
LOW = 0.93  # parts of the best below it are counted
LAYERS = (  # (columns, depth); nobody looked at their times when the model was made
    *((8192, 4608), (4608, 4096), (73_728, 4608), (4608, 36_864)),  # of Gemma-2-27B
    *((12_288, 4096), (22_016, 4096), (4096, 11_008)),  # of Llama-2-7B, without o
    *((7680, 5120), (35_840, 5120), (5120, 17_920)),  # of Phi-3-medium, without o
)


def cells(seed: int) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, depth)."""
    rng = random.Random(seed)
    drawn: set[int] = set()
    while len(drawn) < ROWS:
        drawn.add(round(MOST_ROWS ** rng.random()))
    rows = sorted(drawn)
    for columns, depth in LAYERS:
        assert (columns, depth) not in GRID_LAYERS
        yield from ((m, columns, depth) for m in rows)


def held(job: Job, on: gpu.Gpu, tools: Any) -> dict[str, Any]:
    """One cell: everybody's time, and the table's decision among them."""
    meta = job.meta()
    decision = tuned.decide(on, job.op.name, job.place(meta), job.expected(on, meta))
    assert decision is not None
    found = measure(job, tools)
    times = {str(choice): timed.us for choice, timed in found.bucket.times.items()}
    chosen, best = str(decision.choice), min(times, key=lambda name: times[name])
    return {
        "dims": job.dims,
        "chosen": chosen,
        "predicted_us": round(decision.us, 2),
        "best": best,
        "part_of_best": round(times[best] / times[chosen], 4) if chosen in times else 0.0,
        "times": times,
        "wrong": [str(choice) for choice in found.wrong],
    }


def mean(ratios: list[float]) -> float:
    """0 if a cell took a choice that was refused there."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if all(ratios) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    on = gpu.detect() if torch.cuda.is_available() else None
    if on is None:
        parser.error("torch sees no GPU here, and routes are held against times on one.")
    table = tuned.table(on, "matmul")
    if table is None:  # before the record is written over
        parser.error(f"there is no table of {on.name}; `tilewright tune matmul` makes one.")
    op, tools = registry()["matmul"], instruments(on, given.seed)
    rows = []
    with given.record.open("w", encoding="utf-8") as record:
        digest = hashlib.sha256(repr(table).encode()).hexdigest()[:16]
        head = {"environment": doctor.environment(), "seed": given.seed, "table": digest}
        record.write(json.dumps(head) + "\n")
        for m, n, k in cells(given.seed):
            case = Case("", {"shape": (m, k), "n": n, "b": "column"}, "tune")
            rows.append(held(Job(op, case, torch.bfloat16), on, tools))
            record.write(json.dumps(rows[-1]) + "\n")
    parts = [row["part_of_best"] for row in rows]
    worst = sorted(rows, key=lambda row: row["part_of_best"])[:12]
    for row in worst:
        print(row["part_of_best"], row["dims"], row["chosen"], row["times"])
    low, wrong = sum(part < LOW for part in parts), sum(len(row["wrong"]) for row in rows)
    print(f"{len(parts)} cells, {wrong} choices wrong")
    print(f"geometric mean {mean(parts):.4f}, least {min(parts)}, {low} below {LOW}")


if __name__ == "__main__":
    main()
