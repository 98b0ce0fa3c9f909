"""How far a long command is: a bar on a terminal, a line every few seconds everywhere else."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bar,
)

from tilewright.cli.console import errors
from tilewright.lab import stop

EVERY = 4.0  # seconds between two lines of a log
SOON = 1.5  # seconds before the first one: a mistake in the command line is said alone


class Progress:
    """Shows what a command is at, while the block lasts.

    A thread prints, so that a call which takes long does not silence the log. It writes to the file
    descriptor itself: a process that is forked meanwhile inherits no lock of a stream.
    """

    def __init__(self, command: str, *, soon: float | None = None) -> None:
        self.command = command
        self.what, self.done, self.total = "starting", 0, 0
        self.work, self.worked = 0.0, 0.0
        self._began = self._phase_began = time.monotonic()
        self._said = self._began - EVERY + (SOON if soon is None else soon)
        self._over = threading.Event()
        self._bar: Bar | None = None
        self._task: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if errors.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Bar(*columns, *times, console=errors)
            self._bar.start()
            self._task = self._bar.add_task(self._shown, total=None)
        else:
            if self._said <= self._began - EVERY:
                self._say()
            self._thread = threading.Thread(target=self._talk, daemon=True)
            self._thread.start()
        return self

    def phase(self, what: str, total: int = 0, work: float = 0.0) -> None:
        """Begin a part of the work: its steps, and the seconds of work in them, if known."""
        self.what, self.done, self.total = what, 0, total
        self.work, self.worked = work, 0.0
        self._phase_began = time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=self._shown, total=total or None)

    def at(self, done: int | None = None, what: str = "", work: float = 0.0) -> None:
        """Tell how many steps are done, how much work the last was, and what the next one is."""
        stop.check()
        self.done = self.done + 1 if done is None else done
        self.worked += work
        self.what = what or self.what
        if self._bar is not None:
            self._bar.update(self._task, description=self._shown, completed=self.done)

    def say(self, line: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            _print(line)
            self._said = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
        elif self._thread is not None:
            self._thread.join(1.0)
            if kind is None and self.total:
                self._say()

    @property
    def _shown(self) -> str:
        return f"{self.command}: {self.what}"

    def _talk(self) -> None:
        while not self._over.wait(0.25):
            if time.monotonic() - self._said >= EVERY:
                self._say()

    def _say(self) -> None:
        passed = time.monotonic() - self._began
        line = f"{self.command}: {passed:.0f} s, {self.what}"
        if self.total:
            line += f", {self.done} of {self.total}"
            phase = time.monotonic() - self._phase_began
            part = self.worked / self.work if self.work else self.done / self.total
            if 0 < part < 1 and phase > EVERY:
                line += f", about {phase / part * (1 - part):.0f} s left"
        _print(line)
        self._said = time.monotonic()


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
