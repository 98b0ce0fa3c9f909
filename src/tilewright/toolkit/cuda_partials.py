"""Gradients of parameters in CUDA C++: the second kernel (include/tilewright/partials.cuh)."""

from __future__ import annotations

import ctypes

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance
from tilewright.toolkit.cuda_launch import Run
from tilewright.toolkit.cuda_rows import Plan, ceil

THREADS = 1024


def bind_sum(
    source: nvrtc.Source, count: int, n: int, like: torch.Tensor, gpu: Gpu, *, parameters: int
) -> Run:
    """`run(*gradients, partial)`, for `count` partials of each parameter.

    Few columns are shared by more threads each, so that the launch still fills the GPU.
    """
    columns = 8 if n < 4096 else 32
    return nvrtc.bind(
        source,
        instance("sum_partials", TYPE_NAMES[like.dtype], columns),
        grid=(ceil(n, columns), parameters, 1),
        block=THREADS,
        tensors=[*[like.dtype] * parameters, like],
        scalars=[ctypes.c_uint32(count), ctypes.c_int32(n)],
        gpu=gpu,
        follows=True,
    )


def scratch_bytes(plan: Plan, n: int) -> int:
    """Shared memory in which the owners of a block join their partials; none if it has one."""
    owners = plan.threads // (32 if plan.owner == "GROUP" else plan.lanes)
    return 4 * owners * n if owners > 1 else 0
