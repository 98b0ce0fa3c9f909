"""tilewright compare | report: two runs beside each other, and a run as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.console import Json, console, emit, fail, or_exit, writable
from tilewright.cli.files import Csv, Html, Png, need, write_files

app = typer.Typer()


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A record, or its folder.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same GPU.")],
    fail_over: Annotated[
        float, typer.Option(help="A slowdown beyond this part is a regression.")
    ] = 0.03,
    everybody: Annotated[
        bool, typer.Option("--all", help="Rivals that got slower fail the command too.")
    ] = False,
    json_to: Json = None,
) -> None:
    """Two runs row by row, with confidence intervals; exit 1 if something got slower."""
    from tilewright.bench import compare as room
    from tilewright.bench import record

    found = or_exit(lambda: room.pair(record.read(before), record.read(after), fail_over=fail_over))
    _keep_apart([found.a.path, found.b.path], json_to)
    if not found.pairs:
        fail("compare: no row has a time in both records; there is nothing to compare.")
    emit(room.table(found), room.as_dict(found), json_to)
    raise typer.Exit(int(bool(room.regressions(found, only_ours=not everybody))))


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Record files, or their folders.")],
    csv: Csv = None,
    html: Html = None,
    png: Png = None,
    json_to: Json = None,
) -> None:
    """Turn records into one offline HTML page, a PNG or a CSV."""
    from tilewright.bench import record, tables

    found = or_exit(lambda: [record.read(path) for path in records])
    if html is None and csv is None and png is None and json_to is None:
        html = writable(Path("report.html"), "--html")
    need(("matplotlib", "jinja2"), html, png)
    rows = [row for one in found for row in one.rows]
    _keep_apart([one.path for one in found], csv, html, png, json_to)
    told = "\n".join(
        f"{one.path} ({one.gpu}{', cut short' if one.cut_short else ''}): "
        f"{tables.summary(one.rows)}"
        for one in found
    )
    if json_to is not None:
        emit(told, [asdict(row) for row in rows], json_to)
    elif csv is None or str(csv) != "-":
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    write_files(found, csv, html, png)


def _keep_apart(records: Sequence[Path], *wanted: Path | None) -> None:
    for path in wanted:
        if path is not None and any(path.resolve() == r.resolve() for r in records):
            fail(f"{path} is one of the records; it must not be overwritten. Name another file.")
