"""One producer, two consumers and a ring of buffers: why every buffer has two barriers and a phase.

A barrier counts arrivals; when all have come, its phase bit flips and it counts anew. wait(phase)
passes once the phase of that parity is over. `full` flips when a copy has landed, `empty` when both
consumers have read. Tile i lies in slot i mod N, for the (i // N)-th time: consumers wait for the
parity of that, the producer for the other one, which in the first round has passed already.
Warps and copies are generators: they yield a barrier and a parity to wait for, or cycles to pass.
"""

COPY = 900  # cycles from the order to the last byte
WORK = (1000, 1150)  # cycles that each consumer takes for a tile
TILES = 8


class Barrier:
    def __init__(self, arrivals):
        self.arrivals, self.missing, self.phase = arrivals, arrivals, 0

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.phase = self.arrivals, 1 - self.phase


class Ring:
    def __init__(self, slots):
        self.tiles = [None] * slots  # None: nothing yet, or half written
        self.full = [Barrier(1) for _ in range(slots)]
        self.empty = [Barrier(len(WORK)) for _ in range(slots)]
        self.now, self.torn, self.copies = 0, 0, []


def producer(ring, patient):
    for i in range(TILES):
        slot, turn = i % len(ring.tiles), i // len(ring.tiles)
        yield (ring.empty[slot], 1 - turn % 2) if patient else COPY * (i > 0)  # one after another
        yield copy(ring, slot, i)  # runs by itself


def copy(ring, slot, i):
    ring.copies.append((ring.now, slot, i))
    ring.tiles[slot] = None
    yield COPY
    ring.tiles[slot] = i
    ring.full[slot].arrive()


def consumer(ring, cycles, flips):
    for i in range(TILES):
        slot, turn = i % len(ring.tiles), i // len(ring.tiles)
        yield ring.full[slot], turn % 2 if flips else 0
        begun = ring.tiles[slot]
        yield cycles
        ring.torn += not begun == ring.tiles[slot] == i  # another tile, or half of one
        ring.empty[slot].arrive()


def simulate(slots, patient=True, flips=True):
    """The ring, and when all were done: None if somebody waits for ever."""
    ring = Ring(slots)
    tasks = [producer(ring, patient), *(consumer(ring, work, flips) for work in WORK)]
    asleep, waiting = [(0, task) for task in tasks], []
    while True:
        if passed := [w for w in waiting if w[0].phase != w[1]]:
            waiting.remove(passed[0])
            task = passed[0][2]
        elif asleep:
            asleep.sort(key=lambda sleeper: sleeper[0])
            ring.now, task = asleep.pop(0)
        else:
            return ring, None if waiting else ring.now
        want = next(task, None)
        if isinstance(want, int):
            asleep.append((ring.now + want, task))
        elif isinstance(want, tuple):
            waiting.append((*want, task))
        elif want is not None:  # a copy that begins
            asleep += [(ring.now, want), (ring.now, task)]


print("tile                          ", *range(TILES))
print("slot, of two                  ", *(i % 2 for i in range(TILES)))
print("parity, consumers wait on full", *(i // 2 % 2 for i in range(TILES)))
print("parity, producer on empty     ", *(1 - i // 2 % 2 for i in range(TILES)))

# With one slot, copy and work take turns. With two, only the longer of both counts.
times = [simulate(slots)[1] for slots in (1, 2, 3)]
print("\ncycles with 1, 2 and 3 slots:", *times)
assert times == [TILES * (COPY + max(WORK)), *[COPY + TILES * max(WORK)] * 2]

ring, time = simulate(2)
print("\n100 cycles a sign: ~ a copy is on its way, a number is the tile that lies there")
for slot in range(2):
    begun = [(t // 100, str(tile)) for t, where, tile in ring.copies if where == slot]
    spans = zip(begun, [t for t, _ in begun[1:]] + [time // 100], strict=True)
    print(f"  slot {slot}: " + "".join("~" * 9 + x * (end - t - 9) for (t, x), end in spans))
assert ring.torn == 0

ring, _ = simulate(2, patient=False)
print(f"\na producer that does not wait for empty: {ring.torn} of {2 * TILES} reads are torn")
assert ring.torn > 0
ring, time = simulate(2, flips=False)
print(f"consumers that do not flip the parity: all wait for ever, with tiles {ring.tiles} there")
assert time is None
