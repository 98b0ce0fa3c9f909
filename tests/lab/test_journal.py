"""A record is whole at every moment, and belongs to one run at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import InputError
from tilewright.lab import journal
from tilewright.lab.journal import Journal

SRC = Path(__file__).parents[2] / "src"


def test_the_record_is_there_from_the_first_note(tmp_path: Path) -> None:
    path, state = tmp_path / "new" / "r.json", {"ran": 0}
    with Journal(path, lambda: state) as kept:
        kept.note()
        assert json.loads(path.read_text()) == {"ran": 0}
        state["ran"] = 1
        kept.note()  # a moment later: nothing to write yet
        assert json.loads(path.read_text()) == {"ran": 0}
        kept.keep()
        assert json.loads(path.read_text()) == {"ran": 1}
        state["ran"] = 2
    assert json.loads(path.read_text()) == {"ran": 2}
    assert list(path.parent.iterdir()) == [path]  # no lock, no part is left


def test_what_ends_the_run_leaves_the_record(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt), Journal(path, lambda: {"ran": 3}):
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"ran": 3}


def test_no_reader_sees_half_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    journal.write(path, {"old": True})
    seen: list[Any] = []
    replace = os.replace

    def look_and_replace(new: Any, old: Any) -> None:
        seen.append(json.loads(path.read_text()))
        replace(new, old)

    monkeypatch.setattr(os, "replace", look_and_replace)
    journal.write(path, {"new": list(range(1000))})
    assert seen == [{"old": True}]
    assert json.loads(path.read_text())["new"][-1] == 999


def test_a_record_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    journal.write(path, {"old": True})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with Journal(path, dict) as kept:
        kept.keep()
    with pytest.raises(InputError, match=r"--json: .*r.json cannot be written \(No space left"):
        journal.write(path, {})
    assert json.loads(path.read_text()) == {"old": True}
    assert list(tmp_path.iterdir()) == [path]


def test_two_runs_do_not_write_one_record(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with Journal(path, lambda: {"first": True}):
        with pytest.raises(InputError, match=r"another run is writing .*r\.json"):
            Journal(path, lambda: {"second": True})
    assert json.loads(path.read_text()) == {"first": True}
    with Journal(path, lambda: {"second": True}):
        pass
    assert json.loads(path.read_text()) == {"second": True}


def test_a_run_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom tilewright.lab.journal import Journal\n"
        "Journal(Path(sys.argv[1]), dict).keep()\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", script, str(path)], env=environment)
    assert done.returncode == -9
    with Journal(path, lambda: {"next": True}):
        pass
    assert json.loads(path.read_text()) == {"next": True}


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening a lock's file and locking it, who held it may have removed the file."""
    path, taken = tmp_path / "r.json", journal._take

    def removed_first(file: Any) -> None:
        monkeypatch.setattr(journal, "_take", taken)
        os.unlink(file.name)
        taken(file)

    monkeypatch.setattr(journal, "_take", removed_first)
    with Journal(path, dict), pytest.raises(InputError, match="another run"):
        Journal(path, dict)


def test_nothing_is_kept_before_there_is_something(tmp_path: Path) -> None:
    path, state = tmp_path / "r.json", []
    journal.write(path, {"old": True})
    with Journal(path, lambda: {"new": True} if state else None) as kept:
        kept.keep()
    assert json.loads(path.read_text()) == {"old": True}


def test_a_pipe_gets_one_document(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE, text=True)
    with Journal(path, lambda: {"whole": True}) as kept:
        for _ in range(3):
            kept.note()
    out, _ = reader.communicate(timeout=10)
    assert json.loads(out) == {"whole": True}
    assert path.is_fifo()


def test_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    with Journal(Path(os.devnull), dict) as kept:
        kept.keep()
    assert not Path(os.devnull).is_file()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "r.json")
    journal.write(link, {"through": True})
    assert link.is_symlink() and json.loads((tmp_path / "r.json").read_text()) == {"through": True}


def test_json_has_no_infinity() -> None:
    assert journal.finite({"a": [float("inf"), 1.0], "b": float("nan")}) == {
        "a": ["inf", 1.0],
        "b": "nan",
    }
