"""Routes and launch choices found by measurement: data, and how a call finds its line in it.

`tilewright tune` writes `<gpu>.json`; docs/tuning.md tells what stands there. A call takes the
times of the nearest buckets, carried over by the op's model. A GPU without a table gets no
decision, and the op's own rule speaks. Attention's forward has a file of its own, which it reads
itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from tilewright.gpu import Gpu
from tilewright.spec import Choice
from tilewright.tuned import file
from tilewright.tuned.file import Bucket, Device, Table, Unusable

STAY = 0.05  # an incumbent stays unless it is beaten by more: two runs differ more than two rounds
VARIABLE = "TILEWRIGHT_TUNED"  # a folder of tables that stand before those of the package

_forced: ContextVar[Choice | None] = ContextVar("tilewright_choice", default=None)


@dataclass(frozen=True)
class Decision:
    """What a table says of one call."""

    choice: Choice
    us: float
    bucket: Bucket
    others: tuple[tuple[Choice, float], ...]  # the quickest first
    device: str

    @property
    def best(self) -> dict[str, tuple[Choice, float]]:
        """The quickest of each backend and its microseconds; the chosen one comes first."""
        found: dict[str, tuple[Choice, float]] = {}
        for choice, us in ((self.choice, self.us), *self.others):
            found.setdefault(choice.backend, (choice, us))
        return found

    def against(self, backend: str) -> str | None:
        """Why not this backend; None if it is the one."""
        if backend == self.choice.backend:
            return None
        told = f"{self.choice.backend} is the choice of the table of {self.device}"
        its = f", not {self.best[backend][1]:.1f}" if backend in self.best else ""
        return f"{told}: {self.us:.1f} us{its}"


def decide(
    gpu: Gpu, op: str, place: tuple[str, Sequence[float]], expected: Mapping[Choice, float]
) -> Decision | None:
    """The quickest choice for a call, or None where no table knows.

    `place` is what `Tuning.place` says of the call; `expected` are its choices, in the order of
    ties, with what the model says of each. One that a near bucket refused is no candidate.
    """
    found = table(gpu, op)
    near = found.near(*place) if found else ()
    if found is None or not near:
        return None
    us = {}
    for choice, model in expected.items():
        times = [(weight, b.times[choice]) for weight, b in near if choice in b.times]
        if times and not any(choice in b.refused for _, b in near):
            us[choice] = model * file.beside_model(times)
    if not us:
        return None
    bucket = near[0][1]
    is_there = file.rounded(place[1]) == bucket.coordinates  # the file's own word
    chosen = first(us, found.noise, bucket.choice, STAY if is_there else found.noise)
    others = sorted((pair for pair in us.items() if pair[0] != chosen), key=lambda pair: pair[1])
    return Decision(chosen, us[chosen], bucket, tuple(others), found.device)


def first(
    us: Mapping[Choice, float], noise: float, incumbent: Choice | None = None, stay: float = STAY
) -> Choice:
    """The first of those that are as quick as the quickest, within the noise; or the incumbent, if
    it is not far behind."""
    best = min(us.values())
    if incumbent is not None and incumbent in us and us[incumbent] <= best * (1 + stay):
        return incumbent
    return next(choice for choice, time in us.items() if time <= best * (1 + noise))


def table(gpu: Gpu, op: str) -> Table | None:
    """What was measured for an op on such a GPU."""
    return tables(gpu).get(op)


def tables(gpu: Gpu) -> dict[str, Table]:
    """By op. Files are read once."""
    return _tables(gpu.short_name, Device.of(gpu))


@cache
def _tables(name: str, device: Device) -> dict[str, Table]:
    """A user's table stands before ours. What cannot be used is told once, and left out."""
    found: dict[str, Table] = {}
    mine = folder()
    places = [resources.files(__name__), *([mine] if mine is not None else [])]
    for path in (place.joinpath(f"{name}.json") for place in places):
        try:
            if path.is_file():
                found |= file.read(path.read_text("utf-8"), device)
        except (Unusable, OSError, UnicodeDecodeError) as e:
            why = str(e) if isinstance(e, Unusable) else f"cannot be read ({e})"
            warnings.warn(
                f"tilewright: {path} {why}. It is ignored; `tilewright tune` makes a new one.",
                stacklevel=2,
            )
    return found


@cache
def folder() -> Path | None:
    """The folder that TILEWRIGHT_TUNED names, read once, at the first call that must choose."""
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        warnings.warn(f"tilewright: {VARIABLE} is {named}, which is no folder.", stacklevel=2)
    return Path(named) if named else None


def forced() -> Choice | None:
    """What `tune` measures now: an implementation that is prepared meanwhile takes its launch."""
    return _forced.get()


@contextmanager
def forcing(choice: Choice) -> Iterator[None]:
    """Calls that are prepared inside take this choice. Plans that `library` keeps know nothing of
    it, so only `dispatch.prepare` may be called inside."""
    token = _forced.set(choice)
    try:
        yield
    finally:
        _forced.reset(token)


def reset() -> None:
    """Forget what was read (for tests)."""
    folder.cache_clear()
    _tables.cache_clear()
