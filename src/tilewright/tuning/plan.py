"""What is measured: every case of an op's grid in every dtype, and what may serve each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import dims, dispatch
from tilewright.errors import InputError
from tilewright.explain import expected
from tilewright.gpu import Gpu
from tilewright.ops import registry
from tilewright.spec import Args, Case, Choice, Op, Tuning
from tilewright.tuned import file


@dataclass(frozen=True)
class Job:
    """One bucket to be."""

    op: Op
    case: Case
    dtype: torch.dtype

    @property
    def tuning(self) -> Tuning:
        assert self.op.tuning is not None
        return self.op.tuning

    @property
    def dims(self) -> str:
        return dims.as_text(self.case.dims)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def title(self) -> str:
        return f"{self.op.name} {self.dims}, {self.dtype_name}"

    def make(self, seed: int, device: str) -> Args:
        """Fresh arguments, drawn on the device."""
        assert self.op.inputs is not None
        rng = torch.Generator(device).manual_seed(seed)
        return tuple(self.op.inputs(self.case.dims, self.dtype, device, rng))

    def meta(self) -> Args:
        return dims.meta_inputs(self.op, self.case.dims, self.dtype)

    def expected(self, gpu: Gpu, args: Args) -> dict[Choice, float]:
        """What may serve the call, in the order of ties, and the model's word on each."""
        return expected(self.op, gpu, args)

    def place(self, args: Args) -> tuple[str, tuple[float, ...]]:
        kind, coordinates = dispatch.load(self.tuning.place)(*args)
        return kind, file.rounded(coordinates)


def plan(ops: Sequence[str], dtypes: Sequence[str] = (), case: str = "") -> list[Job]:
    """The buckets of these ops, of all that have some if none is named; in the grid's order."""
    known = {name: op for name, op in registry().items() if op.tuning is not None}
    for name in ops:
        _one_of("op", name, known)
    kinds = [_DTYPES[_one_of("--dtype", name, _DTYPES)] for name in dtypes]
    jobs = [job for name in dict.fromkeys(ops or known) for job in grid(known[name])]
    jobs = [job for job in jobs if not kinds or job.dtype in kinds]
    found = [job for job in jobs if case in job.case.name or case in job.dims]
    if not found:
        asked = f"--case is {case!r}, and" if case else "of these ops and dtypes"
        raise InputError(f"tune: {asked} no case of the grid fits. --dry-run lists them all.")
    return found


def grid(op: Op) -> list[Job]:
    """Every bucket of an op."""
    tuning = op.tuning
    assert tuning is not None
    return [Job(op, case, dtype) for dtype in tuning.dtypes for case in tuning.cases]


_DTYPES = {
    **dims.DTYPES,
    **{str(dtype).removeprefix("torch."): dtype for dtype in dims.DTYPES.values()},
}


def _one_of(what: str, name: str, names: Any) -> str:
    if name not in names:
        told = ", ".join(names) or "... there is none"
        raise InputError(f"tune: {what} is {name!r}; it must be one of {told}.")
    return name
