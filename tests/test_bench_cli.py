"""bench, compare, report and profile on a command line: bad input is one line and exit code 2."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import synthetic
from tilewright import gpu as gpus
from tilewright.bench import guard, suites
from tilewright.bench.record import Row
from tilewright.bench.run import Run
from tilewright.cli import app
from tilewright.cli import bench as commands

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same kernels."""
    folder = tmp_path_factory.mktemp("records")
    paths = folder / "a.jsonl", folder / "b.jsonl"
    for seed, path in enumerate(paths):
        synthetic.write(path, synthetic.rows(seed)[:60])
    return paths


def tw(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def assert_one_line(done: Any, *says: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in says), done.stderr


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "rellu"], ("op is 'rellu'", "softmax")),
        (["bench", "--suite", "fast"], ("--suite is 'fast'", "quick")),
        (["bench", "--baselines", "eager,ligger"], ("--baselines is 'ligger'", "liger")),
        (["bench", "--backends", "tritn"], ("--backends is 'tritn'", "triton")),
        (["bench", "relu", "--shape", "8by8"], ("--shape is '8by8'", "shape=2048x4096")),
        (["bench", "--dtype", "fp64"], ("--dtype is 'fp64'", "bf16")),
        (["bench", "--mode", "up"], ("--mode is 'up'", "fwd")),
        (["bench", "--head-to-head", "triton"], ("--head-to-head is 'triton'", "two")),
        (["bench", "--head-to-head", "triton,cute"], ("--head-to-head is 'cute'", "cuda")),
        (["bench", "--gpu", "h3000"], ("h3000", "h200")),
        (["profile", "rellu"], ("op is 'rellu'",)),
        (["profile", "relu", "--tool", "perf"], ("tool is 'perf'", "ncu")),
        (["profile", "relu", "--shape", "x"], ("--shape is 'x'",)),
        (["profile", "relu", "--mode", "file"], ("mode is 'file'",)),
    ],
)
def test_bad_words(words: list[str], says: tuple[str, ...]) -> None:
    assert_one_line(tw(*words), *says)


@pytest.mark.parametrize("option", ["--csv", "--html", "--png", "--json"])
def test_places_that_cannot_be_written(two: Any, option: str) -> None:
    path = f"/proc/nowhere/x.{option[2:]}"
    done = tw("report", two[0], option, path)
    assert done.exit_code == 2
    assert f"{option}: {path} cannot be written" in done.stderr
    assert_one_line(tw("report", two[0], option, two[0].parent), option, str(two[0].parent))


def test_an_out_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, two: Any) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: gpus.pretend("h200"))
    for out in ("/proc/nowhere", two[0]):  # no such place, and a file
        assert_one_line(tw("bench", "relu", "--out", out), "--out", str(out))


def test_an_out_that_cannot_be_written_is_told_without_a_gpu_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for out in ("/proc/nowhere", tmp_path / ("a" * 300)):
        assert_one_line(tw("bench", "relu", "--out", out), "--out", str(out))
    long = tmp_path / ("a" * 300 + ".json")
    assert_one_line(tw("bench", "relu", "--json", long), "--json", "cannot be written")
    monkeypatch.setattr(commands, "_checked", lambda *_: {"failures": 0, "words": "checked"})
    done = tw("bench", "relu", "--shape", "64x64", "--out", tmp_path / "a" / "b")
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []  # nothing was timed, and no folder is left behind


