"""The call that every tool watches: its inputs, what it must move, a cold L2 before each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewright import dispatch, library
from tilewright import gpu as gpus
from tilewright.dims import meta_inputs
from tilewright.errors import InputError
from tilewright.gpu import Gpu
from tilewright.profiling.request import Request, check, dtype_of
from tilewright.spec import Args, Op, as_tuple

WARM_CALLS = 3  # the first compiles, the second finds its plan, the third leaves a launch ready
FLUSH = 4  # times the L2 that are read to push everything else out of it

Run = Callable[[], Any]


class Predicted(NamedTuple):
    """The fewest bytes one call can move, and its arithmetic where the op declares it."""

    read: int
    written: int
    flops: float | None


def predict(request: Request) -> Predicted:
    """From the declaration alone: needs no GPU, and refuses dims that the op never reads."""
    op = check(request)
    called, args = op.in_phase(_meta_inputs(op, request), request.phase)
    traffic = called.traffic(args)
    flops = None
    if op.cost is not None:
        flops = op.cost_in(request.dims, dtype_of(request.dtype), request.phase).flops
    return Predicted(traffic.read, traffic.written, flops)


def refuse_unserved(request: Request, gpu: Gpu) -> None:
    """Raise what the backend would say to these arguments on that GPU, before a tool is started."""
    op = check(request)
    args = _meta_inputs(op, request)
    op.check(*args)
    if op.backend(request.backend) is not None:
        dispatch.choose(op, args, backend=request.backend, gpu=gpu)


def make(request: Request, device: str = "cuda") -> Run:
    """The call, ready to be repeated. For a backward the forward has been run already."""
    op = check(request)
    assert op.inputs is not None
    rng = torch.Generator(device).manual_seed(request.seed)
    args = tuple(op.inputs(request.dims, dtype_of(request.dtype), device, rng))
    op.check(*args)
    function = _function(op, request.backend)
    if request.phase == "forward":
        return lambda: function(*args)
    args = tuple(a.requires_grad_() if _is_floating(a) else a for a in args)
    leaves = [a for a in args if _is_floating(a)]
    outputs = [o for o in as_tuple(function(*args)) if o.requires_grad]
    # each gradient its own tensor: one that is shared or expanded would be read out of L2
    grads = [torch.randn(o.shape, dtype=o.dtype, device=device, generator=rng) for o in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def repeat(run: Run, calls: int, begin: Run, end: Run) -> None:
    """Warm up, then watch `calls` calls one by one, each between `begin` and `end`.

    L2 is flushed before each by reading, outside of what is watched. A flush that writes would
    leave dirty lines, whose way back to memory would be charged to the call.
    """
    gpu = gpu_or_raise()
    buffer = torch.zeros(FLUSH * gpu.l2_bytes // 4, dtype=torch.int32, device="cuda")
    for _ in range(WARM_CALLS):
        run()
    for _ in range(calls):
        buffer.max()
        torch.cuda.synchronize()
        begin()
        run()
        torch.cuda.synchronize()
        end()


def gpu_or_raise() -> Gpu:
    gpu = gpus.detect()
    if gpu is None:
        raise InputError(
            f"profile: torch {torch.__version__} sees no NVIDIA GPU. Run it on a machine with one."
        )
    return gpu


def _function(op: Op, backend: str) -> Callable[..., Any]:
    ours = op.backend(backend)
    if ours is not None and ours.technology != "torch":
        return lambda *args: library.call(op, args, backend)
    return op.baselines.get(backend, op.reference)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _meta_inputs(op: Op, request: Request) -> Args:
    return meta_inputs(op, request.dims, dtype_of(request.dtype))
