"""LayerNorm in CUDA C++ (device code: cuda_impl.cu).

A group of lanes (short rows) or a block owns a row and holds it in registers, so it is read once
and written once; 16-byte loads where alignment allows. Longer rows, up to 262,144 columns, are held
in the shared memory of a persistent block or, beyond 16,384 half or 8,192 float columns, of a
cluster of blocks (SM 90), while the next rows travel there. Limits: float32, float16, bfloat16;
weight and bias of the input's dtype; 4,096 columns without 16-byte loads; at most seven binaries
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
from tilewright.toolkit.cuda_rows import Plan
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)

STAGES = 3  # rows under way in a wide kernel (H200, 2026-11)
WIDE_THREADS = 512


def launch(n: int, vec: int, gpu: Gpu) -> tuple[Plan, bool] | None:
    """The plan for rows of n columns, `vec` elements to a load, and whether it is a wide one.

    None: no block holds them. Four packs a thread, and a block as soon as it has a whole warp: with
    weight and bias, more loads must be under way than in other row kernels (H200, 2026-11).
    """
    if vec == 1:
        plan = cuda_rows.group(n, 1, 4) or cuda_rows.block(n, 1, 4, 1024)
        return (plan, False) if plan else None
    plan = cuda_rows.group(n, vec, 4) if n <= 64 * vec else cuda_rows.block(n, vec, 4, 256)
    if plan:
        return plan, False
    plans = (
        cuda_rows.block(n, vec, 4, WIDE_THREADS),
        cuda_rows.cluster(n, vec, 4, WIDE_THREADS, WIDE_THREADS, gpu),
        cuda_rows.cluster(n, vec, 8, WIDE_THREADS, WIDE_THREADS, gpu),
    )
    plan = cuda_rows.fits(next(filter(None, plans), None), gpu, 1, STAGES)
    return (plan, True) if plan else None


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
    found = launch(n, common_width(n, input, weight, bias), gpu)
    assert found is not None  # `refuses` was asked
    plan, is_wide = found
    sizes: list[Any] = [ctypes.c_uint32(count), ctypes.c_int32(n)]
    shared = 0
    parameters: tuple[str | int, ...]
    if is_wide:
        parameters = (plan.packs, plan.owner, STAGES, WIDE_THREADS, 1)
        kernel = instance("layer_norm_wide", kind, plan.vec, *parameters)
        shared = plan.shared(1, STAGES)
    else:
        parameters = (plan.packs, plan.owner, plan.compiled_for)
        kernel = instance("layer_norm_rows", kind, plan.vec, *parameters)
        sizes.append(ctypes.c_int32(plan.lanes))
    return nvrtc.bind(
        SOURCE,
        kernel,
        grid=(plan.grid(count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        persistent=is_wide,
        shared=shared,
        tensors=[input.dtype, input, weight, bias],
        scalars=[rows_argument(view), *sizes, ctypes.c_float(eps)],
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