@pytest.mark.parametrize(
    "words", [["profile", "relu"], ["bench", "relu"], ["compare", "{0}", "{1}"], ["doctor"]]
)
def test_no_json_over_a_record(two: Any, words: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes(two[0].read_bytes())
    done = tw(*(word.format(*two) for word in words), "--json", kept)
    assert_one_line(done, "--json", "kept.jsonl is a record", "Name another file")
    assert kept.read_bytes() == two[0].read_bytes()


def test_nothing_to_compare_writes_nothing(two: Any, tmp_path: Path) -> None:
    other, kept = tmp_path / "other.jsonl", tmp_path / "kept.json"
    synthetic.write(other, [])
    kept.write_text("mine")
    assert_one_line(tw("compare", two[0], other, "--json", kept), "nothing to compare")
    assert kept.read_text() == "mine"


def test_a_record_without_its_end_is_called_cut_short(two: Any, tmp_path: Path) -> None:
    lines = two[0].read_text().splitlines(keepends=True)
    short = tmp_path / "short.jsonl"
    short.write_text("".join(lines[:30]))
    assert "cut short" in tw("report", short, "--csv", tmp_path / "rows.csv").stdout
    assert "cut short" not in tw("report", two[0], "--csv", tmp_path / "rows.csv").stdout


def test_a_record_cut_in_half_stays_as_it_is(two: Any, tmp_path: Path) -> None:
    half = tmp_path / "half.jsonl"
    whole = two[0].read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    for words in (["compare", half, two[1]], ["compare", two[0], half], ["report", half]):
        assert_one_line(tw(*words), "half.jsonl", "is cut off")
    assert half.read_bytes() == whole[: len(whole) // 2]
    assert sorted(tmp_path.iterdir()) == [half]


def test_records_of_two_gpus(two: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    synthetic.write(other, synthetic.rows(0)[:20], gpu="NVIDIA H100 80GB HBM3")
    assert_one_line(tw("compare", two[0], other), "NVIDIA H200", "NVIDIA H100")


def test_records_that_are_not_there(tmp_path: Path) -> None:
    assert_one_line(tw("compare", tmp_path / "no", tmp_path), "does not exist")
    assert_one_line(tw("report", tmp_path), "no .jsonl file")


def test_a_fail_over_that_is_no_part(two: Any) -> None:
    assert_one_line(tw("compare", *two, "--fail-over", "-1"), "fail_over")


def test_resume_of_a_foreign_folder(monkeypatch: pytest.MonkeyPatch, two: Any) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: gpus.pretend("h100"))
    before = two[1].read_bytes()
    done = tw("bench", "relu", "--resume", "--out", two[0].parent)
    assert_one_line(done, "--resume", "NVIDIA H200", "NVIDIA H100")
    assert two[1].read_bytes() == before


# --- good input ----------------------------------------------------------------------------------


def test_compare_says_same_and_exits_0(two: Any) -> None:
    done = tw("compare", *two)
    assert done.exit_code == 0
    assert "slower" not in done.stdout.split("slower, faster")[0]
    found = json.loads(tw("compare", *two, "--json", "-").stdout)
    assert found["regressions"] == 0
    assert len(found["pairs"]) > 10


def test_compare_exits_1_on_a_regression(two: Any, tmp_path: Path) -> None:
    slow = tmp_path / "slow.jsonl"
    synthetic.write(slow, synthetic.rows(1, slow=1.08)[:60])
    assert tw("compare", two[0], slow).exit_code == 1
    assert tw("compare", two[0], slow, "--fail-over", "0.2").exit_code == 0
    assert tw("compare", slow, two[0]).exit_code == 0


def test_report_writes_what_is_asked_for(two: Any, tmp_path: Path) -> None:
    csv = tmp_path / "new" / "rows.csv"
    done = tw("report", two[0], "--csv", csv)
    assert done.exit_code == 0
    assert len(csv.read_text().splitlines()) == 61
    rows = json.loads(tw("report", two[0], "--json", "-").stdout)
    assert len(rows) == 60


def test_without_a_gpu_bench_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_checked", lambda *_: {"failures": 0, "words": "checked"})
    done = tw("bench", "relu", "--shape", "4096x4096")
    assert done.exit_code == 0
    assert "Nothing was timed: there is no GPU here." in done.stdout
    assert "1 kernels compiled for SM 90" in done.stdout or "kernels compiled" in done.stdout
    found = json.loads(tw("bench", "relu", "--shape", "4096x4096", "--gpu", "a100",
                          "--json", "-").stdout)  # fmt: skip
    assert found["timed"] is False
    (only,) = found["predictions"]
    assert only["us"] == pytest.approx(2 * 2 * 4096 * 4096 / 2.039e12 * 1e6)


def test_every_rival_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_checked", lambda *_: {"failures": 0, "words": "checked"})
    asked = "eager,vendor,sdpa-flash,sdpa-cudnn,fa4"
    done = tw("bench", "relu", "--shape", "64x64", "--baselines", asked)
    assert done.exit_code == 0
    assert_one_line(tw("bench", "--baselines", "sdpa"), "--baselines is 'sdpa'", "sdpa-flash")


def test_a_suite_of_which_an_op_has_no_case() -> None:
    done = tw("bench", "relu", "--suite", "sparse")
    assert done.exit_code == 1
    assert "no case of these ops fits" in done.stderr


def test_profile_without_a_gpu_prints_the_command() -> None:
    done = tw("profile", "softmax", "--shape", "16x4096,dim=0", "--mode", "full")
    assert done.exit_code == 0
    assert done.stdout.startswith("ncu ")
    assert "--shape 16x4096,dim=0" in done.stdout
    assert "no NVIDIA GPU" in done.stderr
    assert tw("profile", "relu", "--print").stderr == ""


# --- exit codes of a run -------------------------------------------------------------------------


def a_run(*rows: Row, ended_by: str = "") -> Run:
    return Run(None, rows=list(rows), ended_by=ended_by)


def a_row(ours: bool = True, state: str = "ok", **facts: Any) -> Row:
    return Row("relu", "c", {}, "float16", "forward", "triton", ours, state, **facts)


def test_exit_codes() -> None:
    code = commands._bench_code
    above = a_row(flags=(f"1.10{guard.FLAGGED}L2-resident",))
    physics = a_row(False, "refused", reason=f"{guard.REFUSED}9,000 GB/s")
    assert code(a_run(a_row()), strict=True) == 0
    assert code(a_run(above), strict=False) == 0
    assert code(a_run(above), strict=True) == 1
    assert code(a_run(physics), strict=False) == 0
    assert code(a_run(physics), strict=True) == 1
    assert code(a_run(a_row(state="refused", reason="wrong")), strict=False) == 1
    assert code(a_run(a_row(), ended_by="interrupt"), strict=False) == 130


@pytest.mark.parametrize("module", ["agreement", "host"])
def test_modules_say_before_the_work_that_a_file_cannot_be_written(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = importlib.import_module(f"tilewright.bench.{module}")
    monkeypatch.setattr(sys, "argv", [module, "--json", "/no/such/folder/x.json"])
    with pytest.raises(SystemExit) as ended:
        room.main()
    assert ended.value.code == 2
    assert "--json: /no/such/folder is no folder" in capsys.readouterr().err


def test_without_a_gpu_a_check_that_fails_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_compiled", lambda *_: {"violations": [], "words": "compiled"})
    for failures in (0, 1):
        checked = {"failures": failures, "words": "checked"}
        monkeypatch.setattr(commands, "_checked", lambda *_, checked=checked: checked)
        assert tw("bench", "relu", "--shape", "64x64").exit_code == failures


def test_the_quick_suite_draws_within_its_budget() -> None:
    works = suites.plan([], "quick", [], ["bf16"], ["fwd"])
    left = {work.key for work in works}
    for number in range(200):
        taken = suites.drawn(works, 60.0, f"{number:012x}")
        assert 5 < len(taken) < len(works)
        left -= {work.key for work in taken}
    assert not left
    assert suites.drawn(works, 10_000.0, "a") == works
