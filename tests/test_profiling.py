"""The profiling room without a GPU: ncu's words and CSV, the advice, the commands, the errors.

The files in tests/data are raw pages of ncu for an sm_90. Tests read facts from them that hold for
any such file; where a test needs a certain number, it makes its own page.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from tilewright import gpu as gpus
from tilewright import profiling
from tilewright.dims import parse
from tilewright.errors import InputError, UnsupportedError
from tilewright.ops import registry
from tilewright.profiling import (
    Kernel,
    Request,
    Timing,
    advice,
    call,
    example,
    kernel,
    ncu,
    once,
    proton_tool,
    request,
    tables,
    torch_tool,
)

SOURCE = Path(__file__).parents[1] / "src"
DATA = Path(__file__).parent / "data"
QUICK = (DATA / "ncu-quick-sm90.csv").read_text("utf-8")
FULL = (DATA / "ncu-full-eager-sm90.csv").read_text("utf-8")
SOFTMAX = Request("softmax", {"shape": (16384, 4096)})
BYTES = 16384 * 4096 * 2  # of the input, and of the output
PCT = "avg.pct_of_peak_sustained_elapsed"
MEMORY = f"gpu__compute_memory_throughput.{PCT}"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

PERMISSION = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance \
Counters on the target device 0. For instructions on enabling permissions and to get more \
information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4711
==WARNING== No kernels were profiled.
"""
NOTHING = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Disconnected from process 4711
==WARNING== No kernels were profiled.
"""


def page(*launches: dict[str, str], units: dict[str, str] | None = None) -> str:
    """A raw page: a header, the units, a line per launch."""
    metrics = list(dict.fromkeys(name for launch in launches for name in launch if name != "name"))
    lines = [["ID", "Kernel Name", "Block Size", "Grid Size", *metrics]]
    lines.append(["", "", "", "", *((units or {}).get(m, "") for m in metrics)])
    for i, launch in enumerate(launches):
        name = launch.get("name", "k")
        lines.append([str(i), name, "(128, 1, 1)", "(64, 1, 1)", *(launch[m] for m in metrics)])
    return "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n"


# --- parsing -------------------------------------------------------------------------------------


def test_a_quick_page_becomes_one_kernel() -> None:
    (found,) = ncu.parse(QUICK)
    assert found.name == "_softmax_rows"
    assert found.launches == 3
    numbers = dataclasses.asdict(found)
    stalls = numbers.pop("stalls")
    assert not stalls
    assert not [name for name, value in numbers.items() if value is None]
    assert all(0 <= value <= 101 for name, value in numbers.items() if name.endswith("_pct"))
    assert found.dram_read == pytest.approx(BYTES, rel=0.1)
    assert 10 < numbers["duration_us"] < 1000
    assert isinstance(found.registers, int)


def test_a_full_page_becomes_several_kernels_with_their_stalls() -> None:
    found = ncu.parse(FULL)
    assert len(found) > 1
    assert {k.launches for k in found} == {3}
    for k in found:
        assert 1 <= len(k.stalls) <= ncu.TOP_STALLS
        assert list(k.stalls.values()) == sorted(k.stalls.values(), reverse=True)
        assert "selected" not in k.stalls
        assert k.stalls.keys() <= advice.STALLS.keys()


def test_launches_of_one_kernel_are_one_row_of_medians_and_another_grid_is_not() -> None:
    text = page(*({MEMORY: value} for value in ("10", "90", "20")))
    (found,) = ncu.parse(text)
    assert (found.launches, found.memory_pct) == (3, 20.0)
    head, units, first, *rest = text.splitlines()
    other = first.replace("(64, 1, 1)", "(65, 1, 1)")
    assert len(ncu.parse("\n".join([head, units, first, other, *rest]))) == 2


def test_words_around_and_inside_the_table_are_skipped() -> None:
    head, *lines = page({MEMORY: "42"}, {MEMORY: "44"}).splitlines()
    lines.insert(2, "==WARNING== something")
    lines.insert(2, "the program speaks, with, commas")
    text = "\n".join(["==PROF== Connected", 'hello,"ID"', f"no newline{head}", *lines, "bye"])
    (found,) = ncu.parse(text)
    assert found.memory_pct == 43.0


@pytest.mark.parametrize(
    ("unit", "text", "us"), [("ns", "71,904", 71.904), ("nsecond", "500", 0.5), ("ms", "1.5", 1500)]
)
def test_units_and_thousands_separators(unit: str, text: str, us: float) -> None:
    duration = "gpu__time_duration.sum"
    (found,) = ncu.parse(page({duration: text}, units={duration: unit}))
    assert found.duration_us == pytest.approx(us)


@pytest.mark.parametrize("missing", ["n/a", "(!) n/a", "no data", "", "nan"])
def test_what_is_not_measured_is_none_and_the_next_spelling_is_taken(missing: str) -> None:
    blackwell = {"dram__bytes_read.sum": missing, "dram__bytes_op_read.sum": "1,024"}
    (found,) = ncu.parse(page({**blackwell, MEMORY: missing}))
    assert found.dram_read == 1024
    assert found.memory_pct is None
    assert found.tensor_pct is None


def test_stall_reasons_that_are_no_stalls_or_counted_twice_are_left_out() -> None:
    names = ("long_scoreboard", "selected", "wait", "long_scoreboard_not_issued", "barrier")
    values = ("4", "1", "6", "3", "0")
    launch = {STALLED.format(n): v for n, v in zip(names, values, strict=True)}
    (found,) = ncu.parse(page(launch))
    assert list(found.stalls.items()) == [("wait", 6.0), ("long_scoreboard", 4.0)]


@pytest.mark.parametrize("text", [QUICK, FULL], ids=["quick", "full"])
def test_a_page_that_is_cut_off_gives_what_is_whole_or_says_so(text: str) -> None:
    whole = sum(k.launches for k in ncu.parse(text))
    last = text.rstrip("\n").rindex("\n")
    assert sum(k.launches for k in ncu.parse(text[: last + 200])) == whole - 1
    assert sum(k.launches for k in ncu.parse(text.rstrip('\n"'))) == whole - 1
    header = text.index('"ID"')
    for end in (0, header, header + 300, text.index("\n", header) + 20):
        with pytest.raises(InputError, match=r"cut off\?"):
            ncu.parse(text[:end])


def test_the_details_page_is_told_apart() -> None:
    with pytest.raises(InputError, match="--page raw"):
        ncu.parse('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (NOTHING, "no kernel between"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.\n", "driver is too old"),
        ("==WARNING== Failed to load Nsight Compute CUDA modules.\n", "does not fit the driver"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.\n", "in use"),
        ("==ERROR== Failed to find metric sm__x.sum\n", "metric sm__x.sum"),
        ("==ERROR== An error occurred.\n", "ncu failed: An error occurred."),
        (
            "profile: op is 'x'.\n==ERROR== The application returned an error code (2).\n"
            + NOTHING,
            "call itself failed: profile: op is 'x'.",
        ),
    ],
)
def test_what_ncu_says_becomes_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        ncu.parse(text)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", profiling.MODES)
def test_every_command_leaves_the_clocks_alone_and_waits_for_the_program(mode: str) -> None:
    words = ncu.command(["python", "x.py"], mode, Path("call"))
    joined = " ".join(words)
    assert words[0] == "ncu"
    assert words[-2:] == ["python", "x.py"]
    for option in ("--clock-control none", "--profile-from-start off", "--target-processes all"):
        assert option in joined
    assert ("--csv --page raw --print-units base" in joined) == (mode != "file")
    assert ("--section WarpStateStats" in joined) == (mode == "full")
    assert ("--set full" in joined) == (mode == "file")
    metrics = words[words.index("--metrics") + 1].split(",")
    assert {spellings[0] for spellings in ncu.METRICS.values()} <= set(metrics)
    assert all(re.fullmatch(r"\w+(\.\w+)*", metric) for metric in metrics)


def test_a_report_goes_where_the_import_looks() -> None:
    for out in (Path("a/call"), Path("a/call.ncu-rep")):
        written = ncu.command([], "file", out)
        assert written[written.index("-o") + 1] == str(Path("a/call.ncu-rep"))
        assert str(Path("a/call.ncu-rep")) in ncu.import_command(out)
    with pytest.raises(InputError, match="no file"):
        ncu.command([], "file", None)
    with pytest.raises(InputError, match="'slow'"):
        ncu.command([], "slow", None)


def test_the_whole_request_travels() -> None:
    dims = {"shape": (4, 6, 8), "dim": -2, "dtype": torch.float32, "masked": True, "scale": 0.5}
    asked = Request("softmax", dims, "float16", "backward", "cuda_v1", calls=7, seed=3)
    words = profiling.commands(asked)[0]
    options = once._parser().parse_args(words[words.index("softmax") :])
    assert parse(registry()["softmax"], options.shape, "profile") == dims
    found = (options.op, options.dtype, options.phase, options.backend, options.calls, options.seed)
    assert found == ("softmax", "float16", "backward", "cuda_v1", 7, 3)


def test_ncu_is_found_beside_path_and_the_newest_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", (f"{tmp_path}/nsight/*/ncu",))
    assert ncu.find() is None
    for version in ("2025.3.1", "2024.12.0", "2025.10.0"):
        (tmp_path / "nsight" / version).mkdir(parents=True)
        (tmp_path / "nsight" / version / "ncu").touch()
    assert "2025.10.0" in str(ncu.find())


# --- the request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": "sofmax"}, "softmax"),
        ({"backend": "tritn"}, "cuda_v2"),
        ({"dtype": "int32"}, "floating"),
        ({"dtype": "bf61"}, "floating"),
        ({"phase": "sideways"}, "backward"),
        ({"tool": "nsys"}, "proton"),
        ({"mode": "slow"}, "quick"),
        ({"mode": "file"}, "out"),
        ({"calls": 0}, "1 or more"),
        ({"dims": {"shape": (8, 8), "masekd": True}}, "'masekd'"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        profiling.profile(dataclasses.replace(SOFTMAX, **change))
    assert says in str(raised.value)


def test_predictions_are_the_fewest_bytes() -> None:
    assert call.predict(SOFTMAX)[:2] == (BYTES, BYTES)
    backward = dataclasses.replace(SOFTMAX, phase="backward")
    assert call.predict(backward)[:2] == (2 * BYTES, BYTES)
    assert call.predict(SOFTMAX).flops == 5 * 16384 * 4096


@pytest.mark.parametrize("backend", ["eager", "torch", "vendor"])
def test_rivals_run_forward_and_backward(backend: str) -> None:
    asked = Request("rms_norm", {"shape": (4, 16)}, "float32", backend=backend)
    if backend not in request.backends(request.check(dataclasses.replace(asked, backend="eager"))):
        pytest.skip("no such rival")
    assert call.make(asked, "cpu")().shape == (4, 16)
    run = call.make(dataclasses.replace(asked, phase="backward"), "cpu")
    for grads in (run(), run()):
        assert [g.shape for g in grads] == [(4, 16), (16,)]


# --- once ----------------------------------------------------------------------------------------


def test_once_says_what_is_wrong_in_one_line_and_exits_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: None)
    cases = {
        ("relux",): "op is 'relux'",
        ("relu", "--backend", "cuda_v9"): "backend is 'cuda_v9'",
        ("relu", "--dtype", "int8"): "dtype is 'int8'",
        ("relu", "--shape", "8x"): "shape is '8x'",
        ("relu", "--shape", "8x8,depth=3"): "there is no 'depth'",
        ("relu", "--shape", "8x8"): "sees no NVIDIA GPU",
    }
    for words, says in cases.items():
        assert once.main(words) == 2
        told = capsys.readouterr()
        assert says in told.err
        assert (told.out, told.err.count("\n")) == ("", 1)


def test_once_is_a_program() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tilewright.profiling.once"]
    done = subprocess.run(
        [*command, "relu", "--shape", "8x8"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("profile: torch ")
    assert done.stderr.endswith("sees no NVIDIA GPU. Run it on a machine with one.\n")


# --- advice --------------------------------------------------------------------------------------

LONG = Kernel("k", 3, duration_us=70.0, sm_pct=30.0, memory_pct=70.0, dram_pct=70.0)
BEFORE = 0.01


def changed(**facts: Any) -> Kernel:
    return dataclasses.replace(LONG, **facts)


@pytest.mark.parametrize(
    ("beyond", "within", "says"),
    [
        (changed(dram_pct=advice.ROOF), changed(dram_pct=advice.ROOF - BEFORE), "DRAM 85 % busy"),
        (
            changed(tensor_pct=advice.ROOF),
            changed(tensor_pct=advice.ROOF - BEFORE),
            "tensor pipe 85 % busy: at the roof",
        ),
        (changed(sm_pct=advice.ROOF), changed(sm_pct=advice.ROOF - BEFORE), "bound by instruc"),
        (changed(memory_pct=advice.ROOF), changed(memory_pct=advice.ROOF - BEFORE), "L1 or L2 85"),
        (
            changed(memory_pct=advice.LATENCY - BEFORE),
            changed(memory_pct=advice.LATENCY),
            "latency; raise occupancy or loads in flight",
        ),
        (
            changed(duration_us=advice.SHORT_US - BEFORE),
            changed(duration_us=advice.SHORT_US),
            "too short to judge",
        ),
        (
            changed(memory_pct=35.0, theoretical_occupancy_pct=advice.FEW_WARPS - BEFORE),
            changed(memory_pct=35.0, theoretical_occupancy_pct=advice.FEW_WARPS),
            "occupancy held at 50 %",
        ),
        (
            changed(memory_pct=35.0, theoretical_occupancy_pct=100.0, occupancy_pct=74.9),
            changed(memory_pct=35.0, theoretical_occupancy_pct=100.0, occupancy_pct=75.0),
            "too small or uneven",
        ),
        (
            changed(stalls={"long_scoreboard": 3.1, "wait": 2.0, "barrier": 2.0}),
            changed(stalls={"long_scoreboard": 2.0, "wait": 2.0, "barrier": 2.0, "drain": 2.0}),
            "warps wait for loads from L2 or DRAM",
        ),
    ],
)
def test_each_threshold_both_ways(beyond: Kernel, within: Kernel, says: str) -> None:
    assert says in advice.of_kernel(beyond)
    assert says not in advice.of_kernel(within)


@pytest.mark.parametrize(
    ("read", "written", "says"),
    [
        (1.9, 1.0, "reads 1.9x the bytes it must: a second pass over the input"),
        (advice.SECOND_PASS - BEFORE, 1.0, "part is read again"),
        (0.4, 1.0, "came out of L2"),
        (1.0, advice.MORE_BYTES, "writes 1.1x the bytes"),
    ],
)
def test_bytes_beside_the_prediction(read: float, written: float, says: str) -> None:
    assert says in advice.of_kernel(LONG, read, written)


def test_bytes_as_predicted_and_fewer_writes_are_no_finding() -> None:
    for read, written in ((1.0, 1.0), (advice.MORE_BYTES - BEFORE, 0.3), (None, None)):
        told = advice.of_kernel(LONG, read, written)
        assert not re.search(r"reads|writes|came out", told)


def test_at_the_roof_stalls_are_not_mended_but_a_second_pass_is() -> None:
    told = advice.of_kernel(changed(dram_pct=92.0, stalls={"long_scoreboard": 9.0}), 1.9, 1.0)
    assert told.startswith("DRAM 92 % busy: at the roof; reads 1.9x")
    assert "wait" not in told


def test_no_numbers_and_no_advice() -> None:
    assert "too little" in advice.of_kernel(Kernel("k", 1))
    assert "too little" in advice.of_call(2, None, 1.0)


# --- tables --------------------------------------------------------------------------------------


def shown(table: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(table)
    return console.export_text()


def test_one_kernel_stands_beside_the_prediction() -> None:
    k = changed(dram_read=190.0, dram_written=100.0, registers=40, occupancy_pct=50.0)
    text = shown(ncu.table([k], 100, 100, 7e7))
    assert re.search(r"DRAM read +190 B +100 B +1\.90x", text)
    assert re.search(r"DRAM written +100 B +100 B +1\.00x", text)
    assert "1.00 TFLOP/s" in text
    assert "a second pass" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_several_kernels_are_judged_together() -> None:
    each = changed(dram_read=100.0, dram_written=100.0, duration_us=20.0)
    twice = dataclasses.replace(each, name="twice", launches=6)
    *rows, whole = tables.kernel_rows([each, twice], 100, 100, calls=3)
    assert [row["read_over_predicted"] for row in rows] == [None, None]
    assert (whole["name"], whole["launches"], whole["duration_us"]) == ("one call", 3, 60.0)
    assert whole["read_over_predicted"] == pytest.approx(3.0)
    assert "fuse them" in whole["advice"]
    text = shown(ncu.table([each, twice], 100, 100))
    assert text.index("twice") < text.index("one call")


def test_a_lost_launch_is_no_fraction_of_the_bytes() -> None:
    (row,) = tables.kernel_rows([changed(launches=2, dram_read=100.0)], 100, 100, calls=3)
    assert row["read_over_predicted"] == pytest.approx(1.0)
    assert row["written_over_predicted"] is None


def test_names_of_cpp_kernels_are_shortened() -> None:
    assert kernel.short_name("_softmax_rows") == "_softmax_rows"
    assert kernel.short_name("void a::<unnamed>::f<4, g<int>, h>(T1 *, T2)") == "f"
    assert kernel.short_name("void (anonymous namespace)::softmax_v2<float>(int)") == "softmax_v2"
    assert kernel.short_name("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD"


def test_timings_are_per_launch_and_per_call() -> None:
    timings = [Timing("a", 3, 30.0), Timing("b", 6, 120.0)]
    first, second = tables.timing_rows(timings, calls=3)
    assert (first["name"], first["mean_us"], first["us_per_call"]) == ("b", 20.0, 40.0)
    assert second["us_per_call"] == 10.0
    text = shown(tables.timing_table(timings, 3, 60_000, 40_000))
    assert "one call: 50.0 us" in text
    assert "2 GB/s" in text


# --- the tools in this process -------------------------------------------------------------------


def test_torch_events_on_the_device_are_kernels() -> None:
    def event(name: str, device: Any, us: float, annotation: bool = False) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(
            name=name, device_type=device, time_range=span, is_user_annotation=annotation
        )

    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [event("k", gpu, 2.0), event("k", gpu, 4.0), event("aten::relu", cpu, 9.0)]
    events.append(event("a range", gpu, 9.0, annotation=True))
    assert torch_tool.timings(events) == [Timing("k", 2, 6.0)]


def test_a_proton_tree_becomes_kernels() -> None:
    def frame(name: str, children: Any = (), **metrics: Any) -> Any:
        named = {"name": name, "type": "function"}
        return {"frame": named, "metrics": metrics, "children": list(children)}

    measured = {"count": 3, "time (ns)": 6000, "device_id": "0", "device_type": "CUDA"}
    idle = {"count": 0, "time (ns)": 0}
    leaves = [frame("k", **measured), frame("scope", [frame("k", **measured)], **idle)]
    root = frame("ROOT", [*leaves, frame("empty"), frame("never", **idle)], **idle)
    tree = [root, {"CUDA": {"0": {"arch": "90", "num_sms": 132}}}]
    assert proton_tool.timings(tree) == [Timing("k", 6, 12.0)]


def test_proton_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise RuntimeError("0 active drivers")

    fake = SimpleNamespace(start=no_driver)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(profiler=fake))
    monkeypatch.setitem(sys.modules, "triton.profiler", fake)
    with pytest.raises(UnsupportedError, match="cannot start .0 active drivers.*tool torch"):
        proton_tool.run(lambda: None, 1)
    assert proton_tool.hatchet_path(tmp_path / "a.b") == tmp_path / "a.b.hatchet"


# --- the report ----------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and an ncu that are not there: ncu prints the quick page."""
    monkeypatch.setattr(gpus, "detect", lambda index=0: gpus.pretend("h200"))
    monkeypatch.setattr(ncu, "find", lambda: "/somewhere/bin/ncu")
    monkeypatch.setattr(ncu, "run", lambda words: QUICK)


