"""What a run leaves behind, and runs that end early: records, --resume, the machine's state."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_bench import H200, bench, ours, subject
from tilewright import doctor
from tilewright import gpu as gpus
from tilewright.bench import machine, record
from tilewright.bench.record import Roof, Row, Stats, Writer
from tilewright.bench.run import Job, new_path, run, to_resume
from tilewright.errors import InputError

ROOT = Path(__file__).parents[1]


# --- records -------------------------------------------------------------------------------------

ROW = Row("relu", "c", {"shape": [2, 3]}, "float32", "forward", "triton", True, "ok",
          us=2.0, samples=(1.0, 3.0), cold=Stats(2.0, 1.0, 3.0, 2, (1.0, 3.0)))  # fmt: skip
HEADER = {"schema": 1, "environment": {"gpu": "NVIDIA H200"}, "settings": {}, "machine": {}}


def written(path: Path, rows: Any = (ROW,)) -> Path:
    writer = Writer(path)
    writer.write("run", HEADER)
    writer.write("roof", asdict(Roof("bandwidth 1:1", "GB/s", 4200.0)))
    writer.rows(rows)
    writer.write("end", {"seconds": 1.0, "complete": True})
    return path


def test_a_record_comes_back(tmp_path: Path) -> None:
    found = record.read(written(tmp_path / "a.jsonl"))
    assert found.rows == [ROW]
    assert found.roofs == [Roof("bandwidth 1:1", "GB/s", 4200.0)]
    assert found.gpu == "NVIDIA H200"
    assert found.end == {"seconds": 1.0, "complete": True}
    assert record.read(tmp_path).path == tmp_path / "a.jsonl"


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    odd = Row("a", "c", {"dtype": torch.float16}, "x", "forward", "b", False, "ok",
              us=math.inf, error=math.nan)  # fmt: skip
    (back,) = record.read(written(tmp_path / "a.jsonl", [odd])).rows
    assert (back.us, back.error, back.dims) == (None, None, {"dtype": "torch.float16"})
    assert "Infinity" not in (tmp_path / "a.jsonl").read_text()


def test_a_record_cut_anywhere_is_told_in_one_line(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.jsonl").read_bytes()
    path = tmp_path / "b.jsonl"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in (0, 1, 40, ends[0] - 1, ends[0] + 5, ends[2] - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"^record: .*b\.jsonl") as told:
            record.read(path)
        assert "\n" not in str(told.value)
        assert path.read_bytes() == whole[:cut]  # nothing is mended behind anybody's back


GOOD = {
    **{"kind": "row", "op": "x", "case": "c", "dims": {}, "dtype": "f", "phase": "forward"},
    **{"contender": "a", "ours": True, "state": "ok"},
}


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"kind": "rows"}',
        json.dumps({**GOOD, "us": "fast"}),
        json.dumps({**GOOD, "us": -1.0}),
        '{"us": NaN, ' + json.dumps(GOOD)[1:],
        json.dumps({**GOOD, "op": None}),
        json.dumps({**GOOD, "dims": [1]}),
        json.dumps({**GOOD, "ours": 1}),
        json.dumps({**GOOD, "samples": ["a"]}),
        json.dumps({**GOOD, "us": 1e308}),
        json.dumps({**GOOD, "bytes_read": 10**400}),
        json.dumps({**GOOD, "bytes_read": -5}),
        json.dumps({**GOOD, "flags": [1]}),
        "[" * 100_000,
        '{"kind": "roof", "name": "x", "unit": "us", "value": 0}',
        json.dumps({"kind": "run", **HEADER, "settings": [1]}),
        json.dumps({"kind": "run", **HEADER, "machine": "fast"}),
        '{"kind": "end", "machine": 3}',
        json.dumps({**GOOD, "cold": {"median": None, "p20": 1, "p80": 1, "n": 1}}),
        json.dumps({**GOOD, "state": "fine"}),
        json.dumps({**GOOD, "colour": "red"}),
        '{"kind": "roof", "name": "x", "unit": "us", "value": null}',
        '{"kind": "run", "schema": 1, "environment": {"gpu": "another"}}',
        "[1]",
        '{"kind": "row"}',
        '{"kind": "row", "op": "x"}',
        '{"op": "x"}',
        '{"kind": "run", "schema": 99, "environment": {"gpu": null}}',
        '{"kind": "run", "schema": 1}',
    ],
)
def test_lines_that_are_no_record(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"kind": "run", **HEADER}) + "\n" + json.dumps(GOOD) + "\n")
    assert len(record.read(path).rows) == 1
    path.write_text(json.dumps({"kind": "run", **HEADER}) + "\n" + line + "\n")
    with pytest.raises(InputError, match="record: "):
        record.read(path)


def test_the_schema_is_written_down() -> None:
    text = (ROOT / "docs" / "records.md").read_text("utf-8")
    for kind in (Row, Stats, Roof):
        for field in fields(kind):
            assert f"| `{field.name}` |" in text, f"{kind.__name__}.{field.name}"


# --- runs ----------------------------------------------------------------------------------------


def named(count: int) -> list[Job]:
    """Small cases of relu."""
    made = []
    for i in range(count):
        of = replace(subject("relu", (4, 8 + i)), case=f"case {i}")
        made.append(Job.of(of))
    return made


SETTINGS = {"warmup": 2, "iters": 20, "seed": 0}


def instruments() -> Any:
    return bench(subject("relu", (4, 8)), {})


def test_a_run_writes_what_it_measures_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    seen: list[tuple[str, int]] = []

    def progress(title: str, done: int) -> None:
        lines = path.read_text().splitlines()
        seen.append((title, sum('"kind": "row"' in line for line in lines)))

    result = run(named(3), instruments(), settings=SETTINGS, path=path, progress=progress)
    assert [count for _, count in seen] == [0, 2, 4]
    assert result.left == []
    back = record.read(path)
    assert len(back.rows) == 6
    assert back.end is not None
    assert back.end["complete"] is True


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    some = named(2)
    some += [Job(("relu", "late", "float32", "forward"), {}, _interrupt)]
    result = run(some, instruments(), settings=SETTINGS, path=path)
    assert result.ended_by == "interrupt"
    assert result.left == ["relu forward, late, float32"]
    back = record.read(path)
    assert {row.case for row in back.rows} == {"case 0", "case 1"}
    assert back.end is not None
    assert (back.end["complete"], back.end["ended_by"]) == (False, "interrupt")


def _interrupt() -> Any:
    raise KeyboardInterrupt


def test_the_time_limit_starts_no_further_case(tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 10))
    result = run(
        named(5), instruments(), settings=SETTINGS, path=tmp_path / "r.jsonl",
        max_seconds=25, clock=lambda: next(ticks),
    )  # fmt: skip
    assert result.ended_by == "time"
    assert 0 < len(result.left) < 5


def test_resume_measures_only_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(named(2), instruments(), settings=SETTINGS, path=path)
    resumed = record.read(path)
    started: list[str] = []
    result = run(
        named(4), instruments(), settings=SETTINGS, path=path, resumed=resumed,
        progress=lambda title, done: started.append(title),
    )  # fmt: skip
    assert [title.split(", ")[1] for title in started] == ["case 2", "case 3"]
    assert len(result.rows) == 8
    back = record.read(path)
    assert len(back.rows) == 8
    assert len(back.roofs) == 1  # those of the last run


def test_resume_wants_the_same_gpu(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl")
    with pytest.raises(InputError, match="NVIDIA H200.*this is NVIDIA H100"):
        to_resume(tmp_path, gpus.pretend("h100"), SETTINGS)
    assert record.read(path).rows == [ROW]


@pytest.mark.parametrize(
    "changed",
    [
        *({"settings": {name: 7}} for name in ("warmup", "iters", "seed")),
        {"settings": {"baselines": ["eager"]}},
        *({"environment": {name: "old"}} for name in ("source", "torch", "triton")),
    ],
    ids=str,
)
def test_resume_wants_the_same_settings_and_code(tmp_path: Path, changed: Any) -> None:
    now = doctor.environment()
    same = {
        "schema": 1,
        "environment": {**now, "gpu": "NVIDIA H200"},
        "settings": {**SETTINGS, "backends": None, "baselines": None},
    }
    settings = {**same["settings"]}
    Writer(tmp_path / "a.jsonl").write("run", same)
    assert to_resume(tmp_path / "a.jsonl", H200, settings).rows == []
    for block, facts in changed.items():
        same[block] = {**same[block], **facts}
    Writer(tmp_path / "b.jsonl").write("run", same)
    with pytest.raises(InputError, match="was measured with"):
        to_resume(tmp_path / "b.jsonl", H200, settings)


def test_new_records_overwrite_nothing(tmp_path: Path) -> None:
    first = new_path(tmp_path, H200)
    first.write_text("")
    assert new_path(tmp_path, H200) != first
    assert first.name.startswith("h200-")


def test_too_little_memory_is_a_row_with_a_reason(tmp_path: Path) -> None:
    def too_much() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    job = Job(("relu", "huge", "float32", "forward"), {"shape": (1,)}, too_much)
    result = run([job], instruments(), settings=SETTINGS, path=None)
    (row,) = result.rows
    assert row.state == "refused"
    assert "1 TiB" in row.reason


def test_a_case_that_cannot_be_set_up_does_not_end_the_run(tmp_path: Path) -> None:
    def broken() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    bad = Job(("relu", "bad", "float32", "forward"), {"shape": (1,)}, broken)
    path = tmp_path / "a.jsonl"
    result = run([bad, *named(1)], instruments(), settings=SETTINGS, path=path)
    assert result.rows[0].state == "refused"
    assert result.rows[0].reason.endswith("RuntimeError: CUDA error: an illegal memory access")
    assert result.rows[1].state == "ok"
    found = record.read(path)
    assert found.end is not None
    assert found.end["complete"]


def test_a_case_that_failed_as_a_whole_is_tried_again_on_resume(tmp_path: Path) -> None:
    (job,) = named(1)
    tries: list[int] = []

    def once_broken() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a bad moment")
        return job.make()

    path = tmp_path / "a.jsonl"
    jobs = [replace(job, make=once_broken)]
    first = run(jobs, instruments(), settings=SETTINGS, path=path)
    assert [row.contender for row in first.rows] == [record.WHOLE_CASE]
    assert [row.contender for row in record.read(path).rows] == [record.WHOLE_CASE]
    again = run(jobs, instruments(), settings=SETTINGS, path=path, resumed=record.read(path))
    assert {row.state for row in again.rows} == {"ok"}
    kept = record.read(path).rows  # what failed and was measured later is no part of the case
    assert [row.key for row in kept] == [row.key for row in again.rows]


def test_a_wildly_wrong_row_can_be_read_back(tmp_path: Path) -> None:
    wild = ours(lambda x, dim, dtype: torch.full_like(x, 3e38))
    of = replace(subject("softmax", (4, 8)), contenders=(wild,))
    path = tmp_path / "a.jsonl"
    result = run([Job.of(of)], instruments(), settings=SETTINGS, path=path)
    assert result.rows[0].state == "refused"
    (row,) = record.read(path).rows
    assert (row.state, row.error) == ("refused", record.MOST)


# --- machine -------------------------------------------------------------------------------------


def test_the_state_of_the_machine() -> None:
    line = "580.159.04, 1980, 1980, 3201, 83.21, 700.00, 37, 0x0000000000000004"
    found = machine.parse(line)
    assert (found["driver"], found["sm_mhz"], found["power_w"]) == ("580.159.04", 1980.0, 83.21)
    assert (found["limited_by"], found["locked"]) == (["power cap"], False)
    assert machine.parse(line.replace("0x0000000000000004", "0x2"))["locked"] is True
    odd = machine.parse(line.replace("83.21", "[N/A]").replace("0x0000000000000004", "[N/A]"))
    assert (odd["power_w"], odd["limited_by"], odd["locked"]) == (None, None, None)
    assert machine.parse("no devices were found") == {}
