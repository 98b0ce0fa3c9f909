"""swiglu and its backward in CUDA C++ (device code: cuda_impl.cu).

A thread moves one or a few packs of 16 bytes of each operand; there is nothing to reduce and
nothing to keep. Contiguous tensors are one long row; else some lanes, a power of two, share a row,
and a block holds as many short rows as fit. Limits: one dtype, float32, float16 or bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import gated_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_launch import Run
from tilewright.toolkit.gated_rows import Operands
from tilewright.toolkit.launch import programs
from tilewright.toolkit.rows import on_rows

SOURCE = nvrtc.Source.beside(__file__)

Tensors = list["torch.Tensor | torch.dtype | None"]


@dataclass(frozen=True)
class Launch:
    threads: int  # of a block, a power of two
    packs: int  # of each operand and thread


# 2048 resident threads with a pack of each operand on its way are some 64 KiB for each SM, twice
# what the latency of an H200's memory asks for; more packs are no faster (H200, 2026-11).
FORWARD = Launch(threads=128, packs=1)
BACKWARD = Launch(threads=128, packs=1)


def lanes_of(n: int, vec: int, choice: Launch) -> int:
    """Threads that share a row of n elements: the fewest that hold it, at most a block."""
    wanted = programs(n, vec * choice.packs)
    return min(choice.threads, 1 << (wanted - 1).bit_length())


class Starts(ctypes.Structure):
    """`struct Starts` of the .cu file."""

    _fields_ = [("gate", ctypes.c_int64), ("up", ctypes.c_int64)]


def _bind(
    kernel: str,
    choice: Launch,
    operands: Operands,
    tensors: Tensors,
    views: list[Any],
    more: list[Any],
    dtype: torch.dtype,
    gpu: Gpu,
    makes: Callable[[], torch.Tensor] | None = None,
) -> Run:
    flat = operands.levels == 0
    lanes = choice.threads if flat else lanes_of(operands.n, operands.vec, choice)
    column_blocks = programs(operands.n, lanes * operands.vec * choice.packs)
    blocks = column_blocks * programs(operands.count, choice.threads // lanes)
    template = (operands.vec, choice.packs, flat, choice.threads)
    return nvrtc.bind(
        SOURCE,
        instance(kernel, TYPE_NAMES[dtype], *template),
        grid=(blocks, 1, 1),
        block=choice.threads,
        tensors=tensors,
        scalars=[
            *map(rows_argument, views),
            Starts(operands.gate_at, operands.up_at),
            *more,
            ctypes.c_uint32(operands.count),
            ctypes.c_int64(operands.n),
            ctypes.c_uint32(column_blocks),
            ctypes.c_int32(lanes),
        ],
        gpu=gpu,
        makes=makes,
    )


def _bind_forward(
    gpu: Gpu,
    operands: Operands,
    gate: torch.Tensor,
    up: torch.Tensor,
    makes: Callable[[], torch.Tensor],
) -> Run:
    views, dtype = [operands.gate, operands.up], gate.dtype
    return _bind("swiglu", FORWARD, operands, [dtype, gate, up], views, [], dtype, gpu, makes)


def _bind_backward(
    gpu: Gpu, operands: Operands, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> Run:
    views, dtype = [operands.grad, operands.gate, operands.up], gate.dtype
    tensors: Tensors = [dtype, dtype, grad, gate, up]
    step = [ctypes.c_int64(operands.step)]
    return _bind("swiglu_backward", BACKWARD, operands, tensors, views, step, dtype, gpu)


def prepare(gpu: Gpu, gate: torch.Tensor, up: torch.Tensor) -> Callable[..., Any]:
    new_y = memory.contiguous(gate.shape, gate.dtype, gate.device)
    if not gate.numel():
        return lambda *_: new_y()

    def bound(gpu: Gpu, gate: torch.Tensor, up: torch.Tensor) -> Run:
        return _bind_forward(gpu, gated_rows.separate(gate, up), gate, up, new_y)

    as_rows = bound if gated_rows.are_contiguous(gate, up) else on_rows(bound)
    return as_rows(gpu, gate, up)


def prepare_packed(gpu: Gpu, x: torch.Tensor, order: str) -> Callable[..., Any]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    new_y = memory.contiguous(shape, x.dtype, x.device)
    if not x.numel():
        return lambda *_: new_y()

    def bound(gpu: Gpu, x: torch.Tensor) -> Callable[..., Any]:
        kernel = _bind_forward(gpu, gated_rows.packed(x, order), x, x, new_y)
        return lambda x, *_: kernel(x, x)

    return on_rows(bound)(gpu, x)


def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The run returns (gradient of gate, gradient of up)."""
    new = memory.contiguous(gate.shape, gate.dtype, gate.device)
    if not gate.numel():
        return lambda *_: (new(), new())

    def bound(
        gpu: Gpu, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> Callable[..., Any]:
        operands = gated_rows.separate(gate, up, grad)
        kernel = _bind_backward(gpu, operands, grad, gate, up)

        def run(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *_: Any) -> Any:
            dgate, dup = new(), new()
            kernel(dgate, dup, g, gate, up)
            return dgate, dup

        return run

    as_rows = bound if gated_rows.are_contiguous(grad, gate, up) else on_rows(bound)
    return as_rows(gpu, grad, gate, up)


def prepare_packed_backward(
    gpu: Gpu, grad: torch.Tensor, x: torch.Tensor, order: str
) -> Callable[..., torch.Tensor]:
    """The run returns the gradient of both halves in one tensor."""
    new_dx = memory.contiguous(x.shape, x.dtype, x.device)
    if not x.numel():
        return lambda *_: new_dx()

    def bound(gpu: Gpu, grad: torch.Tensor, x: torch.Tensor) -> Callable[..., Any]:
        kernel = _bind_backward(gpu, gated_rows.packed(x, order, grad), grad, x, x)

        def run(g: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
            dx = new_dx()
            kernel(dx, dx, g, x, x)
            return dx

        return run

    return on_rows(bound)(gpu, grad, x)
