"""Uniform registers that machine code reads though a path to there does not write them.

No compiler reports it. ptxas was seen to compute the descriptor of a product before one loop alone
and to read it in the next one, which may come first: the PTX was right, the results were not
(docs/decisions/012-attention-on-hopper.md). A register counts as written on a path if an
instruction writes it there, under a condition or not: what is found is a fault, not a suspicion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LINE = re.compile(r"^\.(?P<label>L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?);")
CONDITION = re.compile(r"^@!?U?P\w+\s+")
WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")  # if their first operand is uniform
BULK = ("UTMA", "UBLK")  # read several registers from one on: left out


@dataclass
class _Instruction:
    text: str
    writes: int  # a bit for each uniform register
    reads: int
    next: list[int]  # numbers of instructions


def unwritten(disassembly: str) -> list[str]:
    """What reads such a register, with its name; of one kernel, as nvdisasm prints it."""
    code = _parsed(disassembly)
    if not code:
        return []
    written: list[int | None] = [0, *[None] * (len(code) - 1)]  # on every path to an instruction
    left = [0]
    while left:
        here = left.pop()
        after = (written[here] or 0) | code[here].writes
        for there in code[here].next:
            before = written[there]
            met = after if before is None else before & after
            if met != before:
                written[there] = met
                left.append(there)
    return [
        f"{one.text}: UR{register}"
        for one, before in zip(code, written, strict=True)
        if before is not None
        for register in _numbers(one.reads & ~before)
    ]


def _parsed(disassembly: str) -> list[_Instruction]:
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if match := LINE.match(line):
            if match["label"]:
                labels[match["label"]] = len(found)
            else:
                found.append((match["text"].strip(), line))
    code = []
    for number, (text, line) in enumerate(found):
        writes, reads = _registers(CONDITION.sub("", text))
        places = [labels[name] for name in re.findall(r"\.(L_x_\d+)", line) if name in labels]
        places += [number + 1] if _goes_on(text) else []
        code.append(_Instruction(text, writes, reads, [n for n in places if n < len(found)]))
    return code


def _goes_on(text: str) -> bool:
    """Whether the next instruction may follow this one."""
    plain = CONDITION.sub("", text)
    may_leave = re.match(r"(BRA|BRX|EXIT|RET)\b", plain)
    return not may_leave or plain != text or bool(re.match(r"BRA\S*\s+!?U?P\d", plain))


def _registers(text: str) -> tuple[int, int]:
    """(written, read) by an instruction without its condition."""
    name, _, rest = text.partition(" ")
    if name.startswith("HGMMA"):  # descriptors of both factors, of which the first may be registers
        _, first, *_ = rest.split(",")
        start = int(re.findall(r"gdesc\[UR(\d+)\]", rest)[0])
        return 0, _bits(range(start + 2 if first.strip().startswith("R") else start, start + 4))
    if name.startswith(BULK):
        return 0, 0
    first, _, others = rest.partition(",")
    pairs = ".64" in name
    if name.startswith(WRITERS) and (result := re.fullmatch(r"UR(\d+)", first.strip())):
        start = int(result[1])
        wide = pairs or ".WIDE" in name
        return _bits(range(start, start + 1 + wide)), _bits(_named(others, pairs))
    return 0, _bits(_named(rest, False))


def _named(operands: str, pairs: bool) -> Iterator[int]:
    for number in map(int, re.findall(r"\bUR(\d+)\b", operands)):
        yield from (number, number + 1) if pairs else (number,)


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


def _numbers(bits: int) -> Iterator[int]:
    return (n for n in range(bits.bit_length()) if bits >> n & 1)
