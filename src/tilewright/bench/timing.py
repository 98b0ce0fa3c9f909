"""The order of measuring and what is made of the samples. No GPU in here.

All contenders of a case are measured interleaved, in an order that rotates from round to round, so
that drift, power limits and whoever ran before hit all alike. Every way of timing is done in two
passes with other work between; a contender whose passes disagree is noisy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tilewright.bench.record import Stats

NOISE = 0.03  # passes whose medians differ by more make a row noisy

Call = Callable[[], Any]
Bind = Callable[[], Sequence[Call]]  # makes the calls of one graph
Samples = dict[str, list[float]]  # microseconds of one call, by contender
Check = Callable[[str, Any], None]  # takes a contender's name and what its last call returned
Setting = Callable[[], AbstractContextManager[Any]]


class Within:
    """A call under a setting that a program enters once, around all its calls.

    Called as it is, it enters and leaves: right where nothing is timed. A clock takes what
    `entered` gives.
    """

    def __init__(self, setting: Setting, call: Call) -> None:
        self.setting, self.call = setting, call

    def __call__(self) -> Any:
        with self.setting():
            return self.call()


@contextmanager
def entered(call: Call) -> Iterator[Call]:
    """A call without the entering and leaving, which are done around all that is timed."""
    if not isinstance(call, Within):
        yield call
        return
    with call.setting():
        yield call.call


class Broken(Exception):
    """A contender raised while it was timed; the others can go on without it."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {str(error)[:300]}")
        self.name = name


class Clock(Protocol):
    """Four ways to time calls; each takes all contenders and returns samples in microseconds."""

    def cold(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        """Device time of one call by events, nothing of it in L2."""

    def graph(self, calls: Mapping[str, Bind], rounds: int, check: Check) -> Samples:
        """Device time of one call by a graph of many, each on tensors of its own. What the last
        call of each graph returned goes to `check`."""

    def host(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        """Wall time of one call among many, awaited at the end."""

    def cpu(self, calls: Mapping[str, Call], rounds: int) -> Samples:
        """Time until a call returns, on an empty queue."""


def rotating(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Every name once a round, in an order that moves on by one from round to round.

    The first round goes to and fro (0, n-1, 1, n-2, ...), so that in n rounds everybody stands at
    every place and follows everybody else equally often: once if n is even, and if it is odd,
    within two turns of n, the second backwards (Williams's design).
    """
    count = len(names)
    ends = [(i // 2 if i % 2 == 0 else count - 1 - i // 2) for i in range(count)]
    for turn in range(rounds):
        backwards = count % 2 == 1 and turn // max(count, 1) % 2 == 1
        order = [names[(end + turn) % count] for end in ends]
        yield from reversed(order) if backwards else order


def interleaved(
    names: Sequence[str], rounds: int, take: Callable[[str], Callable[[], float]]
) -> Samples:
    """Take a sample of each in rotating order; readings are read after the last was taken."""
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for name in rotating(names, rounds):
        try:
            pending[name].append(take(name))
        except Exception as e:
            raise Broken(name, e) from e
    return {name: [reading() for reading in readings] for name, readings in pending.items()}


def stats(*passes: Sequence[float]) -> Stats:
    """Median, p20 and p80 over all passes, and the median of each."""
    every = [sample for one in passes for sample in one]
    cuts = statistics.quantiles(every, n=10) if len(every) > 1 else [every[0]] * 9
    medians = tuple(statistics.median(one) for one in passes if one)
    return Stats(statistics.median(every), cuts[1], cuts[7], len(every), medians)


def is_noisy(found: Stats) -> bool:
    return found.spread > NOISE
