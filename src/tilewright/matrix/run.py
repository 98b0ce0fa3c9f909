"""Which binaries to compile now, and compiling them on every core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from tilewright.lab import costs, workers
from tilewright.lab.draw import Piece, draw
from tilewright.matrix.build import Built, build, facts_of
from tilewright.matrix.ledger import Ledger
from tilewright.matrix.reach import Wanted
from tilewright.ops import registry

LIMIT = 600.0  # seconds after which a compiler hangs
LOST = "no result: "  # of a binary whose compiler hung or was ended

_wanted: list[Wanted] = []  # inherited by forked workers: kernels do not pickle


class Selection:
    """What is compiled now, what the ledger knows, and what is left to another run."""

    def __init__(self, now: list[Wanted], known: list[Built], left: list[Wanted]) -> None:
        self.now, self.known, self.left = now, known, left
        self.seconds = sum(seconds_of(wanted) for wanted in now)


def select(
    wanted: Sequence[Wanted],
    ledger: Ledger,
    whole: float | None,
    key: str,
    *,
    least: bool = False,
) -> Selection:
    """Choose what to compile: everything without a whole, else what is drawn from so many seconds.

    What the ledger does not know comes first. What is left of the whole goes to results that it
    does know, so that a stale or doctored ledger shows. With `least`, a whole that is too small for
    one new binary of each op is an error.
    """
    keyed = [(w, ledger.known.get(w.key)) for w in wanted]
    if whole is None:
        return Selection([w for w, _ in keyed], [], [])
    new = _drawn([w for w, entry in keyed if entry is None], whole, key, least)
    spent = sum(seconds_of(w) for w in new)
    again = _drawn([w for w, entry in keyed if entry is not None], whole - spent, key, False)
    now = {w.key for w in (*new, *again)}
    known = [entry for w, entry in keyed if entry is not None and w.key not in now]
    left = [w for w, entry in keyed if entry is None and w.key not in now]
    return Selection([w for w, _ in keyed if w.key in now], known, left)


def _drawn(wanted: Sequence[Wanted], whole: float, key: str, least: bool) -> list[Wanted]:
    if not wanted or (whole <= 0 and not least):
        return []
    pieces = [Piece(w, public_of(w.op), w.key, seconds_of(w)) for w in wanted]
    return [piece.item for piece in draw(pieces, whole, key, "compile", least=least)]


@cache
def public_of(name: str) -> str:
    """Return the public op of which this is a part: a backward, or one that writes in place."""
    for op in registry().values():
        parts = (op, op.in_place, op.autograd.op if op.autograd else None)
        if any(part is not None and part.name == name for part in parts):
            return op.name
    return name


def seconds_of(one: Wanted | Built) -> float:
    """Return about how long a binary takes to compile."""
    return costs.estimate("compile", f"{one.op} {one.backend}", str(one.sm)).seconds


def run(
    wanted: Sequence[Wanted],
    count: int | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[Built]:
    """Compile all of `wanted`, in any order."""
    count = count or os.cpu_count() or 1
    if "fork" not in multiprocessing.get_all_start_methods():
        for one in wanted:
            yield build(one)
            beat()
        return
    _wanted[:] = wanted
    # what takes longest begins first, so that no core waits for another at the end
    order = sorted(range(len(wanted)), key=lambda i: -seconds_of(wanted[i]))
    for report in workers.run(order, _build_nth, count, limit=LIMIT, beat=beat):
        if report.state == "done":
            yield report.value
        else:
            yield Built(**facts_of(wanted[report.task]), violation=f"{LOST}{report.value}")


def _build_nth(index: int, say: Any) -> Built:
    return build(_wanted[index])
