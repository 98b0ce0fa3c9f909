"""tilewright bench: how fast every kernel is, beside whatever a user would pick instead."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli.console import (
    Budget,
    Draw,
    Json,
    Ops,
    console,
    duration,
    emit,
    errors,
    fail,
    or_exit,
)
from tilewright.cli.files import Csv, Html, Png, need, write_files
from tilewright.cli.progress import Progress
from tilewright.lab import costs, stop
from tilewright.lab.budget import WHOLES
from tilewright.lab.journal import Journal

app = typer.Typer()

RECORDS = Path("out/bench")
SLOWER = 2  # how many times as long a case of another suite takes as one of the quick one


@app.command()
def bench(
    ops: Ops = None,
    suite: Annotated[
        str,
        typer.Option(help="quick, model, sweep, decode, prefill or sparse: which declared cases."),
    ] = "quick",
    shape: Annotated[
        list[str] | None, typer.Option(help="k=v,... instead of a suite: 2048x4096,casting=llama.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Every case of the quick suite, not what is drawn.")
    ] = False,
    draw: Draw = None,
    budget: Budget = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, or several: bf16,fp16.")] = "bf16",
    mode: Annotated[str, typer.Option(help="fwd, bwd or fwd,bwd.")] = "fwd",
    backends: Annotated[str | None, typer.Option(help="Only these of ours: triton,cuda.")] = None,
    baselines: Annotated[
        str | None, typer.Option(help="Only these rivals: eager,compile,vendor,liger, or none.")
    ] = None,
    head_to_head: Annotated[
        str | None, typer.Option(help="One backend of ours against another: triton,cuda.")
    ] = None,
    yardsticks: Annotated[
        bool, typer.Option(help="Instead of ops: what the vendor's libraries reach here.")
    ] = False,
    warmup: Annotated[int, typer.Option(min=1, help="Calls before timing.")] = 50,
    iters: Annotated[int, typer.Option(min=4, help="Timed calls of each contender.")] = 200,
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="Start no further case after so long.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if any row is above its roof.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = RECORDS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest record in --out.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Without a GPU: predict for this one (h200).")
    ] = None,
    checks: Annotated[
        bool,
        typer.Option(help="Without a GPU: also check and compile the kernels of these cases."),
    ] = True,
    csv: Csv = None,
    html: Html = None,
    png: Png = None,
    json_to: Json = None,
) -> None:
    """Time every kernel beside whatever a user would pick instead, under measured roofs."""
    with Progress("bench") as progress:
        progress.phase("getting ready")
        from tilewright import gpu as gpus
        from tilewright.bench import run, suites  # noqa: F401 (torch.compile, Triton: seconds)
        from tilewright.bench.subject import Wish

    pair = _pair(head_to_head)
    works = or_exit(lambda: suites.plan(ops or (), suite, shape or (), _words(dtype), _words(mode)))
    wish = or_exit(lambda: Wish(_backends(backends, pair, works), _baselines(baselines)))
    need(("matplotlib", "jinja2"), html, png)
    if suite == "quick" and not (shape or full or yardsticks):
        works = _drawn(works, draw, budget)
    elif draw is not None or budget is not None:
        fail("bench: --draw and --budget are for the quick suite, without --full or --shape.")
    if not works:
        fail("bench: nothing to measure: no case of these ops fits.", 1)
    here = gpus.detect()
    if yardsticks and (ops or shape):
        fail("bench: --yardsticks measures no op. Leave out the ops, or the option.")
    if yardsticks and here is None:
        fail("bench: --yardsticks needs a GPU, and torch sees none here.", 1)
    timed = here is not None and gpu is None
    if timed or out != RECORDS:
        _folder(out, keep=timed)
    if not timed:
        unused = [n for n, path in (("csv", csv), ("html", html), ("png", png)) if path]
        named = or_exit(lambda: gpus.pretend(gpu or "h200"))
        how = [*(["--draw", draw] if draw else []), *(["--full"] if full else [])]
        _without_gpu(works, named, here is None, unused, how if checks else None, json_to)
        return
    measured = "yardsticks" if yardsticks else "shapes" if shape else suite
    settings = {
        **{"suite": measured, "warmup": warmup, "iters": iters, "seed": seed},
        **{"backends": wish.backends, "baselines": wish.baselines},
    }
    jobs = _yardsticks() if yardsticks else _jobs(works, wish, here)
    result = _measure(jobs, here, settings, out, resume, max_seconds)
    _show(result, pair, json_to)
    write_files(result.as_record(), csv, html, png)
    raise typer.Exit(_bench_code(result, strict))


def _drawn(works: Sequence[Any], draw: str | None, budget: float | None) -> list[Any]:
    """The cases of the quick suite whose turn it is; with few ops, all of them."""
    from tilewright.bench import suites
    from tilewright.lab.draw import key

    whole, named = WHOLES["bench", "cuda"] if budget is None else budget, draw or key()
    taken: list[Any] = or_exit(lambda: suites.drawn(works, whole, named, least=budget is not None))
    if len(taken) < len(works):
        words = f"bench: {len(taken)} of {len(works)} cases, drawn by --draw {named}; --full: all"
        errors.print(words, markup=False, highlight=False, soft_wrap=True)
    return taken


def _jobs(works: Sequence[Any], wish: Any, gpu: Any) -> list[Any]:
    from tilewright.bench import subject
    from tilewright.bench.run import Job

    def make(work: Any) -> Callable[[], Any]:
        what = (work.op, work.case, work.dtype, work.phase)
        return lambda: subject.of_op(*what, "cuda", gpu, wish)

    return [Job(work.key, work.case.dims, make(work)) for work in works]


def _yardsticks() -> list[Any]:
    from tilewright.bench import yardsticks
    from tilewright.bench.run import Job

    return [Job.of(subject) for subject in yardsticks.subjects()]


def _seconds(job: Any) -> float:
    op, _, _, phase = job.key
    return costs.estimate("bench on cuda", f"{op} {phase}").seconds


def _measure(
    jobs: Sequence[Any],
    gpu: Any,
    settings: dict[str, Any],
    out: Path,
    resume: bool,
    max_seconds: float | None,
) -> Any:
    from tilewright.bench import run as running

    resumed = or_exit(lambda: running.to_resume(out, gpu, settings)) if resume else None
    path = resumed.path if resumed else running.new_path(out, gpu)
    with stop.stoppable(), Progress("bench", soon=0.0) as progress:
        each = 1 if settings["suite"] == "quick" else SLOWER
        about = duration(each * sum(_seconds(job) for job in jobs))
        progress.say(f"bench: {len(jobs)} cases, about {about}")
        work = {job.title: _seconds(job) for job in jobs}
        titles = list(work)
        progress.phase("measuring roofs", len(jobs), sum(work.values()))
        result = running.run(
            jobs,
            running.instruments(gpu, settings["warmup"], settings["iters"], settings["seed"]),
            settings=settings,
            path=path,
            resumed=resumed,
            max_seconds=max_seconds,
            progress=lambda title, done: progress.at(
                done, title, work[titles[done - 1]] if done else 0.0
            ),
        )
        progress.at(len(jobs) - len(result.left), "measured")
    return result


def _show(result: Any, pair: tuple[str, str] | None, json_to: Path | None) -> None:
    from tilewright.bench import tables

    shown = tables.head_to_head(result.rows, *pair) if pair else tables.case_tables(result.rows)
    facts = {
        **result.header,
        "roofs": [asdict(roof) for roof in result.roofs],
        "rows": [asdict(row) for row in result.rows],
        "not_measured": result.left,
        "record": str(result.path),
    }
    emit(shown, facts, json_to)
    where = errors if str(json_to) == "-" else console
    where.print(tables.summary(result.rows), highlight=False, soft_wrap=True)
    if result.left:
        why = "--max-seconds was reached" if result.ended_by == "time" else result.ended_by
        where.print(
            f"{len(result.left)} cases were not measured: {why}. Next: --resume measures them.",
            style="yellow",
        )
    where.print(f"[dim]record: {escape(str(result.path))}[/]", soft_wrap=True)
    if not result.left:
        where.print(
            "Next: `tilewright report RECORD --html report.html` draws it, `tilewright compare` "
            "holds two against each other.",
            soft_wrap=True,
        )


def _bench_code(result: Any, strict: bool) -> int:
    from tilewright.bench import guard

    if result.ended_by in stop.CODES:
        return stop.CODES[result.ended_by]
    wrong = any(row.ours and row.state == "refused" for row in result.rows)
    return int(wrong or (strict and any(guard.is_suspect(row) for row in result.rows)))


def _folder(path: Path, keep: bool) -> None:
    """Made before the work: a record that cannot be written is found out too late otherwise."""
    made: list[Path] = []
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK)
    except OSError:
        usable = False
    if not (usable and keep):
        for folder in made:
            with contextlib.suppress(OSError):  # not made after all, or no longer empty
                folder.rmdir()
    if not usable:
        fail(f"bench: --out is {path}, which cannot be written. Name a folder of yours.")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _pair(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    words = _words(text)
    if len(words) != 2 or not all(words) or words[0] == words[1]:
        fail(f"bench: --head-to-head is {text!r}; it must be two backends: triton,cuda.")
    return words[0], words[1]


def _backends(
    text: str | None, pair: tuple[str, str] | None, works: Sequence[Any]
) -> tuple[str, ...] | None:
    from tilewright.bench.suites import one_of

    ours = {b.name for w in works for b in w.op.backends if b.technology != "torch"}
    known = sorted(ours | {name.partition("_")[0] for name in ours})
    for name in _words(text) if text is not None else ():
        one_of("--backends", name, known)
    for name in pair or ():
        one_of("--head-to-head", name, known)
    if text is None:
        return None
    asked = _words(text)
    return tuple(name for name in ours if name in asked or name.partition("_")[0] in asked)


def _baselines(text: str | None) -> tuple[str, ...] | None:
    from tilewright.bench import rivals
    from tilewright.bench.suites import one_of

    if text is None:
        return None
    if text == "none":
        return ()
    return tuple(one_of("--baselines", name, rivals.NAMES) for name in _words(text))


def _without_gpu(
    works: Sequence[Any],
    gpu: Any,
    none_here: bool,
    unused: list[str],
    checks: list[str] | None,
    json_to: Path | None,
) -> None:
    """Predict; unless `checks` is None, also compile and check a part."""
    from tilewright.bench import predict

    record: dict[str, Any] = {"timed": False, "gpu": gpu.name, "ended_by": ""}
    predictions: list[Any] = []
    code = 0
    path = None if str(json_to) == "-" else json_to
    with or_exit(lambda: Journal(path, lambda: record if predictions else None)) as journal:
        try:
            with stop.stoppable(), Progress("bench") as progress:
                progress.phase("predicting", len(works))
                for work in works:
                    predictions.append(predict.predict(work, gpu))
                    record["predictions"] = predict.as_dicts(predictions)
                    progress.at()
                if checks is not None:
                    about = duration(WHOLES["bench", "cpu"] / (os.cpu_count() or 1))
                    progress.say(f"bench: compiling and checking a part, about {about}")
                    progress.phase(f"compiling for SM {gpu.sm}")
                    record["compiled"] = _compiled(works, gpu, checks)
                    journal.keep()
                    progress.phase("checking in Triton's interpreter")
                    record["verified"] = _checked(works, checks)
        except KeyboardInterrupt as e:
            record["ended_by"] = stop.word(e)
            code = stop.CODES[stop.word(e)]
    emit(predict.table(predictions, gpu), record, json_to, journal if path else None)
    where = errors if str(json_to) == "-" else console
    why = "there is no GPU here" if none_here else "a prediction was asked for"
    said = [f"Nothing was timed: {why}."]
    said += [f"No {' or '.join(unused)} file was written." if unused else ""]
    said += [f"{record[name]['words']}." for name in ("compiled", "verified") if name in record]
    if record["ended_by"]:
        said += [f"It was stopped by {record['ended_by']}."]
    else:
        said += ["Next: on a machine with an NVIDIA GPU, `tilewright bench` measures these cases."]
        bad = record.get("compiled", {}).get("violations") or record.get("verified", {}).get(
            "failures"
        )
        code = int(bool(bad))
    where.print(" ".join(filter(None, said)), soft_wrap=True)
    raise typer.Exit(code)


def _checked(works: Sequence[Any], how: Sequence[str]) -> dict[str, Any]:
    """A draw of each op's checks in Triton's interpreter, in a process that starts that way."""
    ops = list(dict.fromkeys(work.op.name for work in works))
    words = ["verify", *ops, "--device", "cpu", "--json", "-"]
    words += how if "--full" in how else [*how, "--budget", str(WHOLES["bench", "cpu"] / 2)]
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"failures": 1, "words": f"verify failed with exit code {done.returncode}"}
    count = sum(row["run"] for row in found["checks"])
    failures = len(found["failures"])
    words_ = f"{count} results in Triton's interpreter, {failures} failed"
    return {"run": count, "failures": failures, "words": words_}


def _compiled(works: Sequence[Any], gpu: Any, how: Sequence[str]) -> dict[str, Any]:
    """A draw of the kernels of these cases, compiled for that SM."""
    from tilewright import matrix
    from tilewright.lab import draw

    wanted = matrix.of_cases([(w.op, w.case, w.dtype) for w in works], gpu.sm)
    whole = None if "--full" in how else WHOLES["bench", "cpu"] / 2
    key = how[how.index("--draw") + 1] if "--draw" in how else draw.key()
    now = matrix.select(wanted, matrix.Ledger(None), whole, key).now
    built = list(matrix.run(now))
    violations = [b.violation for b in built if b.violation]
    words = f"{len(built)} of {len(wanted)} kernels compiled for SM {gpu.sm}, "
    words += f"{len(violations)} with a violation"
    return {"kernels": len(built), "violations": violations, "words": words}
