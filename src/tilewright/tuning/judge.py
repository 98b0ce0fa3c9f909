"""Whether a choice's result is right: held to float64, whatever its time.

A call too large for that is held to float64 in a part of it that the op cuts out at random, and
everywhere to torch's own result, loosely: a tile that nobody wrote shows there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright import dispatch
from tilewright.bench.subject import judge
from tilewright.spec import Args, as_tuple, on_meta
from tilewright.tuning.plan import Job
from tilewright.verify import compare
from tilewright.verify.compare import Truth, Verdict

Checker = Callable[[Any], str]  # results -> what is wrong with them, or ""

LARGE = 2.0**40  # flops of a product of 8192 x 8192 x 8192, 20 ms in float64 on an H200
MANY = 2**26  # elements of a result
LOOSE = 4.0  # bounds, the largest of the part, that any element may be off torch's own
SMALL = 2**22  # bytes of a call for which exact inputs are drawn: they are drawn on the CPU


def checker(job: Job, args: Args, seed: int) -> Checker:
    """Float64's word on a call with these arguments."""
    if job.tuning.part is not None and _is_large(job, args):
        return _of_part(job, args, seed)
    truths = compare.forward_truth(job.op, args)
    return lambda results: _words(judge(truths, results))


def exact(job: Job, device: str, seed: int) -> tuple[Args, Checker] | None:
    """Inputs whose result is exact in any order, and their checker; None if the op has none that
    fit: in some shapes a sum outgrows its dtype."""
    op = job.op
    if op.exact_inputs is None or op.traffic(job.meta()).total > SMALL:
        return None
    rng = torch.Generator().manual_seed(seed)
    args = tuple(op.exact_inputs(job.case.dims, job.dtype, device, rng))
    wanted = [w.double() for w in as_tuple(op.reference(*compare.in_float64(args)))]
    kinds = [result.dtype for result in as_tuple(op.outputs(*on_meta(args)))]
    if not all(torch.equal(w.to(k).double(), w) for w, k in zip(wanted, kinds, strict=True)):
        return None
    truths = [Truth(f"output {i}", w, torch.zeros_like(w)) for i, w in enumerate(wanted)]
    return args, lambda results: _words(judge(truths, results))


def _is_large(job: Job, args: Args) -> bool:
    results = as_tuple(job.op.outputs(*on_meta(args)))
    flops = job.op.cost_in(job.case.dims, job.dtype, "forward").flops
    return flops > LARGE or sum(result.numel() for result in results) > MANY


def _of_part(job: Job, args: Args, seed: int) -> Checker:
    op = job.op
    assert job.tuning.part is not None
    rng = torch.Generator().manual_seed(seed)
    smaller, cut = dispatch.load(job.tuning.part)(rng, *args)
    truths = compare.forward_truth(op, smaller)
    theirs = as_tuple(op.baselines.get("vendor", op.reference)(*args))

    def check(results: Any) -> str:
        got = as_tuple(results)
        declared = [tuple(result.shape) for result in theirs]
        if [tuple(result.shape) for result in got] != declared:
            return f"its results have other shapes than {declared}"
        wrong = _words(judge(truths, tuple(cut(result) for result in got)))
        return wrong or _beside(got, theirs, truths)

    return check


def _beside(got: Args, theirs: Args, truths: list[Truth]) -> str:
    """Every element, not only those of the part."""
    for ours, torchs, truth in zip(got, theirs, truths, strict=True):
        off, bound = compare.numbers((ours - torchs).abs().max(), truth.bound.max())
        if not off <= LOOSE * bound:  # NaN is not
            return f"{truth.what}: {off:.2g} off torch's own, and float64 allows {bound:.2g}"
    return ""


def _words(verdict: Verdict) -> str:
    if verdict.passed:
        return ""
    return verdict.message or f"its error is {verdict.ratio:.2g}x the tolerance"
