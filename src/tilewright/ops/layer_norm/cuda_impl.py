"""LayerNorm in CUDA C++ (device code: cuda_impl.cu).

A group of lanes (short rows) or a block owns a row and holds it in registers, so it is read once
and written once; 16-byte loads where alignment allows. Longer rows, up to 262,144 columns, are held
in the shared memory of a block (SM 80) or, beyond 32,768 half or 16,384 float columns, of a cluster
of blocks (SM 90). The longer ones are walked down, while the next rows travel there; fewer fit
where a block has less shared memory or a cluster fewer blocks. Limits: float32, float16, bfloat16;
weight and bias of the input's dtype; 4,096 columns without 16-byte loads; at most thirteen binaries
per dtype.
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


def launch(n: int, vec: int, gpu: Gpu) -> Launch | None:
    """For rows of n columns, `vec` elements to a load; None: no block holds them.

    Its arithmetic takes as long as its traffic: rows in registers, as many threads as an SM has
    registers for with 64 each; three packs a thread for lengths that three fill and four do not
    (measured on an H200, 2026-11).
    """
    if n > cuda_rows.WIDEST:
        return None
    if vec == 1:
        plan = cuda_rows.group(n, 1, 4)
        if plan:
            return Launch(plan, cuda_rows.GROUP_THREADS, 6)
        plan = cuda_rows.block(n, 1, 4, 1024)
        return Launch(plan, 1024, 1) if plan else None
    newer = gpu.sm >= 100  # takes more registers, which would be spilled
    plan = cuda_rows.group(n, vec, 4)
    if plan:
        return Launch(plan, cuda_rows.GROUP_THREADS, 5 if newer else 7)
    three, four = 3 * vec * cuda_rows.WARP, 4 * vec * cuda_rows.WARP  # columns of a warp
    plan = cuda_rows.block(n, vec, 3, 256) if n % three == 0 and n % four else None
    plan = plan or cuda_rows.block(n, vec, 4, 256)
    if plan:
        return Launch(plan, 256, 3 if vec == 4 else 2 if newer else 4)
    return wide(n, vec, gpu)


# A block for each row while an SM has enough of them on their way; then blocks and clusters that
# walk, in many waves, for SMs are not equally fast; of the longest rows, which are few, those that
# stay for all of theirs end together (H200, 2026-11).
WIDE = (
    Walk(packs=6, threads=256, blocks=3, stages=1, waves=0),
    Walk(packs=6, threads=320, blocks=2, stages=2, waves=8),
    Walk(packs=6, threads=448, blocks=2, stages=1, waves=0),
    Walk(packs=8, threads=512, blocks=1, stages=2, waves=8),
    Walk(packs=6, threads=192, blocks=4, cluster=8, stages=2, waves=8),
    Walk(packs=5, threads=416, blocks=1, cluster=8, stages=3),
    Walk(packs=6, threads=352, blocks=1, cluster=16, stages=3),
    Walk(packs=8, threads=512, blocks=1, cluster=16, stages=2),
)


def wide(n: int, vec: int, gpu: Gpu) -> Launch | None:
    """A block or a cluster that walks."""
    if gpu.sm < 80:
        return None  # rows cannot travel while others are reduced
    return cuda_rows.first_that_fits(WIDE, n, vec, gpu, operands=1, values=2)


def refuses(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *_: Any,
) -> str | None:
    """Why a row does not fit, or None."""
    n = input.shape[-1]
    vec = common_width(n, input, weight, bias)
    return None if launch(n, vec, gpu) else cuda_rows.too_wide(n, vec, gpu)


@on_rows
def _forward(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Callable[..., torch.Tensor]:
    view = rows(input)
    n, count, kind = view.n, view.count, TYPE_NAMES[input.dtype]
    choice = launch(n, common_width(n, input, weight, bias), gpu)
    assert choice is not None  # `refuses` was asked
    plan, walks = choice.plan, choice.stages > 0
    sizes: list[Any] = [ctypes.c_uint32(count), ctypes.c_int32(n)]
    name = "layer_norm_wide" if walks else "layer_norm_rows"
    return nvrtc.bind(
        SOURCE,
        instance(name, kind, plan.vec, *choice.template),
        grid=(choice.grid(count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        waves=choice.waves if walks else 0,
        shared=choice.shared(1) if walks else 0,
        tensors=[input.dtype, input, weight, bias],
        scalars=[
            rows_argument(view),
            *sizes,
            *([] if walks else [ctypes.c_int32(plan.lanes)]),
            ctypes.c_float(eps),
        ],
        gpu=gpu,
        makes=memory.contiguous(input.shape, input.dtype, input.device),
    )


def prepare(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Callable[..., torch.Tensor]:
    if not input.numel():
        empty = memory.contiguous(input.shape, input.dtype, input.device)
        return lambda *_: empty()
    return _forward(gpu, input, weight, bias, eps)
