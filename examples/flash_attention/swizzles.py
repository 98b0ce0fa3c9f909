"""The swizzle of shared memory: rows and columns of a tile are both read without conflicts.

Shared memory has 32 banks of 4 bytes: bank = address / 4 mod 32. In a cycle each bank serves one
word. A tile with rows of 128 bytes (64 halves) has all its chunks of one column in the same four
banks. So TMA writes chunk c of row r, 16 bytes, to place c XOR (r mod 8) of that row, and wgmma
reads it from there. In bits of the address: 4 to 6 are XORed with 7 to 9. For narrower rows there
are swizzles of 64 and 32 bytes, with two bits and one.
"""

import numpy as np

CHUNK = 16  # bytes: what stays together
MASK = {128: 0b111 << 4, 64: 0b11 << 4, 32: 0b1 << 4, 0: 0}


def swizzle(address, span):
    """Where the byte lies that would be at `address`."""
    return address ^ (address >> 3 & MASK[span])


def cycles(addresses):
    """To read a chunk at each: the most words that one bank has to serve."""
    words = np.unique((addresses[:, None] + np.arange(0, CHUNK, 4)) // 4)
    return np.bincount(words % 32).max()


# A picture: which chunk lies where.
r, c = np.indices((8, 8))
lies = swizzle(r * 128 + c * CHUNK, 128)
assert (lies == r * 128 + (c ^ r % 8) * CHUNK).all()  # the same, said with chunks
places = np.empty(64, int)
places[lies // CHUNK] = c
print("row   chunks as they come   where the swizzle puts them; chunk 2 in brackets")
for row, line in enumerate(places.reshape(8, 8)):
    marked = "".join(f"[{x}]" if x == 2 else f" {x} " for x in line)
    print(f"{row:3}   {' '.join(map(str, range(8))):22} {marked}")

# Cycles to read 8 chunks: those of one row as far as it goes, or one column of 8 rows.
print("\nbytes of a row   column, plain   column, swizzled   8 chunks on end, swizzled")
for span in (128, 64, 32):
    rows, wide = np.arange(8), span // CHUNK
    columns = [rows * span + chunk * CHUNK for chunk in range(wide)]
    plain = max(cycles(column) for column in columns)
    mixed = max(cycles(swizzle(column, span)) for column in columns)
    along = max(cycles(swizzle(start + rows * CHUNK, span)) for start in range(0, 8 * span, 128))
    print(f"{span:14}   {plain:13}   {mixed:16}   {along:25}")
    assert (plain, mixed, along) == (span // 16, 1, 1)
    # Nothing is lost: the swizzle is one to one, and its own inverse.
    every = np.arange(8 * span)
    assert (swizzle(swizzle(every, span), span) == every).all()


# A tile of keys, 64 x 128 halves. A row has 256 bytes, two spans: so there are two slabs, of 64
# columns each, one behind the other.
def address(row, column, rows=64, span=128):
    slab, column = column // 64, column % 64
    return swizzle(slab * rows * span + row * span + column * 2, span)


tile = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float16)
memory = np.empty(tile.size, np.float16)
where = address(*np.indices(tile.shape)) // 2
memory[where] = tile  # as TMA writes it
assert (memory[where] == tile).all()  # as wgmma reads it
assert (memory[where.T] == tile.T).all()  # and turned round: the same bytes in another order

flat = np.concatenate([tile[:, :64].ravel(), tile[:, 64:].ravel()])  # slabs without the swizzle
strayed = (memory != flat).mean()
print(f"\na reader that forgets the swizzle finds {strayed:.0%} of the tile in the wrong place")
assert 0.87 <= strayed <= 0.875  # 7 rows of 8 move all their chunks

rows, chunks = np.arange(8), np.arange(0, 128, 8)
blocks = [(first, column) for first in range(0, 64, 8) for column in chunks]
cost = sum(cycles(address(first + rows, np.full(8, column))) for first, column in blocks)
plain = sum(cycles((first + rows) * 128 + column % 64 * 2) for first, column in blocks)
print(f"the tile in columns of 8 chunks: {cost} cycles, {plain} without; 16 KB / 128 = {cost}")
assert cost * 128 == tile.nbytes
assert plain == 8 * cost
