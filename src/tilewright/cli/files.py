"""The options that name a file of rows or pictures, and writing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli.console import console, fail, writable
from tilewright.cli.progress import Progress


def file_option(option: str, what: str, suffix: str = "") -> Any:
    def checked(path: Path | None) -> Path | None:
        if path is not None and suffix and path.suffix.lower() != suffix:
            fail(f"{option}: {path} has another ending; name a file that ends in {suffix}.")
        return writable(path, option)

    return typer.Option(option, help=what, callback=checked)


Csv = Annotated[Path | None, file_option("--csv", "Write the rows here as CSV; '-' for stdout.")]
Html = Annotated[
    Path | None, file_option("--html", "Write a report here: one offline page.", ".html")
]
Png = Annotated[Path | None, file_option("--png", "Write the pictures here.", ".png")]


def write_files(found: Any, csv: Path | None, html: Path | None, png: Path | None) -> None:
    """Write the optional CSV, HTML and PNG files."""
    if csv is None and html is None and png is None:
        return
    with Progress("report") as progress:
        progress.phase("drawing")
        _write(found if isinstance(found, list) else [found], csv, html, png)


def _write(records: Sequence[Any], csv: Path | None, html: Path | None, png: Path | None) -> None:
    from tilewright.bench import report as room

    if csv is not None and str(csv) == "-":
        print(room.csv_text(records), end="")
    elif csv is not None:
        _save("--csv", csv, lambda: csv.write_text(room.csv_text(records), encoding="utf-8"))
    if html is not None:
        _save("--html", html, lambda: html.write_text(room.page(records), encoding="utf-8"))
    if png is not None:
        _save("--png", png, lambda: room.write_png(records, png))


def _save(option: str, path: Path, write: Callable[[], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as e:
        fail(f"{option}: {path} cannot be written ({e.strerror}). Name another file.")
    console.print(f"[dim]written to {escape(str(path))}[/]", soft_wrap=True)


def need(packages: Sequence[str], *wanted: Path | None) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing and any(wanted):
        fail(f'--html and --png need {" and ".join(missing)}: pip install "tilewright[bench]"')
