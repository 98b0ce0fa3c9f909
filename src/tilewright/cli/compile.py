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
from tilewright.lab.workers import most

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
    run = _Run(ops or (), sms, known, whole, draw or room.key(), least=budget is not None)
    run.again = " ".join([*(f"--arch {a}" for a in arch or ()), f"--ledger {ledger or 'FOLDER'}"])
    code = run.work(workers, json_to)
    record = run.show(json_to)
    for violation in record["violations"][:20]:
        errors.print(f"[red]violation[/] {escape(violation)}", highlight=False, soft_wrap=True)
    if update and run.ended_by:
        errors.print("compile: stopped, so the ledger is as it was.", soft_wrap=True)
    elif update:
        or_exit(lambda: matrix.Ledger(ledger).write(run.sound))
    raise typer.Exit(code)


class _Run:
    """One run: what it was asked, what came of it so far."""

    def __init__(
        self, ops: Any, sms: Any, ledger: Any, whole: float | None, key: str, *, least: bool
    ) -> None:
        from tilewright import doctor
        from tilewright.matrix import Selection

        self.ops, self.sms, self.ledger, self.whole, self.key = ops, sms, ledger, whole, key
        self.selected = Selection([], [], [])
        self.least, self.again = least, ""
        self.built: list[Any] = []
        self.planned, self.ended_by = False, ""
        self.journal: Any = None
        self.started = time.perf_counter()
        self.environment = doctor.environment()

    @property
    def results(self) -> list[Any]:
        return [*self.built, *self.selected.known]

    @property
    def sound(self) -> list[Any]:
        """The results without those of compilers that hung or were ended."""
        from tilewright.matrix.run import LOST

        return [built for built in self.results if not built.violation.startswith(LOST)]

    def state(self) -> dict[str, Any] | None:
        """Return what the record holds so far, once there is a result."""
        return self.record() if self.built else None

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
            "complete": self.planned and not self.ended_by,
            "ended_by": self.ended_by,
            **tables.summarise(self.results, drifted),
        }

    def work(self, workers: int | None, json_to: Path | None) -> int:
        """Compile, keep the record meanwhile, and return the exit code."""
        from tilewright import matrix
        from tilewright.lab.journal import Journal

        path = None if str(json_to) == "-" else json_to
        with or_exit(lambda: Journal(path, self.state)) as journal, stop.stoppable():
            self.journal = journal if path else None
            try:
                with Progress("compile") as progress:
                    progress.phase("asking the launchers", len(self.sms))
                    wanted: list[Any] = []
                    for one in matrix.reachable(self.ops, self.sms):
                        if not wanted or one.sm != wanted[-1].sm:
                            progress.at(what=f"asking the launchers, SM {one.sm}")
                        wanted.append(one)
                    self.selected = or_exit(
                        lambda: matrix.select(
                            wanted, self.ledger, self.whole, self.key, least=self.least
                        )
                    )
                    now, self.planned = self.selected.now, True
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
        return int(bool(record["violations"]) or not (self.results or self.selected.left))

    def _before(self, total: int, workers: int | None) -> str:
        import os

        now, known = len(self.selected.now), len(self.selected.known)
        count = most(workers or os.cpu_count() or 1, now)
        words = f"{now:,} of {total:,} binaries, {count} at a time, "
        words += f"about {duration(self.selected.seconds / count)}"
        if self.whole is not None:
            words += f"; {known:,} are known by hash; drawn by --draw {self.key}"
        return words

    def show(self, json_to: Path | None) -> dict[str, Any]:
        """Print the table, and what to do next."""
        from tilewright.matrix import tables

        record = self.record()
        nothing = self.ended_by and not self.built  # an older record is worth more
        journal = self.journal if self.built else None
        emit(tables.table(record), record, None if nothing else json_to, journal)
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
            from tilewright.matrix.run import public_of

            ops = " ".join(dict.fromkeys(public_of(w.op) for w in self.selected.left))
            return (
                f"{words} {len(self.selected.left):,} more are new and had no room in the budget. "
                f"Next: `tilewright compile {ops} {self.again} --all --update`."
            )
        return f"{words} Next: `tilewright bench`."
