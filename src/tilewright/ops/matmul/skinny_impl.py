"""Matmul with few rows of `a`, up to 64, in Triton: as quick as the weights can be read.

The product is computed the other way round, C^T = B^T A^T: columns of `b` are the rows of the
tensor core's tile, and the few rows of `a` are its narrow side, so that little is multiplied in
vain. One program reads [BLOCK_N, some steps of BLOCK_K] of the weights, once, several steps ahead;
`a` stays in L2. K is cut into `splits`, so that enough programs read at a time. Each leaves its
sums, and the last to arrive adds all of a tile in the order of K: the same call gives the same
bits. Limits: halves, one matrix each, 64 rows, whole 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.gpu import Gpu
from tilewright.ops.matmul import routes
from tilewright.ops.matmul.launches import MOST_ROWS, STRIP_DEPTH, strips
from tilewright.toolkit import memory, workspace
from tilewright.toolkit.launch import bind, is_interpreted, programs
from tilewright.toolkit.matmul_call import Product, see, too_long
from tilewright.toolkit.rows import VECTOR_BYTES
from tilewright.toolkit.triton_lib import indices_inside, part_of

FOLLOWS_SM = 90  # from it on a kernel can be launched before the one in front of it has ended
SIZES = [
    "m", "n_vectors", "k_vectors", "a_pitch", "b_pitch", "steps", "splits",
]  # fmt: skip


@triton.jit
def _load(
    ptr, line, along, pitch, is_inside, VEC: tl.constexpr, MASK: tl.constexpr, POLICY: tl.constexpr
):  # fmt: skip
    """Elements that lie side by side `along`, of lines that are `pitch` vectors apart."""
    at = ptr + line.to(tl.int64) * pitch * VEC + along
    if MASK:
        return tl.load(at, mask=is_inside, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(at, eviction_policy=POLICY)


@triton.jit(do_not_specialize=SIZES)
def _few_rows(
    c_ptr, a_ptr, b_ptr, sums_ptr, flags_ptr,
    m, n_vectors, k_vectors, a_pitch, b_pitch, steps, splits,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    if FOLLOWS:  # launched while the kernel before it ends
        tl.extra.cuda.gdc_wait()
    n, k_size = n_vectors * VEC, k_vectors * VEC
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    first, last = part_of(steps, split, splits)
    row, column = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b_column = indices_inside(tile * BLOCK_N, n, BLOCK_N, VEC if B_BY_ROWS else 1)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        k_inside = k < k_size
        if B_BY_ROWS:
            b = _load(
                b_ptr, k[:, None], b_column[None, :], b_pitch, k_inside[:, None], VEC, not EVEN_K,
                "evict_first",
            ).trans()  # fmt: skip
        else:
            b = _load(
                b_ptr, b_column[:, None], k[None, :], b_pitch, k_inside[None, :], VEC, not EVEN_K,
                "evict_first",
            )  # fmt: skip
        # rows beyond the last are not even read: that would be much for one row
        a_inside = (row < m)[:, None] if EVEN_K else (row < m)[:, None] & k_inside[None, :]
        if A_BY_ROWS:
            a = _load(
                a_ptr, row[:, None], k[None, :], a_pitch, a_inside, VEC, True, "evict_last"
            ).trans()
        else:
            a = _load(
                a_ptr, k[:, None], row[None, :], a_pitch, a_inside.trans(), VEC, True, "evict_last"
            )
        if WIDE:  # the interpreter multiplies no bfloat16; a product of float32 is the same one
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(b, a, acc)  # [BLOCK_N, BLOCK_M]

    to = c_ptr + row[None, :].to(tl.int64) * n + column[:, None]
    is_inside = (row < m)[None, :] & (column < n)[:, None]
    if SPLIT:
        here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        of_tile = sums_ptr + tile.to(tl.int64) * splits * (BLOCK_N * BLOCK_M) + here
        tl.store(of_tile + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all threads have stored, and the one that tells it knows
        arrived = tl.atomic_add(flags_ptr + tile, 1, sem="acq_rel")
        if arrived == splits - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                acc += tl.load(of_tile + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=is_inside)
            tl.store(flags_ptr + tile, 0)  # as it was
    else:
        tl.store(to, acc.to(c_ptr.dtype.element_ty), mask=is_inside)


def _vector(a: torch.Tensor) -> int:
    return VECTOR_BYTES // a.element_size()


def refuses(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, *rest: Any
) -> str | None:
    product = see(a, b)
    if product is None or product.count > 1:
        return "it multiplies one matrix by one matrix"
    if product.is_empty or not product.k:
        return "there is nothing to multiply"
    reason = too_long(product)
    if reason is not None:
        return reason
    if product.m > MOST_ROWS:
        return f"a has {product.m} rows; it is for up to {MOST_ROWS}"
    vec = _vector(a)
    for name, tensor, operand in (("a", a, product.a), ("b", b, product.b)):
        if not (operand.by_rows or operand.by_columns):
            return f"{name} has neither rows nor columns whose elements lie side by side"
        sizes = (operand.pitch, operand.columns if operand.by_rows else operand.rows)
        if any(size % vec for size in sizes) or tensor.data_ptr() % VECTOR_BYTES:
            return f"{name} cannot be read 16 bytes at a time"
    if product.n % vec or product.k % vec:
        return f"sizes are {product.n} columns and {product.k} deep: not whole 16 bytes"
    return None


def _bind(
    product: Product, a: torch.Tensor, b: torch.Tensor, out: torch.dtype, gpu: Gpu, *launch: int
) -> Any:
    """(`run(c, a, b, sums, flags)`, floats and flags that it needs)."""
    choice, vec = strips(product, gpu, *launch), _vector(a)
    tiles, steps = programs(product.n, choice.columns), programs(product.k, STRIP_DEPTH)
    is_split = choice.splits > 1
    follows = gpu.sm >= FOLLOWS_SM and not is_interpreted(_few_rows)
    run = bind(
        _few_rows,
        (tiles * choice.splits,),
        [out, a, b, torch.float32 if is_split else None, torch.int32 if is_split else None],
        (
            product.m, product.n // vec, product.k // vec, product.a.pitch // vec,
            product.b.pitch // vec, steps, choice.splits,
        ),
        {
            "VEC": vec, "BLOCK_M": choice.rows, "BLOCK_N": choice.columns, "BLOCK_K": STRIP_DEPTH,
            "A_BY_ROWS": product.a.by_rows, "B_BY_ROWS": product.b.by_rows,
            "EVEN_K": product.k % STRIP_DEPTH == 0, "SPLIT": is_split,
            "WIDE": is_interpreted(_few_rows) and a.dtype == torch.bfloat16, "FOLLOWS": follows,
        },
        aligned=True,
        num_warps=4,
        num_stages=choice.stages,
        follows=follows,
    )  # fmt: skip
    sums = tiles * choice.splits * choice.rows * choice.columns if is_split else 0
    return run, sums, tiles


def prepare(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, *rest: Any
) -> Callable[..., torch.Tensor]:
    product, out = see(a, b), out_dtype or a.dtype
    assert product is not None
    launch = routes.launch("skinny", gpu, a, b, out_dtype, *rest)
    kernel, sums, flags = _bind(product, a, b, out, gpu, *launch)
    new_c = memory.contiguous(product.shape, out, a.device)
    room = workspace.per_stream(sums, flags, a.device) if sums else lambda: (None, None)

    def run(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        c = new_c()
        kernel(c, a, b, *room())
        return c

    return run
