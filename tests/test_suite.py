"""The suite itself: what it draws, what it skips."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import PIECES
from tilewright.lab.budget import WHOLES
from tilewright.lab.draw import draw

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "tests" / "test_planted.py"


def test_within_200_commits_every_drawn_test_runs(request: pytest.FixtureRequest) -> None:
    every = request.config.stash[PIECES]
    left = {piece.name for piece in every}
    for number in range(200):
        taken = draw(every, WHOLES["tests", "cpu"], f"{number:012x}", "tests")
        left -= {piece.name for piece in taken}
    assert not left, sorted(left)[:10]


def test_what_is_not_drawn_does_not_run() -> None:
    def run(*words: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", *words]
        done = subprocess.run([*command, str(BUDGET)], capture_output=True, text=True, cwd=ROOT)
        return {line for line in done.stdout.splitlines() if "::" in line}

    every, some, other = run("--full"), run("--draw", "a"), run("--draw", "b")
    assert some < every > other and some != other
    assert run() == every  # a file that is named


def test_what_is_drawn_keeps_its_budget(request: pytest.FixtureRequest) -> None:
    every = request.config.stash[PIECES]
    longest = max((piece.seconds for piece in every), default=0.0)
    for number in range(20):
        taken = draw(every, WHOLES["tests", "cpu"], f"{number:012x}", "tests")
        assert sum(piece.seconds for piece in taken) <= WHOLES["tests", "cpu"] + longest
