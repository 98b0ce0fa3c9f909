"""Nsight Compute: its command line, its CSV, and its errors in one line each.

Metric names differ between GPUs. We ask for every spelling; one that a GPU does not know comes back
as "n/a" or not at all, and the next spelling is taken.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.errors import InputError
from tilewright.profiling.kernel import Kernel
from tilewright.profiling.tables import table

__all__ = [
    "Kernel",
    "command",
    "failure",
    "find",
    "import_command",
    "parse",
    "run",
    "table",
    "version",
]

_PCT = "avg.pct_of_peak_sustained_elapsed"

# field of Kernel -> its metric, the spelling to prefer first. Elapsed, not active: so that the
# numbers are parts of the same whole, the kernel's duration.
METRICS: Mapping[str, tuple[str, ...]] = {
    "duration_us": ("gpu__time_duration.sum",),
    "sm_pct": (f"sm__throughput.{_PCT}",),
    "memory_pct": (f"gpu__compute_memory_throughput.{_PCT}",),
    "dram_pct": (f"gpu__dram_throughput.{_PCT}", f"dram__throughput.{_PCT}"),
    "dram_read": ("dram__bytes_read.sum", "dram__bytes_op_read.sum"),  # op_: from Blackwell on
    "dram_written": ("dram__bytes_write.sum", "dram__bytes_op_write.sum"),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "theoretical_occupancy_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "registers": ("launch__registers_per_thread",),
    "tensor_pct": (
        f"sm__pipe_tensor_cycles_active.{_PCT}",
        f"sm__pipe_tensor_op_hmma_cycles_active.{_PCT}",  # up to Hopper
        f"sm__pipe_tensor_subpipe_hmma_cycles_active.{_PCT}",  # from Blackwell on
    ),
}
QUICK = tuple(metric for spellings in METRICS.values() for metric in spellings)
# a section names the stall reasons that the GPU has; Hopper has one that the others lack
STALL_SECTION = "WarpStateStats"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.(ratio|pct)")
NO_STALL = ("selected",)  # a warp that issues is not waiting
TOP_STALLS = 5

TO_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3,
         "s": 1e6, "second": 1e6}  # fmt: skip
TO_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}

PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "C:/Program Files/NVIDIA Corporation/Nsight Compute */ncu.bat",
)
NOT_FOUND = (
    "ncu is not on PATH, nor in /usr/local/cuda*/bin or /opt/nvidia/nsight-compute/*. Install "
    "Nsight Compute: it comes with the CUDA toolkit, or as cuda-nsight-compute-13-0 from NVIDIA's "
    "apt repository, or as nsight-compute from conda's channel nvidia."
)

FAILED = ("==ERROR==", "No kernels were profiled")
# what ncu says -> what it means and what to do; the first that fits is told
FAILURES = (
    (
        "ERR_NVGPUCTRPERM",
        "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). Run it as root, or have the "
        "administrator set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia kernel module and "
        "reboot; on Windows, and for WSL, allow it in the NVIDIA Control Panel under Developer, "
        "Manage GPU Performance Counters. A container needs --cap-add=SYS_ADMIN.",
    ),
    (
        "driver is not compatible with Nsight Compute",
        "The driver is too old for this ncu. Update the driver, or use the ncu of a CUDA toolkit "
        "that is no newer than the driver (nvidia-smi shows which).",
    ),
    (
        "Failed to load Nsight Compute CUDA modules",
        "This ncu does not fit the driver or the GPU. Install the ncu of the driver's own CUDA "
        "version (nvidia-smi shows it).",
    ),
    (
        "driver resource was unavailable",
        "The GPU's counters are in use: only one tool at a time can have them. Stop the other one "
        "(DCGM, nsys, a second ncu); `dcgmi profiling --pause` pauses DCGM.",
    ),
)


def command(target: Sequence[str], mode: str, out: Path | None = None) -> list[str]:
    """The ncu command that watches `target`; CSV on stdout, or with mode "file" a report in `out`.

    Clocks are left alone: locked to base, as is ncu's default, they show another machine than the
    one that is benchmarked. Caches are flushed by ncu itself before each of its passes.
    """
    words = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    words += ["--target-processes", "all"]
    if mode == "file":
        if out is None:
            raise InputError("profile: mode is 'file' and there is no file to write.")
        words += ["--set", "full", "--metrics", ",".join(QUICK)]
        words += ["--force-overwrite", "-o", str(report_path(out))]
    elif mode in ("quick", "full"):
        words += ["--section", STALL_SECTION] if mode == "full" else []
        words += ["--metrics", ",".join(QUICK), "--csv", "--page", "raw", "--print-units", "base"]
    else:
        raise InputError(f"profile: mode is {mode!r}; it must be one of quick, full, file.")
    return [*words, *target]


def import_command(report: Path) -> list[str]:
    """The ncu command that prints a report's numbers as the other modes do."""
    return ["ncu", "--import", str(report_path(report)), "--csv", "--page", "raw",
            "--print-units", "base"]  # fmt: skip


