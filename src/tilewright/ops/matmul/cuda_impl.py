"""Matmul for Hopper in CUDA C++ (device code: cuda_impl.cu): tiles of as many columns as suit.

Beside `gluon` it has tiles of 11 widths, so that work comes out evenly; blocks of a cluster
may share what they read of b, or have parts of one tile along K, whose sums meet in shared memory;
and it begins while the kernel before it ends. Which tile a call takes is data where the GPU was
tuned, and else a model's choice; which cluster, the model's always (`launches`).
Limits: halves in any of the four layouts; rows or columns of whole 16 bytes, and so the rows of the
result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import KIB, Gpu
from tilewright.ops.matmul import launches, routes
from tilewright.ops.matmul.launches import Cluster
from tilewright.toolkit import boxes, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance
from tilewright.toolkit.launch import Described, programs
from tilewright.toolkit.matmul_call import Product, see, too_long
from tilewright.toolkit.rows import VECTOR_BYTES

SOURCE = nvrtc.Source.beside(__file__)

WORKER = 128  # threads that multiply together
GROUP = 16  # tiles of rows side by side, so that they meet in L2
MOST_STAGES = 12
# of shared memory: one atom of eight lines for alignment, rows that wait to be stored, barriers
RESERVED = 1 * KIB + 8 * 16 * (128 + 32) + 2 * 8 * MOST_STAGES


class Sizes(ctypes.Structure):
    """`struct Sizes` of the .cu file."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            *("m", "n", "steps", "m_tiles", "n_tiles", "pieces", "group", "bytes"),
            *("a_stacked", "b_stacked"),
        )
    ]


def refuses(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, *rest: Any
) -> str | None:
    """What TMA cannot read, or 16 bytes at a time not write."""
    product = see(a, b)
    if product is None or product.outer > 1:
        return "its stack of matrices has more than one level"
    if product.is_empty or not product.k:
        return "there is nothing to multiply"
    reason = too_long(product)
    if reason is not None:
        return reason
    for name, tensor, operand in (("a", a, product.a), ("b", b, product.b)):
        reason = boxes.unreadable(name, tensor, operand)
        if reason is not None:
            return reason
    if product.n * (out_dtype or a.dtype).itemsize % VECTOR_BYTES:
        return f"the result has {product.n} columns: not whole 16 bytes"
    return None


@dataclass(frozen=True)
class Plan:
    """What a launch is made of."""

    cluster: Cluster
    workers: int
    stages: int
    blocks: int
    shared: int  # bytes
    a: Described
    b: Described
    sizes: Sizes


def plan(
    gpu: Gpu, product: Product, dtype: torch.dtype, cluster: Cluster, most_stages: int = MOST_STAGES
) -> Plan:
    depth, columns, tall = launches.depth(dtype), cluster.columns, cluster.tall
    # What lies across K is fetched 64 rows or columns at a time, as wide as a line is. Of few rows
    # no more is fetched than there are.
    rows = cluster.rows
    a_box = min(programs(product.m, 8) * 8, rows) if product.a.by_rows else depth
    a_rows = a_box if product.a.by_rows else rows
    b_box = depth if product.b.by_rows else columns // tall
    b_columns = programs(columns, b_box) * b_box
    step = (rows + b_columns) * depth * dtype.itemsize
    stages = min((gpu.shared_per_block - RESERVED) // step, most_stages)
    m_tiles = programs(programs(product.m, rows), tall)
    n_tiles = programs(product.n, columns)
    pieces = m_tiles * n_tiles * product.count
    a_stacked, b_stacked = product.a.inner_stride > 0, product.b.inner_stride > 0
    return Plan(
        cluster,
        rows // launches.SHARE,
        stages,
        # blocks that share a tile have no second one
        pieces * cluster.deep if cluster.deep > 1 else min(pieces, gpu.sm_count // tall) * tall,
        stages * step + RESERVED,
        boxes.described(dtype, product.a, product.count, a_box, depth),
        boxes.described(dtype, product.b, product.count, depth, b_box),
        Sizes(
            product.m, product.n, programs(product.k, depth), m_tiles, n_tiles, pieces,
            max(GROUP // tall, 1), (a_rows + b_columns) * depth * dtype.itemsize,
            a_stacked, b_stacked,
        ),
    )  # fmt: skip


def _bind(
    gpu: Gpu, product: Product, dtype: torch.dtype, out: torch.dtype, found: Plan, makes: Any
) -> Callable[..., torch.Tensor]:
    types = f"tilewright::{TYPE_NAMES[dtype]}", _spelled(out)
    layouts = product.a.by_rows, product.b.by_rows
    columns, tall, deep = found.cluster.columns, found.cluster.tall, found.cluster.deep
    return nvrtc.bind(
        SOURCE,
        instance(
            "tilewright::matmul_tiles", *types, found.workers, columns, found.stages, *layouts,
            tall, deep,
        ),
        grid=(found.blocks, 1, 1),
        block=(found.workers + 1) * WORKER,
        cluster=tall * deep,
        waves=1 if deep == 1 else 0,
        shared=found.shared,
        follows=True,
        tensors=[out, found.a, found.b],
        scalars=[found.sizes],
        gpu=gpu,
        makes=makes,
    )  # fmt: skip


def _spelled(dtype: torch.dtype) -> str:
    name = TYPE_NAMES[dtype]
    return name if name == "float" else f"tilewright::{name}"


def prepare(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, *rest: Any
) -> Callable[..., torch.Tensor]:
    product, out = see(a, b), out_dtype or a.dtype
    assert product is not None
    launch = routes.launch("cuda", gpu, a, b, out_dtype, *rest)
    cluster = launches.cluster(product, a.dtype, gpu, *launch)
    new_c = memory.contiguous(product.shape, out, a.device)
    return _bind(gpu, product, a.dtype, out, plan(gpu, product, a.dtype, cluster), new_c)
