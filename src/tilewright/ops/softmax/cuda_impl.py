"""softmax over the last dim and its backward in CUDA C++ (device code: cuda_impl.cu).

`cuda_v1` is the one to read: three passes over memory and a tree in shared memory; rows of any
length. `cuda_v2` reads each element once: a group of lanes (short rows) or a block holds its row in
registers; a longer row is held in the shared memory of a block, and beyond 32,768 half or 16,384
float columns of a cluster of blocks (SM 90). Both use 16-byte loads where alignment allows and
compute in float32. Limits: float32, float16, bfloat16, or half input to float32 output; v2 takes
rows of up to 262,144 columns, 4,096 without 16-byte loads, and needs at most seven binaries per
pair of dtypes.
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
from tilewright.toolkit.rows import common_width, on_rows, rows, vector_width

SOURCE = nvrtc.Source.beside(__file__)

MAX_THREADS = 1024
WIDE_THREADS = 512
CLUSTER_PACKS = 2048  # of a row, for each block of a cluster (H200, 2026-11)


def launch_v1(n: int, vec: int) -> int:
    """Threads of a block: a power of two, as the tree wants."""
    return max(32, min(MAX_THREADS, cuda_rows.power_of_two(cuda_rows.ceil(n, vec))))


def launch(n: int, vec: int, gpu: Gpu, *, operands: int = 1) -> tuple[Plan, bool] | None:
    """The plan for rows of n columns, `vec` elements to a load, and whether it is a wide one.

    None: no block holds them. A wide row is held by all loads it takes: its plan's packs are data.
    """
    if n > cuda_rows.WIDEST:
        return None
    if vec == 1:
        plan = cuda_rows.group(n, 1, 4) or cuda_rows.block(n, 1, 4, 1024)
        return (plan, False) if plan else None
    plan = cuda_rows.group(n, vec, 2) if n <= 64 * vec else cuda_rows.block(n, vec, 4, 384)
    if plan:
        return plan, False
    loads = cuda_rows.ceil(n, vec)
    together = cuda_rows.power_of_two(cuda_rows.ceil(loads, CLUSTER_PACKS))
    for blocks in (1, min(together, cuda_rows.largest_cluster(gpu))):
        plan = cuda_rows.fits(wide(loads, vec, blocks), gpu, operands)
        if plan:
            return plan, True
    plan = cuda_rows.block(n, vec, 4, 512)  # where a block has little shared memory
    return (plan, False) if plan else None


def wide(loads: int, vec: int, blocks: int) -> Plan | None:
    """A block or a cluster of several for rows of that many loads, or None."""
    each = cuda_rows.ceil(loads, blocks)
    if each > 2 * CLUSTER_PACKS:
        return None
    threads = 256 if blocks > 1 and each <= CLUSTER_PACKS else WIDE_THREADS
    owner, packs = "CLUSTER" if blocks > 1 else "BLOCK", cuda_rows.ceil(each, threads)
    return Plan(owner, vec, packs, threads, threads, blocks)


def refuses(gpu: Gpu, input: torch.Tensor, *_: Any) -> str | None:
    """Why v2 does not hold a row, or None."""
    n = input.shape[-1]
    vec = common_width(n, input)
    return None if launch(n, vec, gpu) else cuda_rows.too_wide(n, vec, gpu)


def refuses_backward(gpu: Gpu, grad: torch.Tensor, output: torch.Tensor, *_: Any) -> str | None:
    n = output.shape[-1]
    vec = common_width(n, grad, output)
    return None if launch(n, vec, gpu, operands=2) else cuda_rows.too_wide(n, vec, gpu)


def _bind(
    names: tuple[str, str],
    found: tuple[Plan, bool] | None,
    out: torch.dtype,
    inputs: list[torch.Tensor],
    gpu: Gpu,
) -> Callable[..., torch.Tensor]:
    """Bind the kernel for rows in registers, or the one for wide rows."""
    assert found is not None  # `refuses` was asked
    plan, is_wide = found
    views = [rows(t) for t in inputs]
    view, first = views[0], inputs[0]
    types, n = (TYPE_NAMES[out], TYPE_NAMES[first.dtype]), ctypes.c_int32(view.n)
    shared = 0
    if is_wide:
        kernel = instance(names[1], *types, plan.vec, plan.owner, WIDE_THREADS)
        sizes: list[Any] = [n, ctypes.c_int32(plan.packs)]
        shared = plan.shared(len(inputs))
    else:
        # results wider than what is loaded take several stores
        shape = (plan.vec, plan.packs, plan.owner, plan.compiled_for)
        kernel = instance(names[0], *types, *shape)
        sizes = [ctypes.c_uint32(view.count), n, ctypes.c_int32(plan.lanes)]
    return nvrtc.bind(
        SOURCE,
        kernel,
        grid=(plan.grid(view.count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        shared=shared,
        tensors=[out, *inputs],
        scalars=[*map(rows_argument, views), *sizes],
        gpu=gpu,
        makes=memory.contiguous(first.shape, out, first.device),
    )


@on_rows
def _v1(gpu: Gpu, input: torch.Tensor, out: torch.dtype) -> Callable[..., torch.Tensor]:
    view = rows(input)
    vec = vector_width(view.n, (input, view), (input.new_empty(0, dtype=out), None))
    return nvrtc.bind(
        SOURCE,
        instance("softmax_v1", TYPE_NAMES[out], TYPE_NAMES[input.dtype], vec),
        grid=(view.count, 1, 1),
        block=launch_v1(view.n, vec),
        tensors=[out, input],
        scalars=[rows_argument(view), ctypes.c_int32(view.n)],
        gpu=gpu,
        makes=memory.contiguous(input.shape, out, input.device),
    )


@on_rows
def _v2(gpu: Gpu, input: torch.Tensor, out: torch.dtype) -> Callable[..., torch.Tensor]:
    n = input.shape[-1]
    found = launch(n, common_width(n, input), gpu)
    return _bind(("softmax_v2", "softmax_v2_wide"), found, out, [input], gpu)


@on_rows
def _backward(
    gpu: Gpu, grad: torch.Tensor, output: torch.Tensor, out: torch.dtype
) -> Callable[..., torch.Tensor]:
    n = output.shape[-1]
    found = launch(n, common_width(n, grad, output), gpu, operands=2)
    names = ("softmax_backward_rows", "softmax_backward_wide")
    return _bind(names, found, out, [grad, output], gpu)


def _or_empty(prepare: Any, gpu: Gpu, out: torch.dtype, *tensors: torch.Tensor) -> Any:
    if tensors[0].numel():
        return prepare(gpu, *tensors, out)
    empty = memory.contiguous(tensors[0].shape, out, tensors[0].device)
    return lambda *_: empty()


def prepare_v1(
    gpu: Gpu, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    """`dim` is the last one: the op asks for nothing else."""
    return _or_empty(_v1, gpu, dtype or input.dtype, input)  # type: ignore[no-any-return]


def prepare_v2(
    gpu: Gpu, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> Callable[..., torch.Tensor]:
    return _or_empty(_v2, gpu, dtype or input.dtype, input)  # type: ignore[no-any-return]


def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    return _or_empty(_backward, gpu, input_dtype, grad, output)  # type: ignore[no-any-return]
