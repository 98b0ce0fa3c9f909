"""scripts/check_hazards.py: whom it starts, what it keeps, and what it stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import pytest

import script

# Stands in for compute-sanitizer: it says what the tool and touch would, and part 2 goes wrong as
# the name of the op says.
SANITIZER = """#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 9
echo "$@" >> "$SEEN"
echo 1 >> "$SEEN.now"
for last; do :; done
case "$*" in *"--part 2/"*) how=$last ;; *) how=well ;; esac
binaries=3 status=0
summary="========= ERROR SUMMARY: 0 errors"
[ "$2" = racecheck ] &&
  summary="========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
echo "3/7 rope triton: tall bfloat16" >&2
case "$how" in
  slow) sleep 100 & sleep 100 ;;
  away) setsid sleep 60 & sleep 100 ;;
  dies) printf 'Traceback:\\nAcceleratorError: launch failed\\n' >&2; exit 1 ;;
  none) echo "touch: no op or backend is named 'none'"; exit 2 ;;
  idle) echo "$summary"; exit 0 ;;
  hollow) binaries=0 ;;
  wrong) summary="========= ERROR SUMMARY: 1 error" ;;
  deaf) summary="========= Error: no attachable process found" ;;
  torn) echo "========= Internal Sanitizer Error" ;;
  split) echo "$summary"; summary="========= ERROR SUMMARY: 5 errors" ;;
  fails) status=3 ;;
esac
echo "========= COMPUTE-SANITIZER"
echo "rope triton: $binaries binaries, forward and backward"
echo "$summary"
sleep 0.1
echo -1 >> "$SEEN.now"
exit $status
"""


@pytest.fixture(scope="module")
def hazards() -> ModuleType:
    return script.load("check_hazards")


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands that it was given."""
    fake, seen = tmp_path / "bin" / "compute-sanitizer", tmp_path / "seen.txt"
    fake.parent.mkdir()
    fake.write_text(SANITIZER)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(seen))
    return seen


def all_end(sanitizer: Path) -> bool:
    """What was killed may need a moment."""
    until = time.monotonic() + 10
    while under_way(sanitizer) and time.monotonic() < until:
        time.sleep(0.05)
    return not under_way(sanitizer)


def under_way(sanitizer: Path) -> list[str]:
    """Processes that a sanitizer began."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended, or be somebody else's
            if f"SEEN={sanitizer}\0".encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_every_tool_watches_every_part(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "sanitizer-rope"
    more = ["--parts", "3", "--workers", "2", "--record", str(record)]
    assert hazards.main(["rope", "triton", *more]) == 0
    watched = [line.split() for line in sanitizer.read_text().splitlines()]
    parts = [(line[1], line[line.index("--part") + 1]) for line in watched]
    assert sorted(parts) == sorted((t, f"{i}/3") for t in hazards.TOOLS for i in (1, 2, 3))
    assert all(line[-2:] == ["rope", "triton"] and "--smallest" in line for line in watched)
    at_a_time = accumulate(map(int, Path(f"{sanitizer}.now").read_text().split()))
    assert max(at_a_time) == 2
    options = {line[1]: "--report-api-errors no" in " ".join(line) for line in watched}
    assert [tool for tool, told in options.items() if told] == ["memcheck"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("12/12 ")
    names = {path.name for path in tmp_path.glob("sanitizer-*")}
    assert names == {f"sanitizer-rope-{tool}.txt" for tool in hazards.TOOLS}
    for tool in hazards.TOOLS:
        said = Path(f"{record}-{tool}.txt").read_text().split("$ ")[1:]
        assert [f"--part {i}/3 rope triton\n" in one for i, one in enumerate(said, 1)] == [True] * 3
        assert all(
            f"--tool {tool} " in one
            and re.search("\nrope triton: 3 binaries, forward and backward\n=.*: 0 ", one)
            and "3/7" not in one  # touch's progress
            for one in said
        )


@pytest.mark.drawn(seconds=0.75, family="slow")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("slow", "did not end in 3 s: 3/7 rope triton: tall bfloat16"),
        ("away", "did not end in 3 s: 3/7 rope triton"),  # and a child of it never does
        (
            "dies",
            "ended with status 1, 3/7 rope triton: tall bfloat16: AcceleratorError: launch failed",
        ),
        ("fails", "ended with status 3, 3/7"),
        ("idle", "ended with status 0, 3/7"),  # nothing ran, and nothing was wrong
        ("hollow", "nothing ran: there are fewer calls than parts"),
        ("wrong", "found something: ERROR SUMMARY: 1 error"),
        ("deaf", "the sanitizer did not watch to the end"),
        ("split", "the sanitizer did not watch to the end"),
        ("torn", "the sanitizer did not watch to the end"),
    ],
)
def test_a_part_that_fails_is_told_and_kept(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    how: str, told: str,
) -> None:  # fmt: skip
    record = str(tmp_path / "sanitizer-rope")
    more = ["--tool", "memcheck", "--parts", "3", "--limit", "3", "--record", record]
    begun = time.monotonic()
    assert hazards.main([how, *more]) == 1
    assert time.monotonic() - begun < 50
    assert under_way(sanitizer) if how == "away" else all_end(sanitizer)
    by_part = sorted(line.split(" memcheck ")[1] for line in capsys.readouterr().out.splitlines())
    assert [told in line for line in by_part] == [False, True, False]
    said = Path(f"{record}-memcheck.txt").read_text().split("$ ")[1:]
    assert [f"-- {told}" in one for one in said] == [False, True, False]
    assert ["3/7" in one for one in said] == [False, True, False]  # the standard error


def test_names_that_touch_refuses_cost_no_record(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "sanitizer-rope-memcheck.txt"
    record.write_text("of before")
    more = ["--tool", "memcheck", "--parts", "3", "--record", str(tmp_path / "sanitizer-rope")]
    with pytest.raises(SystemExit) as ended:
        hazards.main(["none", *more])
    assert ended.value.code == 2
    assert "touch: no op or backend is named 'none'" in capsys.readouterr().err
    assert record.read_text() == "of before"
    assert len(sanitizer.read_text().splitlines()) == 2  # nobody asks for the third part


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_stops_the_sanitizers(sanitizer: Path, tmp_path: Path, how: int) -> None:
    """And leaves no record that looks whole."""
    record = tmp_path / "sanitizer-rope"
    more = ["--tool", "memcheck", "--parts", "3", "--workers", "2", "--record", str(record)]
    command = [sys.executable, str(script.FOLDER / "check_hazards.py"), "slow", *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        # a shell that runs the tests in the background has them ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for _ in range(2):  # parts 1 and 3 have ended: part 2 alone is under way
                process.stdout.readline()
            assert under_way(sanitizer)
            process.send_signal(how)
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
    assert all_end(sanitizer)
    assert [path.name for path in tmp_path.glob("sanitizer-*")] == [
        f"{record.name}-memcheck.txt.part"
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--parts", "0"], "--parts"),
        (["--limit", "nan"], "--limit"),
        (["--record", "nowhere/a"], "no folder nowhere"),
    ],
)
def test_hazards_refuse_what_they_cannot_do(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], told: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        hazards.main(["rope", "--record", str(tmp_path / "a"), *more])
    assert ended.value.code == 2 and told in capsys.readouterr().err
    assert not sanitizer.exists()


def test_hazards_want_a_sanitizer(
    hazards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        hazards.main(["rope", "--record", str(tmp_path / "a")])
    assert ended.value.code == 2 and "compute-sanitizer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
