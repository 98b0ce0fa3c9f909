"""What a run leaves behind: a file of JSON lines, one object a line, told apart by `kind`.

    {"kind": "run", "schema": 1, "environment": {...}, "settings": {...}, "machine": {...}}
    {"kind": "roof", "name": "bandwidth 1:1", ...}   what this GPU reached in this run
    {"kind": "row", "op": "softmax", ...}            one contender of one case
    {"kind": "end", "seconds": 71.3, "complete": true, "machine": {...}}

A line is written whole when its case is finished, so that whatever ends a run leaves what it
measured. Every field of a row is described here, and docs/records.md is held to it by a test.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tilewright.errors import InputError

SCHEMA = 1
MOST = 1e30  # no time, count or rate is above this
WHOLE_CASE = "all"  # the contender of a row that says why a case could not be measured
WAYS = ("cold", "graph", "sustained", "host", "cpu")  # of timing; each is a field of a row
STATES = ("ok", "refused", "unavailable")


@dataclass(frozen=True)
class Stats:
    """One way of timing, in microseconds: over `n` samples of two passes."""

    median: float
    p20: float
    p80: float
    n: int
    passes: tuple[float, ...] = ()  # the median of each pass

    @property
    def spread(self) -> float:
        """How far the passes' medians lie apart, as a part of the smaller."""
        return max(self.passes) / min(self.passes) - 1 if len(self.passes) > 1 else 0.0


@dataclass(frozen=True)
class Roof:
    """What this GPU reached in this run, whatever the op."""

    name: str  # "bandwidth read", "bandwidth 1:1", ...; "mma bf16", ...; "empty launch, graph"
    unit: str  # "GB/s", "TFLOP/s" or "us"
    value: float
    datasheet: float | None = None  # the same by the datasheet, where it has one
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One contender of one case."""

    op: str  # the op, or the yardstick
    case: str  # the case's name in the declaration, or the text of --shape
    dims: Mapping[str, Any]  # what the case is made of
    dtype: str  # of the first tensor
    phase: str  # "forward" or "backward"
    contender: str  # "triton", "cuda", ... are ours; "eager", "compile", "vendor", "liger", ...
    ours: bool  # a kernel of this package
    state: str  # "ok", "refused" (measured or not, it gets no number), "unavailable"
    reason: str = ""  # why it is not "ok"
    flags: tuple[str, ...] = ()  # what to know before believing the number
    automatic: bool = False  # what a call takes that names no backend
    ran: str = ""  # the backend whose kernels were really launched
    kernels: tuple[str, ...] = ()  # what one call launches, read off a captured CUDA graph
    bytes_read: int = 0  # counted from the tensors: each input once
    bytes_written: int = 0  # and each output once
    flops: float = 0.0  # by the declaration
    unit: str = "fp32"  # what the flops run on
    method: str = ""  # which of the device times `us` is: "graph", "sustained" or "cold"
    us: float | None = None  # device time of one call
    gbps: float | None = None  # (bytes_read + bytes_written) / us
    tflops: float | None = None  # flops / us
    roof_us: float | None = None  # the floor: the slowest of launch, bandwidth and compute
    roof: str = ""  # which roof that is: "copy 1:1 at this size", "mma bf16", "empty launch"
    of_roof: float | None = None  # roof_us / us
    of_peak: float | None = None  # the larger part of the datasheet's two peaks, bytes and flops
    bound: str = ""  # "launch", "bandwidth" or "compute"
    error: float | None = None  # worst error over its tolerance, before and after timing
    largest_error: float | None = None  # the largest absolute one, likewise
    cold: Stats | None = None  # CUDA events around one call, L2 flushed by reading
    graph: Stats | None = None  # CUDA graph of many calls, each on its own tensors
    sustained: Stats | None = None  # as cold, contenders among themselves, under load
    host: Stats | None = None  # wall time of one call in a queue of calls, kernels awaited
    cpu: Stats | None = None  # until the call returns, kernels not awaited
    samples: tuple[float, ...] = ()  # the device times behind `us`, first pass then second

    @property
    def case_key(self) -> tuple[str, ...]:
        """What must be equal for two rows to be contenders of the same case."""
        dims = json.dumps(self.dims, sort_keys=True)
        return self.op, self.case, dims, self.dtype, self.phase

    @property
    def key(self) -> tuple[str, ...]:
        """What must be equal for two rows of two runs to be the same measurement."""
        return (*self.case_key, self.contender)

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass
class Record:
    """A run, read back."""

    path: Path
    run: dict[str, Any]
    roofs: list[Roof] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    end: dict[str, Any] | None = None  # None: the run was cut short

    @property
    def cut_short(self) -> bool:
        return self.end is None or not self.end.get("complete", True)

    @property
    def gpu(self) -> str:
        return str(self.run["environment"].get("gpu"))


class Writer:
    """Appends to a record, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, facts: Mapping[str, Any]) -> None:
        self._append([{"kind": kind, **facts}])

    def rows(self, rows: Iterable[Row]) -> None:
        """All rows of a case at once: half a case would be taken for a whole one."""
        self._append([{"kind": "row", **asdict(row)} for row in rows])

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def read(path: Path | str) -> Record:
    """The record at `path`, or in the folder `path` the newest one."""
    path = newest(Path(path))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"record: {path} cannot be read ({e}). Name a record file.") from e
    if lines[-1] != "":
        raise _damaged(path, len(lines), "is cut off")
    record: Record | None = None
    for number, line in enumerate(lines[:-1], 1):
        try:
            facts = json.loads(line)
            kind = facts.pop("kind")
            if kind == "run":
                if facts["schema"] != SCHEMA:
                    raise InputError(
                        f"record: {path} has schema {facts['schema']}; this version reads "
                        f"{SCHEMA}. Use the tilewright that wrote it."
                    )
                facts["environment"]["gpu"]  # every reader needs it: a KeyError here is damage
                _blocks(facts, "environment", "settings", "machine", "rivals")
                record = record or Record(path, facts)
                if record.gpu != str(facts["environment"]["gpu"]):
                    raise _damaged(path, number, "is of another GPU than the first")
                record.roofs = []  # a run that was resumed measured them again
            elif record is None:
                raise _damaged(path, number, "comes before the line of the run")
            elif kind == "roof":
                _typed(facts, Roof)
                if not facts["value"]:
                    raise ValueError("a roof of nothing")
                record.roofs.append(Roof(**facts))
            elif kind == "row":
                record.rows.append(_row(facts))
            elif kind == "end":
                _blocks(facts, "machine")
                record.end = facts
            else:
                raise _damaged(path, number, f"is of an unknown kind, {kind!r}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            if isinstance(e, InputError):
                raise
            raise _damaged(path, number, "is no line of a record") from e
    if record is None:
        raise InputError(f"record: {path} is empty. Name a file that `tilewright bench` wrote.")
    record.rows = _settled(record.rows)
    return record


def _settled(rows: Sequence[Row]) -> list[Row]:
    """Without the failures of cases that were measured later, when the run was resumed."""
    measured = {row.case_key for row in rows if row.contender != WHOLE_CASE}
    return [row for row in rows if row.contender != WHOLE_CASE or row.case_key not in measured]


def newest(path: Path) -> Path:
    """The record itself, or the newest one in a folder."""
    if not path.exists():
        raise InputError(f"record: {path} does not exist. Name a record file or its folder.")
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.jsonl"), key=lambda p: (p.stat().st_mtime, p.name))
    if not found:
        raise InputError(f"record: {path} holds no .jsonl file. `tilewright bench` writes one.")
    return found[-1]


def _damaged(path: Path, number: int, what: str) -> InputError:
    return InputError(
        f"record: line {number} of {path} {what}. Delete that line, or measure again."
    )


KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("str",), (str,)),
    **dict.fromkeys(("int", "float", "float | None"), (int, float)),
    **dict.fromkeys(("bool",), (bool,)),
    **dict.fromkeys(("tuple[str, ...]", "tuple[float, ...]"), (list, tuple)),
    **dict.fromkeys(("Mapping[str, Any]", "Stats | None"), (dict,)),
}


