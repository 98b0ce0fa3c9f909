"""Gradients of weights: float32 partials, one row for each program, and the kernel that adds them.

The order of the sum depends on the number of partials alone: the same bits on every run, and no
atomics. One launch serves two gradients, whose partials lie one behind the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.toolkit.launch import Run, bind, programs

COUNT, BLOCK = 32, 128  # partials and columns of one step


@triton.jit(do_not_specialize=["count", "n"])
def sum_partials(
    first_ptr, second_ptr, partial_ptr, count, n, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Partials [1 or 2, count, n] to their totals [n]."""
    which = tl.program_id(1)  # 0 or 1
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    total = tl.zeros([COUNT, BLOCK], tl.float32)
    for start in range(0, count, COUNT):
        line = start + tl.arange(0, COUNT)[:, None]  # [COUNT, 1]
        inside = (line < count) & (column < n)
        at = (which * count + line).to(tl.int64) * n + column
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    sums = tl.sum(total, 0)[None, :].to(first_ptr.dtype.element_ty)
    tl.store(first_ptr + column, sums, mask=column < n * (1 - which))
    if second_ptr is not None:
        tl.store(second_ptr + column, sums, mask=column < n * which)


def bind_sum(count: int, n: int, dtype: torch.dtype, *, two: bool = False) -> Run:
    """`run(first, second, partial)`; `second` is None unless there are `two` gradients."""
    return bind(
        sum_partials,
        (programs(n, BLOCK), 1 + two),
        [dtype, dtype if two else None, torch.float32],
        (count, n),
        {"COUNT": COUNT, "BLOCK": BLOCK},
        aligned=True,
        num_warps=4,
    )
