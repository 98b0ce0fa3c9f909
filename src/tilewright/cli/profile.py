"""tilewright profile: one call under a profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.console import Json, emit, errors, fail, or_exit
from tilewright.cli.files import file_option

app = typer.Typer()


@app.command()
def profile(
    op: Annotated[str, typer.Argument(help="An op's name.")],
    shape: Annotated[str, typer.Option(help="k=v,...: 2048x4096,casting=llama.")] = "2048x4096",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "bfloat16",
    phase: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    backend: Annotated[
        str, typer.Option(help="Whose kernels: triton, cuda, ..., eager or vendor.")
    ] = "triton",
    tool: Annotated[str, typer.Option(help="ncu, torch or proton.")] = "ncu",
    mode: Annotated[
        str, typer.Option(help="ncu: quick (speed of light), full (stalls), file (.ncu-rep).")
    ] = "quick",
    calls: Annotated[int, typer.Option(min=1, help="Calls that the tool sees.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    out: Annotated[Path | None, file_option("--out", "Where the tool's own file goes.")] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the command instead of running it.")
    ] = False,
    json_to: Json = None,
) -> None:
    """Look into one call with a profiler, beside the bytes and flops it must do."""
    from tilewright import dims, profiling
    from tilewright.profiling.request import op_of

    def asked() -> Any:
        found = dims.parse(op_of(op), shape, "profile")
        request = profiling.Request(op, found, dtype, phase, backend, tool, mode, out, calls, seed)
        return profiling.profile(request, run=not only_print)

    found = or_exit(asked)
    if found.ran:
        emit(found.table, found.record(), json_to)
    elif found.state == "failed":
        fail(f"profile: {found.reason}", 1)
    else:
        if found.state == "missing":
            errors.print(f"{found.reason} Run this where there is one:", highlight=False)
        emit(found.command, found.record(), json_to)
