"""Hold matmul's own kernels against cuBLAS at squares and prefill, whichever a table would take.

    python scripts/check_prefill.py --record results/h200/routes-prefill-matmul.jsonl

The cases are those of bench's suites `sweep` and `prefill`, in bfloat16 and float16, and squares in
tf32 with both operands along K. `cuda` and `gluon` with the launches that the table names for them,
cuBLAS and, for squares of halves, the portable kernel are checked and timed as `tilewright tune`
does it. Told are the ratios of each kernel, and of whichever the table names if cuBLAS is no route,
whatever was the quickest here. On an H200 this takes a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from tilewright import doctor, gpu, tuned
from tilewright.ops import registry
from tilewright.ops.matmul import routes
from tilewright.spec import Args, Case, Choice
from tilewright.tuning.measure import measure
from tilewright.tuning.plan import Job
from tilewright.tuning.run import instruments

LOW = 0.92  # parts of cuBLAS's speed below it are counted
TF32 = (2048, 4096, 8192)
HALVES = (torch.bfloat16, torch.float16)
HOPPER = ("cuda", "gluon")  # kernels of ours


class Held(Job):
    """One launch of each backend, as a call that names the backend would take it."""

    def expected(self, gpu: gpu.Gpu, args: Args) -> dict[Choice, float]:
        every = super().expected(gpu, args)
        found = tuned.decide(gpu, self.op.name, self.place(args), every)
        best = dict(found.best) if found else {}
        for choice in sorted(every, key=lambda choice: every[choice]):
            best.setdefault(choice.backend, (choice, every[choice]))  # the model's word
        wanted = (*HOPPER, "torch", *(["triton"] if self.case.group == "sweep" else []))
        return {best[name][0]: every[best[name][0]] for name in wanted if name in best}


def jobs() -> Iterator[Held]:
    op = registry()["matmul"]
    for case in op.cases:
        if case.group in ("sweep", "prefill") and "precision" not in case.dims:
            yield from (Held(op, case, dtype) for dtype in HALVES)
    for size in TF32:
        dims = {"shape": (size, size), "n": size, "b": "column", "precision": "tf32"}
        yield Held(op, Case(f"{size} NT tf32", dims, "tf32"), torch.float32)


def held(job: Held, tools: Any) -> dict[str, Any]:
    found = measure(job, tools).bucket
    return {
        "case": job.case.name,
        "dims": job.dims,
        "dtype": job.dtype_name,
        "launches": [str(choice) for choice in found.times],
        "times": {choice.backend: timed.us for choice, timed in found.times.items()},
        "refused": {str(choice): why for choice, why in found.refused.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    given = parser.parse_args()
    on = gpu.detect() if torch.cuda.is_available() else None
    if on is None:
        parser.error("torch sees no GPU here, and kernels are held against times on one.")
    first = next(jobs())
    able = {choice.backend for choice in Job.expected(first, on, first.meta())}
    if not able.intersection(HOPPER):
        parser.error(
            f"{on.name} has no kernel of ours to hold against cuBLAS but the portable one."
        )
    tools = instruments(on, 0)
    rows: list[dict[str, Any]] = []
    named: list[str] = []
    with given.record.open("w", encoding="utf-8") as record:
        record.write(json.dumps({"environment": doctor.environment()}) + "\n")
        for job in jobs():
            rows.append(held(job, tools))
            record.write(json.dumps(rows[-1]) + "\n")
            record.flush()
            decided = routes.ours(on, job.meta())
            named.append(decided.choice.backend if decided else "")
    wrong = sum(len(row["refused"]) for row in rows)
    print(f"{len(rows)} cells, {wrong} choices refused")
    pairs = zip(rows, named, strict=True)
    halves = [(row["times"], who) for row, who in pairs if row["dtype"] != "float32"]
    tell("whichever the table names", halves)
    for name in HOPPER:
        tell(name, [(times, name) for times, _ in halves])


def tell(what: str, cells: Sequence[tuple[dict[str, float], str]]) -> None:
    parts = [us["torch"] / us[name] for us, name in cells if us.keys() >= {"torch", name}]
    if len(parts) < len(cells):
        print(f"{len(cells) - len(parts)} of {len(cells)} cells left out: a time is missing")
    if parts:
        low, mean = sum(part < LOW for part in parts), geometric_mean(parts)
        print(f"{what}: geometric mean {mean:.4f}, least {min(parts):.4f}, {low} below {LOW}")


if __name__ == "__main__":
    main()
