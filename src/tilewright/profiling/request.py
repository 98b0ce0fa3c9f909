"""What to profile: one call of one op, and the tool to look at it with.

A request travels to another process, and to another machine, as the words of a command line; what
`arguments` writes, `python -m tilewright.profiling.once` reads back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewright.dims import DTYPES, as_text
from tilewright.errors import InputError
from tilewright.ops import registry
from tilewright.spec import Op

PHASES = ("forward", "backward")
TOOLS = ("ncu", "torch", "proton")
MODES = ("quick", "full", "file")


@dataclass(frozen=True)
class Request:
    """One call, how often to run it, and who watches."""

    op: str
    dims: Mapping[str, Any] = field(default_factory=lambda: {"shape": (2048, 4096)})
    dtype: str = "bfloat16"
    phase: str = "forward"
    backend: str = "triton"  # a backend of ours, or a rival: "eager", "vendor", ...
    tool: str = "ncu"
    mode: str = "quick"  # ncu only
    out: Path | None = None  # ncu: the CSV or the .ncu-rep; torch: the trace; proton: the .hatchet
    calls: int = 3
    seed: int = 0

    def arguments(self) -> list[str]:
        """The call as words: what `once` needs to make it again."""
        words = [self.op, "--shape", as_text(self.dims), "--dtype", self.dtype]
        words += ["--phase", self.phase, "--backend", self.backend]
        return [*words, "--calls", str(self.calls), "--seed", str(self.seed)]


def check(request: Request) -> Op:
    """The op that is asked for, or one sentence about the first thing that is wrong."""
    op = op_of(request.op)
    _one_of("tool", request.tool, TOOLS)
    _one_of("mode", request.mode, MODES)
    _one_of("phase", request.phase, PHASES)
    _one_of("backend", request.backend, backends(op))
    dtype_of(request.dtype)
    if request.calls < 1:
        raise InputError(f"profile: calls is {request.calls}; it must be 1 or more.")
    if request.phase == "backward" and op.autograd is None:
        raise InputError(f"profile: {op.name} has no backward. Use phase forward.")
    if (request.tool, request.mode, request.out) == ("ncu", "file", None):
        raise InputError("profile: mode is 'file' and there is no file to write. Name it with out.")
    return op


def op_of(name: str) -> Op:
    _one_of("op", name, registry())
    return registry()[name]


def backends(op: Op) -> tuple[str, ...]:
    """Whose kernels can be looked at: our backends, the declared rivals, and eager torch."""
    ours = (b.name for b in op.backends if b.technology != "torch")
    return tuple(dict.fromkeys((*ours, *op.baselines, "eager", "torch")))


def dtype_of(name: str) -> torch.dtype:
    found = DTYPES.get(name, getattr(torch, name, None))
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"profile: dtype is {name!r}; it must be a floating dtype's name.")
    return found


def _one_of(what: str, name: str, names: Iterable[str]) -> None:
    if name not in (known := tuple(names)):
        raise InputError(f"profile: {what} is {name!r}; it must be one of {', '.join(known)}.")
