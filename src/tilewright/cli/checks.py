"""tilewright doctor | list | explain | verify | compile: what is here, and whether it is right."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from tilewright.cli.console import Json, Ops, emit, errors, fail, or_exit, progress_bar

app = typer.Typer()

Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes; by default one per core, or one on a GPU.")
]
Arch = Annotated[str | None, typer.Option(help="A GPU or SM instead of the one here: h100, sm_86.")]


@app.command()
def doctor(arch: Arch = None, json_to: Json = None) -> None:
    """What is installed, what does not fit together, what each op would run on here."""
    from tilewright import doctor as doctor_room

    findings = or_exit(lambda: doctor_room.examine(arch))
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[red]fault[/]"}
    for f in findings:
        fix = f"\n[bold]fix:[/] {escape(f.fix)}" if f.fix else ""
        table.add_row(marks[f.state], f.what, escape(f.detail) + fix)
    emit(table, [f.as_dict() for f in findings], json_to)
    raise typer.Exit(int(any(f.state == "fault" for f in findings)))


@app.command("list")
def list_ops(json_to: Json = None) -> None:
    """Every op, its backends in order of preference, and its backward."""
    from tilewright.ops import registry

    table = Table("op", "what it computes", "forward", "backward", box=None, pad_edge=False)
    rows = []
    for op in registry().values():
        forward = [b.name for b in op.backends]
        backward = [b.name for b in op.autograd.op.backends] if op.autograd else []
        table.add_row(op.name, op.summary, ", ".join(forward), ", ".join(backward))
        rows.append(
            {"op": op.name, "summary": op.summary, "forward": forward, "backward": backward}
        )
    emit(table, rows, json_to)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op's name.")],
    shape: Annotated[str, typer.Option(help="Shape of the input, e.g. 8,4096.")] = "128,4096",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "bfloat16",
    gpu: Annotated[str | None, typer.Option(help="Pretend this GPU: h100, t4, sm_86.")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for this backend.")] = None,
    json_to: Json = None,
) -> None:
    """Which backend would serve a call, why, and why not the others. Needs no GPU."""
    import torch

    from tilewright import gpu as gpus
    from tilewright.errors import InputError
    from tilewright.explain import explain_call
    from tilewright.ops import registry

    def explanation() -> Any:
        declared = registry().get(op)
        if declared is None or declared.inputs is None:
            raise InputError(f"explain: op is {op!r}; it must be one of {', '.join(registry())}.")
        sizes = _shape(shape)
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise InputError(f"explain: --dtype is {dtype!r}; it must be a torch dtype's name.")
        with torch.device("meta"):
            args = declared.inputs({"shape": sizes}, kind, "meta", None)
        target = gpu or gpus.detect()
        return explain_call(declared, tuple(args), gpu=target, backend=backend)

    found = or_exit(explanation)
    emit(str(found), vars(found), json_to)


@app.command()
def verify(
    ops: Ops = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick",
            help="Random cases: 500 or 40; on a GPU 5,000 or 200. On a CPU, every shape and layout "
            "in every dtype, or in one each, and few wide shapes.",
        ),
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; repeatable.")] = None,
    case: Annotated[str, typer.Option(help="Only this declared edge case, in full: widest.")] = "",
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    cases: Annotated[
        int | None,
        typer.Option(min=1, help="Random cases per op and backend, and calls of a cover, at most."),
    ] = None,
    seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    workers: Workers = None,
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
    from tilewright import doctor as doctor_room
    from tilewright.ops import registry
    from tilewright.verify import plan, run, summary
    from tilewright.verify.runner import backends_on

    full = full or bool(case)
    steps = or_exit(
        lambda: plan(
            ops or (), device=device, full=full, only=only or (), backend=backend, cases=cases,
            seed=seed, case=case,
        )
    )  # fmt: skip
    names = sorted({b for op in ops or registry() for b in backends_on(op, device)})
    if not names:
        fail(f"verify: {', '.join(ops or ())} has no kernel that runs on {device} yet.", 1)
    if not steps and case and backend in names:
        fail(f"verify: no op with the case {case!r} has the backend {backend!r}; leave one out.")
    if not steps and backend in (None, *names):
        checks, named = ", ".join(only or ()), ", ".join(ops or ())
        fail(f"verify: --only is {checks}, which {named or 'no op'} has not; leave it out.")
    if not steps:
        fail(f"verify: --backend is {backend!r}; on {device} it must be one of {', '.join(names)}.")
    cores = 1 if device == "cuda" else os.cpu_count() or 1
    processes = 1 if fail_fast else workers or cores
    started, results = time.perf_counter(), []
    with progress_bar() as progress:
        bar = progress.add_task(f"verify on {device}", total=len(steps))
        for batch in run(steps, fail_fast=fail_fast, workers=processes):
            results += batch
            progress.advance(bar)
    if not results:
        fail("verify: nothing to run: these checks do not apply to these ops on this device.")
    report = summary.summarise(results, device)
    record = {
        "environment": doctor_room.environment(),
        "device": device,
        "full": full,
        "seconds": round(time.perf_counter() - started, 1),
        **report,
    }
    where = "the GPU" if device == "cuda" else "the CPU (Triton's interpreter)"
    table = summary.table(report, f"verify on {where}")
    emit(table, record, json_to)
    for failure in report["failures"][:20]:
        words = f"failed {failure['line']}\n       {failure['repro']}"
        errors.print(words, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(int(bool(report["failures"])))


@app.command("compile")
def compile_matrix(
    ops: Ops = None,
    arch: Annotated[list[str] | None, typer.Option(help="Only these SMs: 75, sm_90, h100.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Folder of earlier results.")] = None,
    sample: Annotated[float, typer.Option(help="Part of the known results to redo.")] = 0.1,
    everything: Annotated[bool, typer.Option("--all", help="Compile all, known or not.")] = False,
    update: Annotated[bool, typer.Option(help="Write the results into the ledger.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the random part.")] = None,
    workers: Workers = None,
    json_to: Json = None,
) -> None:
    """Compile every kernel and launch choice for every SM, without a GPU."""
    from tilewright import doctor as doctor_room
    from tilewright import gpu as gpus
    from tilewright import matrix
    from tilewright.matrix import tables

    if update and ledger is None:
        fail("compile: --update needs --ledger, the folder to write.")
    sms = or_exit(lambda: [gpus.pretend(a).sm for a in arch or ()] or list(matrix.SMS))
    or_exit(lambda: matrix.known_ops(ops or ()))
    known = or_exit(lambda: matrix.Ledger(None if everything else ledger))
    started = time.perf_counter()
    with progress_bar() as progress:
        bar = progress.add_task("asking the launchers", total=len(sms))
        wanted = []
        for sm in sms:
            wanted += or_exit(lambda sm=sm: list(matrix.reachable(ops or (), [sm])))
            progress.advance(bar)
        chosen = seed if seed is not None else random.SystemRandom().randrange(2**32)
        now, kept = matrix.select(wanted, known, sample, random.Random(chosen))
        bar = progress.add_task("compiling", total=len(now))
        built = []
        for result in matrix.run(now, workers):
            built.append(result)
            progress.advance(bar)
    results = [*built, *kept]
    drifted = [b for b in built if b.key in known.known and tables.differs(b, known.known[b.key])]
    record = {
        "environment": doctor_room.environment(),
        "seconds": round(time.perf_counter() - started, 1),
        "compiled": len(built),
        "known": len(kept),
        "seed": chosen,
        **tables.summarise(results, drifted),
    }
    emit(tables.table(record), record, json_to)
    for violation in record["violations"][:20]:
        errors.print(f"[red]violation[/] {escape(violation)}", highlight=False, soft_wrap=True)
    if update:
        matrix.Ledger(ledger).write(results)
    raise typer.Exit(int(bool(record["violations"]) or not results))


def _shape(text: str) -> tuple[int, ...]:
    from tilewright.dims import MOST_ELEMENTS
    from tilewright.errors import InputError

    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise InputError(f"explain: --shape is {text!r}; it must be sizes such as 8,4096.")
    shape = tuple(int(size) for size in sizes)
    if math.prod(shape) >= MOST_ELEMENTS:
        raise InputError(f"explain: --shape is {text!r}; no tensor has so many elements.")
    return shape
