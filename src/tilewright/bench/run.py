"""A whole run: a record file, every case after the other, whatever ends it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tilewright import doctor
from tilewright.bench import machine, record, rivals
from tilewright.bench.clock import CudaClock
from tilewright.bench.measure import Bench, measure
from tilewright.bench.record import Record, Row, Writer
from tilewright.bench.roofs import DeviceRoofs
from tilewright.bench.subject import Subject
from tilewright.errors import InputError
from tilewright.gpu import Gpu
from tilewright.lab import journal, stop

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Job:
    """A case to come: what it is called, and how to make it."""

    key: Key  # op, case, dtype, phase
    dims: Mapping[str, Any]
    make: Callable[[], Subject]

    @property
    def title(self) -> str:
        op, case, dtype, phase = self.key
        return f"{op} {phase}, {case}, {dtype}"

    @staticmethod
    def of(subject: Subject) -> Job:
        dtype = str(subject.dtype).removeprefix("torch.")
        key = (subject.op, subject.case, dtype, subject.phase)
        return Job(key, subject.dims, lambda: subject)


@dataclass
class Run:
    """What came of it."""

    path: Path | None
    rows: list[Row] = field(default_factory=list)
    roofs: list[record.Roof] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # cases that were not measured
    ended_by: str = ""  # "", "time", "interrupt" or "SIGTERM"
    header: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    def as_record(self) -> Record:
        return Record(self.path or Path(), self.header, self.roofs, self.rows, self.end)


def instruments(gpu: Gpu, warmup: int, iters: int, seed: int) -> Bench:
    """The real ones."""
    return Bench(gpu, CudaClock(gpu), DeviceRoofs(gpu), warmup=warmup, iters=iters, seed=seed)


def new_path(folder: Path, gpu: Gpu) -> Path:
    """A name that no other run has: nothing is overwritten."""
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    path = folder / f"{gpu.short_name}-{now}.jsonl"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{gpu.short_name}-{now}-{number}.jsonl"
    return path


def to_resume(folder: Path, gpu: Gpu, settings: dict[str, Any]) -> Record:
    """The newest record in the folder, if it is of this GPU and these settings."""
    found = record.read(folder)
    if found.gpu != gpu.name:
        raise InputError(
            f"bench: --resume: {found.path} was measured on {found.gpu}, and this is {gpu.name}. "
            "Name another --out."
        )
    same = ("tilewright", "source", "torch", "triton")
    here = doctor.environment()
    asked = ("warmup", "iters", "seed", "backends", "baselines")
    before = {k: found.run.get("settings", {}).get(k) for k in asked}
    before |= {k: found.run["environment"].get(k) for k in same}
    now = {k: here[k] if k in same else _as_read(settings.get(k)) for k in before}
    for name, value in before.items():
        if value != now[name]:
            raise InputError(
                f"bench: --resume: {found.path} was measured with {name} {value}, and this is "
                f"{now[name]}. Give the same options and code, or another --out."
            )
    return found


def _as_read(value: Any) -> Any:
    """A tuple comes back from a record as a list."""
    return list(value) if isinstance(value, tuple) else value


def run(
    jobs: Sequence[Job],
    bench: Bench,
    *,
    settings: dict[str, Any],
    path: Path | None,
    resumed: Record | None = None,
    max_seconds: float | None = None,
    progress: Callable[[str, int], None] = lambda title, done: None,
    clock: Callable[[], float] = time.monotonic,
) -> Run:
    """Measure the jobs in order. Ctrl-C and the time limit keep what was measured."""
    started = clock()
    kept = [r for r in resumed.rows if r.contender != record.WHOLE_CASE] if resumed else []
    result = Run(path, rows=kept)
    done = {(r.op, r.case, r.dtype, r.phase) for r in result.rows}
    waiting = [job for job in jobs if job.key not in done]
    result.header = header(settings)
    held = journal.lock(path, "--out") if path else None
    writer = Writer(path) if path else None
    if writer:
        writer.write("run", result.header)
    try:
        result.roofs = bench.roofs.survey(bench.clock)
        for roof in result.roofs if writer else ():
            writer.write("roof", asdict(roof))  # type: ignore[union-attr]
        for rows in _each(waiting, bench, result, progress, clock, started, max_seconds):
            result.rows += rows
            if writer:
                writer.rows(rows)
    except KeyboardInterrupt as e:
        result.ended_by = stop.word(e)
    measured = {(r.op, r.case, r.dtype, r.phase) for r in result.rows}
    result.left = [job.title for job in waiting if job.key not in measured]
    result.end = {
        "seconds": round(clock() - started, 1),
        "complete": not result.left,
        "ended_by": result.ended_by,
        "machine": machine.state(),
    }
    if writer:
        writer.write("end", result.end)
    if held:
        journal.unlock(held)
    return result


def header(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": record.SCHEMA,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": doctor.environment(),
        "rivals": rivals.versions(),
        "settings": settings,
        "machine": machine.state(),
    }


def _each(
    jobs: Sequence[Job],
    bench: Bench,
    result: Run,
    progress: Callable[[str, int], None],
    clock: Callable[[], float],
    started: float,
    max_seconds: float | None,
) -> Iterator[list[Row]]:
    for number, job in enumerate(jobs):
        if max_seconds is not None and clock() - started >= max_seconds:
            result.ended_by = "time"
            return
        progress(job.title, number)
        yield _measured(job, bench)


def _measured(job: Job, bench: Bench) -> list[Row]:
    """The rows of a case. One that cannot be set up does not end the run."""
    try:
        return measure(job.make(), bench)
    except torch.OutOfMemoryError as e:
        why = f"not enough memory on this GPU: {e}"
    except Exception as e:  # an input, a reference or an earlier kernel may fail in its own way
        why = f"it could not be measured: {type(e).__name__}: {e}"
    finally:
        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # a broken context has nothing to give back
                torch.cuda.empty_cache()
    op, case, dtype, phase = job.key
    reason = why.splitlines()[0][:250]
    return [Row(op, case, job.dims, dtype, phase, record.WHOLE_CASE, True, "refused", reason)]
