"""Checks that the same call gives the same bits: again, on a stream, in a graph, in many rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tilewright.library import call
from tilewright.spec import FLOATS, Args, as_tuple
from tilewright.verify import compare, features
from tilewright.verify.compare import Verdict
from tilewright.verify.context import Context, Part
from tilewright.verify.record import Result

FEW_ROWS = 40  # a kernel may be for few
SHAPE = (37, 1000)  # of what runs on a stream and in a graph


def repeat(c: Context) -> Iterator[Part]:
    """The same call gives the same bits, forward and backward."""
    columns = (48, 1000, 20_000) if c.device == "cuda" else (48, 1000)
    rows = (300, FEW_ROWS) if c.device == "cuda" else (FEW_ROWS,)
    for dtype, n in itertools.product(FLOATS, columns):
        shapes = [(m, n) for m in rows]
        yield Part(f"{n} columns", dtype, partial(_repeat_shapes, c, shapes, dtype))
    if c.device == "cuda":  # and some with options
        for name, dims, dtype in features.calls(c.op.name, c.device, c.backend)[::8]:
            yield Part(name, dtype, partial(_repeat, c, name, dims, dtype))


def _repeat_shapes(
    c: Context, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Result]:
    """Repeat the first of these shapes that the backend serves."""
    for shape in shapes:
        if c.serves(c.inputs({"shape": shape}, dtype, c.seed)):
            yield from _repeat(c, f"{shape[0]} x {shape[1]}", {"shape": shape}, dtype)
            return


def _repeat(c: Context, name: str, dims: Any, dtype: torch.dtype) -> Iterator[Result]:
    args = c.inputs(dims, dtype, c.seed)
    if not c.serves(args):
        return
    upstream = compare.random_like(as_tuple(c.op.outputs(*args)), c.seed)
    first = _outputs_and_grads(c, args, upstream)
    again = (_outputs_and_grads(c, args, upstream) for _ in range(_times(c)))
    same = all(compare.same_bits(first, other) for other in again)
    verdict = Verdict() if same else Verdict(message="bits differ from run to run")
    yield c.result("repeat", name, dtype, "", verdict)


def _times(c: Context) -> int:
    return 250 if c.device == "cuda" else 2


def _outputs_and_grads(c: Context, args: Args, upstream: Any) -> list[torch.Tensor]:
    if c.op.autograd is None:
        return list(as_tuple(call(c.op, args, c.backend)))
    leaves, wanted = compare.with_leaves(c.op, args)
    outputs = as_tuple(call(c.op, leaves, c.backend))
    grads = torch.autograd.grad(outputs, wanted, upstream)
    return [*(o.detach() for o in outputs), *grads]


def streams(c: Context) -> Iterator[Part]:
    """On a stream of its own, behind work that is late: a launch elsewhere reads old values."""
    for dtype in FLOATS if c.device == "cuda" else ():
        yield Part("37 x 1000", dtype, partial(_stream, c, dtype))


def _stream(c: Context, dtype: torch.dtype) -> Iterator[Result]:
    args, fresh, upstream = _twice(c, dtype)
    if not c.serves(args):
        return
    wanted = _outputs_and_grads(c, fresh, upstream)
    _outputs_and_grads(c, args, upstream)  # compiles, so that nothing below waits for that
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
        _copy(args, fresh)
        got = _outputs_and_grads(c, args, upstream)
    stream.synchronize()
    same = compare.same_bits(got, wanted)
    verdict = Verdict() if same else Verdict(message="not launched on the current stream")
    yield c.result("streams", "37 x 1000", dtype, "", verdict)


def capture(c: Context) -> Iterator[Part]:
    """A CUDA graph captured after a warm call, replayed on other values, gives their bits."""
    for dtype in FLOATS if c.device == "cuda" else ():
        yield Part("37 x 1000", dtype, partial(_capture, c, dtype))


def _capture(c: Context, dtype: torch.dtype) -> Iterator[Result]:
    args, fresh, upstream = _twice(c, dtype)
    if not c.serves(args):
        return
    wanted = _outputs_and_grads(c, fresh, upstream)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _outputs_and_grads(c, args, upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _outputs_and_grads(c, args, upstream)
    _copy(args, fresh)
    graph.replay()
    same = compare.same_bits(got, wanted)
    verdict = Verdict() if same else Verdict(message="the replay gives other bits")
    yield c.result("capture", "37 x 1000", dtype, "", verdict)


def _twice(c: Context, dtype: torch.dtype) -> tuple[Args, Args, list[torch.Tensor]]:
    """Return arguments, the same with other values, and an incoming gradient."""
    args, fresh = (c.inputs({"shape": SHAPE}, dtype, c.seed + i) for i in range(2))
    return args, fresh, compare.random_like(as_tuple(c.op.outputs(*args)), c.seed)


def _copy(to: Args, values: Args) -> None:
    for a, b in zip(to, values, strict=True):
        if isinstance(a, torch.Tensor):
            a.copy_(b)


def large(c: Context) -> Iterator[Part]:
    """More than 2^31 elements for real; the last rows are the ones a 32-bit offset gets wrong."""
    if c.device == "cuda" and c.full:
        rows, n = 2**31 // 4096 + 3, 4096
        yield Part(f"{rows} x {n}", torch.float16, partial(last_rows, c, rows, n))


def last_rows(c: Context, rows: int, n: int) -> Iterator[Result]:
    """The first and the last of many rows give the bits of a call with those four alone. Of an op
    that is tuned by shape few rows may be added in another order: there sums are exact."""
    inputs = c.op.exact_inputs if c.op.tuning else c.op.inputs
    assert inputs is not None
    rng = torch.Generator().manual_seed(c.seed)
    few = tuple(inputs({"shape": (4, n)}, torch.float16, c.device, rng))
    if not c.serves(few):
        return
    ends = torch.tensor([0, 1, rows - 2, rows - 1], device=c.device)
    many = tuple(
        torch.zeros((rows, *a.shape[1:]), dtype=a.dtype, device=a.device).index_copy_(0, ends, a)
        if isinstance(a, torch.Tensor) and a.dim() > 1 and len(a) == 4
        else a
        for a in few
    )
    if not c.serves(many):
        return
    with torch.no_grad():
        got = [torch.cat((g[:2], g[-2:])) for g in as_tuple(call(c.op, many, c.backend))]
        wanted = as_tuple(call(c.op, few, c.backend))
    message = "" if compare.same_bits(got, wanted) else "the last rows are wrong"
    yield c.result("large", f"{rows} x {n}", torch.float16, "forward", Verdict(message=message))
