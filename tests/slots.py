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
    out_ptr, cu_ptr, blocks, together, sequences, longest,
    HEADS: tl.constexpr, TILE: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    block, head, sequence = place(
        blocks, HEADS, HEADS, together, sequences, longest, cu_ptr, TILE, LAST_FIRST
    )
    out_ptr += tl.program_id(0) * 3
    tl.store(out_ptr, block)
    tl.store(out_ptr + 1, head)
    tl.store(out_ptr + 2, sequence)


def tiles(
    lengths: list[int], before: int, spare: int, longest: int, together: int, last_first: bool
) -> list[tuple[int, ...]]:
    """(block, head, sequence) of the programs that have rows."""
    ends = torch.tensor([before, *itertools.accumulate(lengths, initial=before)][1:])
    ends = ends.to(torch.int32)
    blocks = (before + sum(lengths) + spare) // TILE + len(lengths)
    out = torch.full((blocks * HEADS, 3), -1, dtype=torch.int32)
    sizes = (blocks, together, len(lengths), longest)
    note[(blocks * HEADS,)](out, ends, *sizes, HEADS, TILE, last_first)
    found = [tuple(row) for row in out.tolist()]
    assert all(block >= 0 and n >= 0 for block, _, n in found), "rows before the first"
    return [one for one in found if one[0] * TILE < lengths[one[2]]]


last_first = sys.argv[1] == "True"
rng = random.Random(0)
for number, (before, spare, longest) in enumerate(
    [(0, 0, 100), (0, 1, 100), (0, 16, 100), (0, 500, 100), (0, 37, 33), (40, 100, 100)]
):
    lengths = [rng.choice((0, 1, 15, 16, 17, 31, 33, 100)) for _ in range(9)] + [0] * number
    together = 1 + number % HEADS
    found = tiles(lengths, before, spare, longest, together, last_first)
    wanted = [
        (block, head, n)
        for n, length in enumerate(lengths)
        for block in range(-(-min(length, -(-longest // TILE) * TILE) // TILE))
        for head in range(HEADS)
    ]
    assert Counter(found) == Counter(wanted), (lengths, together, spare)
    first = [one for one in found if one[1] == 0]
    order = sorted(first, key=lambda one: (one[2], -one[0] if last_first else one[0]))
    assert first == order, (lengths, together)
