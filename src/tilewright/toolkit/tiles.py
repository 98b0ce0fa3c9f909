"""How many rows and columns one program of a row kernel holds: a pure function of the row length.

The table is short on purpose: each entry is one binary per dtype and flag set, and a user's shapes
must not compile more than twelve. Rows of a class share a binary whatever their exact length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    rows: int  # rows per program
    block: int  # columns per step; a power of two
    warps: int
    whole: bool  # the row fits in one step, so it is read once and kept in registers


# 16 to 32 elements per thread: two to four 16-byte loads in flight, no spill (compile matrix).
ALIGNED = (
    Tile(32, 64, 4, True),
    Tile(8, 256, 4, True),
    Tile(2, 1024, 4, True),
    Tile(1, 2048, 4, True),
    Tile(1, 4096, 4, True),
    Tile(1, 8192, 8, True),
    Tile(1, 16384, 16, True),
    Tile(1, 32768, 32, True),
)
# Rows that allow no 16-byte load: bandwidth is lost anyway, so fewer binaries.
UNALIGNED = (Tile(32, 64, 4, True), Tile(2, 1024, 4, True))
WIDE = Tile(1, 8192, 16, False)
WIDE_UNALIGNED = Tile(1, 4096, 8, False)


def tile(n: int, vec: int, widest: int = 32768) -> Tile:
    """The tile for rows of n columns; beyond `widest`, the wide loop that reads a row twice."""
    table, wide = (ALIGNED, WIDE) if vec > 1 else (UNALIGNED, WIDE_UNALIGNED)
    return next((t for t in table if n <= t.block <= widest), wide)
