"""Options in company: a list of calls in which every two levels of an op's features meet.

Bugs of an op with many options lie between two of them far more often than in one or in five. A
cover by pairs takes a few dozen calls where all combinations would take millions; on a GPU every
three levels meet. A backend that refuses most of these calls declares the levels that it serves,
and has a cover of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilewright.ops import registry
from tilewright.spec import FLOATS, Features

Levels = dict[str, str]  # factor -> level
Meeting = frozenset[tuple[str, str]]

DTYPE = "dtype"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
STRENGTH = {"cpu": 2, "cuda": 3}


def cover(factors: Mapping[str, Sequence[str]], strength: int) -> list[Levels]:
    """Calls in which every `strength` levels of different factors meet; always the same ones.

    Greedy: a call starts from levels that have not met, then each factor takes the level that
    brings most new meetings.
    """
    missing: dict[Meeting, None] = {}
    for chosen in itertools.combinations(factors, strength):
        for levels in itertools.product(*(factors[name] for name in chosen)):
            missing[frozenset(zip(chosen, levels, strict=True))] = None
    calls = []
    while missing:
        call: Levels = dict(next(iter(missing)))
        for name in sorted(factors, key=lambda n: -len(factors[n])):
            if name not in call:
                call[name] = max(
                    factors[name], key=lambda level: len(_met({**call, name: level}, missing))
                )
        for meeting in _met(call, missing):
            del missing[meeting]
        calls.append({name: call[name] for name in factors})
    return calls


def _met(call: Levels, missing: Mapping[Meeting, None]) -> list[Meeting]:
    pairs = call.items()
    return [meeting for meeting in missing if meeting <= pairs]


def declared(op: str, device: str, backend: str = "") -> Features:
    """The features of an op, or those that a backend says it serves, and the dtypes."""
    found, named = registry()[op].features, registry()[op].backend(backend)
    dtypes: Sequence[Any] = FLOATS
    if named is not None and named.features is not None:
        found, dtypes = named.features, named.dtypes or FLOATS
    if found is None:
        return {}
    taken = {name: {DTYPE: dtype} for name, dtype in DTYPES.items() if dtype in dtypes}
    return {**found(device == "cuda"), DTYPE: taken}


@lru_cache(maxsize=8)
def calls(op: str, device: str, backend: str = "") -> tuple[tuple[str, dict[str, Any], Any], ...]:
    """(levels as text, dims, dtype) of each call of an op's cover, or of a backend's."""
    factors, found = declared(op, device, backend), []
    for levels in cover({name: list(of) for name, of in factors.items()}, STRENGTH[device]):
        dims: dict[str, Any] = {}
        for name, levels_of in factors.items():
            dims |= levels_of[levels[name]]
        dtype = dims.pop(DTYPE)
        found.append((as_text(levels), dims, dtype))
    return tuple(found)


def as_text(levels: Levels) -> str:
    return "; ".join(f"{name}: {level}" for name, level in levels.items())


def from_text(text: str) -> Levels:
    return dict(part.split(": ", 1) for part in text.split("; "))
