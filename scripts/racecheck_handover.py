"""The smallest kernel in which a warp hands numbers to others: what does racecheck say of it?

    compute-sanitizer --tool racecheck python scripts/racecheck_handover.py 8

One warp leaves a number in shared memory and arrives at a barrier; four wait for it, read, and
arrive at another that the first waits for. So attention's Gluon kernel tells its consumers which
tile is next; here it is alone. The sum that is printed is right if no number was lost. racecheck
(CUDA 13.0) reports these accesses all the same, and some of Triton's own that come with the split
into partitions.
"""

from __future__ import annotations

import argparse

import torch

from tilewright.toolkit.gluon_compat import gl, gluon, mbarrier


@gluon.jit
def _put(place, full, empty, count):  # type: ignore[no-untyped-def]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(count):
        mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        place.store(gl.full([1], 0, gl.int32, ONE) + i)
        mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def _get(out_ptr, place, full, empty, count):  # type: ignore[no-untyped-def]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for i in range(count):
        mbarrier.wait(full.index(0), i & 1)
        total += gl.sum(place.load(ONE), 0)
        mbarrier.arrive(empty.index(0), count=1)
    gl.store(out_ptr, total)


@gluon.jit
def _hand_over(out_ptr, count):  # type: ignore[no-untyped-def]
    place = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize(
        [
            (_get, (out_ptr, place, full, empty, count)),
            (_put, (place, full, empty, count)),
        ],
        [1],
        [24],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="numbers that are handed over")
    count = parser.parse_args().count
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    _hand_over[(1,)](out, count, num_warps=4)
    print(f"{count} numbers: their sum is {out.item()}, and should be {count * (count - 1) // 2}")


if __name__ == "__main__":
    main()
