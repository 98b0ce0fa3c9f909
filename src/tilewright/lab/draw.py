"""Choose the pieces of work that a run does: the same for one key, others for the next commit.

Each op has a share of the whole, in seconds. Its pieces are taken in an order that the key
shuffles, as far as the share goes. So every piece has its turn within some commits, and a larger
budget takes what a smaller one takes, and more.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tilewright.errors import InputError

Item = TypeVar("Item")

ALIKE = 1 / 3  # the part of a whole that is due to all shares alike


@dataclass(frozen=True)
class Piece(Generic[Item]):
    """Something that can be run by itself, and about how long it takes."""

    item: Item
    share: Hashable  # whose share it is taken from: an op's name
    name: str  # unique among the pieces of a run
    seconds: float
    measured: bool = True  # whether the seconds are of this op, or a guess from others


def key(root: Path | None = None) -> str:
    """Return the commit that is checked out, or the version where there is no checkout."""
    from tilewright import __version__

    root, git = root or Path(__file__).parents[3], shutil.which("git")
    if git is not None and (root / ".git").exists():
        command = [git, "-C", str(root), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip()
    return __version__


def draw(
    pieces: Iterable[Piece[Item]], whole: float, key: str, command: str, *, least: bool = True
) -> list[Piece[Item]]:
    """Return the pieces whose turn it is, `whole` seconds of them, in their own order.

    The share that has used least of what is its due takes the next piece, until the whole is used
    up. A third of the whole is due to all shares alike, the rest in proportion to how long all of
    their pieces take: a small op is seen in full more often, a large one is not starved. Of the
    rest a share that was never measured gets nothing.

    A whole that is too small for one piece of each share is an error, unless `least` is False.
    """
    given = list(pieces)
    queues = _queues(given, key)
    due = _due(queues)
    needed = sum(queue[-1].seconds for queue in queues.values())
    if least and needed > whole:
        raise InputError(
            f"{command}: the budget is {whole:g} s; it must be at least {needed:.1f} s, a case of "
            f"each of {len(queues)} ops. Give more seconds, name fewer ops, or use --full."
        )
    used = dict.fromkeys(queues, 0.0)
    taken: set[str] = set()
    left = whole
    while queues and left > 0:
        first = min(queues, key=lambda share: (used[share] > 0, used[share] / due[share]))
        piece = queues[first].pop()
        taken.add(piece.name)
        used[first] += piece.seconds
        left -= piece.seconds
        if not queues[first]:
            del queues[first]
    return [piece for piece in given if piece.name in taken]


def _queues(pieces: Sequence[Piece[Item]], key: str) -> dict[Hashable, list[Piece[Item]]]:
    """Return each share's pieces in the key's order; the last is the first to be taken."""
    queues: dict[Hashable, list[Piece[Item]]] = {}
    for piece in sorted(pieces, key=lambda p: rank(key, p.name)):
        queues.setdefault(piece.share, []).append(piece)
    return dict(sorted(queues.items(), key=lambda pair: rank(key, str(pair[0]))))


def _due(queues: dict[Hashable, list[Piece[Item]]]) -> dict[Hashable, float]:
    long = {s: sum(p.seconds for p in queue if p.measured) for s, queue in queues.items()}
    total = sum(long.values()) or 1.0
    return {share: ALIKE / len(queues) + (1 - ALIKE) * of / total for share, of in long.items()}


def rank(key: str, name: str) -> bytes:
    """Return a number, as bytes, that mixes a key and a name."""
    return hashlib.sha256(f"{key}\0{name}".encode()).digest()
