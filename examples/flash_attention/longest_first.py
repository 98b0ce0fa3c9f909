"""Causal blocks are unequal: their order decides how long the last SM works alone.

Block b of a head sees b + 1 tiles of keys. The GPU gives an SM that is free the next block of the
list. If a long one comes last, one SM still works when the others have nothing left to do. A
persistent kernel has one program on each SM, which takes its blocks by number. It can fetch the
next block's queries while it ends this one: the fixed cost of a block is then paid once an SM.
"""

import heapq

SMS = 132  # of an H200


def as_free(blocks, fixed=0):
    """When each SM ends, in steps, if it takes the next block as soon as it is free."""
    free = [0] * SMS
    for steps in blocks:
        heapq.heappush(free, heapq.heappop(free) + steps + fixed)
    return sorted(free)


def by_number(blocks, turning):
    """SM n takes block n of each 132; `turning`: in every other round the last SM comes first."""
    ends = [0] * SMS
    for number, steps in enumerate(blocks):
        turn, sm = divmod(number, SMS)
        ends[SMS - 1 - sm if turning and turn % 2 else sm] += steps
    return sorted(ends)


def causal(tokens, heads, rows=128):
    """Steps of all blocks, head by head, and the same with the longest first."""
    numbered = [b + 1 for _ in range(heads) for b in range(tokens // rows)]
    return numbered, sorted(numbered, reverse=True)


print("time over that of evenly spread work, 132 SMs, blocks of 128 rows")
print("  tokens   heads   head by head   longest first   by number   by number, turning")
for tokens, heads in ((2048, 128), (8192, 32), (16384, 16)):
    numbered, longest = causal(tokens, heads)
    even = sum(numbered) / SMS
    ends = as_free(numbered), as_free(longest), by_number(longest, False), by_number(longest, True)
    plain, first, fixed, turning = (end[-1] / even for end in ends)
    print(f"{tokens:8,} {heads:7} {plain:14.3f} {first:15.3f} {fixed:11.3f} {turning:20.3f}")
    assert turning < 1.04 < plain
    assert first < 1.01

print("\n8,192 tokens, 16 heads: steps until the first, the middle and the last SM end")
ways = {"head by head": as_free(causal(8192, 16)[0]), "longest first": as_free(causal(8192, 16)[1])}
for words, ends in ways.items():
    for end in (ends[0], ends[SMS // 2], ends[-1]):
        print(f"  {words:14} {'#' * (end // 5)} {end}")
assert ways["head by head"][0] < 0.8 * ways["head by head"][-1]
assert ways["longest first"][0] > 0.98 * ways["longest first"][-1]

# What persistence can win: n blocks of a head have (n + 1) / 2 steps on average, and each pays the
# fixed cost of its start and end.
print("\ntime with a fixed cost of so many steps for each block, over that without")
for tokens in (512, 2048, 8192):
    _, longest = causal(tokens, 2**18 // tokens)
    ratios = [as_free(longest, fixed)[-1] / as_free(longest)[-1] for fixed in (1, 2)]
    print(f"{tokens:8,} tokens   1 step: {ratios[0]:.2f}   2 steps: {ratios[1]:.2f}")
    mean = (tokens // 128 + 1) / 2
    assert all(abs(r - 1 - fixed / mean) < 0.03 for fixed, r in zip((1, 2), ratios, strict=True))
