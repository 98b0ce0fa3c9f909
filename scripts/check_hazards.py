"""Let compute-sanitizer watch every binary of some ops or backends, and keep what it says.

    python scripts/check_hazards.py matmul cuda skinny --parts 11 --workers 16 \\
        --record results/h200/sanitizer-matmul-cuda

Every tool watches `tilewright.verify.touch --smallest` in so many parts, as many at a time as there
are workers. A tool's record is <record>-<tool>.txt: each command, and all that it said. The exit
status is 1 if a tool found something, or if a part failed or did not end in time; the record tells
which call was under way. A sanitizer takes memory on the GPU for each part.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
# cuda-bindings looks for driver functions that an older driver lacks: no error of ours.
MORE = {"memcheck": ("--report-api-errors", "no")}
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # past the end of a tensor lies nobody's memory
CLEAN = re.compile(r"^========= .*SUMMARY: 0 (errors|hazards)", re.M)
RAN = re.compile(r"^\w+ \w+: \d+ binaries, forward and backward$", re.M)


@dataclass(frozen=True)
class Watch:
    """One tool, one part of the calls."""

    tool: str
    names: tuple[str, ...]
    part: int
    parts: int

    def command(self, python: str) -> list[str]:
        which = ("--smallest", "--part", f"{self.part}/{self.parts}")
        program = (python, "-m", "tilewright.verify.touch", *which, *self.names)
        return ["compute-sanitizer", "--tool", self.tool, *MORE.get(self.tool, ()), *program]

    @property
    def line(self) -> str:
        return f"$ {UNCACHED}=1 {shlex.join(self.command('python'))}"


@dataclass(frozen=True)
class Seen:
    """What came of it."""

    watch: Watch
    said: str
    trouble: str  # "": it ended, and found nothing

    @property
    def text(self) -> str:
        trouble = f"{self.trouble}\n" if self.trouble else ""
        return f"{self.watch.line}\n{self.said}{trouble}"


def see(watch: Watch, limit: float) -> Seen:
    """Run it, with all that it starts."""
    process = subprocess.Popen(
        watch.command(sys.executable), env={**os.environ, UNCACHED: "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    late = False
    try:
        said, aside = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        said, aside = process.communicate()
    said = said if said.endswith("\n") or not said else f"{said}\n"
    return Seen(watch, said, _trouble(said, aside, process.returncode, limit if late else 0.0))


def _trouble(said: str, aside: str, status: int, late: float) -> str:
    refused = re.search(r"^touch: .+", said, re.M)
    last = refused[0] if refused else (aside.strip().splitlines() or ["it said nothing"])[-1]
    if late:
        return f"did not end in {late:g} s: {last}"
    if status or not RAN.search(said):
        return f"ended with status {status}: {last}"
    return "" if CLEAN.search(said) else f"found something: {last}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="OP or BACKEND", help="none: all")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated; none: all")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="parts at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a part")
    parser.add_argument("--record", required=True, help="the records' path, without -TOOL.txt")
    given = parser.parse_args(arguments)
    if min(given.parts, given.workers, given.limit) <= 0:
        parser.error("--parts, --workers and --limit must be more than 0.")
    if shutil.which("compute-sanitizer") is None:
        parser.error("there is no compute-sanitizer on the PATH; it comes with the CUDA toolkit.")
    turns = itertools.product(given.tool or TOOLS, range(1, given.parts + 1))
    watches = [Watch(tool, tuple(given.names), part, given.parts) for tool, part in turns]
    found: list[Seen] = []
    with ThreadPoolExecutor(given.workers) as pool:
        for done in as_completed([pool.submit(see, watch, given.limit) for watch in watches]):
            found.append(done.result())
            watch, trouble = found[-1].watch, found[-1].trouble or "nothing found"
            print(
                f"{len(found)}/{len(watches)} {watch.tool} part {watch.part}: {trouble}", flush=True
            )
            keep(given.record, watch.tool, found)  # what is known so far, if we are cut off
    return 1 if any(seen.trouble for seen in found) else 0


def keep(record: str, tool: str, found: list[Seen]) -> None:
    of_tool = sorted((s for s in found if s.watch.tool == tool), key=lambda s: s.watch.part)
    text = "".join(seen.text for seen in of_tool)
    Path(f"{record}-{tool}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
