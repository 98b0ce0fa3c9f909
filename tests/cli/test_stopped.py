"""Long commands that hang, are stopped, or meet another run: named, survived, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import apart
from tilewright.lab import journal

SRC = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are read there")


def start(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tilewright", *words], env=environment, cwd=folder,
            stdout=log, stderr=log, text=True,
        )  # fmt: skip


def below(pid: int) -> set[int]:
    """The processes that descend from one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        if rest.split()[0] != "Z":
            parents[int(name.split()[0])] = int(rest.split()[1])
    found: set[int] = set()
    while more := {p for p, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def running(pids: set[int]) -> set[int]:
    return {p for p in pids if Path(f"/proc/{p}").exists()}


LONG = {
    "verify": ["verify", "--device", "cpu", "--full", "--workers", "2", "--json", "r.json"],
    "compile": ["compile", "rope", "--all", "--workers", "2", "--json", "r.json"],
}


@pytest.mark.parametrize("command", LONG)
def test_sigterm_keeps_the_record_and_leaves_no_worker(command: str, tmp_path: Path) -> None:
    process = start(*LONG[command], folder=tmp_path)
    path, counted = tmp_path / "r.json", "compiled" if command == "compile" else "steps"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists():
            found = json.loads(path.read_text())  # whole at every moment
            if found[counted] if command == "compile" else found[counted]["ran"]:
                break
        time.sleep(0.1)
    workers = below(process.pid)
    assert len(workers) >= 2
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 143
    while running(workers) and time.monotonic() - began < 5:
        time.sleep(0.05)
    assert not running(workers)
    record = json.loads(path.read_text())
    assert (record["complete"], record["ended_by"]) == (False, "SIGTERM")
    if command == "verify":
        assert record["steps"]["ran"] > 0
        assert sum(row["run"] for row in record["checks"]) > 0
    else:
        assert record["binaries"] == record["compiled"] > 0
    log = (tmp_path / "log").read_text()
    assert "Stopped by SIGTERM" in log and "Traceback" not in log


def test_sigterm_ends_a_bench_without_a_gpu(tmp_path: Path) -> None:
    process = start("bench", "--json", "r.json", folder=tmp_path)
    deadline = time.monotonic() + 60
    while "compiling" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    while not (workers := below(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 143
    time.sleep(1.0)
    assert not running(workers)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["ended_by"] == "SIGTERM" and len(record["predictions"]) >= 15
    log = (tmp_path / "log").read_text()
    assert "stopped by SIGTERM" in log and "Traceback" not in log


def test_sigterm_while_planning_leaves_the_record_of_before(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"mine": true}')
    process = start("compile", "attention", "--json", "r.json", folder=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".r.json.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 143
    assert json.loads(path.read_text()) == {"mine": True}


def test_a_kernel_that_never_ends_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    package = Path(shutil.copytree(apart.PACKAGE, tmp_path / "tilewright"))
    path = package / "ops/relu/triton_impl.py"
    right = "    y = tl.where(x <= 0.0, 0.0, x)  # a NaN stays a NaN\n"
    assert path.read_text().count(right) == 1
    forever = "    spin = tl.load(x_ptr)\n    while spin == spin:\n        spin = tl.load(x_ptr)\n"
    path.write_text(path.read_text().replace(right, right + forever))
    words = ["verify", "relu", "geglu", "--device", "cpu", "--only", "nan", "--case", "inf of 33"]
    report = tmp_path / "r.json"
    done = apart.run(
        [*words, "--limit", "2", "--workers", "2", "--json", str(report)], package=package
    )
    assert done.returncode == 1, done.stderr[-1000:]
    record = json.loads(report.read_text())
    assert record["complete"] is True
    lines = [failure["line"] for failure in record["failures"]]
    assert len(lines) == 3 and all("no end after 2 s in _relu" in line for line in lines)
    assert {row["op"]: row["failed"] for row in record["checks"]} == {"relu": 3, "geglu": 0}


def test_two_runs_do_not_write_one_record(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with journal.Journal(path, lambda: {"first": True}):
        for words in ("verify relu --device cpu --only empty", "compile relu --arch 75"):
            done = apart.run([*words.split(), "--json", str(path)])
            assert done.returncode == 2
            (line,) = [
                line for line in done.stderr.splitlines() if "record" in line or "--json" in line
            ]
            assert "another run is writing" in line and str(path) in line
    assert json.loads(path.read_text()) == {"first": True}


def budget_error(*words: str) -> Any:
    done = apart.run(list(words))
    return done.returncode, done.stderr.splitlines()


def test_a_budget_below_one_case_of_each_op_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    code, lines = budget_error(
        "verify", "--device", "cpu", "--budget", "0.01", "--json", str(record)
    )
    assert code == 2 and len(lines) == 1
    assert all(word in lines[0] for word in ("verify: the budget is 0.01 s", "15 ops", "--full"))
    assert not record.exists()
    code, lines = budget_error("verify", "relu", "--device", "cpu", "--full", "--budget", "9")
    assert code == 2 and "Leave one out" in lines[-1]


def test_a_key_repeats_a_draw(tmp_path: Path) -> None:
    seen = []
    for key in ("a", "a", "b"):
        path = tmp_path / "r.json"
        words = ["verify", "swiglu", "--device", "cpu", "--only", "random"]
        done = apart.run([*words, "--budget", "0.6", "--draw", key, "--json", str(path)])
        assert done.returncode == 0, done.stderr
        assert f"--draw {key}" in done.stderr
        record = json.loads(path.read_text())
        assert record["draw"]["key"] == key
        numbers = {(row["dtype"], row["worst_error"]) for row in record["numerics"]}
        seen.append((numbers, sorted((row["check"], row["run"]) for row in record["checks"])))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize(
    "words",
    [
        "compile relu rope --arch 75 --budget 0.001",
        "bench relu softmax --no-checks --budget 0.001",
    ],
)
def test_compile_and_bench_refuse_such_a_budget_too(words: str) -> None:
    code, lines = budget_error(*words.split())
    assert code == 2
    assert "the budget is 0.001 s" in lines[-1] and "2 ops" in lines[-1]


def test_what_compile_advises_can_be_run() -> None:
    done = apart.run("compile relu --arch 75 --ledger none --budget 1".split())
    assert done.returncode == 0, done.stderr
    (advice,) = re.findall(r"`tilewright (compile .*?)`", done.stdout)
    assert advice == "compile relu --arch 75 --ledger none --all --update"


def test_a_session_that_never_began_is_no_success() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nonsense"], capture_output=True, cwd=SRC.parent
    )
    assert done.returncode == 4
