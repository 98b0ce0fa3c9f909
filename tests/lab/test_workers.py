"""A task may hang, die or raise and the others go on; what ends the parent ends the workers."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tilewright.lab import stop, workers
from tilewright.lab.workers import Report, Spent

SRC = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked here")


def work(task: Any, say: Any) -> Any:
    kind, value = task
    say(f"at {value}")
    if kind == "hang":
        time.sleep(600)
    if kind == "talk":  # long, and with signs of life
        for _ in range(8):
            time.sleep(0.2)
            say("still at it")
    if kind == "die":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "leave":
        os._exit(3)
    if kind == "raise":
        raise ValueError(f"no {value}")
    if kind == "spent":
        raise Spent(value)
    return value, os.getpid()


def run(*tasks: Any, count: int = 2, **more: Any) -> dict[Any, Report]:
    return {r.task: r for r in workers.run(tasks, work, count, **more)}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("way", ["fork", "forkserver", "spawn"])
def test_every_task_is_done_once(way: str) -> None:
    tasks = [("add", n) for n in range(20)]
    found = run(*tasks, way=way)
    assert {task: r.state for task, r in found.items()} == dict.fromkeys(tasks, "done")
    assert [found[task].value[0] for task in tasks] == list(range(20))
    assert len({r.value[1] for r in found.values()}) <= 2


def test_what_goes_wrong_is_told_and_the_others_go_on() -> None:
    odd = [("die", 1), ("leave", 2), ("raise", 3), ("hang", 4), ("spent", 5)]
    fine = [("add", n) for n in range(10, 16)]
    found = run(*odd, *fine, limit=1.0)
    assert {task: found[task].state for task in fine} == dict.fromkeys(fine, "done")
    states = {task: (found[task].state, found[task].at) for task in odd}
    assert states == {
        ("die", 1): ("died", "at 1"),
        ("leave", 2): ("died", "at 2"),
        ("raise", 3): ("failed", "at 3"),
        ("hang", 4): ("hung", "at 4"),
        ("spent", 5): ("spent", "at 5"),
    }
    assert found["die", 1].value == "its process was ended by SIGSEGV"
    assert found["leave", 2].value == "its process ended with exit code 3"
    assert found["raise", 3].value == "ValueError: no 3"
    assert found["hang", 4].value == "no end after 1 s"
    assert found["spent", 5].value == 5


def test_a_process_that_is_spent_does_no_more() -> None:
    found = run(("spent", 0), *[("add", n) for n in range(4)], count=1)
    assert len({r.value[1] for t, r in found.items() if t[0] == "add"}) == 1
    assert all(r.state == "done" for t, r in found.items() if t[0] == "add")


def test_a_task_with_signs_of_life_does_not_hang() -> None:
    assert run(("talk", 1), limit=1.0)["talk", 1].state == "done"


def test_no_more_workers_than_tasks_nor_than_cores_feed() -> None:
    assert workers.most(400, 3) == workers.most(3, 400) == 3
    assert workers.most(100_000, 6_000) <= max(32, 4 * (os.cpu_count() or 1))
    assert workers.most(5, 0) == 1


def test_a_run_starts_no_more_workers_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    context = multiprocessing.get_context("fork")
    whole = context.Process

    def process(**how: Any) -> Any:
        started.append(1)
        return whole(**how)

    monkeypatch.setattr(type(context), "Process", staticmethod(process), raising=False)
    beats: list[int] = []
    found = run(*[("add", n) for n in range(3)], count=24, beat=lambda: beats.append(1))
    assert len(found) == len(started) == 3
    assert beats


def test_who_stops_listening_ends_the_workers() -> None:
    tasks = [("add", 0), ("hang", 1), ("hang", 2)]
    reports = workers.run(tasks, work, 3)
    pid = next(reports).value[1]
    began = time.monotonic()
    reports.close()
    assert time.monotonic() - began < 3
    assert not alive(pid)


PARENT = """
import os, signal, subprocess, sys, time
from tilewright.lab import stop, workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
def work(task, say):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
try:
    with stop.stoppable():
        list(workers.run([1, 2], work, 2))
except KeyboardInterrupt as e:
    print(stop.word(e), flush=True)
    sys.exit(stop.CODES[stop.word(e)])
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGINT, 130, "interrupt"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_no_worker_is_left(how: int, code: int, said: str) -> None:
    """Nor what a worker started; of a parent that was killed, its workers at least, on Linux."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pairs = [[int(pid) for pid in parent.stdout.readline().split()] for _ in range(2)]
    parent.send_signal(how)
    assert parent.wait(5) == code
    gone = [pid for pair in pairs for pid in (pair if said else pair[:1])]
    deadline = time.monotonic() + 5
    while any(map(alive, gone)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, gone))
    for pair in pairs:  # what a killed parent could not end
        if alive(pair[1]):
            os.kill(pair[1], signal.SIGKILL)
    assert parent.stdout.read().strip() == said


def test_a_stop_that_a_library_caught_is_raised_again() -> None:
    with pytest.raises(stop.Terminated), stop.stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except BaseException:  # as some do
            pass
        list(workers.run([("add", 1), ("hang", 2)], work, 2))
    stop.check()  # and then it is over
