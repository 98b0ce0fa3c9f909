"""How each family of ops fares against the fastest rival of each case: wins, losses, the worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from tilewright.bench.contest import Contest, grouped, time_of, verdict
from tilewright.ops import registry

FAMILIES = {
    "attention": ("attention",),
    "matrix products": ("matmul",),
    "norms": ("layer_norm", "rms_norm", "add_rms_norm", "rms_norm_swiglu"),
    "norms to fp8": ("layer_norm_fp8", "rms_norm_fp8"),
    "gated activations": ("swiglu", "swiglu_packed", "geglu", "geglu_packed"),
    "rotary embedding": ("rope",),
    "softmax": ("softmax",),
}


@dataclass(frozen=True)
class Standing:
    """One family over all of its judged cases."""

    family: str
    ratios: Sequence[float]  # the fastest rival's time over ours, case by case
    faster: int
    level: int
    slower: int
    worst: Contest  # the case with the least ratio

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def least(self) -> float:
        return min(self.ratios)


def family_of(op: str) -> str:
    """Return an op's family; an op of no family is one by itself."""
    return next((family for family, ops in FAMILIES.items() if op in ops), op)


def standings(cases: Iterable[Contest]) -> list[Standing]:
    """Return a line for each family that has a case with a speed-up, in the families' order."""
    judged = [case for case in cases if is_judged(case)]
    found = []
    for (family,), its in grouped(judged, lambda case: (family_of(case.first.op),)).items():
        ratios = [ratio(case) for case in its]
        outcomes = Counter(map(verdict, ratios))
        faster, level, slower = (outcomes[one] for one in ("faster", "level", "slower"))
        found.append(Standing(family, ratios, faster, level, slower, min(its, key=ratio)))
    order = list(FAMILIES)
    return sorted(found, key=lambda one: (*order, one.family).index(one.family))


def is_judged(case: Contest) -> bool:
    """Whether a case counts: its field is whole, or its rivals are the vendor's kernels by name.

    Nobody writes attention's formula out: records of its forward hold cuDNN's kernels and peers'.
    """
    op = registry().get(case.first.op)
    by_name = op is not None and op.vendor_is_eager
    return bool(case.outcome or (by_name and case.best and case.best_rival))


def ratio(case: Contest) -> float:
    """Return the fastest rival's time over ours, of a case that is judged."""
    best, rival = case.best, case.best_rival
    assert best is not None
    assert rival is not None
    return time_of(rival) / time_of(best)
