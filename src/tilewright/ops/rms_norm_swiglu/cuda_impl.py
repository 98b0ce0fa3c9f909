"""RMSNorm gated by silu in CUDA C++ (device code: cuda_impl.cu).

A group of lanes (short rows) or a block owns a row and holds x and the gate in registers, so both
are read once and y is written once; 16-byte loads where alignment allows. Longer rows, up to
262,144 columns, are held in the shared memory of a block (SM 80) or, beyond 32,768 half or 16,384
float columns, of a cluster of blocks (SM 90) that walks down them; fewer fit where a block has less
shared memory or a cluster fewer blocks. Limits: float32, float16, bfloat16; a weight of x's dtype;
4,096 columns without 16-byte loads; at most nine binaries per dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_rows import Launch, Walk
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)
OPERANDS = 2  # x and the gate


# A block for each row while an SM's shared memory holds several; then clusters that stay for all of
# theirs. The thresholds are those of rms_norm.
WIDE = (
    Walk(packs=6, threads=512, blocks=2, stages=1, waves=0),
    Walk(packs=8, threads=512, blocks=2, stages=1, waves=0),
    Walk(packs=8, threads=256, blocks=2, cluster=16, stages=1),
    Walk(packs=8, threads=512, blocks=1, cluster=16, stages=1),
)


def launch(n: int, vec: int, gpu: Gpu) -> Launch | None:
    """For rows of n columns, `vec` elements to a load; None: no block holds them."""
    if n > cuda_rows.WIDEST:
        return None
    if vec == 1:
        plan = cuda_rows.group(n, 1, 4)
        if plan:
            return Launch(plan, cuda_rows.GROUP_THREADS, 8)
        plan = cuda_rows.block(n, 1, 4, 1024)
        return Launch(plan, 1024, 1) if plan else None
    plan = cuda_rows.group(n, vec, 2) if n <= 32 * vec else None
    if plan:
        return Launch(plan, cuda_rows.GROUP_THREADS, 6)
    # Few packs a thread, so that of a few rows each has many threads; more where a block would be
    # too large for an SM to have several (H200, 2026-11).
    for packs, threads, blocks in ((2, 256, 5), (4, 384, 2)):
        plan = cuda_rows.block(n, vec, packs, threads)
        if plan:
            return Launch(plan, threads, blocks)
    if gpu.sm < 80:  # rows cannot travel to shared memory by themselves
        plan = cuda_rows.block(n, vec, 4, 512)
        return Launch(plan, 512, 1) if plan else None
    return cuda_rows.first_that_fits(WIDE, n, vec, gpu, operands=OPERANDS, values=1)


def refuses(
    gpu: Gpu, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, *_: Any
) -> str | None:
    """Why a row does not fit, or None."""
    n = x.shape[-1]
    vec = common_width(n, x, gate, weight)
    return None if launch(n, vec, gpu) else cuda_rows.too_wide(n, vec, gpu)


@on_rows
def _forward(
    gpu: Gpu, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Callable[..., torch.Tensor]:
    view = rows(x)
    choice = launch(view.n, common_width(view.n, x, gate, weight), gpu)
    assert choice is not None  # `refuses` was asked
    plan, walks = choice.plan, choice.stages > 0
    kernel = "rms_norm_swiglu_wide" if walks else "rms_norm_swiglu_rows"
    return nvrtc.bind(
        SOURCE,
        instance(kernel, TYPE_NAMES[x.dtype], plan.vec, *choice.template),
        grid=(choice.grid(view.count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        waves=choice.waves if walks else 0,
        shared=choice.shared(OPERANDS) if walks else 0,
        tensors=[x.dtype, x, gate, weight],
        scalars=[
            rows_argument(view),
            rows_argument(rows(gate)),
            ctypes.c_uint32(view.count),
            ctypes.c_int32(view.n),
            *([] if walks else [ctypes.c_int32(plan.lanes)]),
            ctypes.c_float(eps),
        ],
        gpu=gpu,
        makes=memory.contiguous(x.shape, x.dtype, x.device),
    )


def prepare(
    gpu: Gpu, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> Callable[..., torch.Tensor]:
    if not x.numel():
        empty = memory.contiguous(x.shape, x.dtype, x.device)
        return lambda *_: empty()
    return _forward(gpu, x, gate, weight, eps)
