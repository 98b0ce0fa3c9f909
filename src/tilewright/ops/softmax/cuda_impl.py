"""softmax over the last dim in CUDA C++, in two versions (device code: cuda_impl.cu).

`cuda_v1` is the one to read: three passes over memory and a tree in shared memory; rows of any
length. `cuda_v2` reads each element once: a group of lanes (short rows) or a block holds its row in
registers, 32 elements a thread, and reduces by warp shuffles. Both use 16-byte loads where
alignment allows and compute in float32. Limits: float32, float16, bfloat16, or half input to
float32 output; v2 takes rows of up to 32,768 columns, and needs at most six binaries per pair of
dtypes.
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

MAX_THREADS = 1024
GROUP_THREADS = 128  # of a block whose rows are owned by groups of lanes
FEW, MOST = 8, 32  # elements of a row that one thread of v2 holds
V2_MAX_COLUMNS = MAX_THREADS * MOST


@dataclass(frozen=True)
class Launch:
    vec: int  # elements per load
    packs: int  # loads per thread that hold a row; 0: v1, which holds none
    group: bool  # `lanes` threads own a row, not the block
    lanes: int  # threads that own a row
    threads: int  # of a block
    blocks: int


def launch(count: int, n: int, vec: int, gpu: Gpu, *, version: int) -> Launch:
    """The launch for `count` rows of n columns, `vec` elements to a load."""
    loads = _power_of_two(-(-n // vec))
    if version == 1:
        threads = max(32, min(MAX_THREADS, loads))  # a power of two, as the tree wants
        return Launch(vec, 0, False, threads, threads, count)
    if n > 32 * MOST:
        # single elements are a constant distance apart: see the .cu file
        threads = 32 * -(-n // (32 * MOST)) if vec > 1 else MAX_THREADS
        return Launch(vec, MOST // vec, False, threads, threads, count)
    elements = FEW if n <= 32 * FEW else MOST
    lanes = min(32, loads)
    blocks = -(-count // (GROUP_THREADS // lanes))
    return Launch(vec, elements // vec, True, lanes, GROUP_THREADS, blocks)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _bind(choice: Launch, view: Rows, input: torch.Tensor, out: torch.dtype, gpu: Gpu) -> Run:
    types = TYPE_NAMES[out], TYPE_NAMES[input.dtype]
    count, n, lanes = ctypes.c_uint32(view.count), ctypes.c_int32(view.n), choice.lanes
    if choice.packs:
        kernel = instance("softmax_v2", *types, choice.vec, choice.packs, choice.group)
        scalars: list[Any] = [rows_argument(view), count, n, ctypes.c_int32(lanes)]
    else:
        kernel = instance("softmax_v1", *types, choice.vec)
        scalars = [rows_argument(view), n]
    return nvrtc.bind(
        SOURCE,
        kernel,
        grid=(choice.blocks, 1, 1),
        block=choice.threads,
        tensors=[out, input],
        scalars=scalars,
        gpu=gpu,
        makes=memory.contiguous(input.shape, out, input.device),
    )


@on_rows
def _softmax(
    gpu: Gpu, input: torch.Tensor, out: torch.dtype, version: int
) -> Callable[..., torch.Tensor]:
    view = rows(input)
    vec = vector_width(view.n, (input, view), (input.new_empty(0, dtype=out), None))
    return _bind(launch(view.count, view.n, vec, gpu, version=version), view, input, out, gpu)


def _prepare(
    gpu: Gpu, input: torch.Tensor, dtype: torch.dtype | None, version: int
) -> Callable[..., torch.Tensor]:
    out = dtype or input.dtype
    if not input.numel():
        new_output = memory.contiguous(input.shape, out, input.device)
        return lambda *_: new_output()
    return _softmax(gpu, input, out, version)


def prepare_v1(
    gpu: Gpu, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    """`dim` is the last one: the op asks for nothing else."""
    return _prepare(gpu, input, dtype, 1)


def prepare_v2(
    gpu: Gpu, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    """As `prepare_v1`, for rows of up to V2_MAX_COLUMNS."""
    return _prepare(gpu, input, dtype, 2)
