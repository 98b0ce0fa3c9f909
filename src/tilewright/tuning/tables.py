"""What won, by how much over the next, and over torch: for people, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table

from tilewright.gpu import Gpu
from tilewright.tuned.file import Bucket
from tilewright.tuning.plan import Job
from tilewright.tuning.run import Result

TORCH = "torch"
NOTHING = "-"


def table(result: Result) -> Table:
    right = [Column(name, justify="right") for name in ("us", "over the next", "over torch")]
    shown = Table("bucket", "choice", *right, box=None, pad_edge=False)
    for job, bucket in result.measured:
        facts = _facts(job, bucket)
        us = NOTHING if facts["us"] is None else f"{facts['us']:.1f}"
        beside = [_times(facts[name]) for name in ("over_next", "over_torch")]
        shown.add_row(job.title, facts["choice"] or "none is right", us, *beside)
    return shown


def summary(result: Result) -> str:
    """One line: how often each backend won, and what was refused."""
    wins = Counter(b.choice.backend for _, b in result.measured if b.choice is not None)
    told = ", ".join(f"{name} {count}" for name, count in wins.most_common()) or "nobody"
    refused = sum(len(bucket.refused) for _, bucket in result.measured)
    return (
        f"{len(result.measured)} buckets, won by {told}; {refused} choices refused, "
        f"{len(result.wrong)} of them as wrong"
    )


def as_dicts(result: Result) -> list[dict[str, Any]]:
    return [_facts(job, bucket) for job, bucket in result.measured]


def planned(jobs: Sequence[Job], gpu: Gpu) -> list[dict[str, Any]]:
    """What would be measured, on a GPU that need not be here."""
    return [
        {
            "op": job.op.name,
            "case": job.case.name,
            "dims": job.dims,
            "dtype": job.dtype_name,
            "choices": [str(choice) for choice in job.expected(gpu, job.meta())],
        }
        for job in jobs
    ]


def plan_table(rows: Sequence[dict[str, Any]], gpu: Gpu) -> Table:
    title = f"what tune would measure on {gpu.name}"
    shown = Table("bucket", "choices", box=None, pad_edge=False, title=title, title_justify="left")
    for row in rows:
        shown.add_row(f"{row['op']} {row['dims']}, {row['dtype']}", ", ".join(row["choices"]))
    return shown


def _facts(job: Job, bucket: Bucket) -> dict[str, Any]:
    us = {choice: timed.us for choice, timed in bucket.times.items()}
    best = us.get(bucket.choice) if bucket.choice is not None else None
    others = [time for choice, time in us.items() if choice != bucket.choice]
    torchs = [time for choice, time in us.items() if choice.backend == TORCH]
    return {
        "op": job.op.name,
        "dims": bucket.dims,
        "dtype": bucket.dtype,
        "choice": None if bucket.choice is None else str(bucket.choice),
        "us": best,
        "over_next": min(others) / best if best and others else None,
        "over_torch": min(torchs) / best if best and torchs else None,
        "times": {str(choice): time for choice, time in us.items()},
        "refused": {str(choice): why for choice, why in bucket.refused.items()},
    }


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}x"
