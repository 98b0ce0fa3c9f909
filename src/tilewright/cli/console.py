"""What every command shares: two consoles, JSON beside tables, one line for a mistake."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tilewright.lab import journal

LOG_WIDTH = 160  # columns of a log, where no terminal says how many there are: no table wraps


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    narrow = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if narrow else LOG_WIDTH)


console, errors = _console(stderr=False), _console(stderr=True)


def emit(
    shown: Any, record: Any, json_to: Path | None, kept: journal.Journal | None = None
) -> None:
    """Show the table to people, and the same facts as JSON to scripts, unless a journal did."""
    if json_to is not None and str(json_to) == "-":
        print(json.dumps(journal.finite(record), indent=1, default=str, allow_nan=False))
        return
    if isinstance(shown, str):
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
    elif console.is_terminal:
        console.print(shown)
    else:  # a log: no colours, and no blanks up to the edge of a screen that is not there
        with console.capture() as captured:
            console.print(shown)
        console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    if json_to is not None:
        if kept is not None and kept.error is not None:
            fail(str(kept.error))
        if kept is None:
            or_exit(lambda: journal.write(json_to, record))
        console.print(f"[dim]written to {escape(str(json_to))}[/]")


def writable(path: Path | None, option: str = "--json") -> Path | None:
    """Said before the work, not after it."""
    if path is None or str(path) == "-":
        return path
    try:
        if path.suffix == ".jsonl" and path.exists():
            fail(f"{option}: {path} is a record; it must not be overwritten. Name another file.")
        there = path  # or the nearest folder above it that exists
        while not there.exists():
            there = there.parent
        taken = path.is_dir() or (there != path and not there.is_dir())
        usable = not taken and os.access(there, os.W_OK)
    except OSError:  # a name that no file can have, a folder that may not be entered
        usable = False
    if not usable:
        fail(f"{option}: {path} cannot be written. Name a file in a folder of yours.")
    return path


def or_exit(call: Any) -> Any:
    """A user's mistake is one line on stderr and exit code 2, not a traceback."""
    from tilewright.errors import TilewrightError

    try:
        return call()
    except TilewrightError as e:
        fail(str(e))


def fail(message: str, code: int = 2) -> None:
    errors.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    sys.exit(code)


def duration(seconds: float) -> str:
    """Say how long in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


Ops = Annotated[list[str] | None, typer.Argument(help="Op names; all if left out.")]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the result here as JSON; '-' for stdout.",
        callback=lambda path: writable(path),
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes; by default as many as the machine feeds.")
]
Draw = Annotated[
    str | None,
    typer.Option(
        "--draw",
        metavar="KEY",
        help="The key of the draw to repeat; by default the commit.",
        callback=lambda key: fail("--draw is empty; it must be a key.") if key == "" else key,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds of one core to draw, instead of the declared ones."),
]
