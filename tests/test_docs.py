"""The documents keep their word: tables, links, examples, transcripts and predicted floors."""

from __future__ import annotations

import ast
import doctest
import inspect
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import tilewright
from tilewright import readme
from tilewright.explain import explain_call
from tilewright.gpu import pretend
from tilewright.ops import every_op, registry
from tilewright.spec import Args, Choice, Op, as_tuple
from tilewright.tuned import file as tuned_file
from tilewright.tuned.file import Bucket, Table, Timed
from tilewright.verify import features
from tilewright.verify.runner import backends_on

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tilewright"
README = ROOT / "README.md"
USING = ROOT / "docs" / "using.md"
GUIDE = ROOT / "docs" / "attention.md"
NOTES = sorted(SRC.glob("ops/*/notes.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *NOTES]
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)


def run(*command: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", **variables}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- generated tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", readme.DOCUMENTS)
def test_tables_are_what_the_records_say(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert readme.render(text, ROOT) == text, "run python -m tilewright.readme"


def test_pictures_are_what_the_records_say() -> None:
    assert readme.stale_pictures(ROOT) == [], "run python -m tilewright.readme"


def test_every_table_is_used_once() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in readme.DOCUMENTS]
    names = [match[1] for text in texts for match in readme.REGION.findall(text)]
    assert sorted(names) == sorted(readme.REGIONS)


ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
HOST_ROW = {"op": "relu", "contender": "torch", "median_us": 7.04, "over_torch": 1.0}
CHECK = {"op": "relu", "backend": "triton", "worst_error_over_tolerance": 0.25}
BUILT = {
    **{"op": "relu", "backend": "triton", "kernel": "_relu", "dtype": "float16"},
    **{"case": "", "choice": "", "compiler": "triton 3.6.0"},
}
RUN = {"kind": "run", "schema": 1, "environment": ENVIRONMENT, "settings": {}, "machine": {}}


def bench_row(contender: str, us: float | None, *, ours: bool = False, **facts: Any) -> Any:
    return {
        **{"kind": "row", "op": "relu", "case": "c", "dims": {}, "dtype": "bfloat16"},
        **{"phase": "forward", "contender": contender, "ours": ours, "state": "ok", "us": us},
        **({"of_roof": 0.9} if us else {}),
        **facts,
    }


ATTENTION = {"op": "attention", "bound": "compute"}
DENSE = {"shape": [1, 4, 8, 16], "kv_heads": 4}
SPARSE = {"shape": [9, 4, 16], "kv_heads": 2, "layout": "thd", "lengths": [4, 5], "window": [3, 0]}


def wide(tokens: int, *, causal: bool) -> Any:
    return {"shape": [1, 32, tokens, 64], "kv_heads": 32, "causal": causal}


def feature_rows(mask: str, softcap: str, heads: str = "4 to 4") -> list[Any]:
    """A call of attention that passed in both phases, other options at their first level."""
    declared = registry()["attention"].features
    assert declared is not None
    levels = {name: next(iter(levels)) for name, levels in declared(True).items()}
    levels |= {"mask": mask, "softcap": softcap, "heads": heads, features.DTYPE: "bfloat16"}
    row = {"op": "attention", "backend": "triton", "levels": features.as_text(levels)}
    return [{**row, "phase": phase, "passed": True} for phase in ("forward", "backward")]


RECORDS: dict[str, tuple[str, list[Any], list[str]]] = {
    "host-cost": (
        "results/h200/host.json",
        [
            {
                "environment": ENVIRONMENT,
                "case": {"rows": 128, "columns": 1024, "dtype": "float16"},
                "rows": [
                    {**HOST_ROW, "grad": False},
                    {**HOST_ROW, "grad": True, "median_us": 12.0},
                    {**HOST_ROW, "grad": False, "contender": "automatic", "over_torch": 1.25},
                ],
            }
        ],
        [
            "| `relu` | torch | 7.0 | 1.00 | 12.0 | 1.00 |",
            "| `relu` | automatic | 7.0 | 1.25 |  |  |",
            "128 x 1024, float16; medians; NVIDIA H200, torch 2.11.0, triton 3.6.0.",
        ],
    ),
    "verified": (
        "results/h200/verify-all.json",
        [
            {
                "environment": ENVIRONMENT,
                "full": True,
                "checks": [
                    {**CHECK, "check": "cases", "phase": "forward", "run": 1200, "failed": 0},
                    {**CHECK, "check": "random", "phase": "forward", "run": 34, "failed": 1},
                    {**CHECK, "check": "cases", "phase": "backward", "run": 56, "failed": 0},
                    {**CHECK, "check": "errors", "phase": "", "run": 4, "failed": 2},
                ],
            }
        ],
        ["| `relu` | triton | full | 1,234 | 56 | 4 | 3 | 0.25 |", "records `verify-all.json`."],
    ),
    "compiled": (
        "results/compile/triton-3.6.0.jsonl",
        [
            {**BUILT, "key": key, "sm": sm, "spills": spills, "violation": violation}
            for key, sm, spills, violation in (
                *(("a", 90, 0, ""), ("b", 75, 8, "spills 8 bytes")),
                *(("c", 90, 4, ""), ("d", 90, 0, "")),
            )
        ],
        ["| triton 3.6.0 | 75, 90 | 4 | 2 | 1 |"],
    ),
    "performance": (
        "results/h200/bench-model.jsonl",
        [
            RUN,
            bench_row("triton", 10.0, ours=True),
            *(bench_row(n, us) for n, us in (("eager", 80.0), ("compile", 9.0), ("vendor", 15.0))),
            bench_row("liger", None, state="unavailable", reason="not installed"),
        ],
        ["| `relu` forward | c | triton | 10.0 | 90% | 8.00 | 0.90 | 1.50 |", "bench-model.jsonl"],
    ),
    "measured-relu": (
        "results/h200/bench-model.jsonl",
        [
            RUN,
            *(bench_row(n, us, ours=True, dims={"shape": [4, 8]}) for n, us in
              (("triton", 10.0), ("cuda", 20.0))),
            *(bench_row(n, us, dims={"shape": [4, 8]}, flags=flags) for n, us, flags in
              (("eager", 80.0, []), ("compile", 9.0, ["saved less"]), ("vendor", 15.0, []))),
            bench_row("triton", 10.0, ours=True, dims={"shape": [9, 9]}),
            bench_row("eager", 80.0, dims={"shape": [9, 9]}),
        ],
        [
            "| `relu` forward | 4 x 8 | triton | 10.0 | 90% | 8.00 | 0.90* | 1.50 |",
            "| `relu` forward | 4 x 8 | cuda | 20.0 | 90% | 4.00 | 0.45* | 0.75 |",
            "| `relu` forward | 9 x 9 | triton | 10.0 | 90% | – | – | – |",
        ],
    ),
    "measured-attention": (
        "results/h200/bench-sweep-attention.jsonl",
        [
            RUN,
            *(bench_row(n, us, **ATTENTION, ours=n == "triton", dims=dims, tflops=tflops)
              for dims, us, tflops in (({**DENSE, "causal": False}, 10.0, 500.4),
                                       ({**SPARSE, "causal": True}, 5.0, 1234.5))
              for n, us in (("triton", us), ("eager", 80.0), ("compile", 9.0), ("vendor", 15.0))),
        ],
        [
            "| op | shape, bf16 | backend | µs | of roof | TFLOP/s | eager / ours |",
            "| `attention` forward | 1 x 4 x 8 x 16, full | triton | 10.0 | 90% | 500 | 8.00 |",
            "| 9 x 4 x 16, thd, 2 key heads, 2 sequences, causal, window 3 + 0 | triton | 5.00 |",
        ],
    ),
    "attention-floors": (
        "results/h200/bench-quick.jsonl",
        [RUN, {"kind": "roof", "name": "mma bf16", "unit": "TFLOP/s", "value": 1000.0}],
        [
            "| D128 T8192 full | 1,100 | 2,749 | 1,100 | 2,749 | 3,848 |",
            "At 1,000 TFLOP/s, the roof `mma bf16`.",
        ],
    ),
    "attention-speed": (
        "results/h200/bench-sweep-attention.jsonl",
        [
            RUN,
            *(bench_row(n, us, **{**ATTENTION, "phase": phase}, ours=n == "triton", dims=dims)
              for dims, phase, times in (
                  (wide(512, causal=False), "forward", (10.0, 20.0, 5.0)),
                  (wide(2048, causal=True), "forward", (10.0, 40.0, 9.0)),
                  (wide(8192, causal=True), "forward", (10.0, 10.0, 4.0)),
                  (wide(512, causal=True), "backward", (10.0, 15.0, 8.0)),
                  (wide(512, causal=True) | {"softcap": 50.0}, "backward", (10.0, 99.0, 99.0)),
                  ({**wide(512, causal=True), "shape": [1, 48, 512, 64], "kv_heads": 48},
                   "backward", (10.0, 15.0, 8.0)))
              for n, us in zip(("triton", "sdpa-flash", "sdpa-cudnn", "vendor"),
                               (*times, times[-1]), strict=True)),
        ],
        [
            "| forward | 64 | sdpa-flash | 2.00 | – | – | 4.00 | – | 1.00 |",
            "| backward | 64 | sdpa-cudnn | – | 0.80 | – | – | – | – |",
            "| backward | 64, 48 heads | sdpa-cudnn | – | 0.80 | – | – | – | – |",
            "forward of 2,048 tokens and more, sdpa-flash 2.00 and sdpa-cudnn 0.60;",
            "backward, sdpa-flash 1.50 and sdpa-cudnn 0.80.",
        ],
    ),
    "attention-sparse": (
        "results/h200/bench-sparse-attention.jsonl",
        [
            RUN,
            *({**bench_row("triton", us, **ATTENTION, ours=True), "case": case, "flops": flops,
               "host": {"median": host, "p20": host, "p80": host, "n": 4}}
              for case, us, host, flops in (("T16384 causal", 1000.0, 900.0, 8e9),
                                            ("16 skewed lengths causal", 300.0, 225.0, 2e9))),
        ],
        # a quarter of the work should take 250 us, or 225 in a queue
        ["| 16 skewed lengths causal | 25% | 1.20 | 1.00 |"],
    ),
    "attention-sparse-hopper": (
        "results/h200/bench-sparse-forward-attention.jsonl",
        [
            RUN,
            *({**bench_row("gluon", us, **ATTENTION, ours=True), "case": case, "flops": flops}
              for case, us, flops in (("T16384 full", 1000.0, 8e9),
                                      ("16 skewed lengths full", 500.0, 2e9))),
        ],
        ["| 16 skewed lengths full | 25% | 2.00 | – |"],
    ),
    "attention-features": (
        "results/h200/verify-attention.json",
        [{"environment": ENVIRONMENT, "features": [
            *feature_rows("none", "no"), *feature_rows("causal", "no"),
            *feature_rows("none", "yes"), *feature_rows("none", "yes", heads="4 to 1"),
            {**feature_rows("causal", "yes")[0], "passed": False},
        ]}],
        [
            "`triton`: 5 calls, 5 forward and 4 backward checks, 1 failure.",
            "NVIDIA H200, torch 2.11.0, triton 3.6.0; record `verify-attention.json`.",
        ],
    ),
    "yardsticks": (
        "results/h200/yardsticks.jsonl",
        [
            RUN,
            bench_row("vendor", 10.0, bound="compute", tflops=700.4, flags=["noisy: by 6.7%"]),
            bench_row("fa4", None, state="unavailable", reason="not installed"),
        ],
        ["| relu c, bf16 | vendor | 10.0 | 700 TFLOP/s | 90% | noisy: by 6.7% |\n\n"],
    ),
    "roofs": (
        "results/h200/bench-quick.jsonl",
        [RUN, {"kind": "roof", "name": "mma bf16", "unit": "TFLOP/s", "value": 890.7,
               "datasheet": 989.0}],
        ["| mma bf16 | 891 TFLOP/s | 989 |"],
    ),
    "agreement": (
        "results/h200/agreement.json",
        [{"environment": ENVIRONMENT, "rows": [
            {"case": "copy", "clock_us": 127.0, "in_turns_us": 130.0, "clock_ratio": 0.9769,
             "bench_us": 128.0, "do_bench_us": 131.0, "bench_ratio": 0.9771,
             "reading_us": 128.1, "reading_ratio": 0.9992}]}],
        ["| copy | 127.0 | 130.0 | 0.977 | 128.0 | 131.0 | 0.977 | 128.1 | 0.999 |"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_table_shows_its_record_and_its_absence(name: str, tmp_path: Path) -> None:
    text = f"before\n<!-- generated: {name} -->\nold\n<!-- end -->\nafter\n"
    empty = readme.render(text, tmp_path)
    assert empty == text.replace("old", readme.NOT_MEASURED)
    file, records, expected = RECORDS[name]
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    full = readme.render(empty, tmp_path)
    assert all(line in full for line in expected)
    assert full.startswith("before\n")
    assert full.endswith("<!-- end -->\nafter\n")
    assert readme.render(full, tmp_path) == full


def test_a_family_counts_both_phases_and_names_its_worst_case() -> None:
    """Attention's forward has cuDNN beside it by name, and neither eager nor a row `vendor`."""
    judged = [row for row in readme.families(ROOT).splitlines() if row.startswith("| attention")]
    (cells,) = [[c.strip() for c in row.strip("|").split("|")] for row in judged]
    _, cases, faster, level, slower, _, worst = cells
    forward = readme._bench(ROOT, "bench-forward-attention")
    assert forward is not None
    assert int(cases) == int(faster) + int(level) + int(slower)
    assert int(cases) > len({row.case_key for row in forward.rows})
    assert "`attention` backward" in worst


def _cells(shown: str, line: str) -> dict[str, str]:
    """A line of the first table, by its column's head."""
    rows = [[c.strip() for c in row.strip("|").split("|")] for row in shown.splitlines()]
    found = next(row for row in rows if row[0] == line)
    return dict(zip(rows[0], found, strict=True))


def _feature_table(folder: Path, rows: list[Any]) -> str:
    path = folder / "results" / "h200" / "verify-attention.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": ENVIRONMENT, "features": rows}))
    return readme.attention_features(folder)


def test_the_feature_matrix_counts_meetings(tmp_path: Path) -> None:
    rows = [row for mask, cap, heads in (
        ("none", "no", "4 to 4"), ("none", "yes", "4 to 4"), ("none", "yes", "4 to 1"),
        ("causal", "no", "4 to 4"),
    ) for row in feature_rows(mask, cap, heads)]  # fmt: skip
    none = _cells(_feature_table(tmp_path, rows), "mask: none")
    assert none["mask"] == "–"
    assert none["softcap"] == "2/2 · 1"  # both, the rarer one once
    assert none["heads"] == "2/3 · 0"  # never with "4 to 2"
    assert none["bias"] == "1/6 · 0"
    assert (none["forward"], none["backward"]) == ("3", "3")
    assert _cells(_feature_table(tmp_path, rows), "mask: causal, top left")["softcap"] == "0/2 · 0"


def test_the_feature_matrix_shows_what_failed(tmp_path: Path) -> None:
    failed = {**feature_rows("causal", "yes")[1], "passed": False}
    rows = [*feature_rows("none", "yes"), feature_rows("causal", "yes")[0], failed]
    shown = _feature_table(tmp_path, rows)
    causal = _cells(shown, "mask: causal")
    assert causal["heads"] == causal["bias"] == causal["backward"] == "FAILED 1"
    assert (causal["mask"], causal["forward"]) == ("–", "1")
    assert _cells(shown, "softcap: yes")["mask"] == "FAILED 1"  # though another call passed
    assert _cells(shown, "mask: none")["softcap"] == "1/2 · 0"
    assert "2 calls, 2 forward and 2 backward checks, 1 failure." in shown


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_cover_fills_the_feature_matrix(backend: str, tmp_path: Path) -> None:
    declared = features.declared("attention", "cuda", backend)
    factors = {name: list(levels) for name, levels in declared.items()}
    assert ("by head" in factors["ALiBi"]) == (backend == "triton")
    texts = map(features.as_text, features.cover(factors, 2))
    row = {"op": "attention", "backend": backend, "phase": "forward", "passed": True}
    shown = _feature_table(tmp_path, [{**row, "levels": text} for text in texts])
    pairs = sum(len(factors[a]) * len(factors[b]) for a, b in itertools.combinations(factors, 2))
    assert f"{pairs:,} of {pairs:,} pairs" in shown
    assert "FAILED" not in shown
    for factor, levels in factors.items():
        for level in levels:
            for other, cell in _cells(shown, f"{factor}: {level}").items():
                if other in factors and other != factor:
                    assert cell.startswith(f"{len(factors[other])}/{len(factors[other])} · ")


def test_the_forward_on_hopper_is_shown_beside_the_quickest_rival() -> None:
    """Reckoned again from the record's lines."""
    name = "bench-forward-attention"
    lines = (ROOT / "results" / "h200" / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [row for line in lines if (row := json.loads(line))["kind"] == "row" and row["us"]]
    plain = [row for row in rows if not re.search("GQA|heads|softcap", row["case"])]
    ratios = []
    for case in {row["case"] for row in plain}:
        us = {row["contender"]: row["us"] for row in plain if row["case"] == case}
        ratios.append(min(t for who, t in us.items() if who != "gluon") / us["gluon"])
    assert len(ratios) == 36
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    shown = readme.render("<!-- generated: attention-hopper -->\n<!-- end -->\n", ROOT)
    assert f"geometric mean {mean:.2f}, least {min(ratios):.2f}." in shown
    ours = {row["case"]: row["us"] for row in rows if row["contender"] == "gluon"}
    own = {name: name.replace("GQA 48/6", "48 heads").replace("GQA", "32 heads") for name in ours}
    shared = [ours[own[name]] / us for name, us in ours.items() if "GQA" in name]
    assert len(shared) == 16
    assert f"as many with their own: {min(shared):.2f} to {max(shared):.2f}," in shown


def _of_forward(contender: str, us: float, *, ours: bool = False, **dims: Any) -> Any:
    return bench_row(contender, us, **ATTENTION, ours=ours, dims=dims)


def _rendered(folder: Path, region: str, record: str, rows: list[Any]) -> str:
    path = folder / "results" / "h200" / f"{record}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [RUN, *rows]), encoding="utf-8")
    return readme.render(f"<!-- generated: {region} -->\n<!-- end -->\n", folder)


def test_a_record_of_shared_heads_alone_is_shown(tmp_path: Path) -> None:
    dims = {"shape": [1, 32, 2048, 128], "kv_heads": 8, "causal": False}
    rows = [_of_forward("gluon", 10.0, ours=True, **dims), _of_forward("fa4", 12.0, **dims)]
    rows[1]["flags"] = ["noisy: two passes differ by 4.1%"]
    shown = _rendered(tmp_path, "attention-hopper", "bench-forward-attention", rows)
    assert "| 128, 8 of 32 key heads | full | fa4 / ours | 1.20* |" in shown
    assert "quickest rival" not in shown


def test_the_first_step_is_that_of_plain_calls(tmp_path: Path) -> None:
    """Neither a softcap nor other numbers of heads take its place."""
    kept = tmp_path / "results" / "h200" / "tune-attention.json"
    kept.parent.mkdir(parents=True)
    kept.write_text((ROOT / "results" / "h200" / kept.name).read_text("utf-8"), encoding="utf-8")
    rows = []
    for times, dims in (
        ((10.0, 5.0), {"shape": [2, 16, 8192, 128], "kv_heads": 16}),
        ((10.0, 90.0), {"shape": [2, 16, 8192, 128], "softcap": 50.0}),
        ((10.0, 80.0), {"shape": [2, 48, 8192, 128], "kv_heads": 48}),
        ((10.0, 70.0), {"shape": [2, 32, 8192, 128], "kv_heads": 8}),
    ):
        dims["causal"] = False
        rows += [_of_forward("triton", times[0], ours=True, **dims)]
        rows += [_of_forward(n, times[1], **dims) for n in ("sdpa-cudnn", "vendor")]
    shown = _rendered(tmp_path, "flash-attention-steps", "bench-sweep-attention", rows)
    assert _cells(shown[shown.index("|") :], "tiles, in Triton")["D128 T8,192 full"] == "0.50"


def test_cases_of_one_shape_are_measured_once_and_told_apart(tmp_path: Path) -> None:
    plain = {"shape": [1, 16, 2048, 128], "causal": True}
    rows = [
        _of_forward("triton", us, ours=True, **dims)
        for us, dims in (
            (10.0, {**plain, "kv_heads": 16}), (20.0, plain), (30.0, {**plain, "softcap": 50.0}),
        )
    ]  # fmt: skip
    for number, row in enumerate(rows):
        row["case"] = f"case {number}"
    shown = _rendered(tmp_path, "measured-attention", "bench-sweep-attention", rows)
    assert shown.count("1 x 16 x 2048 x 128, causal | triton | 10.0") == 1
    assert "| triton | 20.0" not in shown
    assert "1 x 16 x 2048 x 128, causal, softcap 50 | triton | 30.0" in shown


def test_every_level_met_every_other_on_a_gpu() -> None:
    for name, backend in (("verify-attention", "triton"), ("verify-attention-gluon", "gluon")):
        record = json.loads((ROOT / "results" / "h200" / f"{name}.json").read_text("utf-8"))
        there = {row["levels"] for row in record["features"] if row["backend"] == backend}
        assert there == {text for text, *_ in features.calls("attention", "cuda", backend)}
        assert all(row["passed"] for row in record["features"])


@pytest.mark.drawn(seconds=5.7, family="slow")
def test_check_sees_drift_and_the_command_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- generated: ops -->\n<!-- end -->\n", encoding="utf-8")
    command = [sys.executable, "-m", "tilewright.readme", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def code(*more: str) -> int:
        done = subprocess.run([*command, *more], capture_output=True, env=environment)
        return done.returncode

    assert [code("--check"), code(), code("--check")] == [1, 0, 0]
    for op in registry():
        assert f"`{op}`" in path.read_text("utf-8")


def test_a_full_run_stands_before_a_quick_one(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)

    def keep(name: str, *, full: bool, count: int) -> None:
        checks = [{**CHECK, "check": "random", "phase": "forward", "run": count, "failed": 0}]
        record = {"environment": ENVIRONMENT, "full": full, "checks": checks}
        (folder / f"verify-{name}.json").write_text(json.dumps(record))

    keep("a", full=False, count=7)
    keep("b", full=True, count=5000)
    table = readme.verified(tmp_path)
    assert "| `relu` | triton | full | 5,000 |" in table
    assert "7 |" not in table and "verify-a.json" not in table
    keep("c", full=True, count=9)
    with pytest.raises(ValueError, match="verify-b.json and verify-c.json both hold relu triton"):
        readme.verified(tmp_path)


def test_what_ran_on_a_gpu_found_nothing() -> None:
    folder = ROOT / "results" / "h200"
    kernels = set()
    for path in folder.glob("verify-*.json"):
        record = json.loads(path.read_text("utf-8"))
        assert not record["failures"] and not any(row["failed"] for row in record["checks"]), path
        kernels |= {(row["op"], row["backend"]) for row in record["checks"]}
    every = {(op, b) for op in registry() for b in backends_on(op, "cuda")}
    assert kernels == every
    for path in folder.glob("sanitizer-*.txt"):
        said = path.read_text("utf-8")
        ends = [line for line in said.splitlines() if "SUMMARY" in line]
        assert ends and all(re.search(r": 0 (errors|hazards)", line) for line in ends), path
        # a program that died is no error to a sanitizer that does not know why
        ran = len(re.findall(r"(binaries, forward and backward|roofs: \d+ kernels)\n=", said))
        assert ran == len(ends) == said.count("$ ") and "returned an error" not in said, path
        for count, names in set(re.findall(r"--part \d+/(\d+) (.+)", said)):
            parts = re.findall(rf"--part (\d+)/{count} {re.escape(names)}$", said, re.M)
            assert sorted(map(int, parts)) == [*range(1, int(count) + 1)], path
    ops = registry().values()
    cuda = {(op.name, b.name) for op in ops for b in op.backends if b.technology == "cuda"}
    for tool in ("memcheck", "initcheck", "racecheck", "synccheck"):
        records = (path.read_text("utf-8") for path in folder.glob(f"sanitizer-*{tool}.txt"))
        watched = {kernel for said in records for kernel in WATCHED.findall(said)}
        assert watched >= cuda, tool


WATCHED = re.compile(r"^(\w+) (\w+): [1-9]\d* binaries", re.M)


def test_two_runs_are_held_against_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    for name, times in (("bench-quick", (10.0, 100.0)), ("bench-quick-again", (10.5, 101.0))):
        rows = [bench_row("a", times[0]), bench_row("b", times[1])]
        lines = [RUN, *rows, {"kind": "end", "seconds": 61.2}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    shown = readme.repeated(tmp_path)
    assert "| all rows | 2 | 1 | 5.0% |" in shown
    assert "| rows above 20 µs | 1 | 1 | 1.0% |" in shown
    assert "61 s and 61 s" in shown


@pytest.mark.drawn(seconds=4.3, family="slow")
def test_a_picture_of_other_data_is_stale(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    source = (ROOT / "results/h200/bench-model.jsonl").read_text("utf-8")
    (folder / "bench-model.jsonl").write_text(source)
    assert set(readme.stale_pictures(tmp_path)) == {"speedup.svg", "bandwidth.svg"}  # not there
    pictures = tmp_path / "docs" / "pictures"
    pictures.mkdir(parents=True)
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        (pictures / path.name).write_text(path.read_text("utf-8"))
    assert readme.stale_pictures(tmp_path) == []
    run, *rest = source.splitlines()
    fewer = [line for line in rest if '"softmax"' not in line]
    (folder / "bench-model.jsonl").write_text("\n".join([run, *fewer]) + "\n")
    assert set(readme.stale_pictures(tmp_path)) == {"speedup.svg", "bandwidth.svg"}


def _tuned_table(us: float) -> str:
    """One layer of the picture at two rows, and a product that is in none."""
    found = []
    for m, n, k, taken, times in (
        (1, 6144, 4096, "skinny:64x6", {"skinny:64x6": us, "gluon:64": 30.0, "torch": 18.0}),
        (512, 6144, 4096, "torch", {"gluon:128": 50.0, "gluon:256": 40.0, "torch": 36.0}),
        (1, 8192, 8192, "torch", {"triton": 50.0, "torch": 25.0}),
    ):
        every = {Choice.of(name): Timed(time, 1.0) for name, time in times.items()}
        place = tuple(map(math.log2, (m, n, k)))
        dims = f"{m}x{k},n={n},b=column"
        found.append(Bucket(dims, "bfloat16", "half T", place, Choice.of(taken), every))
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    table = Table("NVIDIA H200", 0.02, versions, "0", found)
    return tuned_file.text(tuned_file.Device.of(pretend("h200")), {"matmul": table})


def test_routes_are_drawn_from_the_tuned_table(tmp_path: Path) -> None:
    regions = ("matmul-curves", "matmul-routes")
    text = "".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in regions)
    assert readme.render(text, tmp_path).count(readme.NOT_MEASURED) == 2
    assert readme.stale_pictures(tmp_path) == []
    path = tmp_path / readme.TUNED
    path.parent.mkdir(parents=True)
    path.write_text(_tuned_table(16.0), encoding="utf-8")
    shown = readme.render(text, tmp_path)
    assert "Llama-3-8B qkv is served, by rows of a, by skinny from 1, cuBLAS from 512." in shown
    assert "(pictures/routes.svg)" in shown
    assert "| 6,144 x 4,096 | columns | skinny 1.12 | cuBLAS 0.90 |" in shown
    assert "| 8,192 x 8,192 | columns | cuBLAS 0.50 | – |" in shown
    assert "skinny 1, gluon 0, cuda 0, triton 0, cuBLAS 2." in shown
    assert "Up to 64 rows: 0.50 to 1.12, geometric mean 0.75." in shown
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0; table `tuned/h200.json`." in shown
    assert readme.stale_pictures(tmp_path) == ["routes.svg"]
    picture = tmp_path / readme.PICTURES / "routes.svg"
    picture.parent.mkdir(parents=True)
    picture.write_text(readme._drawn(tmp_path)["routes.svg"], encoding="utf-8")
    assert readme.stale_pictures(tmp_path) == []
    path.write_text(_tuned_table(17.0), encoding="utf-8")
    assert readme.stale_pictures(tmp_path) == ["routes.svg"]


def test_kernels_stand_beside_cublas_by_records(tmp_path: Path) -> None:
    def rows(m: int, n: int, k: int, dtype: str, **us: float) -> list[Any]:
        dims = {"shape": [m, k], "n": n, "b": "column"}
        every = {"op": "matmul", "case": f"{m} {n} {k}"}
        return [
            {**bench_row(who, time, ours=who != "vendor", dims=dims), **every, "dtype": dtype}
            for who, time in us.items()
        ]

    assert readme.matmul_beside_cublas(tmp_path) == readme.NOT_MEASURED
    found = [
        *rows(512, 4096, 4096, "bfloat16", gluon=10.0, vendor=9.0),
        *rows(512, 4096, 4096, "float16", gluon=10.0, vendor=12.1),
        *rows(64, 4096, 4096, "bfloat16", gluon=99.0, skinny=8.0, cuda=5.0, vendor=10.0),
        *rows(1, 8192, 8192, "bfloat16", skinny=10.0, vendor=11.0),
        *rows(4096, 4096, 4096, "bfloat16", triton=10.0, vendor=8.5),
        *rows(4096, 4096, 4096, "float32", triton=10.0, vendor=3.4),  # tf32 is another matter
        *(
            {**row, "phase": "backward"}
            for row in rows(2048, 64, 64, "float16", gluon=9.0, vendor=1.0)
        ),
    ]
    (tmp_path / "results" / "h200").mkdir(parents=True)
    record = tmp_path / "results" / "h200" / "routes-matmul.jsonl"
    cells = [{"environment": {}}, *({"dims": "1x2", "part_of_best": part} for part in (1.0, 0.81))]
    record.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    squares = {"gluon": 10.0, "cuda": 9.0, "triton": 12.5, "torch": 10.0}
    held = [
        {"dims": "8192x8192,n=8192,b=row", "dtype": "float16", "times": squares},
        {"dims": "512x4096,n=5120", "dtype": "bfloat16", "times": {"gluon": 10.0, "torch": 8.0}},
        {
            "dims": "2048x2048,n=2048,b=column,precision=tf32",
            "dtype": "float32",
            "times": {"gluon": 10.0, "triton": 90.0, "torch": 9.5},
        },
        {  # no square
            "dims": "512x4096,n=4096,b=column,precision=tf32",
            "dtype": "float32",
            "times": {"gluon": 10.0, "torch": 5.0},
        },
        # refused ones have no time, cuBLAS's or ours
        {"dims": "8192x8192,n=8192", "dtype": "bfloat16", "times": {"gluon": 9.0, "triton": 9.0}},
        {"dims": "8192x8192,n=8192", "dtype": "float16", "times": {"torch": 9.0}},
    ]
    record = tmp_path / "results" / "h200" / "routes-prefill-matmul.jsonl"
    record.write_text("".join(json.dumps(cell) + "\n" for cell in ({"environment": {}}, *held)))
    shown = _rendered(tmp_path, "matmul-beside-cublas", "bench-prefill-matmul", found)
    named = readme._named({"shape": [64, 4096], "n": 4096, "b": "column"}, "bfloat16")
    by_the_table = {"skinny": 1.25, "cuda": 2.0}[named]
    square = readme._named({"shape": [8192, 8192], "n": 8192, "b": "row"}, "float16")
    assert squares[square] > min(squares.values())
    for line in (
        "| `gluon`, squares and prefill | 4 | 0.966 | 0.80 at 512 x 5120 x 4096, NN, bf16 | 2",
        "| `cuda`, squares and prefill | 1 | 1.111 |",
        # not the quickest of the row, but whom the table names
        f"| ours, by the table, squares and prefill | 1 | {10 / squares[square]:.3f} |",
        "| `skinny`, layers of 32 to 100 MB | 1 | 1.250 | 1.25 at 64 x 4096 x 4096, NT, bf16 | 0",
        "| `cuda`, layers of 32 to 100 MB | 1 | 2.000 |",
        f"| ours, by the table, layers of 32 to 100 MB | 1 | {by_the_table:.3f} |",
        "| `skinny`, layers of 100 MB and more | 1 | 1.100 |",
        "| `triton`, squares of 4096 and 8192, NT | 1 | 0.850 |",
        "| `triton`, squares of 4096 and 8192, NN | 1 | 0.800 |",
        "| `gluon`, squares in tf32, NT | 1 | 0.950 |",
        "| routes, rows and layers that are in no table | 2 | 0.900 | 0.81 at 1x2 | 1 below 0.93 |",
    ):
        assert line in shown
    notes = _rendered(tmp_path, "measured-matmul", "bench-prefill-matmul", found)
    assert notes.count("512 x 4096 x 4096, NT | gluon") == 1  # of bfloat16, as its head says


def test_ridges_are_where_both_floors_meet() -> None:
    h200 = pretend("h200")
    shown = _cells(readme.matmul_ridges(ROOT), h200.name)
    assert h200.bandwidth
    assert shown["ridge, flops per byte"] == f"{h200.peaks['fp16'] / h200.bandwidth:.0f}"
    rows = int(shown["rows of Llama-3-8B qkv"])
    moved, computed = readme._floors(h200, rows, *readme.LAYERS["Llama-3-8B qkv"])
    assert math.isclose(moved, computed, rel_tol=0.01)


# --- examples and transcripts --------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks(README, "python"))
def test_python_blocks_run(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


def test_readme_has_a_python_block() -> None:
    assert blocks(README, "python")


def test_the_readme_is_read_in_two_minutes() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 150
    assert sum(line.startswith("![") for line in lines) == 1
    assert sum(line.startswith("| ") for line in lines) <= 30


def test_the_guide_to_attention_keeps_its_word() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    text = "\n".join(blocks(GUIDE, "python"))
    test = doctest.DocTestParser().get_doctest(text, {}, GUIDE.name, str(GUIDE), 0)
    assert len(test.examples) > 20
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


def test_every_option_of_attention_is_in_its_guide() -> None:
    text = GUIDE.read_text("utf-8")
    for name in inspect.signature(tilewright.attention).parameters:
        assert re.search(rf"\b{name}\b", text), name


def test_explain_prints_what_the_readme_shows() -> None:
    shown = [b for b in blocks(USING, "console") if b.startswith("$ tilewright explain ")]
    assert shown
    for block in shown:
        command, _, output = block.partition("\n")
        assert run("-m", *command.removeprefix("$ ").split()) == output


@pytest.mark.parametrize("interpreter", ["0", "1"])
def test_the_quickstart_runs(interpreter: str) -> None:
    out = run("examples/quickstart.py", TRITON_INTERPRET=interpreter)
    backend = "torch" if interpreter == "0" and not torch.cuda.is_available() else "triton"
    assert f": {backend} (automatic)" in out.splitlines()[0]


@documents
def test_commands_and_make_targets_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *blocks(path, "console")])
    source = "".join(part.read_text("utf-8") for part in (SRC / "cli").glob("*.py"))
    known = re.findall(r'@app\.command\("?(\w*)"?\)\ndef (\w+)', source)
    commands = {name or function for name, function in known}
    assert set(re.findall(r"^(?:\$ )?tilewright (\w+)", code, re.M)) <= commands
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(re.findall(r"^(?:\$ )?make (\w+)", code, re.M)) <= set(targets)
    for module in re.findall(r"^(?:\$ )?python -m tilewright\.([\w.]+)", code, re.M):
        assert (SRC / f"{module.replace('.', '/')}.py").exists()


# --- links and pictures --------------------------------------------------------------------------


@documents
def test_links_point_at_something(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", path.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_every_decision_is_listed() -> None:
    listed = (ROOT / "docs" / "design.md").read_text("utf-8")
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert f"(decisions/{path.name})" in listed
        heads = re.findall(r"^## (\w+)", path.read_text("utf-8"), re.M)
        assert heads == ["Context", "Decision", "Consequences"]


def test_pictures_can_be_read_aloud() -> None:
    pictures = list((ROOT / "docs").rglob("*.svg"))
    assert pictures
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        space = "{http://www.w3.org/2000/svg}"
        for tag in ("title", "desc"):
            element = root.find(f"{space}{tag}")
            assert element is not None
            assert (element.text or "").strip()
            assert element.get("id") in root.get("aria-labelledby", "")


# --- notes ---------------------------------------------------------------------------------------


def test_every_op_has_notes() -> None:
    folders = {path.parent for path in SRC.glob("ops/*/op.py")}
    assert {path.parent for path in NOTES} == folders


PREDICTION = re.compile(r"^\| (`[^|]+`) \| [^|]+ \| ([\d,]+) \| ([\d.]+) µs \|$", re.M)


def _predictions() -> list[Any]:
    return [
        pytest.param(*match, id=f"{path.parent.name}: {match[0]}")
        for path in NOTES
        for match in PREDICTION.findall(path.read_text("utf-8"))
    ]


PREDICTED = {
    "attention": "D128 T8192 full"
}  # a case, for an op that rows and columns say little of


def _call(names: list[str]) -> tuple[Op, Args]:
    """The op that a line of a table of floors is about, and its call: 16384 x 4096 in bfloat16, or
    the case that its notes name."""
    op = every_op()[names[0]]
    by_backward = {o.autograd.op.name: o for o in reversed(registry().values()) if o.autograd}
    forward = registry()[names[1]] if len(names) > 1 else by_backward.get(op.name, op)
    assert forward.inputs is not None
    named = (case.dims for case in forward.cases if case.name == PREDICTED.get(forward.name))
    dims = next(named, {"shape": (16384, 4096)})
    with torch.device("meta"):
        args = tuple(forward.inputs(dims, torch.bfloat16, "meta", None))
    if op is forward:
        return op, args
    outputs = as_tuple(forward.outputs(*args))
    return op, forward.backward_call(args, outputs, outputs)


@pytest.mark.parametrize(("name", "moved", "floor"), _predictions())
def test_floors_are_what_explain_says(name: str, moved: str, floor: str) -> None:
    op, args = _call(re.findall(r"`(\w+)`", name))
    found = explain_call(op, args, gpu="h200")
    assert f"{found.bytes_moved:,}" == moved
    assert f"{found.floor_us:.1f}" == floor


def test_every_op_has_a_floor() -> None:
    names = {n for p in _predictions() for n in re.findall(r"`(\w+)`", p.values[0])}
    assert names == set(every_op())


# --- promises ------------------------------------------------------------------------------------


def test_three_environment_variables_in_all() -> None:
    text = "".join(path.read_text("utf-8") for path in SRC.rglob("*.py"))
    variables = set(re.findall(r"\bTILEWRIGHT_[A-Z_]+\b", text))
    assert variables == {"TILEWRIGHT_BACKEND", "TILEWRIGHT_CACHE_DIR", "TILEWRIGHT_TUNED"}
    assert variables == set(
        re.findall(r"^\| `(TILEWRIGHT_\w+)` \|", USING.read_text("utf-8"), re.M)
    )


def test_nothing_opens_a_network_connection() -> None:
    network = {"socket", "ssl", "http", "urllib", "ftplib", "requests", "httpx", "aiohttp"}
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not network & {name.split(".")[0] for name in names}, path


def test_the_autocast_table() -> None:
    table = dict(
        re.findall(r"^\| `(\w+)` \| (the input's|float32) \|$", USING.read_text("utf-8"), re.M)
    )
    x = torch.randn(2, 8, dtype=torch.float16)
    calls = {
        "attention": lambda: tilewright.attention(*[x[None, None]] * 3),
        "geglu": lambda: tilewright.geglu(x, x),
        "relu": lambda: tilewright.relu(x),
        "layer_norm": lambda: tilewright.layer_norm(x, 8),
        "rms_norm": lambda: tilewright.rms_norm(x, 8),
        "rms_norm_swiglu": lambda: tilewright.rms_norm_swiglu(x, x),
        "rope": lambda: tilewright.rope(x[None], x[None], x[:1], x[:1], layout="thd")[0],
        "softmax": lambda: tilewright.softmax(x),
        "swiglu": lambda: tilewright.swiglu(x, x),
    }
    assert table.keys() == calls.keys()
    with torch.autocast("cpu", torch.bfloat16):
        for name, call in calls.items():
            wanted = x.dtype if table[name] == "the input's" else torch.float32
            assert call().dtype == wanted


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == "Unreleased"


@pytest.mark.drawn(seconds=6.5, family="slow")
def test_a_picture_that_says_something_else_is_stale(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "results" / "h200", tmp_path / "results" / "h200")
    shutil.copytree(ROOT / readme.PICTURES, tmp_path / readme.PICTURES)
    assert readme.stale_pictures(tmp_path) == readme.stale_pictures(ROOT)
    path = tmp_path / readme.PICTURES / "speedup.svg"
    path.write_text(path.read_text("utf-8").replace(">0.9", ">9.9"), encoding="utf-8")
    assert "speedup.svg" in readme.stale_pictures(tmp_path)
