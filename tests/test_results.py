"""The records in results/ hold what the documents say of them, and no impossible number."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from tilewright import gpu as gpus
from tilewright.bench import record
from tilewright.ops import registry

ROOT = Path(__file__).parents[1]


# --- the bars of the committed records -----------------------------------------------------------


def test_bench_agrees_with_do_bench() -> None:
    """Within 3 % on copies of 256 MiB and more and on matrix products of 4096 cubed and more: the
    clock, and what bench prints. The copy of 256 MiB is the smallest, and the lines that do_bench's
    flush has written weigh most: there bench is held to do_bench with a flush that reads."""
    found = json.loads((ROOT / "results/h200/agreement.json").read_text("utf-8"))
    assert len(found["rows"]) == 4
    for row in found["rows"]:
        assert 0.97 <= row["clock_ratio"] <= 1.03, row["case"]
        dirty = row["case"].startswith("copy forward, 256 MiB")
        ratio = row["reading_ratio"] if dirty else row["bench_ratio"]
        assert 0.97 <= ratio <= 1.03, row["case"]
        assert not dirty or 0.95 <= row["bench_ratio"] <= 1.0


def test_the_yardsticks_are_what_agreement_saw() -> None:
    """One call, one figure, whatever it was measured for. The two runs are minutes apart, and the
    clock of a GPU at its power limit moves between them."""
    agreed = json.loads((ROOT / "results/h200/agreement.json").read_text("utf-8"))["rows"]
    rows = record.read(ROOT / "results/h200/yardsticks.jsonl").rows
    printed = {
        f"{r.op} {r.phase}, {r.case}, {r.dtype}": r.us for r in rows if r.contender == "vendor"
    }
    for row in agreed:
        assert printed[row["case"]] == pytest.approx(row["bench_us"], rel=0.06), row["case"]


def test_a_second_run_agrees_with_the_first() -> None:
    """Medians within 3 % on 95 % of the rows above 20 µs; of one build, on one machine."""
    first, second = (
        record.read(ROOT / f"results/h200/{name}.jsonl")
        for name in ("bench-quick", "bench-quick-again")
    )
    assert first.run["environment"]["source"] == second.run["environment"]["source"]
    again = {row.key: row.us for row in second.rows if row.us}
    pairs = [(r.us, again[r.key]) for r in first.rows if r.us and r.us > 20 and r.key in again]
    assert len(pairs) > 20
    assert sum(abs(b / a - 1) <= 0.03 for a, b in pairs) >= 0.95 * len(pairs)


def test_the_quick_suite_is_quick() -> None:
    """Four minutes with fifteen ops, two cases each, forward, all rivals: by the time of a case."""
    found = record.read(ROOT / "results/h200/bench-quick.jsonl")
    cases = {row.case_key for row in found.rows}
    assert {"eager", "compile", "vendor", "liger", "quack"} <= {r.contender for r in found.rows}
    assert found.end is not None
    assert found.end["seconds"] / len(cases) * 30 <= 240


RECORDS = sorted((ROOT / "results" / "h200").glob("*.jsonl"))


def test_routes_were_held_against_times_everywhere() -> None:
    _, *cells = map(
        json.loads, (ROOT / "results/h200/routes-matmul.jsonl").read_text("utf-8").splitlines()
    )
    assert len(cells) == 400
    assert len({tuple(re.findall(r"x(\d+),n=(\d+)", cell["dims"])) for cell in cells}) == 10
    for cell in cells:
        assert not cell["wrong"]
        best, taken = min(cell["times"].values()), cell["times"][cell["chosen"]]
        assert cell["part_of_best"] == pytest.approx(best / taken, abs=1e-4)


def test_kernels_were_held_against_cublas_at_squares_and_prefill() -> None:
    """Every case of both suites in both halves, and squares in tf32; nothing above the peak."""
    path = ROOT / "results/h200/routes-prefill-matmul.jsonl"
    _, *cells = map(json.loads, path.read_text("utf-8").splitlines())
    op, h200 = registry()["matmul"], gpus.pretend("h200")
    cases = [case for case in op.cases if case.group in ("sweep", "prefill")]
    names = [case.name for case in cases if "precision" not in case.dims]
    found = [(cell["case"], cell["dtype"]) for cell in cells if cell["dtype"] != "float32"]
    assert sorted(found) == sorted(itertools.product(names, ("bfloat16", "float16")))
    assert len(cells) == len(found) + 3
    for cell in cells:
        kernels = {"gluon"} if cell["dtype"] == "float32" else {"gluon", "cuda"}
        assert not cell["refused"] and cell["times"].keys() >= {*kernels, "torch"}
        m, k, n = map(int, re.findall(r"\d+", cell["dims"])[:3])
        peak = h200.peaks["tf32" if cell["dtype"] == "float32" else "fp16"]
        assert all(2e6 * m * n * k / us < peak for us in cell["times"].values())


@pytest.mark.parametrize("path", [p for p in RECORDS if "routes" not in p.name], ids=str)
def test_committed_records_can_be_read_and_hold_no_impossible_number(path: Path) -> None:
    found = record.read(path)
    assert found.rows
    assert found.end is not None
    assert found.end["complete"]
    gpu = gpus.pretend(found.gpu)
    assert gpu.bandwidth is not None
    for row in found.rows:
        if row.state == "ok":
            assert row.us
            assert row.gbps is None or row.gbps * 1e9 < gpu.bandwidth
            assert row.tflops is None or row.tflops * 1e12 < gpu.peaks[row.unit]
            assert row.of_roof is None or row.of_roof <= 1.03 or row.flags
            assert not row.ours or (row.error is not None and row.error <= 1)
            assert not row.ours or row.ran == row.contender
