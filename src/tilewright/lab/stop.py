"""How a run is stopped: by Ctrl-C or by SIGTERM, both of which keep what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: from docker stop, from timeout, from a cluster's queue."""


_asked: list[bool] = []  # whether SIGTERM arrived

CODES = {"interrupt": 130, "SIGTERM": 143}  # what ended a run -> exit code, as a shell says it


def word(error: KeyboardInterrupt) -> str:
    """Say what ended a run, as its record does; who asks has heard it."""
    _asked.clear()
    return "SIGTERM" if isinstance(error, Terminated) else "interrupt"


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that records are kept and workers ended."""
    if threading.current_thread() is not threading.main_thread():  # others have no signals
        yield
        return

    def stop(*_: object) -> None:
        _asked.append(True)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _asked.clear()


def check() -> None:
    """Raise once more what a library may have caught: long loops ask at every turn."""
    if _asked:
        _asked.clear()
        raise Terminated
