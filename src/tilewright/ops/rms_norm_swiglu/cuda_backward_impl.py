"""The backward of RMSNorm gated by silu in CUDA C++ (device code: cuda_backward_impl.cu).

Persistent groups of lanes, blocks or clusters walk down the rows; the next rows of grad, x
and gate travel through shared memory meanwhile. The weight's gradient stays in registers over all
rows of a thread; a second kernel adds the blocks' partials in a fixed order, so the result has the
same bits on every run. Limits: float32, float16, bfloat16; weight and gradient of x's dtype; 12,288
half or 6,144 float columns without clusters, 131,072 half or 65,536 float columns with them, 2,048
without 16-byte loads; fewer where a block has less shared memory than an H100 gives it or a cluster
fewer blocks.
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
OPERANDS = 3  # grad, x and the gate
VALUES = 2  # that are reduced together: the squares of x, and what the norm's mean takes out


# Of some hundred choices at nine row lengths the fastest, or near it: few rows under way at a time,
# for long ones a block or a cluster of two that has its SMs to itself (H200, 2026-11).
WALKS = (
    Walk(packs=2, threads=128, blocks=3, stages=2, at_once=1),
    Walk(packs=1, threads=640, blocks=1, stages=2, at_once=2),
    Walk(packs=1, threads=1024, blocks=1, stages=2, at_once=1, full=True),
    Walk(packs=4, threads=384, blocks=1, stages=2, at_once=1),
    Walk(packs=2, threads=608, blocks=1, cluster=2, stages=2, at_once=1),
    Walk(packs=2, threads=512, blocks=1, cluster=4, stages=2, at_once=2),
    Walk(packs=4, threads=256, blocks=2, cluster=16, stages=2, at_once=1),
    Walk(packs=4, threads=256, blocks=2, cluster=16, stages=1, at_once=1),  # less shared memory
)


def launch(n: int, vec: int, gpu: Gpu) -> Launch | None:
    """For rows of n columns, `vec` elements to a load, or None."""
    small = cuda_rows.group(n, vec, 2 if vec > 1 else 4)
    if small:
        blocks = 4 if gpu.sm < 100 else 2  # newer SMs would spill registers with four
        return Launch(small, cuda_rows.GROUP_THREADS, blocks, stages=2, at_once=1)
    if vec == 1:
        plan = cuda_rows.block(n, vec, 4, 512)
        return Launch(plan, 512, 1, stages=2, at_once=1) if plan else None
    # newer SMs would spill registers with two rows at once
    walks = WALKS if gpu.sm < 100 else tuple(walk for walk in WALKS if walk.at_once == 1)
    return cuda_rows.first_that_fits(walks, n, vec, gpu, operands=OPERANDS, values=VALUES)


def refuses(
    gpu: Gpu,
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *_: Any,
) -> str | None:
    """Why a row does not fit, or None."""
    n = x.shape[-1]
    vec = common_width(n, grad, x, gate, weight)
    return None if launch(n, vec, gpu) else cuda_rows.too_wide(n, vec, gpu)


@on_rows
def _backward(
    gpu: Gpu,
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    dtype, device = x.dtype, x.device
    view = rows(x)
    n, vec = view.n, common_width(view.n, grad, x, gate, weight)
    choice = launch(n, vec, gpu)
    assert choice is not None  # `refuses` was asked
    plan = choice.plan
    kernel_name = instance("rms_norm_swiglu_backward", TYPE_NAMES[dtype], vec, *choice.template)
    place: dict[str, Any] = {
        "block": plan.threads,
        "shared": max(choice.shared(OPERANDS), cuda_partials.scratch_bytes(plan, n)),
        "cluster": plan.cluster,
        "gpu": gpu,
    }
    room = nvrtc.resident(SOURCE, kernel_name, device=device, **place)
    per_sm = choice.blocks * choice.threads // plan.threads  # of smaller blocks more
    blocks = min(choice.grid(view.count), room, per_sm * gpu.sm_count)
    blocks -= blocks % plan.cluster
    partial_dtype = torch.float32 if weight_grad else None
    kernel = nvrtc.bind(
        SOURCE,
        kernel_name,
        grid=(blocks, 1, 1),
        tensors=[dtype, dtype, partial_dtype, grad, x, gate, weight],
        scalars=[
            *(rows_argument(rows(t)) for t in (grad, x, gate)),
            ctypes.c_uint32(view.count),
            ctypes.c_int32(n),
            ctypes.c_int32(plan.lanes),
            ctypes.c_float(eps),
        ],
        **place,
    )
    partials = blocks // plan.cluster
    new = memory.contiguous(x.shape, dtype, device)
    new_partial = memory.contiguous((partials, n), torch.float32, device)
    new_dw = memory.contiguous((n if weight_grad else 0,), dtype, device)
    if weight_grad:
        add_up = cuda_partials.bind_sum(SOURCE, partials, n, x, gpu, parameters=1)

    def run(
        grad: torch.Tensor,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        *_: Any,
    ) -> tuple[torch.Tensor, ...]:
        dx, dgate, dw = new(), new(), new_dw()
        partial = new_partial() if weight_grad else None
        kernel(dx, dgate, partial, grad, x, gate, weight)
        if partial is not None:
            add_up(dw, partial)
        return dx, dgate, dw

    return run


def prepare(
    gpu: Gpu,
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_grad: bool,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The run returns the gradients of x, the gate and the weight: empty unless `weight_grad`."""
    wanted = weight_grad and weight is not None
    if not x.numel():
        empty = memory.contiguous(x.shape, x.dtype, x.device)
        new_dw = memory.contiguous(x.shape[-1:] if wanted else (0,), x.dtype, x.device)
        return lambda *_: (empty(), empty(), new_dw().zero_())
    return _backward(gpu, grad, x, gate, weight, eps, wanted)
