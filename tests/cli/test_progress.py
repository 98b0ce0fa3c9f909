"""A log without a terminal: a line at least every few seconds, also while one call takes long."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tilewright.cli import progress as room
from tilewright.cli.progress import Progress
from tilewright.starting import is_command_line

EVERY = room.EVERY


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EVERY", 0.3)
    monkeypatch.setattr(room, "SOON", 0.1)


def test_a_call_that_takes_long_does_not_silence_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("verify") as progress:
        progress.phase("checks", 4, work=10.0)
        progress.at(what="relu triton random", work=5.0)
        time.sleep(1.5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("verify: ") for line in lines)
    assert "relu triton random, 1 of 4, about 1 s left" in lines[-2]


def test_a_mistake_that_is_found_at_once_is_said_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), Progress("verify"):
        raise ValueError
    assert capfd.readouterr().err == ""


def test_lines_of_their_own_stand_between(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("compile") as progress:
        progress.say("compile: 3 of 4 binaries")
    assert "compile: 3 of 4 binaries\n" in capfd.readouterr().err


def test_lines_are_never_five_seconds_apart() -> None:
    assert EVERY + 0.25 < 5  # and how often the thread looks up


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        (["-m", "tilewright", "doctor"], True),
        (["-B", "-m", "tilewright"], True),
        (["/home/me/.venv/bin/tilewright", "verify"], True),
        (["-m", "pytest", "tilewright"], False),
        (["train.py", "tilewright"], False),
        (["-c", "import tilewright"], False),
        ([], False),
    ],
)
def test_only_the_command_line_says_that_it_has_begun(words: list[str], is_it: bool) -> None:
    assert is_command_line(words) is is_it


def test_a_log_begins_before_torch_is_loaded() -> None:
    program = "import sys; sys.orig_argv[1:] = ['-m', 'tilewright']; sys.modules['torch'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "import tilewright"], capture_output=True, text=True
    )
    assert done.stderr.startswith("tilewright: loading torch\nTraceback")
