"""tilewright compile: every kernel for every SM, without a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

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

app = typer.Typer()


@app.command("compile")
def compile_matrix(
    ops: Ops = None,
    arch: Annotated[list[str] | None, typer.Option(help="Only these SMs: 75, sm_90, h100.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Folder of earlier results.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Compile all, known or not.")] = False,
    update: Annotated[bool, typer.Option(help="Write the results into the ledger.")] = False,
    draw: Draw = None,
    budget: Budget = None,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Compile every kernel and launch choice for every SM, without a GPU.

    Without a ledger all are compiled. With one, what it does not know comes first, then what it
    does, as far as the budget goes.
    """
    from tilewright import gpu as gpus
    from tilewright import matrix
    from tilewright.lab import draw as room
    from tilewright.lab.budget import WHOLES

    if update and ledger is None:
        fail("compile: --update needs --ledger, the folder to write.")
    all_ = everything or (ledger is None and budget is None)
    if all_ and (draw is not None or budget is not None):
        fail("compile: --all takes every binary, so there is nothing to draw. Leave one out.")
    if ledger is not None and ledger.exists() and not ledger.is_dir():
        fail(f"compile: --ledger is {ledger}; it must be a folder.")
    sms = or_exit(lambda: [gpus.pretend(a).sm for a in arch or ()] or list(matrix.SMS))
    or_exit(lambda: matrix.known_ops(ops or ()))
    known = or_exit(lambda: matrix.Ledger(None if everything else ledger))
    whole = None if all_ else WHOLES["compile", "cpu"] if budget is None else budget
    run = _Run(ops or (), sms, known, whole, draw or room.key())
    code = run.work(workers, json_to)
    record = run.show(json_to)
    for violation in record["violations"][:20]:
        errors.print(f"[red]violation[/] {escape(violation)}", highlight=False, soft_wrap=True)
    if update and not run.ended_by:
        or_exit(lambda: matrix.Ledger(ledger).write(run.results))
    raise typer.Exit(code)


class _Run:
    """One run: what it was asked, what came of it so far."""

    def __init__(self, ops: Any, sms: Any, ledger: Any, whole: float | None, key: str) -> None:
        from tilewright import doctor
        from tilewright.matrix import Selection

        self.ops, self.sms, self.ledger, self.whole, self.key = ops, sms, ledger, whole, key
        self.selected = Selection([], [], [])
        self.built: list[Any] = []
        self.ended_by = ""
        self.started = time.perf_counter()
        self.environment = doctor.environment()

    @property
    def results(self) -> list[Any]:
        return [*self.built, *self.selected.known]

    def record(self) -> dict[str, Any]:
        from tilewright.matrix import tables

        before = self.ledger.known
        drifted = [b for b in self.built if b.key in before and tables.differs(b, before[b.key])]
        whole = self.whole
        drawn = None if whole is None else {"key": self.key, "budget": whole}
        return {
            "environment": self.environment,
            "seconds": round(time.perf_counter() - self.started, 1),
            "draw": drawn,
            "compiled": len(self.built),
            "known": len(self.selected.known),
            "left": len(self.selected.left),
            "complete": len(self.built) == len(self.selected.now),
            "ended_by": self.ended_by,
            **tables.summarise(self.results, drifted),
        }

    def work(self, workers: int | None, json_to: Path | None) -> int:
        """Compile, keep the record meanwhile, and return the exit code."""
        from tilewright import matrix
        from tilewright.lab.journal import Journal

        path = None if str(json_to) == "-" else json_to
        with or_exit(lambda: Journal(path, self.record)) as journal, stop.stoppable():
            try:
                with Progress("compile") as progress:
                    progress.phase("asking the launchers", len(self.sms))
                    wanted: list[Any] = []
                    for one in matrix.reachable(self.ops, self.sms):
                        if not wanted or one.sm != wanted[-1].sm:
                            progress.at(what=f"asking the launchers, SM {one.sm}")
                        wanted.append(one)
                    self.selected = matrix.select(wanted, self.ledger, self.whole, self.key)
                    now = self.selected.now
                    progress.say(f"compile: {self._before(len(wanted), workers)}")
                    progress.phase("compiling", len(now), self.selected.seconds)
                    for built in matrix.run(now, workers, journal.note):
                        self.built.append(built)
                        work = matrix.seconds_of(built)
                        progress.at(what=f"{built.op} {built.backend}, SM {built.sm}", work=work)
            except KeyboardInterrupt as e:
                self.ended_by = stop.word(e)
        if self.ended_by:
            return stop.CODES[self.ended_by]
        record = self.record()
        return int(bool(record["violations"]) or not self.results)

    def _before(self, total: int, workers: int | None) -> str:
        import os

        now, known = len(self.selected.now), len(self.selected.known)
        count = max(1, min(workers or os.cpu_count() or 1, now))
        words = f"{now:,} of {total:,} binaries, {count} at a time, "
        words += f"about {duration(self.selected.seconds / count)}"
        if self.whole is not None:
            words += f"; {known:,} are known by hash; drawn by --draw {self.key}"
        return words

    def show(self, json_to: Path | None) -> dict[str, Any]:
        """Print the table, and what to do next."""
        from tilewright.matrix import tables

        record = self.record()
        emit(tables.table(record), record, json_to)
        where = errors if str(json_to) == "-" else console
        where.print(self._after(record), markup=False, highlight=False, soft_wrap=True)
        return record

    def _after(self, record: dict[str, Any]) -> str:
        words = f"{record['compiled']:,} compiled in {duration(record['seconds'])}, "
        words += f"{len(record['violations'])} violations."
        if self.ended_by:
            left = len(self.selected.now) - len(self.built)
            return f"{words} Stopped by {self.ended_by}: {left:,} were not compiled."
        if self.selected.left:
            ops = " ".join(dict.fromkeys(w.op for w in self.selected.left))
            return (
                f"{words} {len(self.selected.left):,} more are new and had no room in the budget. "
                f"Next: `tilewright compile {ops} --ledger FOLDER --all --update`."
            )
        return f"{words} Next: `tilewright bench`."
