"""`tilewright verify` finds every planted bug (planted.py), and passes the kernels as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import apart
from planted import PLANTED, Checks, Planted
from tilewright.ops import registry
from tilewright.verify import Context, runner
from tilewright.verify.context import edge_cases

# A copy of the kernels as they are must pass one set of checks of each op, or a bug might be
# "caught" by the copying.
SETS = {bug.checks.op: bug.checks for bug in PLANTED if bug.checks.only == ("random",)}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    # with its __pycache__, which knows by a file's time that it is of another text
    return Path(shutil.copytree(apart.PACKAGE, tmp_path / "tilewright"))


def verify(package: Path, checks: Checks) -> tuple[int | None, dict[str, Any]]:
    """The exit code and the report; no report means that verify itself fell over."""
    report = package.parent / "report.json"
    words = ["verify", *checks.words, "--device", "cpu", "--fail-fast", "--json", str(report)]
    done = apart.run(words, package=package)
    assert report.exists(), (done.returncode, done.stderr[-2000:])
    return done.returncode, json.loads(report.read_text())


@pytest.mark.drawn(seconds=0.75)
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_verify_catches(bug: Planted, copied: Path) -> None:
    path = copied / bug.file
    text = path.read_text()
    assert text.count(bug.find) == bug.times, "the source changed: plant this bug anew"
    path.write_text(text.replace(bug.find, bug.replace))
    code, report = verify(copied, bug.checks)
    assert code == 1
    assert {f["op"] for f in report["failures"]} == {bug.checks.op}
    # a wrong result, not a replacement that does not compile
    raised = [f["line"] for f in report["failures"] if f["message"].startswith("raised")]
    assert not raised


@pytest.mark.drawn(seconds=1.5)
@pytest.mark.parametrize("checks", SETS.values(), ids=str)
def test_verify_passes_what_is_right(checks: Checks, copied: Path) -> None:
    code, report = verify(copied, checks)
    assert (code, report["failures"]) == (0, [])
    assert {row["check"] for row in report["checks"]} == set(checks.only)


def test_planted_bugs_are_many_and_distinct() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) >= 20
    assert set(SETS) == {bug.checks.op for bug in PLANTED} == set(registry())
    for bug in PLANTED:  # what verify runs of the kernels as they are
        assert bug.checks.seed + bug.checks.cases <= runner.RANDOM["cpu"][0]
        if bug.checks.case:
            context = Context(registry()[bug.checks.op], "triton", "cpu", False, 1, 0)
            assert bug.checks.case in [case.name for case in edge_cases(context)]