@pytest.mark.parametrize("tool", profiling.TOOLS)
def test_without_a_gpu_the_command_is_the_answer(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "detect", lambda index=0: None)
    report = profiling.profile(dataclasses.replace(SOFTMAX, tool=tool))
    assert (report.ran, report.state, report.rows, report.table) == (False, "missing", [], None)
    assert "no NVIDIA GPU" in report.reason
    assert "softmax --shape 16384x4096 --dtype bfloat16" in report.command
    asked = profiling.profile(dataclasses.replace(SOFTMAX, tool=tool), run=False)
    assert (asked.state, asked.command) == ("printed", report.command)


def test_without_ncu_the_reason_says_where_it_was_looked_for(
    pretended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "find", lambda: None)
    report = profiling.profile(SOFTMAX)
    assert report.state == "missing"
    assert "/opt/nvidia/nsight-compute" in report.reason


@pytest.mark.parametrize("mode", profiling.MODES)
def test_a_report_of_every_mode(pretended: None, mode: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "call"
    report = profiling.profile(dataclasses.replace(SOFTMAX, mode=mode, out=out))
    assert report.ran
    assert [row["name"] for row in report.rows] == ["_softmax_rows"]
    assert "_softmax_rows" in shown(report.table)
    assert "/somewhere" not in report.command  # a record names no folder of the machine
    assert sys.executable not in report.command
    assert report.command.count("ncu ") == (2 if mode == "file" else 1)
    assert out.exists() == (mode != "file")


def test_a_tool_that_fails_is_told_not_raised(
    pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ncu, "run", lambda words: PERMISSION)
    for mode in profiling.MODES:
        report = profiling.profile(dataclasses.replace(SOFTMAX, mode=mode, out=tmp_path / "c"))
        assert (report.ran, report.state) == (False, "failed")
        assert "ERR_NVGPUCTRPERM" in report.reason


def test_a_backend_that_refuses_is_told_before_the_tool_starts(pretended: None) -> None:
    wide = Request("softmax", {"shape": (2, 65_537)}, backend="cuda_v2")
    with pytest.raises(UnsupportedError, match="blocks hold"):
        profiling.profile(wide)


def test_a_csv_from_elsewhere_is_read(tmp_path: Path) -> None:
    report = profiling.read_csv(DATA / "ncu-quick-sm90.csv", SOFTMAX)
    assert report.ran
    assert report.record()["environment"] == {}  # this machine did not measure it
    with pytest.raises(InputError, match="cannot be read"):
        profiling.read_csv(tmp_path / "none.csv", SOFTMAX)


# --- the worked example --------------------------------------------------------------------------


def saved(csv: str, backend: str) -> Any:
    report = profiling.read_csv(DATA / csv, dataclasses.replace(SOFTMAX, backend=backend))
    facts = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "ncu": "2025.3.1"}
    return json.loads(json.dumps({**report.record(), "environment": facts}, default=str))


