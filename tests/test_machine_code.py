"""Registers that a path leaves unwritten are found in machine code, and nothing else is."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from tilewright import matrix
from tilewright.matrix import reach
from tilewright.matrix.machine_code import unwritten
from tilewright.ops.attention import op

BUILD = sys.modules["tilewright.matrix.build"]  # whose name in the package is its function's


def printed(*lines: str) -> str:
    """As nvdisasm does: labels at the margin, instructions with their places."""
    place = count(0, 16)
    shown = []
    for line in lines:
        text, _, more = line.partition(" // ")
        is_label = text.endswith(":")
        shown.append(text if is_label else f"        /*{next(place):04x}*/  {text} ;  {more}")
    return "\n".join(shown)


# A descriptor is computed before the first loop, and read in the second one.
SKIPPED = (
    "@!P0 BRA `(.L_x_2)",
    "UIADD3 UR32, UP0, UR4, 0x2, URZ",
    ".L_x_1:",
    "@P1 BRA `(.L_x_1)",
    ".L_x_2:",
    "UIADD3 UR20, UP0, UR32, 0x2, URZ",
    "EXIT",
)
RIGHT: dict[str, tuple[str, ...]] = {
    "written on both paths": (
        "ULDC UR4, c[0x0][0x208]", "@P0 BRA `(.L_x_1)", "UMOV UR5, UR4", "BRA `(.L_x_2)",
        ".L_x_1:", "UMOV UR5, URZ", ".L_x_2:", "UMOV UR6, UR5", "EXIT",
    ),
    "written before a loop": (
        "UMOV UR5, URZ", ".L_x_1:", "UIADD3 UR5, UR5, 0x1, URZ", "@P0 BRA `(.L_x_1)", "EXIT",
    ),
    "written under a condition": ("@UP0 UMOV UR5, URZ", "UMOV UR6, UR5", "EXIT"),
    "a pair": ("ULDC.64 UR4, c[0x0][0x208]", "UIADD3.64 UR6, UR4, 0x2, URZ", "UMOV UR8, UR7",
               "EXIT"),
    "where nothing goes": ("EXIT", ".L_x_1:", "UMOV UR6, UR5", "BRA `(.L_x_1)"),
    "a table of places": (
        'BRX R12 -0x10 // (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);', ".L_x_1:", "UMOV UR4, URZ",
        "BRA `(.L_x_3)", ".L_x_2:", "R2UR UR4, R9", ".L_x_3:", "VIADD R1, R2, UR4", "EXIT",
    ),
    "the second factor alone, the first in registers": (
        "UMOV UR14, URZ", "UMOV UR15, URZ",
        "HGMMA.64x128x16.F32.BF16 R88, R24, gdesc[UR12].tnspB, R88, gsb0", "EXIT",
    ),
}  # fmt: skip
WRONG: dict[str, tuple[tuple[str, ...], list[int]]] = {
    "a loop that may be skipped": (("UMOV UR4, URZ", *SKIPPED), [32]),
    "nowhere": (("VIADD R1, R2, UR7", "EXIT"), [7]),
    "after a loop alone": ((".L_x_1:", "UMOV UR6, UR5", "UMOV UR5, URZ", "@P0 BRA `(.L_x_1)"), [5]),
    "half of a pair": (("UMOV UR4, URZ", "UIADD3.64 UR6, UR4, 0x2, URZ", "EXIT"), [5]),
    "by one of a table of places": (
        ('BRX R12 -0x10 // (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);', ".L_x_1:", "UMOV UR4, URZ",
         ".L_x_2:", "VIADD R1, R2, UR4", "EXIT"),
        [4],
    ),
    "a branch by a second condition": (
        ("@P0 BRA P2, `(.L_x_1)", "EXIT", ".L_x_1:", "UMOV UR6, UR5", "EXIT"), [5],
    ),
    "a descriptor": (
        ("UMOV UR16, URZ", "UMOV UR17, URZ", "UMOV UR18, URZ",
         "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT", "EXIT"),
        [19],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_code_that_writes_before_it_reads_is_right(name: str) -> None:
    assert unwritten(printed(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_path_that_leaves_a_register_unwritten_is_found(name: str) -> None:
    lines, registers = WRONG[name]
    found = unwritten(printed(*lines))
    assert [int(one.rpartition("UR")[2]) for one in found] == registers
    assert all(one.rpartition(": ")[0] in lines for one in found)


def test_nothing_is_found_in_nothing() -> None:
    assert unwritten("") == []


@pytest.mark.drawn(seconds=6.6, family="slow")
def test_a_binary_with_such_a_path_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    gluon = next(b for b in op.OP.backends if b.name == "gluon")
    alone = replace(op.OP, backends=(gluon,), autograd=None)
    (case,) = (c for c in op.CASES if c.name == "D128 T512 full")
    (wanted,) = reach.of_cases([(alone, case, torch.bfloat16)], 90)
    asked = []
    read = BUILD._read

    def broken(cubin: bytes, tool: str, option: str) -> Any:
        asked.append(tool)
        text = read(cubin, tool, option)
        return printed("UMOV UR4, URZ", *SKIPPED) if tool == "nvdisasm" else text

    assert matrix.build(wanted).violation == ""
    monkeypatch.setattr(BUILD, "_read", broken)
    said = "reads what a path leaves unwritten: UIADD3 UR20, UP0, UR32, 0x2, URZ: UR32"
    assert matrix.build(wanted).violation == said
    assert asked == ["cuobjdump", "nvdisasm"]
