"""The backward of RMSNorm, also after a residual add, in CUDA C++ (cuda_backward_impl.cu).

Persistent groups of lanes, teams of warps or clusters walk down the rows; the next rows travel
through shared memory meanwhile. The weight's gradient stays in registers over all rows of a thread;
a second kernel adds the blocks' partials in a fixed order, so the result has the same bits on every
run. Limits: float32, float16, bfloat16; weight and gradient of the input's dtype; 12,288 half or
6,144 float columns without clusters, 262,144 half or 131,072 float columns with them, 2,048 without
16-byte loads; fewer where a block has less shared memory than an H100 gives it or a cluster fewer
blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_partials, cuda_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_rows import Launch, Walk
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)


# Two rows at once where a cluster's long exchange is worth the registers (H200, 2026-11).
WIDE = (
    Walk(packs=2, threads=512, blocks=1, stages=3, at_once=1),
    Walk(packs=4, threads=384, blocks=1, stages=2, at_once=1),
    Walk(packs=2, threads=256, blocks=2, cluster=4, stages=2, at_once=2),
    Walk(packs=4, threads=256, blocks=2, cluster=16, stages=2, at_once=2),
    Walk(packs=4, threads=256, blocks=2, cluster=16, stages=2, at_once=1),  # less shared memory
    Walk(packs=4, threads=256, blocks=2, cluster=16, stages=1, at_once=1),
    Walk(packs=4, threads=512, blocks=1, cluster=16, stages=2, at_once=1),
)


def launch(n: int, vec: int, gpu: Gpu, *, operands: int = 2) -> Launch | None:
    """For rows of n columns, `vec` elements to a load, or None (measured on an H200, 2026-11)."""
    small = cuda_rows.group(n, vec, 4)
    if small:
        return Launch(small, cuda_rows.GROUP_THREADS, 2, stages=2, at_once=1)
    if vec == 1:
        plan = cuda_rows.block(n, vec, 4, 512)
        return Launch(plan, 512, 1, stages=2, at_once=1) if plan else None
    for most in (512, 256, 128):  # GPUs with less shared memory take smaller blocks
        plan = cuda_rows.full_teams(n, vec, most)
        choice = Launch(plan, 512, 1, stages=2, at_once=1) if plan else None
        if choice and choice.fits(gpu, operands, 2):
            return choice
    # newer SMs would spill registers with two rows at once
    walks = WIDE if gpu.sm < 100 else tuple(walk for walk in WIDE if walk.at_once == 1)
    return cuda_rows.first_that_fits(walks, n, vec, gpu, operands=operands, values=2)


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
    kernel_name = instance("rms_norm_backward", TYPE_NAMES[dtype], vec, *choice.template)
    place: dict[str, Any] = {
        "block": plan.threads,
        "shared": max(choice.shared(operands), cuda_partials.scratch_bytes(plan, n)),
        "cluster": plan.cluster,
        "gpu": gpu,
    }
    room = nvrtc.resident(SOURCE, kernel_name, device=device, **place)
    blocks = min(choice.grid(view.count), room, choice.blocks * gpu.sm_count)
    blocks -= blocks % plan.cluster
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
