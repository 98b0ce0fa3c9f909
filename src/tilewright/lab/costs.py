"""About how long each piece of work takes: what budgets are drawn by, from measured runs.

`seconds.json` holds, for each table and kind of work, the mean over its pieces, and the pieces that
take much longer or shorter than that. scripts/measure_costs.py measures them.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("seconds.json")
UNKNOWN = 1.0  # seconds of a piece of a kind that no op has


class Estimate(NamedTuple):
    seconds: float
    measured: bool  # whether it is of this very kind of work


def estimate(table: str, kind: str, part: str = "") -> Estimate:
    """Return how long a piece takes.

    A kind that was never measured counts as the slowest of those that end in the same word: the
    budget holds for a new op too.
    """
    known = _tables().get(table, {})
    if kind in known:
        parts = known[kind]
        return Estimate(parts.get(part, parts[""]), True)
    return Estimate(_slowest(table, kind.rpartition(" ")[2]), False)


@lru_cache(maxsize=256)
def _slowest(table: str, last: str) -> float:
    alike = [
        parts[""]
        for kind, parts in _tables().get(table, {}).items()
        if kind.rpartition(" ")[2] == last
    ]
    return max(alike, default=UNKNOWN)


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
