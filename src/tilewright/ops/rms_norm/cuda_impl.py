"""RMSNorm and RMSNorm of a residual sum in CUDA C++ (device code: cuda_impl.cu).

A group of lanes (short rows) or a block owns a row and holds it in registers, so it is read once
and written once; 16-byte loads where alignment allows. Longer rows, up to 262,144 columns, are held
in the shared memory of a block (SM 80) or, beyond 32,768 half or 16,384 float columns, of a cluster
of blocks (SM 90) that walks down them; fewer fit where a block has less shared memory or a cluster
fewer blocks. Limits: float32, float16, bfloat16; a weight of the input's dtype; 4,096 columns
without 16-byte loads; at most nine binaries per dtype and form.
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
from tilewright.toolkit.cuda_rows import Launch, Walk
from tilewright.toolkit.rows import common_width, on_rows, rows

SOURCE = nvrtc.Source.beside(__file__)

Tensors = list["torch.Tensor | torch.dtype | None"]


# A block for each row while an SM's shared memory holds several; then clusters that stay for all of
# theirs, for the longest rows are few (H200, 2026-11).
CLUSTERS = (
    Walk(packs=8, threads=256, blocks=2, cluster=16, stages=1),
    Walk(packs=8, threads=512, blocks=1, cluster=16, stages=1),
)
WIDE = (
    Walk(packs=6, threads=512, blocks=2, stages=1, waves=0),
    Walk(packs=8, threads=512, blocks=2, stages=1, waves=0),
    *CLUSTERS,
)
WIDE_ADD = (Walk(packs=8, threads=512, blocks=1, stages=1, waves=0), *CLUSTERS)


def launch(n: int, vec: int, gpu: Gpu, *, operands: int = 1) -> Launch | None:
    """For rows of n columns, `vec` elements to a load; None: no block holds them.

    Few packs a thread leave an SM more blocks, many leave it fewer instructions; the binaries allow
    for as many blocks as the packs need to be on their way (measured on an H200, 2026-11).
    """
    if n > cuda_rows.WIDEST:
        return None
    if vec == 1:
        plan = cuda_rows.group(n, 1, 4)
        if plan:
            return Launch(plan, cuda_rows.GROUP_THREADS, 8)
        plan = cuda_rows.block(n, 1, 4, 1024)
        return Launch(plan, 1024, 1) if plan else None
    plan = cuda_rows.group(n, vec, 2 if n <= 64 * vec else 4)
    if plan:
        return Launch(plan, cuda_rows.GROUP_THREADS, 8 if operands == 1 else 6)
    plan = cuda_rows.block(n, vec, 4, 384)
    if plan:
        return Launch(plan, 384, 3 if operands == 1 else 2)
    if gpu.sm < 80:  # rows cannot travel to shared memory by themselves
        plan = cuda_rows.block(n, vec, 4, 512)
        return Launch(plan, 512, 1) if plan else None
    wide = WIDE if operands == 1 else WIDE_ADD
    return cuda_rows.first_that_fits(wide, n, vec, gpu, operands=operands, values=1)


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
    choice: Launch,
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
    plan, walks = choice.plan, choice.stages > 0
    sizes: list[Any] = [ctypes.c_uint32(count), ctypes.c_int32(n)]
    kernel = f"{name}_wide" if walks else f"{name}_rows"
    return nvrtc.bind(
        SOURCE,
        instance(kernel, TYPE_NAMES[input.dtype], plan.vec, *choice.template),
        grid=(choice.grid(count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        waves=choice.waves if walks else 0,
        shared=choice.shared(len(layouts)) if walks else 0,
        tensors=tensors,
        scalars=[
            *map(rows_argument, layouts),
            *sizes,
            *([] if walks else [ctypes.c_int32(plan.lanes)]),
            options,
        ],
        gpu=gpu,
        makes=makes,
    )


def _planned(choice: Launch | None) -> Launch:
    assert choice is not None  # `refuses` was asked
    return choice


@on_rows
def _forward(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> Callable[..., torch.Tensor]:
    view = rows(input)
    choice = _planned(launch(view.n, common_width(view.n, input, weight), gpu))
    new_out = memory.contiguous(input.shape, input.dtype, input.device)
    tensors: Tensors = [input.dtype, input, weight]
    return _bind(
        "rms_norm", choice, tensors, [view], view.count, view.n, options, input, gpu, new_out
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
    choice = _planned(launch(view.n, vec, gpu, operands=2))
    tensors: Tensors = [dtype, dtype, input, residual, weight]
    layouts = [view, rows(residual)]
    kernel = _bind(
        "add_rms_norm", choice, tensors, layouts, view.count, view.n, options, input, gpu
    )

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
