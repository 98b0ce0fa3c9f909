"""Profiling one call: what its kernels do to the GPU, beside what they must.

`profile(request)` runs one of three tools over the same call: Nsight Compute ("ncu"), which reads
counters, or torch.profiler ("torch") and Triton's proton ("proton"), which read clocks. Where the
tool or the GPU is missing, the report holds the command to run elsewhere.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright import gpu as gpus
from tilewright.errors import InputError, TilewrightError
from tilewright.profiling import call, ncu, proton_tool, tables, torch_tool
from tilewright.profiling.call import Predicted
from tilewright.profiling.kernel import Kernel, Timing
from tilewright.profiling.request import MODES, PHASES, TOOLS, Request

__all__ = [
    "MODES",
    "PHASES",
    "TOOLS",
    "Kernel",
    "Predicted",
    "Report",
    "Request",
    "Timing",
    "profile",
    "read_csv",
]

ONCE = ("python", "-m", "tilewright.profiling.once")


@dataclass(frozen=True)
class Report:
    """What was seen, or why nothing was."""

    request: Request
    predicted: Predicted
    command: str  # for a shell, here or elsewhere; it names programs, not where they lie here
    state: str  # "ran"; "printed": on request; "missing": no GPU or no tool; "failed": the tool
    reason: str = ""  # why it did not run
    rows: list[dict[str, Any]] = field(default_factory=list)
    table: Any = None  # a rich.table.Table
    source: str = ""  # the file that the numbers were read from, if they were not measured here

    @property
    def ran(self) -> bool:
        return self.state == "ran"

    def record(self) -> dict[str, Any]:
        """What `--json` writes, and what `example.worked_example` reads."""
        from tilewright import doctor

        environment: dict[str, Any] = {}
        if not self.source:
            environment = doctor.environment()
            if self.ran and self.request.tool == "ncu":
                environment["ncu"] = ncu.version()
        return {
            "environment": environment,
            "source": self.source,
            # where the output lies says nothing about it, and may name somebody's folders
            "request": {**vars(self.request), "dims": dict(self.request.dims), "out": None},
            "command": self.command,
            "predicted": self.predicted._asdict(),
            "ran": self.ran,
            "reason": self.reason,
            "rows": self.rows,
        }


def profile(request: Request, *, run: bool = True) -> Report:
    """Watch the call that `request` describes; with run=False, only say how.

    A request that makes no sense raises InputError or UnsupportedError. A missing GPU or tool, or
    a tool that fails, does not: the report says so, and holds the command.
    """
    predicted = call.predict(request)
    shown = " && ".join(shlex.join(words) for words in commands(request))

    def report(state: str, reason: str, rows: Any = (), table: Any = None) -> Report:
        return Report(request, predicted, shown, state, reason, list(rows), table)

    if not run:
        return report("printed", "asked for the command only")
    gpu = gpus.detect()
    missing = _missing(request, gpu)
    if missing or gpu is None:
        return report("missing", missing)
    call.refuse_unserved(request, gpu)
    try:
        if request.tool == "ncu":
            kernels = ncu.parse(_run_ncu(request))
            return report("ran", "", *_of_kernels(kernels, predicted, request.calls))
        tool = torch_tool.run if request.tool == "torch" else proton_tool.run
        timings = tool(call.make(request), request.calls, request.out)
    except TilewrightError as e:
        return report("failed", str(e))
    return report(
        "ran",
        "",
        tables.timing_rows(timings, request.calls),
        tables.timing_table(timings, request.calls, predicted.read, predicted.written),
    )


def read_csv(path: Path, request: Request) -> Report:
    """The report of a raw page that was measured elsewhere with the request's command."""
    predicted = call.predict(request)
    shown = " && ".join(shlex.join(words) for words in commands(request))
    try:
        kernels = ncu.parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as e:
        raise InputError(f"profile: {path} cannot be read ({e.strerror}).") from e
    rows, table = _of_kernels(kernels, predicted, request.calls)
    return Report(request, predicted, shown, "ran", "", rows, table, path.name)


def commands(request: Request) -> list[list[str]]:
    """What to type: for ncu the tool itself, for the tools in this process our own command."""
    if request.tool != "ncu":
        words = ["tilewright", "profile", *request.arguments(), "--tool", request.tool]
        return [[*words, "--out", str(request.out)] if request.out else words]
    found = [ncu.command([*ONCE, *request.arguments()], request.mode, request.out)]
    if request.mode == "file" and request.out is not None:
        found.append(ncu.import_command(request.out))
    return found


def _missing(request: Request, gpu: gpus.Gpu | None) -> str:
    if gpu is None:
        return "There is no NVIDIA GPU here."
    return ncu.NOT_FOUND if request.tool == "ncu" and ncu.find() is None else ""


def _run_ncu(request: Request) -> str:
    """The CSV, from the commands that are shown, with the paths of this machine put in."""
    text = ""
    if request.out is not None:
        request.out.parent.mkdir(parents=True, exist_ok=True)
    for words in commands(request):
        if "--import" in words and any(sign in text for sign in ncu.FAILED):
            break  # nothing new to import: what ncu said is what there is to tell
        text = ncu.run(_located(words))
    if request.out is not None and request.mode != "file":
        request.out.write_text(text, encoding="utf-8")
    return text


def _located(words: Sequence[str]) -> list[str]:
    places = {"ncu": ncu.find() or "ncu", "python": sys.executable}
    return [places.get(word, word) for word in words]


def _of_kernels(
    kernels: Sequence[Kernel], predicted: Predicted, calls: int
) -> tuple[list[dict[str, Any]], Any]:
    read, written, flops = predicted
    rows = tables.kernel_rows(kernels, read, written, calls)
    return rows, tables.table(kernels, read, written, flops, calls)
