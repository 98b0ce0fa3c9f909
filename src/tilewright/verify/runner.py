"""Which checks run on which op and backend, and running them in processes that may die."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import InputError
from tilewright.lab import costs, workers
from tilewright.lab.draw import Piece
from tilewright.ops import registry
from tilewright.toolkit import recording
from tilewright.verify import features
from tilewright.verify.checks import CHECKS
from tilewright.verify.compare import Verdict
from tilewright.verify.context import Context, dtype_name
from tilewright.verify.interpreter import without_repetition
from tilewright.verify.record import Result

RANDOM = {"cpu": (500, 500), "cuda": (200, 5000)}  # random cases: to draw from, and in full
ONCE_PER_OP = ("errors",)
SEEDED = ("random", "exact", "features")  # whose parts are seeds
PIECE, LONG_PIECE = 5, 50  # seeds of one step, and of one in a full run on a GPU
LIMIT = {"cpu": 600.0, "cuda": 120.0}  # seconds without a word after which a step hangs

Step = tuple[str, Context]  # a check, and the part of it that is wanted


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
    case: str = "",
) -> list[Step]:
    """Return (check, context) for every part of every check; with a `case`, for that case alone."""
    for name in ops:
        _known(name, registry(), "op")
    for name in only:
        _known(name, CHECKS, "--only")
    if case and not only:
        only = ["cases"]
    count = cases if cases is not None else RANDOM[device][full]
    steps: list[Step] = []
    names: dict[str, None] = {}
    for name in ops or registry():
        op = registry()[name]
        served_by = [b for b in backends_on(name, device) if backend in (None, b)]
        for i, b in enumerate(served_by):
            context = Context(op, b, device, full, count, seed)
            for check in CHECKS:
                if (only and check not in only) or (i and check in ONCE_PER_OP):
                    continue
                parts = _parts(check, context)
                names |= dict.fromkeys(part.case for part in parts if part.case)
                steps += [(check, part) for part in parts if case in ("", part.case)]
    if case and not steps and (names or _has_backend(ops, device, backend)):
        if not names:
            raise InputError(
                f"verify: --case is {case!r}; {' and '.join(only)} has seeds instead. Use --seed."
            )
        _known(case, names, "--case")
    return steps


def _has_backend(ops: Sequence[str], device: str, backend: str | None) -> bool:
    return any(backend in (None, b) for op in ops or registry() for b in backends_on(op, device))


def _parts(check: str, context: Context) -> list[Context]:
    """Return the context of each part of a check: a case in a dtype, or some seeds."""
    if check not in SEEDED:
        parts = [(p.case, dtype_name(p.dtype)) for p in CHECKS[check].parts(context)]
        # cases of one name are run together
        return [replace(context, case=case, dtype=dtype) for case, dtype in dict.fromkeys(parts)]
    count, piece = context.cases, PIECE
    if context.full and context.device == "cuda":
        piece = LONG_PIECE
    if check == "features":
        left = len(features.calls(context.op.name, context.device, context.backend)) - context.seed
        count, piece = min(count, left), piece // 5
    elif check == "exact":
        has = context.op.exact_inputs is not None and context.op.sample is not None
        count = max(count // 2, 1) if has else 0
    return [
        replace(context, seed=context.seed + start, cases=min(piece, count - start))
        for start in range(0, count, piece)
    ]


def pieces(steps: Sequence[Step]) -> list[Piece[Step]]:
    """Return the steps as what a budget is drawn from: with a name, an op and their seconds."""
    found = []
    for step in steps:
        estimate = costs.estimate(*costs_of(step))
        name = name_of(step)
        found.append(Piece(step, step[1].op.name, name, estimate.seconds, estimate.measured))
    return found


def costs_of(step: Step) -> tuple[str, str, str]:
    """Return where the table has a step's seconds: which table, which kind of step, which part."""
    check, c = step
    return f"verify on {c.device}", f"{c.op.name} {c.backend} {check}", f"{c.case} {c.dtype}"


def name_of(step: Step) -> str:
    """Return what tells a step from all others of a run."""
    check, c = step
    which = f"seed {c.seed} + {c.cases}" if check in SEEDED else f"{c.case} {c.dtype}".strip()
    return f"{c.op.name} {c.backend} {check}, {which}"


class Ended(list[Result]):
    """The results of a step, which step it was, and how long it took."""

    def __init__(self, step: Step, results: Sequence[Result], seconds: float = 0.0) -> None:
        super().__init__(results)
        self.step, self.seconds = step, seconds


