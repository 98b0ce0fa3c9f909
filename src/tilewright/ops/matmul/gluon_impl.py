"""Matmul for Hopper (SM 90): the host side of `hopper_kernels`.

Which tile a call takes is data where the GPU was tuned, and else a model's choice (`launches`).
Limits: halves in any of the four layouts, and tf32 whose rows of a and columns of b lie side by
side; rows or columns of whole 16 bytes, and so the rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import KIB, Gpu
from tilewright.multiplying import factors_of_da, factors_of_db
from tilewright.ops.matmul import launches, routes
from tilewright.ops.matmul.hopper_kernels import _matmul_on_hopper
from tilewright.ops.matmul.launches import ROWS, WORKERS, Tiles
from tilewright.toolkit import boxes, memory, workspace
from tilewright.toolkit.launch import bind
from tilewright.toolkit.matmul_call import Operand, Product, gradients, see, too_long
from tilewright.toolkit.rows import VECTOR_BYTES

SHARE = ROWS // WORKERS
STORED = 128  # bytes of a row that TMA stores at a time
RESERVED = 1 * KIB  # of shared memory, for barriers
GROUP = 16  # tiles of rows side by side, so that they meet in L2
MOST_STAGES = 8
REGISTERS, FEW_REGISTERS = 240, 32  # of a consumer's and the producer's threads


def refuses(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str,
    *rest: Any,
) -> str | None:  # fmt: skip
    """What the tensor cores do not multiply, or TMA cannot read or write."""
    product = see(a, b)
    if product is None or product.outer > 1:
        return "its stack of matrices has more than one level"
    if product.is_empty or not product.k:
        return "there is nothing to multiply"
    reason = too_long(product)
    if reason is not None:
        return reason
    if a.dtype == torch.float32:
        if precision != "tf32":
            return "precision is 'ieee', and tensor cores multiply float32 as tf32"
        if not product.a.by_rows or product.b.by_rows:
            return "tf32 wants rows of a and columns of b whose elements lie side by side"
    for name, tensor, operand in (("a", a, product.a), ("b", b, product.b)):
        reason = boxes.unreadable(name, tensor, operand)
        if reason is not None:
            return reason
    if product.n * (out_dtype or a.dtype).itemsize % VECTOR_BYTES:
        return f"the result has {product.n} columns: not whole 16 bytes, as TMA wants them"
    return None


def _bind(
    gpu: Gpu, product: Product, dtype: torch.dtype, out: torch.dtype, tiles: Tiles
) -> Callable[..., None]:
    """`run(c, a, b, b, sums, flags)`; the second b if columns of a tile are no power of two, the
    last two if tiles are cut."""
    plan = launches.work(product, tiles, dtype, gpu)
    c = Operand(product.m, product.n, product.n, 1, inner_stride=product.m * product.n)
    depth, columns = launches.depth(dtype), _power(tiles.columns)
    rest = tiles.columns - columns
    part = min(STORED // out.itemsize, rest or columns)
    room = gpu.shared_per_block - RESERVED - 2 * WORKERS * SHARE * part * out.itemsize
    stages = min(room // (depth * (ROWS + tiles.columns) * dtype.itemsize), MOST_STAGES)
    return bind(
        _matmul_on_hopper,
        (plan.blocks,),
        [
            boxes.described(out, c, product.count, SHARE, part, gluon=True),
            boxes.described(dtype, product.a, product.count, SHARE, depth, gluon=True),
            boxes.described(dtype, product.b, product.count, depth, columns, gluon=True),
            boxes.described(dtype, product.b, product.count, depth, rest, gluon=True)
            if rest
            else None,
            torch.float32 if plan.cut else None,
            torch.int32 if plan.cut else None,
        ],
        (
            product.m, plan.m_tiles, plan.n_tiles, plan.whole, plan.cut, plan.splits, plan.steps,
            GROUP, int(product.a.inner_stride > 0), int(product.b.inner_stride > 0),
        ),
        {
            "WORKERS": WORKERS, "SHARE": SHARE, "COLUMNS": columns, "REST": rest,
            "DEPTH": depth, "STAGES": stages, "PART": part, "A_BY_ROWS": product.a.by_rows,
            "B_BY_ROWS": product.b.by_rows, "SPLIT": plan.cut > 0,
            "REGISTERS": REGISTERS, "FEW_REGISTERS": FEW_REGISTERS,
        },
        aligned=True,
        num_warps=4,
    )  # fmt: skip


def prepare(
    gpu: Gpu, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str,
    block: Any, deterministic: bool,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    product, out = see(a, b), out_dtype or a.dtype
    assert product is not None
    given = routes.launch("gluon", gpu, a, b, out_dtype, precision, block, deterministic)
    tiles = launches.hopper_tiles(product, a.dtype, gpu, *given)
    kernel = _bind(gpu, product, a.dtype, out, tiles)
    new_c = memory.contiguous(product.shape, out, a.device)
    plan = launches.work(product, tiles, a.dtype, gpu)
    sums, flags = plan.parts * tiles.sums, plan.cut * WORKERS
    room = workspace.per_stream(sums, flags, a.device) if plan.cut else _no_room
    has_rest = _power(tiles.columns) < tiles.columns

    def run(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        c = new_c()
        kernel(c, a, b, b if has_rest else None, *room())
        return c

    return run


def _power(size: int) -> int:
    """The largest power of two in it: what a tensor of a kernel may have."""
    return 1 << (size.bit_length() - 1)


def _no_room() -> tuple[None, None]:
    return None, None


def refuses_backward(
    gpu: Gpu, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: Any, precision: str,
    deterministic: bool, need_a: bool, need_b: bool,
) -> str | None:  # fmt: skip
    """What either of the two products would be refused for."""
    like = grad if grad.dtype == a.dtype else torch.empty_like(grad, dtype=a.dtype)
    for factors, is_needed in ((factors_of_da, need_a), (factors_of_db, need_b)):
        left, right, _ = factors(like, a, b)
        reason = refuses(gpu, left, right, None, precision) if is_needed else None
        if reason is not None:
            return reason
    return None


def prepare_backward(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return gradients(prepare, gpu, *args)
