"""The backward of LayerNorm in CUDA C++ (cuda_backward_impl.cu).

Persistent groups of lanes, teams of warps or clusters walk down the rows; the next rows travel
through shared memory meanwhile. The gradients of weight and bias stay in registers over all rows of
a thread (the bias' of the longest rows in shared memory); a second kernel adds the blocks' partials
in a fixed order, so the result has the same bits on every run. Limits: float32, float16, bfloat16;
weight, bias and gradient of the input's dtype; 12,288 half or 6,144 float columns without clusters,
262,144 half or 131,072 float columns with them, 1,536 without 16-byte loads; fewer where a block
has less shared memory than an H100 gives it or a cluster fewer blocks.
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
    Walk(packs=2, threads=512, blocks=1, stages=2, at_once=1),
    Walk(packs=4, threads=128, blocks=3, cluster=4, stages=2, at_once=1, full=True),
    Walk(packs=2, threads=512, blocks=1, cluster=16, stages=2, at_once=2),
    Walk(packs=4, threads=256, blocks=1, cluster=16, stages=2, at_once=1),  # less shared memory
    Walk(packs=4, threads=512, blocks=1, cluster=16, stages=2, at_once=1, aside=True),
    Walk(packs=4, threads=384, blocks=1, stages=2, at_once=1),  # where there are no clusters
)


def launch(n: int, vec: int, gpu: Gpu) -> Launch | None:
    """For rows of n columns, `vec` elements to a load, or None (measured on an H200, 2026-11)."""
    if vec == 1:
        group, alone = cuda_rows.group(n, 1, 4), cuda_rows.block(n, 1, 4, 384)
        if group:
            return Launch(group, cuda_rows.GROUP_THREADS, 3, stages=2, at_once=1)
        return Launch(alone, 384, 1, stages=2, at_once=1) if alone else None
    short, group = cuda_rows.group(n, vec, 2), cuda_rows.group(n, vec, 4)
    two = cuda_rows.teams(n, vec, 2, 512)
    # newer SMs for desktops would spill three packs; others may lack the shared memory for them
    full = two if gpu.sm // 10 == 12 else cuda_rows.full_teams(n, vec, 512)
    teams = [plan for plan in (full, two) if plan and plan.owner == "TEAM"]
    choices = (
        Launch(short, cuda_rows.GROUP_THREADS, 3, stages=2, at_once=1) if short else None,
        Launch(group, cuda_rows.GROUP_THREADS, 2, stages=2, at_once=1) if group else None,
        *(Launch(plan, 512, 1, stages=2, at_once=1) for plan in teams),
    )
    few = next((each for each in choices if each and each.fits(gpu, 2, 4, held=1)), None)
    return few or cuda_rows.first_that_fits(WIDE, n, vec, gpu, operands=2, values=4, held=1)


def refuses(
    gpu: Gpu, grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, *_: Any
) -> str | None:
    """Why a row does not fit, or None."""
    n = input.shape[-1]
    vec = common_width(n, grad, input, weight)
    return None if launch(n, vec, gpu) else cuda_rows.too_wide(n, vec, gpu)


@on_rows
def _backward(
    gpu: Gpu,
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
    bias_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    dtype, device = input.dtype, input.device
    view, parameters = rows(input), weight_grad or bias_grad
    n = view.n
    vec = common_width(n, grad, input, weight)
    choice = launch(n, vec, gpu)
    assert choice is not None  # `refuses` was asked
    plan = choice.plan
    kernel_name = instance("layer_norm_backward", TYPE_NAMES[dtype], vec, *choice.template)
    place: dict[str, Any] = {
        "block": plan.threads,
        "shared": max(choice.shared(2, held=1), cuda_partials.scratch_bytes(plan, n)),
        "cluster": plan.cluster,
        "gpu": gpu,
    }
    room = nvrtc.resident(SOURCE, kernel_name, device=device, **place)
    blocks = min(choice.grid(view.count), room, choice.blocks * gpu.sm_count)
    blocks -= blocks % plan.cluster
    kernel = nvrtc.bind(
        SOURCE,
        kernel_name,
        grid=(blocks, 1, 1),
        tensors=[dtype, torch.float32 if parameters else None, grad, input, weight],
        scalars=[
            rows_argument(rows(grad)),
            rows_argument(view),
            ctypes.c_uint32(view.count),
            ctypes.c_int32(n),
            ctypes.c_int32(plan.lanes),
            ctypes.c_float(eps),
        ],
        **place,
    )
    partials = blocks // plan.cluster
    new_dx = memory.contiguous(input.shape, dtype, device)
    new_partial = memory.contiguous((2, partials, n), torch.float32, device)
    new_sum = memory.contiguous((n,), dtype, device)
    nothing = memory.contiguous((0,), dtype, device)
    if parameters:
        add_up = cuda_partials.bind_sum(SOURCE, partials, n, input, gpu, parameters=2)

    def run(
        grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dx = new_dx()
        if not parameters:
            kernel(dx, None, grad, input, weight)
            return dx, nothing(), nothing()
        partial, dw, db = new_partial(), new_sum(), new_sum()
        kernel(dx, partial, grad, input, weight)
        add_up(dw, db, partial)
        return dx, dw if weight_grad else nothing(), db if bias_grad else nothing()

    return run


def prepare(
    gpu: Gpu,
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
    bias_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The run returns the gradients of input, weight and bias, the last two empty unless wanted."""
    wants = weight_grad and weight is not None, bias_grad and bias is not None
    if not input.numel():
        empty = memory.contiguous(input.shape, input.dtype, input.device)
        new = [
            memory.contiguous(input.shape[-1:] if wanted else (0,), input.dtype, input.device)
            for wanted in wants
        ]
        return lambda *_: (empty(), new[0]().zero_(), new[1]().zero_())
    run = _backward(gpu, grad, input, weight, eps, *wants)
    return lambda grad, input, weight, *_: run(grad, input, weight)