def run(
    steps: Sequence[Step],
    *,
    fail_fast: bool = False,
    count: int = 1,
    apart: bool = False,
    limit: float | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Generator[Ended, None, None]:
    """Run the steps and yield each one's results as it ends.

    Several workers share them, and one works `apart` from this process, which a kernel that hangs
    or crashes then leaves alone. Workers are forked on a CPU, which is quick; on a GPU a fork would
    inherit a driver that does not work, so there a server without one forks them.
    """
    for _, context in steps[:1]:
        _interpreter_or_raise(context)
    ways = multiprocessing.get_all_start_methods()
    device = steps[0][1].device if steps else "cpu"
    way = "fork" if device == "cpu" else "forkserver" if "forkserver" in ways else "spawn"
    if (count == 1 and not apart) or way not in ways:
        for step in steps:
            began = time.perf_counter()
            results = run_step(step, fail_fast=fail_fast)
            yield Ended(step, results, time.perf_counter() - began)
            beat()
            if fail_fast and not all(r.passed for r in results):
                return
        return
    if way == "fork":
        importlib.import_module("triton.runtime.interpreter")  # once, for all workers
    # what takes longest begins first, or one worker would end long after the others
    order = sorted(steps, key=lambda step: -costs.estimate(*costs_of(step)).seconds)
    names = {(check, *c.by_name()): (check, c) for check, c in order}
    reports = workers.run(
        list(names),
        _run_named,
        count,
        way=way,
        limit=LIMIT[device] if limit is None else limit,
        prepare=_prepare_worker,
        preload=("tilewright.verify.runner", "triton"),
        beat=beat,
    )
    for report in reports:
        step = names[report.task]
        has_results = report.state in ("done", "spent")
        results = report.value if has_results else [_lost(step, report)]
        yield Ended(step, results, report.seconds)
        if fail_fast and not all(r.passed for r in results):
            reports.close()
            return


def run_step(
    step: Step, *, fail_fast: bool = False, judged: Callable[[], None] = lambda: None
) -> list[Result]:
    """Return the results of a step; `judged` is called after each of them."""
    check, context = step
    # the interpreter computes on numpy, which warns of the NaN that masked lanes rightly hold; and
    # torch of CPUs without instructions for bfloat16
    results: list[Result] = []
    quick = without_repetition() if context.interpreted else nullcontext()
    with np.errstate(all="ignore"), warnings.catch_warnings(), quick:
        for message in ("All-NaN slice", "mkldnn_matmul failed"):
            warnings.filterwarnings("ignore", message)
        try:
            for result in CHECKS[check](context):
                results.append(result)  # what came before an exception counts
                judged()
                if fail_fast and not result.passed:
                    break
        except Exception as e:
            broken = Verdict(message=f"raised {type(e).__name__}: {e}")
            results.append(context.result(check, context.case, context.dtype, "", broken))
    return results


def _run_named(task: Any, say: Callable[[str], None]) -> list[Result]:
    """Run a step by its op's name: a declaration holds functions and does not travel."""
    check, op, *rest = task
    context = Context(registry()[op], *rest)
    kernels: list[str] = []

    def hear(kernel: str) -> None:
        kernels.append(kernel)
        say(", ".join(dict.fromkeys(kernels)))

    with recording.listening(hear):
        results = run_step((check, context), judged=kernels.clear)
    if context.device == "cuda":
        try:
            torch.cuda.synchronize()  # a device error belongs to the check that caused it
        except RuntimeError as e:  # and makes every later call of this process fail
            words = str(e).partition("\n")[0]
            verdict = Verdict(message=f"left an error on the device: {words}")
            broken = context.result(check, context.case, context.dtype, "", verdict)
            raise workers.Spent([*results, broken]) from e
    return results


def _lost(step: Step, report: workers.Report) -> Result:
    """Return the failure of a step whose process hung or died."""
    check, context = step
    at = f" in {report.at}" if report.at else ""
    verdict = Verdict(message=f"{report.value}{at}")
    return context.result(check, context.case, context.dtype, "", verdict)


def _prepare_worker() -> None:
    torch.set_num_threads(1)


def _interpreter_or_raise(context: Context) -> None:
    if context.device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") not in ("1", "true"):
        raise InputError(
            "verify: kernels run on the CPU only in Triton's interpreter, which must be chosen "
            "before triton is imported. Use `tilewright verify --device cpu`: it starts that way."
        )


def _known(name: str, names: object, what: str) -> None:
    if name not in names:  # type: ignore[operator]
        raise InputError(f"verify: {what} is {name!r}; it must be one of {', '.join(names)}.")  # type: ignore[arg-type]
