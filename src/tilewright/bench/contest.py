"""The contenders of one case side by side: who is fastest, and whether anybody may say so.

Tables, pictures and the report read a case through this. A speed-up needs the whole field: eager,
compile and vendor with a number each; of these only a vendor's kernel may not exist. Where eager
and compiled programs call the vendor's kernel themselves (attention), it is the whole field.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tilewright.bench.record import WAYS, Row, Stats
from tilewright.bench.rivals import ALWAYS
from tilewright.ops import registry

T = TypeVar("T")

LEVEL = 0.02  # two times closer than this are the same
NO_NUMBER = "\N{EN DASH}"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Contest:
    """The contenders of one case, by name."""

    rows: Mapping[str, Row]

    @property
    def entered(self) -> bool:
        """Whether anything of ours takes part: a yardstick is a case without."""
        return any(row.ours for row in self.rows.values())

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))

    @property
    def best(self) -> Row | None:
        """What a user gets who names no backend; the fastest of ours if that was not asked for."""
        ours = [row for row in self.rows.values() if row.ours]
        return _fastest([row for row in ours if row.automatic] or ours)

    @property
    def best_rival(self) -> Row | None:
        return _fastest(row for row in self.rows.values() if not row.ours)

    @property
    def barred(self) -> str:
        """Why no speed-up may be shown, or nothing. A weak field makes a fast winner."""
        if self.best is None:
            taken = [row for row in self.rows.values() if row.automatic and row.reason]
            why = f": {taken[0].contender}, which a call takes, {taken[0].reason}" if taken else ""
            return f"none of ours may be judged{why}"
        for name in self._field:
            row = self.rows.get(name)
            if row is None:
                return f"{name} was not measured"
            if has_number(row) or (name == "vendor" and row.state == "unavailable" and row.reason):
                continue
            why = row.reason or "; ".join(row.flags) or "nothing says why"
            return f"{name} has no number: {why}"
        if self.best_rival is None:
            return "no rival has a number"
        return ""

    @property
    def _field(self) -> tuple[str, ...]:
        """Who must have a number."""
        op, vendor = registry().get(self.first.op), self.rows.get("vendor")
        if op is not None and op.vendor_is_eager and vendor is not None and has_number(vendor):
            return ("vendor",)
        return ALWAYS

    def speedup(self, rival: str) -> float | None:
        """The rival's time over ours; None where it may not be shown."""
        row, best = self.rows.get(rival), self.best
        if self.barred or row is None or best is None or not has_number(row):
            return None
        return time_of(row) / time_of(best)

    @property
    def outcome(self) -> str:
        """ "faster", "level" or "slower" than the fastest rival; "" where nobody may say."""
        best, rival = self.best, self.best_rival
        if self.barred or best is None or rival is None:
            return ""
        return verdict(time_of(rival) / time_of(best))


def contests(rows: Iterable[Row]) -> list[Contest]:
    """Rows by case, in the order in which cases appear."""
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row.case_key][row.contender] = row
    return [Contest(by_name) for by_name in found.values()]


def grouped(
    items: Iterable[T], key: Callable[[T], tuple[str, ...]]
) -> dict[tuple[str, ...], list[T]]:
    """Items by key, in the order in which keys appear."""
    found: dict[tuple[str, ...], list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def verdict(speedup: float) -> str:
    if speedup > 1 + LEVEL:
        return "faster"
    return "slower" if speedup < 1 - LEVEL else "level"


def has_number(row: Row) -> bool:
    return row.state == "ok" and bool(row.us)


def time_of(row: Row) -> float:
    assert row.us is not None
    return row.us


def device_stats(row: Row) -> Stats | None:
    """The statistics behind `us`."""
    return getattr(row, row.method) if row.method in WAYS else None


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(filter(has_number, rows), key=time_of, default=None)


def size(count: float) -> str:
    """Bytes as people say them: 512 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def micros(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:#.3g}".rstrip(".")


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def where(row: Row) -> str:
    return f"{row.op} {row.case} {SHORT.get(row.dtype, row.dtype)} {row.phase}"
