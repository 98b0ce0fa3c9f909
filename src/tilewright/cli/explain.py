"""tilewright doctor | list | explain: what is here, and which kernel a call would take."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from tilewright.cli.console import Json, emit, or_exit
from tilewright.cli.progress import Progress

app = typer.Typer()

Arch = Annotated[str | None, typer.Option(help="A GPU or SM instead of the one here: h100, sm_86.")]


@app.command()
def doctor(arch: Arch = None, json_to: Json = None) -> None:
    """Show what is installed, what does not fit together, and what each op would run on here."""
    from tilewright import doctor as doctor_room
    from tilewright import gpu as gpus

    if arch is not None:
        or_exit(lambda: gpus.pretend(arch))
    with Progress("doctor", soon=0.3) as progress:
        progress.phase("looking around")
        findings = or_exit(lambda: doctor_room.examine(arch))
    table = Table("", "", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fault": "[red]fault[/]"}
    alike: dict[tuple[str, ...], list[str]] = {}  # ops of which the same is to be said
    for f in findings:
        what = "op" if f.what.startswith("op ") else f.what
        alike.setdefault((f.state, what, f.detail, f.fix), []).append(f.what.removeprefix("op "))
    for (state, what, detail, fix), names in alike.items():
        words = escape(detail) + (f"\n[bold]fix:[/] {escape(fix)}" if fix else "")
        words += f": {', '.join(names)}" if what == "op" else ""
        table.add_row(marks[state], "ops" if what == "op" else what, words)
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
