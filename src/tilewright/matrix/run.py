"""Which binaries to compile now, and compiling them on every core."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tilewright.matrix.build import Built, build
from tilewright.matrix.ledger import Ledger
from tilewright.matrix.reach import Wanted

_wanted: list[Wanted] = []  # inherited by forked workers: kernels do not pickle


def select(
    wanted: Sequence[Wanted], ledger: Ledger, sample: float, rng: random.Random
) -> tuple[list[Wanted], list[Built]]:
    """(to compile, known): what changed, one of every kernel and SM, and `sample` of the rest."""
    keyed = [(w, ledger.known.get(w.key)) for w in wanted]
    shuffled = rng.sample(keyed, len(keyed))
    compile_now: dict[str, Wanted] = {}
    seen: set[tuple[str, str, int]] = set()
    for w, entry in shuffled:
        kernel = (w.backend, w.kernel.partition("<")[0], w.sm)
        if entry is None or kernel not in seen or rng.random() < sample:
            compile_now[w.key] = w
            seen.add(kernel)
    known = [entry for w, entry in keyed if entry is not None and w.key not in compile_now]
    return [w for w, _ in keyed if w.key in compile_now], known


def run(wanted: Sequence[Wanted], workers: int | None = None) -> Iterator[Built]:
    """Compile all of `wanted`, in any order."""
    count = workers or os.cpu_count() or 1
    if count == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(build, wanted)
        return
    _wanted[:] = wanted
    # the slow ones (Turing) first, so that no core waits for another at the end
    order = sorted(range(len(wanted)), key=lambda i: wanted[i].sm)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        for done in as_completed([pool.submit(_build_nth, i) for i in order]):
            yield done.result()


def _build_nth(index: int) -> Built:
    return build(_wanted[index])
