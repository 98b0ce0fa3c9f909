"""What one check runs on, and the parts that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewright import dispatch
from tilewright.errors import UnsupportedError
from tilewright.spec import Args, Case, Choice, Op
from tilewright.verify import compare
from tilewright.verify.compare import Verdict
from tilewright.verify.record import Result

GROUPS = {"cpu": ("edge",), "cuda": ("edge", "plan")}  # the declared cases that a device takes


@dataclass(frozen=True)
class Context:
    """An op on a backend and a device, and which parts of a check are wanted."""

    op: Op
    backend: str
    device: str  # "cpu" or "cuda"
    full: bool  # also what wants tens of gigabytes
    cases: int  # how many random cases
    seed: int  # the first of their seeds
    case: str = ""  # only this case
    dtype: str = ""  # only this dtype

    def by_name(self) -> tuple[str, str, str, bool, int, int, str, str]:
        """Return the fields, with the op's name for the op: what another process can be sent."""
        return (
            self.op.name, self.backend, self.device, self.full, self.cases, self.seed, self.case,
            self.dtype,
        )  # fmt: skip

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu" and self.backend != "torch"

    def serves(self, args: Args) -> bool:
        """Skipping is asking: the declaration says what a backend takes."""
        try:
            dispatch.choose(self.op, args, backend=self.backend)
        except UnsupportedError:
            return False
        return True

    def launches(self, args: Args) -> list[Choice]:
        """Return what a table may name, for a call that is served."""
        on = dispatch.choose(self.op, args, backend=self.backend).gpu
        return dispatch.launches(self.op, self.backend, args, on)

    def result(
        self, check: str, case: str, dtype: Any, phase: str, v: Verdict, seed: int | None = None
    ) -> Result:
        return Result(
            self.op.name, check, self.backend, case, dtype_name(dtype), phase, v.passed, v.ratio,
            v.error, v.message, self.seed if seed is None else seed,
        )  # fmt: skip

    def inputs(self, dims: Any, dtype: torch.dtype, seed: int) -> Args:
        assert self.op.inputs is not None
        rng = torch.Generator().manual_seed(seed)
        return tuple(self.op.inputs(dims, dtype, self.device, rng))


class Part(NamedTuple):
    """A piece of a check that can be named, drawn and repeated by itself."""

    case: str
    dtype: torch.dtype | None
    run: Callable[[], Iterator[Result]]


class Check(NamedTuple):
    """A check: `parts(context)` lists it without running anything, a call runs what is wanted."""

    parts: Callable[[Context], Iterator[Part]]

    def __call__(self, c: Context) -> Iterator[Result]:
        for part in self.parts(c):
            if c.case in ("", part.case) and c.dtype in ("", dtype_name(part.dtype)):
                yield from part.run()


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if dtype else ""


def edge_cases(c: Context) -> list[Case]:
    """Return the declared cases that this device takes."""
    return [case for case in c.op.cases if case.group in GROUPS[c.device]]


def both_phases(
    c: Context, check: str, case: str, dtype: Any, args: Args, seed: int
) -> Iterator[Result]:
    """Judge forward and backward of one call, if the backend serves it."""
    if not c.serves(args):
        return
    verdict, _ = compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
    yield c.result(check, case, dtype, "forward", verdict, seed)
    # without a backward of its own, a backend's gradients are another's, which is checked too
    if c.op.autograd is not None and c.op.autograd.op.backend(c.backend) is not None:
        verdict, _ = compare.backward(c.op, args, c.backend, seed, interpreted=c.interpreted)
        yield c.result(check, case, dtype, "backward", verdict, seed)
