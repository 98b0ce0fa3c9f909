"""The compile matrix: every kernel a launcher can ask for, compiled for every SM without a GPU."""

from tilewright.matrix.build import Built, build
from tilewright.matrix.ledger import Ledger
from tilewright.matrix.reach import SMS, Wanted, known_ops, of_cases, reachable
from tilewright.matrix.run import Selection, run, seconds_of, select

__all__ = [
    "SMS",
    "Built",
    "Ledger",
    "Selection",
    "Wanted",
    "build",
    "known_ops",
    "of_cases",
    "reachable",
    "run",
    "seconds_of",
    "select",
]