def _blocks(facts: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(facts.get(name, {}), dict):
            raise TypeError(f"{name} is {facts[name]!r}")


def _typed(facts: Mapping[str, Any], of: type) -> None:
    """A record may have been edited by hand: what is no number must not be taken for one."""
    for field_ in fields(of):
        kind, value = str(field_.type), facts.get(field_.name)
        if value is None and ("None" in kind or field_.name not in facts):
            continue
        if not isinstance(value, KINDS[kind]) or (kind != "bool" and isinstance(value, bool)):
            raise TypeError(f"{field_.name} is {value!r}")
        alone = "float" in kind or kind == "int"
        numbers: Any = value if kind == "tuple[float, ...]" else [value] if alone else []
        for number in numbers:
            if not isinstance(number, (int, float)) or not 0 <= number <= MOST:
                raise ValueError(f"{field_.name} holds {number!r}")
        words: Any = value if kind == "tuple[str, ...]" else ()
        if not all(isinstance(word, str) for word in words):
            raise TypeError(f"{field_.name} holds {value!r}")


def _row(facts: dict[str, Any]) -> Row:
    _typed(facts, Row)
    for name in WAYS:
        if facts.get(name):
            _typed(facts[name], Stats)
            facts[name] = Stats(**{**facts[name], "passes": tuple(facts[name].get("passes", ()))})
    for name in ("flags", "kernels", "samples"):
        facts[name] = tuple(facts.get(name, ()))
    if facts["state"] not in STATES:
        raise ValueError(facts["state"])
    return Row(**facts)


def _plain(value: Any) -> Any:
    """What JSON can hold: no infinity, no dtype, no more digits than a clock has."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)