def report_path(out: Path) -> Path:
    """The name that ncu gives the file: it adds its suffix to any other."""
    return out if out.suffix == ".ncu-rep" else out.with_name(f"{out.name}.ncu-rep")


def find() -> str | None:
    """Where ncu is: on PATH, or the newest in the places where installers put it."""
    found = shutil.which("ncu")
    if found is None:
        candidates = [path for place in PLACES for path in glob.glob(place)]
        found = max(candidates, key=_numbers, default=None)
    return found


def _numbers(path: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", path)]


def version() -> str | None:
    """ncu's own version, for a record."""
    found = find()
    match = re.search(r"Version (\S+)", run([found, "--version"])) if found else None
    return match[1] if match else None


def run(words: Sequence[str]) -> str:
    """What the command printed, on both streams; its exit code says less than its words."""
    # LC_ALL: the decimal point and the thousands separators of the CSV follow the locale
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        words, capture_output=True, encoding="utf-8", errors="replace", env=environment
    )
    return f"{done.stderr}\n{done.stdout}"


def parse(csv_text: str) -> list[Kernel]:
    """The kernels of a raw page as CSV, in the order of their first launch.

    Whatever is printed around the table is skipped, and so is a line that was cut off. Launches of
    one kernel with one grid become one Kernel, by the median of each number.
    """
    header, units, rows = _table_of(csv_text)
    launches: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        key = (cells["Kernel Name"], cells.get("Block Size", ""), cells.get("Grid Size", ""))
        numbers = {name: _number(text, units.get(name, "")) for name, text in cells.items()}
        known = {name: value for name, value in numbers.items() if value is not None}
        launches.setdefault(key, []).append(known)
    return [_kernel(key[0], seen) for key, seen in launches.items()]


def failure(text: str) -> str:
    """Why ncu's output holds no kernel, and what to do about it, in one line."""
    for words, meaning in FAILURES:
        if words in text:
            return meaning
    unknown = re.search(r"Failed to find metric (\S+)", text)
    if unknown:
        return f"This ncu does not know the metric {unknown[1]}. Install a newer ncu."
    if "application returned an error code" in text:
        return f"The call itself failed: {_last_words(text)}"
    if "No kernels were profiled" in text:
        return (
            "ncu saw no kernel between the profiler's start and stop. Did the call launch one? "
            "An empty shape launches none."
        )
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return f"ncu failed: {errors[0].removeprefix('==ERROR==').strip()}"
    return "There is no whole line of ncu's raw page in this text. Was the file cut off?"


def _table_of(text: str) -> tuple[list[str], dict[str, str], list[list[str]]]:
    header: list[str] = []
    units: dict[str, str] = {}
    rows: list[list[str]] = []
    for line in text.splitlines():
        start = line.find('"ID",')
        if not header:
            # the program's own output may end without a newline before it
            if start >= 0 and '"Kernel Name"' in line:
                header = _cells(line[start:])
                if "Metric Name" in header:
                    raise InputError("profile: this is ncu's details page; ask for --page raw.")
            continue
        cells = _cells(line)
        if len(cells) != len(header):
            continue  # ncu's own words, the program's, or a line that was cut off
        if not cells[0]:
            units = dict(zip(header, cells, strict=True))
        elif cells[0].isdigit():
            rows.append(cells)
    if not rows:
        raise InputError(f"profile: {failure(text)}")
    return header, units, rows


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:  # a quote that is never closed
        return []


def _number(text: str, unit: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # "n/a", "no data", or a column of words
        return None
    value *= TO_US.get(unit) or TO_BYTES.get(unit) or 1.0
    return value if math.isfinite(value) else None


def _kernel(name: str, launches: Sequence[Mapping[str, float]]) -> Kernel:
    def median(metric: str) -> float | None:
        seen = [numbers[metric] for numbers in launches if metric in numbers]
        return statistics.median(seen) if seen else None

    facts: dict[str, float | None] = {}
    for field, spellings in METRICS.items():
        values = (median(metric) for metric in spellings)
        facts[field] = next((value for value in values if value is not None), None)
    registers = facts.pop("registers")
    return Kernel(
        name=name,
        launches=len(launches),
        registers=int(registers) if registers is not None else None,
        stalls=_stalls({metric: median(metric) for numbers in launches for metric in numbers}),
        **facts,
    )


def _stalls(medians: Mapping[str, float | None]) -> dict[str, float]:
    """Reason -> warps that waited for it whenever one issued, the most first."""
    found: dict[str, float] = {}
    for metric, value in medians.items():
        match = STALL.fullmatch(metric)
        if match and value and match[1] not in NO_STALL and not match[1].endswith("_not_issued"):
            found[match[1]] = value / 100 if match[2] == "pct" else value
    return dict(sorted(found.items(), key=lambda item: -item[1])[:TOP_STALLS])


def _last_words(text: str) -> str:
    """The program's last line on stderr, which comes before ncu's own words about it."""
    own = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    return own[-1] if own else "it said nothing."
