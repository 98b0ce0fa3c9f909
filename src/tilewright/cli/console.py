"""What every command shares: two consoles, JSON beside tables, one line for a mistake."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console()
errors = Console(stderr=True)


def emit(shown: Any, record: Any, json_to: Path | None) -> None:
    """The table for people; the same facts as JSON for scripts."""
    text = json.dumps(finite(record), indent=1, default=str, allow_nan=False)
    if json_to is not None and str(json_to) == "-":
        print(text)
        return
    if isinstance(shown, str):
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(shown)
    if json_to is not None:
        try:
            json_to.parent.mkdir(parents=True, exist_ok=True)
            json_to.write_text(text + "\n", encoding="utf-8")
        except OSError as e:
            fail(f"--json: {json_to} cannot be written ({e.strerror}). Name another file.")
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


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: say them in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, *times, console=errors)


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


Ops = Annotated[list[str] | None, typer.Argument(help="Op names; all if left out.")]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Write the result here as JSON; '-' for stdout.",
        callback=lambda path: writable(path),
    ),
]
