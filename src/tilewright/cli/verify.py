"""tilewright verify: whether every kernel is right."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.console import (
    Budget,
    Draw,
    Json,
    Ops,
    Workers,
    console,
    duration,
    emit,
    errors,
    fail,
    or_exit,
)
from tilewright.cli.progress import Progress
from tilewright.lab import stop
from tilewright.lab.workers import most

app = typer.Typer()

MOST_ON_A_GPU = 16  # processes: each has a driver's context of its own
GPU_MEMORY_EACH = 4 * 2**30
COLD = 2.0  # how many times as long steps take while each binary is compiled for the first time


@app.command()
def verify(
    ops: Ops = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="Every case, or what the budget allows: another part of them for each commit.",
        ),
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; repeatable.")] = None,
    case: Annotated[str, typer.Option(help="Only this case, in full: widest.")] = "",
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="Random cases per op and backend; calls of a cover of options."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="First seed.")] = None,
    draw: Draw = None,
    budget: Budget = None,
    workers: Workers = None,
    limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds without a sign of life after which a kernel hangs."),
    ] = None,
    fail_fast: Annotated[bool, typer.Option(help="Stop at the first failure.")] = False,
    json_to: Json = None,
) -> None:
    """Check every kernel against float64: on a GPU, or on the CPU in Triton's interpreter."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        fail(f"verify: --device is {device!r}; it must be cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        fail("verify: --device is cuda and torch sees no GPU. Use --device cpu.")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, here and in children
    if full and (draw is not None or budget is not None):
        fail("verify: --full takes every case, so there is nothing to draw. Leave one out.")
    named = bool(case) or cases is not None or seed is not None  # then that is what runs
    if named and (draw is not None or budget is not None):
        fail(
            "verify: --case, --cases and --seed say what runs, so nothing is drawn. Leave one out."
        )
    try:
        with stop.stoppable(), Progress("verify") as progress:
            progress.phase("planning")
            from tilewright.verify import plan

            full = full or bool(case)
            steps = or_exit(
                lambda: plan(
                    ops or (), device=device, full=full, only=only or (), backend=backend,
                    cases=cases, seed=seed or 0, case=case,
                )
            )  # fmt: skip
            _refuse_nothing(steps, ops, device, only, backend, case)
            taken, drawn = (steps, None) if full or named else _draw(steps, device, draw, budget)
            count = 1 if fail_fast else workers or _workers(device)
            run = _Run(taken, len(steps), drawn, device, full, most(count, len(taken)))
            code = run.work(fail_fast, limit, json_to, progress)
    except KeyboardInterrupt as e:  # a run that has begun handles it itself
        fail(f"verify: stopped by {stop.word(e)} while planning.", stop.CODES[stop.word(e)])
    run.show(json_to)
    raise typer.Exit(code)


def _refuse_nothing(
    steps: Any, ops: Any, device: str, only: Any, backend: str | None, case: str
) -> None:
    """Say which word left nothing to run."""
    from tilewright.ops import registry
    from tilewright.verify.runner import backends_on

    names = sorted({b for op in ops or registry() for b in backends_on(op, device)})
    if not names:
        fail(f"verify: {', '.join(ops or ())} has no kernel that runs on {device} yet.", 1)
    if steps:
        return
    if case and backend in names:
        fail(f"verify: no op with the case {case!r} has the backend {backend!r}; leave one out.")
    if backend in (None, *names):
        checks, named = ", ".join(only or ()), ", ".join(ops or ())
        fail(f"verify: --only is {checks}, which {named or 'no op'} has not; leave it out.")
    fail(f"verify: --backend is {backend!r}; on {device} it must be one of {', '.join(names)}.")


def _draw(steps: Any, device: str, key: str | None, budget: float | None) -> tuple[Any, Any]:
    """Return the steps whose turn it is, and what the record says of the draw."""
    from tilewright.lab import draw as room
    from tilewright.lab.budget import WHOLES
    from tilewright.verify.runner import pieces

    key, whole = key or room.key(), WHOLES["verify", device] if budget is None else budget
    taken = or_exit(lambda: room.draw(pieces(steps), whole, key, "verify"))
    seconds = sum(piece.seconds for piece in taken)
    return [piece.item for piece in taken], {"key": key, "budget": whole, "seconds": seconds}


