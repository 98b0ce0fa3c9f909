"""Softmax beside products: how long the tensor core is busy, by who waits where.

Step i of a consumer is scores of tile i, values of tile i - 1 and softmax of tile i. The products
need the tensor core, softmax the vector units. A warpgroup starts its products and goes on; the
schedules differ in nothing but what it waits for, and when.
A model, not a measurement: those who use a unit at once share it evenly; tiles are always there.
The tensor core of Hopper does 4,096 flops a cycle. A score costs the vector units one exponential,
of 16 a cycle, and four other instructions, of 128 a cycle.
"""

from collections import Counter

ROWS = 64  # of a consumer
WAYS = {  # overlap inside a consumer, ping-pong between them
    "one after the other": (False, False),
    "overlap inside": (True, False),
    "ping-pong": (False, True),
    "both": (True, True),
}


def consumer(start, done, turn, me, consumers, tiles, overlap):
    """Yields what it waits for."""
    for i in range(tiles):
        if turn is not None:
            yield lambda: turn[0] == me
        start("tensor", me)  # scores of tile i
        if i > 0:
            start("tensor", me)  # values of tile i - 1
        both = 2 * i + 1
        first = max(both - 1, 1) if overlap else both  # with overlap values run on for now
        yield lambda n=first: done["tensor", me] >= n
        if turn is not None:
            turn[0] = (me + 1) % consumers
        start("vector", me)
        yield lambda n=i: done["vector", me] > n
        yield lambda n=both: done["tensor", me] >= n
    start("tensor", me)


def simulate(cost, consumers, overlap, pingpong, tiles=100):
    """A list of (unit, begin, end, consumers on it)."""
    jobs, done, log, now = [], Counter(), [], 0.0
    turn = [0] if pingpong else None

    def start(unit, me):
        jobs.append([unit, me, cost[unit]])

    warps = [consumer(start, done, turn, n, consumers, tiles, overlap) for n in range(consumers)]
    waiting = {warp: next(warp) for warp in warps}
    while True:
        while ready := [warp for warp, passes in waiting.items() if passes()]:
            for warp in ready:
                waiting[warp] = next(warp, lambda: False)
        if not jobs:
            return log
        first = {}  # of one consumer's jobs on a unit the oldest runs
        for job in jobs:
            first.setdefault(job[0], {}).setdefault(job[1], job)
        step = min(job[2] * len(by) for by in first.values() for job in by.values())
        for unit, by in first.items():
            log.append((unit, now, now + step, [*by]))
            for me, job in by.items():
                job[2] -= step / len(by)
                done[unit, me] += job[2] < 1e-6
        jobs = [job for job in jobs if job[2] >= 1e-6]
        now += step


def costs(dim, keys):
    pairs = ROWS * keys
    return {"tensor": 2 * pairs * dim / 4096, "vector": pairs / 16 + 4 * pairs / 128}


def busy(log):
    return sum(end - begin for unit, begin, end, _ in log if unit == "tensor") / log[-1][2]


def line(log, unit, time):
    on = [who for name, begin, end, who in log if name == unit and begin <= time < end]
    return "." if not on else "=" if len(on[0]) > 1 else str(on[0][0])


print("D 128, tiles of 64 x 128, 128 cycles a sign: consumer 0 or 1, = both, a dot nobody")
for words, way in WAYS.items():
    log = simulate(costs(128, 128), 2, *way)
    print(f"\n{words}: tensor core busy {busy(log):.0%}")
    for unit in ("tensor", "vector"):
        print(f"  {unit} " + "".join(line(log, unit, t + 64) for t in range(10240, 18432, 128)))

print("\ntensor core busy     " + "   ".join(WAYS))
for dim, keys, consumers in ((64, 128, 2), (64, 128, 3), (128, 128, 2), (256, 64, 2)):
    cost = costs(dim, keys)
    shares = [busy(simulate(cost, consumers, *way)) for way in WAYS.values()]
    cells = [f"{share:{len(words)}.0%}" for words, share in zip(WAYS, shares, strict=True)]
    print(f"D {dim:3}, {consumers} consumers   " + "   ".join(cells))
    two, soft = 2 * cost["tensor"], cost["vector"]
    bound = min(1, two / soft)  # either unit without a pause
    wanted = [two / (two + soft), two / (two / 2 + max(two / 2, soft)), bound, bound]
    assert all(abs(s - w) < 0.02 for s, w in zip(shares, wanted, strict=True)), (shares, wanted)
