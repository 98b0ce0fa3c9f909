"""Which checks run on which op and backend, one after another."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tilewright.errors import InputError
from tilewright.ops import registry
from tilewright.verify import features
from tilewright.verify.checks import CHECKS, GROUPS, Context, edge_cases
from tilewright.verify.compare import Verdict
from tilewright.verify.interpreter import without_repetition
from tilewright.verify.record import Result

# random cases per op and backend: (quick, full)
RANDOM = {"cpu": (40, 500), "cuda": (200, 5000)}
ONCE_PER_OP = ("errors",)
SEEDED = ("random", "exact")
BY_CASE = ("cases", "launches")
PIECE = 50


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
) -> list[tuple[str, Context]]:
    """(check, context) for every check to run; with a `case`, that edge case and nothing else."""
    for name in ops:
        _known(name, registry(), "op")
    for name in only:
        _known(name, CHECKS, "--only")
    if case:
        declared = [c for op in ops or registry() for c in registry()[op].cases]
        names = dict.fromkeys(c.name for c in declared if c.group in GROUPS[device])
        _known(case, names, "--case")
        if set(only) - set(BY_CASE):
            raise InputError(
                f"verify: --case is for {' and '.join(BY_CASE)}; --only must name no other check."
            )
        only = only or ["cases"]
    count = cases if cases is not None else RANDOM[device][full]
    steps = []
    for name in ops or registry():
        op = registry()[name]
        served_by = [b for b in backends_on(name, device) if backend in (None, b)]
        for i, b in enumerate(served_by):
            context = Context(op, b, device, full, count, seed, case)
            for check in CHECKS:
                if (only and check not in only) or (i and check in ONCE_PER_OP):
                    continue
                steps += [(check, part) for part in _parts(check, context)]
    return steps


def _parts(check: str, context: Context) -> list[Context]:
    """Long checks in pieces, so that cores share them and a progress bar moves."""
    if check == "launches" and context.op.tuning is None:
        return []
    if check in BY_CASE:
        names = dict.fromkeys(case.name for case in edge_cases(context))
        return [replace(context, case=name) for name in names]
    if check not in (*SEEDED, "features"):
        return [context]
    count, piece = context.cases, PIECE
    if check == "features":
        left = len(features.calls(context.op.name, context.device, context.backend)) - context.seed
        count, piece = min(count, left), PIECE // 5
    return [
        replace(context, seed=context.seed + start, cases=min(piece, count - start))
        for start in range(0, count, piece)
    ]


def run(
    steps: Sequence[tuple[str, Context]], *, fail_fast: bool = False, workers: int = 1
) -> Iterator[list[Result]]:
    """Run the steps and yield each one's results; several workers share them.

    Workers are forked on a CPU, which is quick, and spawned on a GPU, where a fork would inherit a
    driver that does not work.
    """
    for _, context in steps[:1]:
        _interpreter_or_raise(context)
    way = "fork" if steps and steps[0][1].device == "cpu" else "spawn"
    if workers == 1 or way not in multiprocessing.get_all_start_methods():
        for step in steps:
            results = run_step(step, fail_fast=fail_fast)
            yield results
            if fail_fast and not all(r.passed for r in results):
                return
        return
    made = multiprocessing.get_context(way)
    with ProcessPoolExecutor(workers, mp_context=made, initializer=_one_thread) as pool:
        # what is not in pieces begins first, or one worker would end long after the others
        first = sorted(steps, key=lambda step: step[0] in (*BY_CASE, "features", *SEEDED))
        jobs = [pool.submit(_run_named, check, *c.by_name()) for check, c in first]
        for done in as_completed(jobs):
            yield done.result()


def run_step(step: tuple[str, Context], *, fail_fast: bool = False) -> list[Result]:
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
                if fail_fast and not result.passed:
                    break
        except Exception as e:
            broken = Verdict(message=f"raised {type(e).__name__}: {e}")
            results.append(context.result(check, context.case, "", "", broken))
    if context.device == "cuda":
        torch.cuda.synchronize()  # a device error belongs to the check that caused it
    return results


def _run_named(check: str, op: str, *rest: Any) -> list[Result]:
    """A step by its op's name: a declaration holds functions and does not travel."""
    return run_step((check, Context(registry()[op], *rest)))


def _one_thread() -> None:
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
