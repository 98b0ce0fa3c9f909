"""RMSNorm, RMSNorm of a residual sum, and their backward in CUDA C++ (device code: cuda_impl.cu).

Forward: a group of lanes (short rows) or a block owns a row and holds it in registers, so it is
read once and written once; 16-byte loads where alignment allows. Rows beyond 32,768 half or 16,384
float columns (8,192 of either without 16-byte loads) are read twice. Backward: persistent blocks
keep the weight's gradient in registers over all their rows; a second kernel adds the blocks'
partials in a fixed order, so that the result has the same bits on every run. Limits: float32,
float16, bfloat16; a weight of the input's dtype; at most eight binaries per dtype and direction.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_launch import Run
from tilewright.toolkit.rows import Rows, on_rows, rows, vector_width

SOURCE = nvrtc.Source.beside(__file__)

GROUP_THREADS = 128  # of a block whose rows are owned by groups of lanes
FORWARD_THREADS = 1024  # the most a block may have: registers, see the .cu file
BACKWARD_THREADS = 512
BACKWARD_THREADS_PER_SM = 1024
ROWS_PER_PARTIAL = 4  # below this the partials cost as much traffic as the rows


@dataclass(frozen=True)
class Launch:
    vec: int  # elements per load
    packs: int  # loads per thread that hold a row; 0: the row is read twice
    group: bool  # `lanes` threads own a row, not the block
    lanes: int  # threads that own a row
    threads: int  # of a block
    blocks: int
    partials: int = 0  # backward: rows of partial weight gradients


def launch(count: int, n: int, vec: int, gpu: Gpu, *, backward: bool = False) -> Launch:
    """The launch for `count` rows of n columns, `vec` elements to a load."""
    threads = BACKWARD_THREADS if backward else FORWARD_THREADS
    most = 4 if vec > 1 else 8  # packs: 16 bytes each, or one element each
    if n > threads * vec * most:
        shape = Launch(vec, 0, False, threads, threads, count)
    elif n > 32 * vec * most:
        if vec > 1:  # else full: single elements are a constant distance apart, see the .cu file
            threads = 32 * _ceil(n, 32 * vec * most)
        shape = Launch(vec, most, False, threads, threads, count)
    else:
        few = most // 4
        packs = few if n <= 32 * vec * few and not backward else most
        lanes = min(32, _power_of_two(_ceil(n, vec)))
        blocks = _ceil(count, GROUP_THREADS // lanes)
        shape = Launch(vec, packs, True, lanes, GROUP_THREADS, blocks)
    return _persistent(shape, count, gpu) if backward else shape


def _persistent(shape: Launch, count: int, gpu: Gpu) -> Launch:
    full = gpu.sm_count * max(1, BACKWARD_THREADS_PER_SM // shape.threads)
    rows_per_block = shape.threads // shape.lanes
    frugal = max(gpu.sm_count, _ceil(count, rows_per_block * ROWS_PER_PARTIAL))
    blocks = min(full, frugal, shape.blocks)
    partials = blocks * (shape.threads // 32 if shape.group else 1)
    return Launch(shape.vec, shape.packs, shape.group, shape.lanes, shape.threads, blocks, partials)


def _ceil(total: int, each: int) -> int:
    return -(-total // each)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Options(ctypes.Structure):
    """`struct Options` of the .cu file."""

    _fields_ = [("eps", ctypes.c_float), ("offset", ctypes.c_float), ("llama", ctypes.c_int32)]


def _bind_rows(
    name: str,
    choice: Launch,
    tensors: list[torch.Tensor | torch.dtype | None],
    layouts: list[Rows | None],
    count: int,
    n: int,
    options: Options,
    dtype: torch.dtype,
    gpu: Gpu,
    makes: Callable[[], torch.Tensor] | None = None,
) -> Run:
    """Bind `name`_rows or `name`_long, which differ in template parameters and in two scalars."""
    scalars: list[Any] = [rows_argument(layout) for layout in layouts]
    if choice.packs:
        kernel = instance(f"{name}_rows", TYPE_NAMES[dtype], choice.vec, choice.packs, choice.group)
        scalars += [ctypes.c_uint32(count), ctypes.c_int32(n), ctypes.c_int32(choice.lanes)]
    else:
        kernel = instance(f"{name}_long", TYPE_NAMES[dtype], choice.vec)
        scalars += [ctypes.c_uint32(count)] if choice.partials else []
        scalars += [ctypes.c_int32(n)]
    return nvrtc.bind(
        SOURCE,
        kernel,
        grid=(choice.blocks, 1, 1),
        block=choice.threads,
        tensors=tensors,
        scalars=[*scalars, options],
        gpu=gpu,
        makes=makes,
    )


def _width(n: int, *tensors: torch.Tensor | None) -> int:
    return vector_width(n, *((t, rows(t)) for t in tensors if t is not None))


@on_rows
def _forward(
    gpu: Gpu, input: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> Callable[..., torch.Tensor]:
    dtype = input.dtype
    new_out = memory.contiguous(input.shape, dtype, input.device)
    view = rows(input)
    choice = launch(view.count, view.n, _width(view.n, input, weight), gpu)
    tensors: list[torch.Tensor | torch.dtype | None] = [dtype, input, weight]
    return _bind_rows(
        "rms_norm", choice, tensors, [view], view.count, view.n, options, dtype, gpu, new_out
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
    choice = launch(view.count, view.n, _width(view.n, input, residual, weight), gpu)
    tensors: list[torch.Tensor | torch.dtype | None] = [dtype, dtype, input, residual, weight]
    layouts: list[Rows | None] = [view, rows(residual)]
    kernel = _bind_rows(
        "add_rms_norm", choice, tensors, layouts, view.count, view.n, options, dtype, gpu
    )

    def run(
        input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = new(), new()
        kernel(out, total, input, residual, weight)
        return out, total

    return run


@on_rows
def _backward(
    gpu: Gpu,
    grad: torch.Tensor,
    grad_residual: torch.Tensor | None,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    options: Options,
    weight_grad: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    dtype, device = input.dtype, input.device
    view = rows(input)
    n = view.n
    vec = _width(n, grad, grad_residual, input, weight)
    choice = launch(view.count, n, vec, gpu, backward=True)
    partial_type = torch.float32 if weight_grad else None
    past = None if grad_residual is None else rows(grad_residual)
    kernel = _bind_rows(
        "rms_norm_backward",
        choice,
        [dtype, partial_type, grad, grad_residual, input, weight],
        [rows(grad), past, view],
        view.count,
        n,
        options,
        dtype,
        gpu,
    )
    new_dx = memory.contiguous(input.shape, dtype, device)
    new_partial = memory.contiguous((choice.partials, n), torch.float32, device)
    new_dw = memory.contiguous((n if weight_grad else 0,), dtype, device)
    if weight_grad:
        add_up = nvrtc.bind(
            SOURCE,
            instance("sum_partials", TYPE_NAMES[dtype]),
            grid=(_ceil(n, 32), 1, 1),
            block=1024,
            tensors=[dtype, input],
            scalars=[ctypes.c_uint32(choice.partials), ctypes.c_int32(n)],
            gpu=gpu,
        )

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


def _empty_like(input: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What a call without elements returns, and makes without a launch."""
    return memory.contiguous(input.shape, input.dtype, input.device)


def _options(eps: float, weight_offset: float, casting: str) -> Options:
    return Options(eps, weight_offset, casting == "llama")


def prepare_forward(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> Callable[..., torch.Tensor]:
    if not input.numel():
        empty = _empty_like(input)
        return lambda *_: empty()
    return _forward(gpu, input, weight, _options(eps, weight_offset, casting))


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
        empty = _empty_like(input)
        return lambda *_: (empty(), empty())
    return _add(gpu, input, residual, weight, _options(eps, weight_offset, casting))


def prepare_backward(
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
        empty = _empty_like(input)
        new_dw = memory.contiguous(input.shape[-1:] if wanted else (0,), input.dtype, input.device)
        return lambda *_: (empty(), new_dw().zero_())
    options = _options(eps, weight_offset, "")
    return _backward(gpu, grad, grad_residual, input, weight, options, wanted)
