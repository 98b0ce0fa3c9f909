"""The file that `tilewright tune` writes, read and written in one place; see docs/tuning.md.

A file that is not whole, or not of the GPU that asks, is `Unusable`: a table is a matter of speed,
and no reason for a call to fail.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilewright.gpu import Gpu
from tilewright.spec import Choice

FORMAT = 1
NEAR = 8  # buckets whose times are carried over to a call
TINY = 1e-6


class Unusable(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


class Elsewhere(Unusable):
    """It is a whole table of another GPU."""


class Device(NamedTuple):
    """A GPU as a file names it. A partition may carry the name of the whole: SMs are counted."""

    name: str
    sm: int
    sm_count: int

    @staticmethod
    def of(gpu: Gpu) -> Device:
        return Device(gpu.name, gpu.sm, gpu.sm_count)

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.sm}, {self.sm_count} SMs)"


class Timed(NamedTuple):
    """Microseconds of one choice at a bucket."""

    us: float  # measured
    expected: float  # by the op's model


def rounded(coordinates: Sequence[float]) -> tuple[float, ...]:
    """As the file has them."""
    return tuple(float(f"{x:.6g}") for x in coordinates)


@dataclass(frozen=True)
class Bucket:
    """One call of the grid: what was measured there, and who won."""

    dims: str
    dtype: str
    kind: str
    coordinates: tuple[float, ...]
    choice: Choice | None  # None: nobody was admitted
    times: Mapping[Choice, Timed]  # of those whose results were right, in the order of ties
    refused: Mapping[Choice, str] = field(default_factory=dict)  # and of the others why

    @property
    def key(self) -> tuple[str, tuple[float, ...]]:
        return self.kind, self.coordinates


@dataclass(frozen=True)
class Table:
    """All buckets of an op on one GPU."""

    device: str
    noise: float  # times closer than this part of each other are equal
    versions: Mapping[str, str]
    source: str  # a digest of the kernels that were measured
    buckets: Sequence[Bucket]

    def near(self, kind: str, coordinates: Sequence[float]) -> list[tuple[float, Bucket]]:
        """The nearest of the same kind, with what each counts: the nearer, the more. Among equally
        near ones the first in the file; a bucket at the very place stands alone."""
        same = [
            (math.dist(b.coordinates, coordinates), b)
            for b in self.buckets
            if b.kind == kind and len(b.coordinates) == len(coordinates)
        ]
        same = sorted(same, key=lambda pair: pair[0])[:NEAR]
        if same and same[0][1].coordinates == rounded(coordinates):
            return [(1.0, same[0][1])]
        return [(max(distance, TINY) ** -2, bucket) for distance, bucket in same]


def beside_model(times: Sequence[tuple[float, Timed]]) -> float:
    """What was measured over what the model says, of several buckets with their weights."""
    ratios = (weight * math.log(timed.us / timed.expected) for weight, timed in times)
    return math.exp(sum(ratios) / sum(weight for weight, _ in times))


def read(text: str, device: Device) -> dict[str, Table]:
    """The tables of a file by op; raises Unusable."""
    if not text.strip():
        raise Unusable("is empty")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise Unusable("is no whole JSON; it may have been cut off") from e
    if not isinstance(facts, dict) or "format" not in facts:
        raise Unusable("is no table of tilewright")
    if facts["format"] != FORMAT:
        raise Unusable(f"has format {facts['format']!r}, and this version reads {FORMAT}")
    if facts.get("proof") != proof(facts):
        raise Unusable("does not fit its proof: it was changed after it was measured")
    try:
        measured_on = Device(**facts["device"])
        found = {name: _table(measured_on, one) for name, one in facts["ops"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise Unusable("is no table of tilewright") from e
    if measured_on != device:
        raise Elsewhere(f"is of another GPU, {measured_on}, and this is {device}")
    return found


def text(device: Device, tables: Mapping[str, Table]) -> str:
    """The file, with a line for each bucket, so that a diff shows what changed."""
    ops = {name: _plain(table) for name, table in sorted(tables.items())}
    facts = {"format": FORMAT, "device": device._asdict(), "ops": ops}
    blocks = []
    for name, op in ops.items():
        head = [f"   {json.dumps(key)}: {json.dumps(op[key])}," for key in op if key != "buckets"]
        rows = ",\n".join(f"    {json.dumps(bucket)}" for bucket in op["buckets"])
        lines = [f"  {json.dumps(name)}: {{", *head, '   "buckets": [', rows, "   ]", "  }"]
        blocks.append("\n".join(lines))
    lines = [
        "{",
        f' "format": {FORMAT},',
        f' "device": {json.dumps(device._asdict())},',
        ' "ops": {',
        ",\n".join(blocks),
        " },",
        f' "proof": {json.dumps(proof(facts))}',
        "}",
    ]
    return "\n".join(lines) + "\n"


def proof(facts: Mapping[str, Any]) -> str:
    """A digest of all that a file says but this."""
    rest = {name: value for name, value in facts.items() if name != "proof"}
    plain = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def _plain(table: Table) -> dict[str, Any]:
    return {
        "noise": table.noise,
        "versions": dict(sorted(table.versions.items())),
        "source": table.source,
        "buckets": [
            {
                "dims": bucket.dims,
                "dtype": bucket.dtype,
                "kind": bucket.kind,
                "coordinates": list(bucket.coordinates),
                "choice": None if bucket.choice is None else str(bucket.choice),
                "times": {str(choice): list(timed) for choice, timed in bucket.times.items()},
                "refused": {str(choice): why for choice, why in bucket.refused.items()},
            }
            for bucket in table.buckets
        ],
    }


def _table(device: Device, op: Mapping[str, Any]) -> Table:
    return Table(
        device=device.name,
        noise=_positive(op["noise"]),
        versions=dict(op["versions"]),
        source=op["source"],
        buckets=tuple(_bucket(bucket) for bucket in op["buckets"]),
    )


def _bucket(facts: Mapping[str, Any]) -> Bucket:
    times = {
        Choice.of(choice): Timed(_positive(us), _positive(expected))
        for choice, (us, expected) in facts["times"].items()
    }
    choice = None if facts["choice"] is None else Choice.of(facts["choice"])
    if (choice is None) != (not times) or (times and choice not in times):
        raise ValueError(f"{choice} was not measured")
    return Bucket(
        facts["dims"],
        facts["dtype"],
        facts["kind"],
        tuple(float(x) for x in facts["coordinates"]),
        choice,
        times,
        {Choice.of(choice): why for choice, why in facts["refused"].items()},
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(value)
    return number
