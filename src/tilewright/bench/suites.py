"""Which cases are measured: suites of declared cases, or a shape from the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import dims
from tilewright.errors import InputError
from tilewright.lab import costs
from tilewright.lab.draw import Piece, draw
from tilewright.ops import registry
from tilewright.spec import Case, Op

QUICK_FLOPS = 6e11  # a case of the quick suite has no more: its truth is made in float64
SUITES = {
    "quick": "the first model case and the first of the sweep that is not too large",
    "model": "one layer of each model, 2048 tokens",
    "sweep": "one size, every row length",
    "decode": "1, 16 and 128 tokens",
    "prefill": "512, 2048 and 8192 tokens",
    "sparse": "windows and sequences of many lengths, of ops that know such",
}
DTYPES = {
    **dims.DTYPES,
    **{str(dtype).removeprefix("torch."): dtype for dtype in dims.DTYPES.values()},
}
PHASES = {"fwd": "forward", "bwd": "backward", "forward": "forward", "backward": "backward"}


@dataclass(frozen=True)
class Work:
    """One subject to be, before anything of it is made."""

    op: Op
    case: Case
    dtype: torch.dtype
    phase: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a record's rows of it have in common."""
        return self.op.name, self.case.name, str(self.dtype).removeprefix("torch."), self.phase


def plan(
    ops: Sequence[str],
    suite: str,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    modes: Sequence[str],
) -> list[Work]:
    """Everything to measure, op by op. Shapes, where given, stand in for the suite."""
    for name in ops:
        one_of("op", name, registry())
    one_of("--suite", suite, SUITES)
    kinds = [DTYPES[one_of("--dtype", name, DTYPES)] for name in dtypes]
    phases = [PHASES[one_of("--mode", name, PHASES)] for name in modes]
    found = []
    for name in dict.fromkeys(ops or registry()):
        op = registry()[name]
        cases = [_given(op, text) for text in shapes] or suite_cases(op, suite)
        for phase in dict.fromkeys(phases):
            if phase == "backward" and op.autograd is None:
                continue
            found += [Work(op, c, d, phase) for c in cases for d in dict.fromkeys(kinds)]
    return list({work.key: work for work in found}.values())


def _given(op: Op, text: str) -> Case:
    found = dims.parse(op, text, "bench")
    return Case(dims.as_text(found), found, "shape")


def suite_cases(op: Op, suite: str) -> list[Case]:
    groups: dict[str, list[Case]] = {}
    for case in op.cases:
        groups.setdefault(case.group, []).append(case)
    if suite == "quick":
        sweep = [case for case in groups.get("sweep", []) if _flops(op, case) <= QUICK_FLOPS]
        return [*groups.get("model", [])[:1], *sweep[:1]]
    once: dict[str, Case] = {}  # models share layers: a shape is measured once
    for case in groups.get(suite, []):
        once.setdefault(dims.as_text(case.dims), case)
    return list(once.values())


def _flops(op: Op, case: Case) -> float:
    return op.cost(case.dims, torch.bfloat16).flops if op.cost else 0.0


def drawn(works: Sequence[Work], whole: float, key: str, *, least: bool = False) -> list[Work]:
    """Return the works whose turn it is, within a whole of seconds.

    With `least`, a whole that is too small for one work of each op is an error.
    """
    pieces = []
    for work in works:
        seconds, measured = costs.estimate("bench on cuda", f"{work.op.name} {work.phase}")
        pieces.append(Piece(work, work.op.name, " ".join(work.key), seconds, measured))
    return [piece.item for piece in draw(pieces, whole, key, "bench", least=least)]


def one_of(what: str, name: str, names: Mapping[str, Any] | Sequence[str]) -> str:
    if name not in names:
        raise InputError(f"bench: {what} is {name!r}; it must be one of {', '.join(names)}.")
    return name
