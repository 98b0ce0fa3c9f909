"""python slots.py LAST_FIRST, interpreted: which tiles of packed sequences programs take."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter

import torch
import triton
import triton.language as tl

from tilewright.toolkit.triton_attention import place

TILE, HEADS = 16, 3


@triton.jit
def note(
    out_ptr, cu_ptr, blocks, total_heads, together,
    HEADS: tl.constexpr, TILE: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    block, head, sequence = place(
        blocks, HEADS, total_heads, together, cu_ptr, TILE, True, LAST_FIRST
    )
    out_ptr += tl.program_id(0) * 3
    tl.store(out_ptr, block)
    tl.store(out_ptr + 1, head)
    tl.store(out_ptr + 2, sequence)


def tiles(lengths: list[int], together: int, last_first: bool) -> list[tuple[int, ...]]:
    """(block, head, sequence) of the programs that have rows."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    blocks = sum(lengths) // TILE + len(lengths)
    out = torch.full((blocks * HEADS, 3), -1, dtype=torch.int32)
    total = HEADS * len(lengths)
    note[(blocks * HEADS,)](out, ends, blocks, total, together, HEADS, TILE, last_first)
    found = [tuple(row) for row in out.tolist()]
    assert all(block >= 0 for block, _, _ in found)
    return [one for one in found if one[0] * TILE < lengths[one[2]]]


last_first = sys.argv[1] == "True"
rng = random.Random(0)
for number, together in enumerate((1, 2, 3, 1)):
    lengths = [rng.choice((0, 1, 15, 16, 17, 31, 33, 100)) for _ in range(9)]
    lengths += [0] * number
    found = tiles(lengths, together, last_first)
    wanted = [
        (block, head, n)
        for n, length in enumerate(lengths)
        for block in range(-(-length // TILE))
        for head in range(HEADS)
    ]
    assert Counter(found) == Counter(wanted), (lengths, together)
    first = [one for one in found if one[1] == 0]
    order = sorted(first, key=lambda one: (one[2], -one[0] if last_first else one[0]))
    assert first == order, (lengths, together)
