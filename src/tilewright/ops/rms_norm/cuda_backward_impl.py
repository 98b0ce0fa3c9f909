"""The backward of RMSNorm, also after a residual add, in CUDA C++ (cuda_backward_impl.cu).

Persistent groups of lanes, teams of warps or clusters walk down the rows; the next rows travel
through shared memory meanwhile. The weight's gradient stays in registers over all rows of a thread;
a second kernel adds the blocks' partials in a fixed order, so the result has the same bits on every
run. Limits: float32, float16, bfloat16; weight and gradient of the input's dtype; 8,192 half or
4,096 float columns without clusters, 262,144 half or 131,072 float columns with them, 2,048 without
16-byte loads; fewer where a block has less shared memory than an H100 gives it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_partials, cuda_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_rows import Plan
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)


@dataclass(frozen=True)
class Launch:
    plan: Plan
    stages: int  # rows under way
    most: int  # threads that the binary is compiled for
    blocks: int  # on an SM

    def shared(self, n: int, operands: int) -> int:
        travelling = self.plan.shared(operands, self.stages) if self.plan.vec > 1 else 0
        return max(travelling, cuda_partials.scratch_bytes(self.plan, n))


def launch(n: int, vec: int, gpu: Gpu, *, operands: int = 2) -> Launch | None:
    """For rows of n columns, `vec` elements to a load, or None (measured on an H200, 2026-11)."""
    small = cuda_rows.group(n, vec, 4)
    if small:
        return Launch(small, 2, cuda_rows.GROUP_THREADS, 2)
    if vec == 1:
        plan = cuda_rows.block(n, vec, 4, 512)
        return Launch(plan, 2, 512, 1) if plan else None
    for most in (512, 256, 128):  # GPUs with less shared memory take smaller blocks
        plan = cuda_rows.teams(n, vec, 2, most)
        stages = 2 if plan and plan.owner == "TEAM" else 3
        if plan and cuda_rows.fits(plan, gpu, operands, stages):
            return Launch(plan, stages, 512, 1)
    plan = cuda_rows.cluster(n, vec, 4, 256, 512, gpu)
    blocks = 2 if plan and plan.threads <= 256 else 1
    if plan and cuda_rows.fits(plan, gpu, operands, 2):
        return Launch(plan, 2, 512 // blocks, blocks)
    return None


def refuses(
    gpu: Gpu,
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    *_: Any,
) -> str | None:
    """Why a row does not fit, or None."""
    n = input.shape[-1]
    vec = common_width(n, grad, grad_residual, input, weight)
    found = launch(n, vec, gpu, operands=2 if grad_residual is None else 3)
    return None if found else cuda_rows.too_wide(n, vec, gpu)


@on_rows
def _backward(
    gpu: Gpu,
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    dtype, device = input.dtype, input.device
    view = rows(input)
    n, operands = view.n, 2 if grad_residual is None else 3
    vec = common_width(n, grad, grad_residual, input, weight)
    choice = launch(n, vec, gpu, operands=operands)
    assert choice is not None  # `refuses` was asked
    plan = choice.plan
    parameters = (plan.packs, plan.owner, choice.stages, choice.most, choice.blocks)
    kernel_name = instance("rms_norm_backward", TYPE_NAMES[dtype], vec, *parameters)
    place: dict[str, Any] = {
        "block": plan.threads,
        "shared": choice.shared(n, operands),
        "cluster": plan.cluster,
        "gpu": gpu,
    }
    room = nvrtc.resident(SOURCE, kernel_name, device=device, **place)
    blocks = min(plan.grid(view.count), room // plan.cluster * plan.cluster)
    layouts = [rows(grad), None if grad_residual is None else rows(grad_residual), view]
    kernel = nvrtc.bind(
        SOURCE,
        kernel_name,
        grid=(blocks, 1, 1),
        tensors=[dtype, torch.float32 if weight_grad else None, grad, grad_residual, input, weight],
        scalars=[
            *map(rows_argument, layouts),
            ctypes.c_uint32(view.count),
            ctypes.c_int32(n),
            ctypes.c_int32(plan.lanes),
            ctypes.c_float(eps),
            ctypes.c_float(0.0 if weight is None else offset),
        ],
        **place,
    )
    partials = blocks // plan.cluster
    new_dx = memory.contiguous(input.shape, dtype, device)
    new_partial = memory.contiguous((partials, n), torch.float32, device)
    new_dw = memory.contiguous((n if weight_grad else 0,), dtype, device)
    if weight_grad:
        add_up = cuda_partials.bind_sum(SOURCE, partials, n, input, gpu, parameters=1)

    def run(
        grad: torch.Tensor,
        grad_residual: torch.Tensor | None,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        *_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = new_dx(), new_dw()
        if not weight_grad:
            kernel(dx, None, grad, grad_residual, input, weight)
            return dx, dw
        partial = new_partial()
        kernel(dx, partial, grad, grad_residual, input, weight)
        add_up(dw, partial)
        return dx, dw

    return run


def prepare(
    gpu: Gpu,
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    weight_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The run returns (the input's gradient, the weight's: empty unless `weight_grad`)."""
    wanted = weight_grad and weight is not None
    if not input.numel():
        empty = memory.contiguous(input.shape, input.dtype, input.device)
        new_dw = memory.contiguous(input.shape[-1:] if wanted else (0,), input.dtype, input.device)
        return lambda *_: (empty(), new_dw().zero_())
    return _backward(gpu, grad, grad_residual, input, weight, eps, weight_offset, wanted)