def test_the_worked_example_takes_its_numbers_from_the_record() -> None:
    record = saved("ncu-quick-sm90.csv", "triton")
    text = example.worked_example(record)
    (row,) = record["rows"]
    assert f"took {row['duration_us']:.1f} µs" in text
    assert f"| {row['dram_read']:,.0f} | {BYTES:,} |" in text
    assert f"read {row['read_over_predicted']:.2f} times" in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, ncu 2025.3.1." in text
    assert "16384 x 4096 in bfloat16, backend `triton`" in text
    assert text.startswith("```console\n$ ncu \\\n")
    row["dram_pct"], row["sm_pct"], row["memory_pct"] = 20.0, 30.0, 31.0
    assert "waits more than it works" in example.worked_example(record)


def test_the_worked_example_of_several_kernels_has_a_column_for_each() -> None:
    record = saved("ncu-full-eager-sm90.csv", "eager")
    lines = example.worked_example(record).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert {line.count(" | ") for line in table} == {len(record["rows"])}
    assert any("long_scoreboard" in line for line in table)


@pytest.mark.parametrize("record", [None, {}, {"rows": []}, {"rows": [{"name": "k"}]}])
def test_without_a_record_nothing_is_claimed(record: Any) -> None:
    assert example.worked_example(record) == example.NOT_MEASURED


