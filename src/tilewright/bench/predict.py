"""Without a GPU: what each case should take, from the datasheet's roofline of a named one.

A prediction is bytes over bandwidth or flops over rate, whichever is longer. It is a floor, not a
measurement, and is never shown as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from tilewright.bench.contest import NO_NUMBER, micros, size
from tilewright.bench.suites import Work
from tilewright.dims import meta_inputs
from tilewright.explain import explain_call
from tilewright.gpu import Gpu

LAUNCH_US = 2.0  # an assumption, the same for every GPU: it decides only what is bound by launching


@dataclass(frozen=True)
class Prediction:
    op: str
    case: str
    dtype: str
    phase: str
    backend: str
    kernels: tuple[str, ...]
    bytes: int
    flops: float
    us: float | None
    bound: str


def predict(work: Work, gpu: Gpu) -> Prediction:
    """From the declaration alone."""
    cost = work.op.cost_in(work.case.dims, work.dtype, work.phase)
    meta = meta_inputs(work.op, work.case.dims, work.dtype)
    op, args = work.op.in_phase(meta, work.phase)
    moved = op.traffic(args).total
    found = explain_call(op, args, gpu=gpu)
    times = {"launch": LAUNCH_US}
    if gpu.bandwidth:
        times["bandwidth"] = moved / gpu.bandwidth * 1e6
    if cost.flops and cost.unit in gpu.peaks:
        times["compute"] = cost.flops / gpu.peaks[cost.unit] * 1e6
    bound = max(times, key=lambda name: times[name])
    us = times[bound] if gpu.bandwidth else None
    dtype = str(work.dtype).removeprefix("torch.")
    return Prediction(
        work.op.name, work.case.name, dtype, work.phase, found.backend, found.kernels,
        moved, cost.flops, us, bound if us else "",
    )  # fmt: skip


def table(predictions: Sequence[Prediction], gpu: Gpu) -> Table:
    found = Table(
        "case", "backend", "moves", "at least, µs", "bound by", box=None, pad_edge=False,
        title=f"predicted for {gpu.name}, from its datasheet", title_justify="left",
    )  # fmt: skip
    for p in predictions:
        us = micros(p.us) if p.us else NO_NUMBER
        words = f"{p.op} {p.phase}, {p.case}, {p.dtype}"
        found.add_row(words, p.backend, size(p.bytes), us, p.bound or NO_NUMBER)
    return found


def as_dicts(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [asdict(p) for p in predictions]
