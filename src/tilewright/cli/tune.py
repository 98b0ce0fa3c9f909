"""tilewright tune: which route and launch is the quickest here, of those that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli.console import (
    Json,
    Ops,
    console,
    emit,
    errors,
    fail,
    or_exit,
    writable,
)
from tilewright.cli.progress import Progress
from tilewright.lab import stop

app = typer.Typer()


@app.command()
def tune(
    ops: Ops = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU that must be here; with --dry-run, any: h200.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default this GPU's own table.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Only these: bf16, fp16,fp32.")] = "",
    case: Annotated[str, typer.Option(help="Only cases whose name or dims hold this.")] = "",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List buckets and choices; needs no GPU.")
    ] = False,
    json_to: Json = None,
) -> None:
    """Measure routes and launch choices over a grid of shapes, and keep the quickest right ones."""
    from tilewright import gpu as gpus
    from tilewright.tuning.plan import plan

    dtypes = [word.strip() for word in dtype.split(",") if word.strip()]
    jobs = or_exit(lambda: plan(ops or (), dtypes, case))
    here, named = gpus.detect(), or_exit(lambda: gpus.pretend(gpu)) if gpu else None
    if dry_run:
        _list(jobs, named or here or gpus.pretend("h200"), json_to)
        return
    if here is None:
        fail("tune: it measures on a GPU, and torch sees none here. --dry-run lists what it would.")
    assert here is not None
    if named is not None and named.short_name != here.short_name:
        fail(f"tune: --gpu is {gpu}, and the GPU here is {here.name}. Leave it out, or change it.")
    path = _path(out, here)
    result = _measure(jobs, here, path, seed)
    _show(result, here, path, json_to)
    raise typer.Exit(int(result.failed))


def _list(jobs: Any, gpu: Any, json_to: Path | None) -> None:
    from tilewright.tuning import tables

    rows = or_exit(lambda: tables.planned(jobs, gpu))
    emit(tables.plan_table(rows, gpu), {"gpu": gpu.name, "buckets": rows}, json_to)


def _path(out: Path | None, gpu: Any) -> Path:
    """Said before the work: a table that cannot be written is found out too late otherwise."""
    from tilewright import tuned

    path = out or (tuned.folder() or Path(tuned.__file__).parent) / f"{gpu.short_name}.json"
    writable(path, "--out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fail(f"--out: {path} cannot be written ({e.strerror}). Name another file.")
    return path


def _measure(jobs: Any, gpu: Any, path: Path, seed: int) -> Any:
    from tilewright import tuned
    from tilewright.tuning import run

    kept = or_exit(lambda: run.there(path, gpu))
    try:
        with stop.stoppable(), Progress("tune") as progress:
            progress.phase("tuning", len(jobs))
            result = or_exit(
                lambda: run.run(
                    jobs,
                    run.instruments(gpu, seed),
                    kept,
                    {**tuned.tables(gpu), **kept},
                    lambda title, done: progress.at(done, title),
                )
            )
            progress.at(len(jobs), "tuned")
        run.write(path, gpu, result.tables)
    except KeyboardInterrupt as e:
        fail(f"tune: interrupted; {path} is as it was.", stop.CODES[stop.word(e)])
    except OSError as e:
        fail(f"--out: {path} cannot be written ({e.strerror}). Name another file.")
    return result


def _show(result: Any, gpu: Any, path: Path, json_to: Path | None) -> None:
    from tilewright.tuning import run, tables

    facts = {"gpu": gpu.name, "out": str(path), "versions": run.versions()}
    emit(tables.table(result), {**facts, "buckets": tables.as_dicts(result)}, json_to)
    for job, choice, why in result.wrong[:20]:
        words = f"refused {job.title}: {choice} {why}"
        errors.print(words, style="red", highlight=False, markup=False, soft_wrap=True)
    where = errors if str(json_to) == "-" else console
    where.print(tables.summary(result), highlight=False, soft_wrap=True)
    where.print(f"[dim]written to {escape(str(path))}[/]", soft_wrap=True)