def _workers(device: str) -> int:
    cores = os.cpu_count() or 1
    if device == "cpu":
        return cores
    import torch

    _, memory = torch.cuda.mem_get_info()
    return max(1, min(MOST_ON_A_GPU, cores, memory // GPU_MEMORY_EACH))


class _Run:
    """One run: what it was asked, what came of it so far."""

    def __init__(
        self, steps: Any, planned: int, drawn: Any, device: str, full: bool, count: int
    ) -> None:
        from tilewright import doctor

        self.steps, self.planned, self.drawn = steps, planned, drawn
        self.device, self.full, self.count = device, full, count
        self.results: list[Any] = []
        self.work_of: dict[str, float] = {}  # seconds, by a step's name
        self.ran, self.ended_by = 0, ""
        self.journal: Any = None
        self.started = time.perf_counter()
        self.environment = doctor.environment()

    def state(self) -> dict[str, Any] | None:
        """Return what the record holds so far, once there is a result."""
        return self.record() if self.results else None

    def record(self) -> dict[str, Any]:
        from tilewright.verify import summary

        return {
            "environment": self.environment,
            "device": self.device,
            "full": self.full,
            "draw": self.drawn,
            "steps": {"there_are": self.planned, "taken": len(self.steps), "ran": self.ran},
            "complete": self.ran == len(self.steps) and not self.ended_by,
            "ended_by": self.ended_by,
            "seconds": round(time.perf_counter() - self.started, 1),
            **summary.summarise(self.results, self.device),
        }

    def work(
        self, fail_fast: bool, limit: float | None, json_to: Path | None, progress: Progress
    ) -> int:
        """Run the steps, keep the record as they end, and return the exit code."""
        from tilewright.lab.journal import Journal
        from tilewright.verify import run
        from tilewright.verify.runner import pieces

        path = None if str(json_to) == "-" else json_to
        with or_exit(lambda: Journal(path, self.state)) as journal:
            self.journal = journal if path else None
            try:
                self.work_of = {p.name: p.seconds for p in pieces(self.steps)}
                progress.say(f"verify: {self._before()}")
                progress.phase("checks", len(self.steps), sum(self.work_of.values()))
                ended = run(
                    self.steps, fail_fast=fail_fast, count=self.count,
                    apart=True, limit=limit, beat=journal.note,
                )  # fmt: skip
                for results in ended:
                    self._take(results, progress)
            except KeyboardInterrupt as e:
                self.ended_by = stop.word(e)
        if self.ended_by:
            return stop.CODES[self.ended_by]
        if not self.results:
            fail("verify: nothing to run: these checks do not apply to these ops on this device.")
        return int(not all(result.passed for result in self.results))

    def _take(self, results: Any, progress: Progress) -> None:
        self.results += results
        self.ran += 1
        from tilewright.verify.runner import name_of

        name = name_of(results.step)
        progress.at(what=name, work=self.work_of[name])
        for result in results:
            if not result.passed:
                progress.say(f"failed {result.line}")
                progress.say(f"       {result.repro(self.device)}")

    def _before(self) -> str:
        cold = COLD if self.device == "cuda" else 1.0
        about = duration(cold * sum(self.work_of.values()) / max(self.count, 1))
        of, drawn = "", ""
        if self.drawn is not None:
            of, drawn = f" of {self.planned:,}", f"; drawn by --draw {self.drawn['key']}"
        return (
            f"{len(self.steps):,}{of} steps on {_where(self.device)}, {self.count} at a time, "
            f"about {about}{drawn}"
        )

    def show(self, json_to: Path | None) -> None:
        """Print the table, and what to do next."""
        from tilewright.verify import summary

        record = self.record()
        table = summary.table(record, f"verify on {_where(self.device)}")
        nothing = self.ended_by and not self.results  # an older record is worth more
        emit(table, record, None if nothing else json_to, self.journal)
        where = errors if str(json_to) == "-" else console
        where.print(self._after(record), markup=False, highlight=False, soft_wrap=True)

    def _after(self, record: dict[str, Any]) -> str:
        run = sum(row["run"] for row in record["checks"])
        failed = len(record["failures"])
        words = f"{run:,} results in {duration(record['seconds'])}, {failed} failed."
        if self.ended_by:
            left = len(self.steps) - self.ran
            return f"{words} Stopped by {self.ended_by}: {left:,} steps did not run."
        if failed:
            return f"{words} Each line `tilewright verify ...` above runs one of them again."
        if self.drawn is not None and self.planned > len(self.steps):
            part = len(self.steps) / self.planned
            words += f" That was {part:.0%} of all steps; the next commit draws others."
            return f"{words} Next: `tilewright bench`; all steps: `tilewright verify --full`."
        return f"{words} Next: `tilewright bench`."


def _where(device: str) -> str:
    return "the GPU" if device == "cuda" else "the CPU (Triton's interpreter)"
