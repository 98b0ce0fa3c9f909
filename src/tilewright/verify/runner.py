"""Which checks run on which op and backend, one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tilewright.errors import InputError
from tilewright.ops import registry
from tilewright.verify.checks import CHECKS, Context
from tilewright.verify.record import Result

# random cases per op and backend: (quick, full)
RANDOM = {"cpu": (40, 500), "cuda": (200, 5000)}
ONCE_PER_OP = ("errors",)


def backends_on(op_name: str, device: str) -> list[str]:
    """The backends that this device can run; on a CPU that is what the interpreter runs."""
    names = []
    for backend in registry()[op_name].backends:
        technology = backend.technology
        if technology == "torch" or (device == "cpu" and technology != "triton"):
            continue
        names.append(backend.name)
    return names


def plan(
    ops: Sequence[str] = (),
    *,
    device: str = "cpu",
    full: bool = False,
    only: Sequence[str] = (),
    backend: str | None = None,
    cases: int | None = None,
    seed: int = 0,
) -> list[tuple[str, Context]]:
    """(check, context) for every check to run."""
    for name in ops:
        _known(name, registry(), "op")
    for name in only:
        _known(name, CHECKS, "--only")
    count = cases if cases is not None else RANDOM[device][full]
    steps = []
    for name in ops or registry():
        op = registry()[name]
        names = [b for b in backends_on(name, device) if backend in (None, b)]
        for i, b in enumerate(names):
            context = Context(op, b, device, full, count, seed)
            for check in CHECKS:
                if (only and check not in only) or (i and check in ONCE_PER_OP):
                    continue
                steps.append((check, context))
    return steps


def run(
    steps: Sequence[tuple[str, Context]],
    *,
    fail_fast: bool = False,
    progress: Callable[[str, Context, int], None] | None = None,
) -> Iterator[Result]:
    """Run the steps and yield every result."""
    for check, context in steps:
        _interpreter_or_raise(context)
        done = 0
        # the interpreter computes on numpy, which warns of the NaN that masked lanes rightly hold
        with np.errstate(all="ignore"):
            for result in CHECKS[check](context):
                yield result
                done += 1
                if progress is not None:
                    progress(check, context, done)
                if fail_fast and not result.passed:
                    return
        if context.device == "cuda":
            torch.cuda.synchronize()  # a device error belongs to the check that caused it


def _interpreter_or_raise(context: Context) -> None:
    if context.device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") not in ("1", "true"):
        raise InputError(
            "verify: kernels run on the CPU only in Triton's interpreter, which must be chosen before "
            "triton is imported. Use `tilewright verify --device cpu`, which starts it that way."
        )


def _known(name: str, names: object, what: str) -> None:
    if name not in names:  # type: ignore[operator]
        raise InputError(f"verify: {what} is {name!r}; it must be one of {', '.join(names)}.")  # type: ignore[arg-type]