def test_the_document_has_a_place_for_the_example_and_names_every_threshold() -> None:
    text = (SOURCE.parent / "docs" / "profiling.md").read_text("utf-8")
    assert re.search(r"<!-- generated: profile -->\n.*?<!-- end -->", text, re.S)
    for reason in advice.STALLS:
        assert f"`{reason}`" in text
    for number in (advice.ROOF, advice.LATENCY, advice.MORE_BYTES, advice.SECOND_PASS):
        assert f"{number:g}" in text


# --- a page from a real H200 ---------------------------------------------------------------------


def test_a_real_page_of_an_h200() -> None:
    """softmax 16384 x 4096 in bfloat16, Nsight Compute 2025.3, mode full."""
    (kernel,) = ncu.parse((DATA / "ncu-h200-full.csv").read_text("utf-8"))
    assert (kernel.name, kernel.launches, kernel.registers) == ("_softmax_rows", 3, 48)
    assert 60 < kernel.duration_us < 70
    assert kernel.dram_read == pytest.approx(2**27, rel=0.01)
    assert 0 < kernel.dram_written < 2**27  # the rest was still in L2
    assert (kernel.memory_pct, kernel.tensor_pct) == (77.68, 0.19)
    assert list(kernel.stalls)[0] == "long_scoreboard"
