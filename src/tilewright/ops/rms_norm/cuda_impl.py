"""RMSNorm and RMSNorm of a residual sum in CUDA C++ (device code: cuda_impl.cu).

A group of lanes (short rows) or a block owns a row and holds it in registers, so it is read once
and written once; 16-byte loads where alignment allows. Longer rows, up to 262,144 columns (131,072
floats with a residual), are held in the shared memory of a persistent cluster of blocks (SM 90),
while the next rows travel there; fewer fit where a block has less shared memory. Limits: float32,
float16, bfloat16; a weight of the input's dtype; without clusters 16,384 half or 8,192 float
columns, 4,096 without 16-byte loads; at most seven binaries per dtype and form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_launch import Run
from tilewright.toolkit.cuda_rows import Plan
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)

STAGES = 3  # rows under way in a wide kernel (H200, 2026-11)
WIDE_THREADS = 512  # of a block of a cluster
Tensors = list["torch.Tensor | torch.dtype | None"]


def launch(n: int, vec: int, gpu: Gpu, *, operands: int = 1) -> Plan | None:
    """The plan for rows of n columns, `vec` elements to a load; None: no block holds them.

    Two packs a thread while that leaves a block small, then four: more blocks on an SM, or more
    loads under way in a thread (H200, 2026-11).
    """
    if vec == 1:
        return cuda_rows.group(n, 1, 4) or cuda_rows.block(n, 1, 4, 1024)
    if n <= 64 * vec:
        return cuda_rows.group(n, vec, 2)
    in_registers = cuda_rows.block(n, vec, 2, 256) or cuda_rows.block(n, vec, 4, 512)
    return in_registers or wide(n, vec, gpu, operands)


def wide(n: int, vec: int, gpu: Gpu, operands: int) -> Plan | None:
    """A cluster; the widest rows of floats take more packs a thread."""
    plans = (cuda_rows.cluster(n, vec, packs, WIDE_THREADS, WIDE_THREADS, gpu) for packs in (4, 8))
    return cuda_rows.fits(next(filter(None, plans), None), gpu, operands, STAGES)


def refuses(gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, *_: Any) -> str | None:
    """Why a row does not fit, or None."""
    return _refuses(gpu, 1, input, weight)


def refuses_add(
    gpu: Gpu, input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *_: Any
) -> str | None:
    return _refuses(gpu, 2, input, residual, weight)


def _refuses(gpu: Gpu, operands: int, *tensors: torch.Tensor | None) -> str | None:
    assert tensors[0] is not None
    n = tensors[0].shape[-1]
    vec = common_width(n, *tensors)
    return None if launch(n, vec, gpu, operands=operands) else cuda_rows.too_wide(n, vec, gpu)


class Options(ctypes.Structure):
    """`struct Options` of the .cu file."""

    _fields_ = [("eps", ctypes.c_float), ("offset", ctypes.c_float), ("llama", ctypes.c_int32)]


def _bind(
    name: str,
    plan: Plan,
    tensors: Tensors,
    layouts: list[Any],
    count: int,
    n: int,
    options: Options,
    input: torch.Tensor,
    gpu: Gpu,
    makes: Callable[[], torch.Tensor] | None = None,
) -> Run:
    """Bind `name`_rows or `name`_wide."""
    sizes: list[Any] = [ctypes.c_uint32(count), ctypes.c_int32(n)]
    kind, wide, shared = TYPE_NAMES[input.dtype], plan.owner == "CLUSTER", 0
    if wide:
        parameters: tuple[str | int, ...] = (plan.packs, plan.owner, STAGES, WIDE_THREADS, 1)
        kernel = instance(f"{name}_wide", kind, plan.vec, *parameters)
        shared = plan.shared(len(layouts), STAGES)
    else:
        parameters = (plan.packs, plan.owner, plan.compiled_for)
        kernel = instance(f"{name}_rows", kind, plan.vec, *parameters)
        sizes.append(ctypes.c_int32(plan.lanes))
    return nvrtc.bind(
        SOURCE,
        kernel,
        grid=(plan.grid(count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        persistent=wide,
        shared=shared,
        tensors=tensors,
        scalars=[*map(rows_argument, layouts), *sizes, options],
        gpu=gpu,
        makes=makes,
    )


def _planned(plan: Plan | None) -> Plan:
    assert plan is not None  # `refuses` was asked
    return plan


@on_rows
def _forward(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> Callable[..., torch.Tensor]:
    view = rows(input)
    plan = _planned(launch(view.n, common_width(view.n, input, weight), gpu))
    new_out = memory.contiguous(input.shape, input.dtype, input.device)
    tensors: Tensors = [input.dtype, input, weight]
    return _bind(
        "rms_norm", plan, tensors, [view], view.count, view.n, options, input, gpu, new_out
    )


@on_rows
def _add(
    gpu: Gpu,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    options: Options,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    dtype = input.dtype
    new = memory.contiguous(input.shape, dtype, input.device)
    view = rows(input)
    vec = common_width(view.n, input, residual, weight)
    plan = _planned(launch(view.n, vec, gpu, operands=2))
    tensors: Tensors = [dtype, dtype, input, residual, weight]
    layouts = [view, rows(residual)]
    kernel = _bind("add_rms_norm", plan, tensors, layouts, view.count, view.n, options, input, gpu)

    def run(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = new(), new()
        kernel(out, total, input, residual, weight)
        return out, total

    return run


def _options(
    weight: torch.Tensor | None, eps: float, weight_offset: float, casting: str
) -> Options:
    return Options(eps, 0.0 if weight is None else weight_offset, casting == "llama")


def prepare(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> Callable[..., torch.Tensor]:
    if not input.numel():
        empty = memory.contiguous(input.shape, input.dtype, input.device)
        return lambda *_: empty()
    return _forward(gpu, input, weight, _options(weight, eps, weight_offset, casting))


def prepare_add(
    gpu: Gpu,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The run returns (the norm of the sum, the sum)."""
    if not input.numel():
        empty = memory.contiguous(input.shape, input.dtype, input.device)
        return lambda *_: (empty(), empty())
    return _add(gpu, input, residual, weight, _options(weight, eps, weight_offset, casting))
