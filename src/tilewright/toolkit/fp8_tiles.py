"""Launches of the Triton norms that are quantised to fp8: a pure function of shape and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.fp8 import GROUP
from tilewright.gpu import Gpu
from tilewright.toolkit.launch import programs
from tilewright.toolkit.tiles import Tile, tile

# Columns that stay in registers without a spill on any SM, by the bytes of an element (compile
# matrix, 2026-11).
WIDEST = {2: 16384, 4: 8192}
SECOND = Tile(8, 256, 4, False)  # of the second pass: it reduces nothing, so one serves all
RESIDENT = 16  # warps of an SM that find room for their registers


@dataclass(frozen=True)
class Launch:
    tile: Tile
    group: int  # columns that share a scale in a tile; the whole block: one scale per row
    programs: int


def launch(count: int, n: int, vec: int, gpu: Gpu, size: int, scaling: str) -> Launch:
    # two passes share the budget of binaries: without the narrowest tile they keep it
    choice = tile(max(n, 65) if scaling == "tensor" else n, vec, WIDEST[size])
    if choice.whole and vec > 1:  # 32 elements to a thread: a program's overhead counts here
        choice = replace(choice, warps=choice.rows * choice.block // 1024)
    group = min(GROUP, choice.block) if scaling == "group" else choice.block
    tiles = programs(count, choice.rows)
    resident = gpu.sm_count * max(RESIDENT // choice.warps, 1)
    return Launch(choice, group, min(tiles, resident) if choice.whole else tiles)
