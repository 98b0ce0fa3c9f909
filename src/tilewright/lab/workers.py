"""Processes that work through tasks, each of which may hang or die without ending the run.

A pool of the standard library cannot end one worker: a kernel that never returns would hold it for
ever. Here the parent hears what each worker is doing, ends one whose task takes too long together
with all that it started, starts another, and goes on. A parent that ends takes its workers along;
when it is killed, Linux ends them, but not what they started.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, Literal, NamedTuple

from tilewright.lab import stop

BEAT = 0.5  # seconds after which the parent looks up, whether a worker said something or not
FEW, EACH_CORE = 32, 4  # workers that any machine takes, and that a core feeds
PATIENCE = 2.0  # seconds that a worker has to end by itself when there is nothing left to do
PR_SET_PDEATHSIG = 1  # of Linux's prctl

inside = False  # whether this process is a worker, which may be lost

Say = Callable[[str], None]
Work = Callable[[Any, Say], Any]  # (task, say what it is at) -> result


class Spent(Exception):
    """Raised by work that has a result and has made its process unfit for more: `Spent(result)`."""


class Report(NamedTuple):
    """What became of a task."""

    task: Any
    state: Literal["done", "spent", "failed", "died", "hung"]  # the first two have a result
    value: Any  # the result, or the exception's words
    at: str  # what the task was at, by its own last word
    seconds: float


@dataclass
class _Worker:
    process: Any
    pipe: Any
    task: Any = None
    busy: bool = False
    since: float = 0.0  # when the task, or its last word, began
    started: float = 0.0
    at: str = ""
    heard: bool = field(default=False)  # it is up: what it imports counts to no task


def run(
    tasks: Sequence[Any],
    work: Work,
    count: int,
    *,
    way: str = "fork",
    limit: float | None = None,
    prepare: Callable[[], None] | None = None,
    preload: Sequence[str] = (),
    beat: Callable[[], None] = lambda: None,
) -> Generator[Report, None, None]:
    """Work through `tasks` and yield a report of each, in the order in which they end.

    Parameters
    ----------
    work : called as `work(task, say)` in a worker; `say(words)` tells the parent what it is at
    count : processes; at most one for each task, and a few for each core
    way : how they are started: "fork", "forkserver" or "spawn"
    limit : seconds without a word after which a task counts as hung; None: it may take for ever
    prepare : called once in each worker before its first task
    preload : modules that a fork server imports once for all workers
    beat : called every half second, and after each report
    """
    waiting = list(reversed(tasks))
    crew: list[_Worker] = []
    context: Any = multiprocessing.get_context(way)
    if way == "forkserver" and preload:
        context.set_forkserver_preload(list(preload))

    def hire() -> None:
        ours, theirs = context.Pipe()
        # a forked worker holds the ends of the pipes of those before it, and must let them go
        foreign = [ours, *(w.pipe for w in crew)] if way == "fork" else []
        parent = os.getpid() if way == "fork" else None  # a fork server's is another
        arguments = (work, prepare, theirs, foreign, parent)
        process = context.Process(target=_serve, args=arguments, daemon=False)
        process.start()
        theirs.close()
        crew.append(_Worker(process, ours))

    try:
        for _ in range(most(count, len(tasks))):
            hire()
        while waiting or any(worker.busy for worker in crew):
            for worker in crew:
                if not worker.busy and waiting:
                    worker.task, worker.busy, worker.at = waiting.pop(), True, ""
                    worker.since = worker.started = time.monotonic()
                    with contextlib.suppress(OSError):  # it is gone: the end of its pipe tells
                        worker.pipe.send(worker.task)
            busy = [worker for worker in crew if worker.busy]
            connection.wait([worker.pipe for worker in busy], timeout=BEAT)
            for worker in busy:
                for report in _heard(worker, limit):
                    if report.state in ("died", "hung", "spent"):
                        crew.remove(worker)
                        _end(worker)
                        if waiting:
                            hire()
                    yield report
            beat()
            stop.check()
        for worker in crew:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        deadline = time.monotonic() + PATIENCE
        for worker in crew:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for worker in crew:
            _end(worker)


def most(count: int, tasks: int) -> int:
    """Return how many of the workers that were asked for are of use."""
    return max(1, min(count, tasks, max(FEW, EACH_CORE * (os.cpu_count() or 1))))


def _heard(worker: _Worker, limit: float | None) -> Iterator[Report]:
    """Yield a report if the worker's task has ended, one way or another."""
    task, started = worker.task, worker.started
    try:
        while worker.pipe.poll():
            kind, value = worker.pipe.recv()
            worker.since, worker.heard = time.monotonic(), True
            if kind == "at":
                worker.at = value
            elif kind != "up":
                worker.busy = False
                yield Report(task, kind, value, worker.at, time.monotonic() - started)
                return
    except (EOFError, OSError):
        worker.process.join(PATIENCE)
        worker.busy = False
        yield Report(
            task, "died", _words_of(worker.process.exitcode), worker.at, time.monotonic() - started
        )
        return
    quiet = time.monotonic() - worker.since
    if limit is not None and worker.heard and quiet > limit:
        worker.busy = False
        yield Report(
            task, "hung", f"no end after {limit:g} s", worker.at, time.monotonic() - started
        )


def _words_of(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _end(worker: _Worker) -> None:
    """End a worker and all processes that it started."""
    process = worker.process
    if process.pid is not None and hasattr(os, "killpg"):
        with contextlib.suppress(OSError):  # it has a group of its own, unless it just began
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):
        process.kill()
        process.join(PATIENCE)
    with contextlib.suppress(OSError):
        worker.pipe.close()


def _serve(
    work: Work,
    prepare: Callable[[], None] | None,
    pipe: Any,
    foreign: Sequence[Any],
    parent: int | None,
) -> None:
    """Work through what comes down the pipe; in the worker's process."""
    global inside
    inside = True
    die_with_parent(parent)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which ends this group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in foreign:
        other.close()
    if prepare is not None:
        prepare()

    def say(words: str) -> None:
        pipe.send(("at", words))

    try:
        pipe.send(("up", None))
        while (task := pipe.recv()) is not None:
            try:
                answer = ("done", work(task, say))
            except Spent as e:
                answer = ("spent", e.args[0])
            except Exception as e:
                answer = ("failed", f"{type(e).__name__}: {e}")
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the parent is gone
    finally:
        # what libraries print when a process ends is of no use to the user
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def die_with_parent(parent: int | None = None) -> None:
    """Let Linux end this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:  # it ended before
            os._exit(1)
