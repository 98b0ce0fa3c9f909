"""Let compute-sanitizer watch every binary of some ops or backends, and keep what it says.

    python scripts/check_hazards.py matmul cuda skinny --parts 11 --workers 11 \\
        --record results/h200/sanitizer-matmul-cuda

Every tool watches `tilewright.verify.touch --smallest` in so many parts, as many at a time as there
are workers. A tool's record is <record>-<tool>.txt: each command, and what it printed; where
something is wrong, its standard error as well, and the reason. It is written when all parts have
ended or were stopped, over one that is there; until then it is called .part. The exit status is 1
if anything was wrong, and 2 if touch refuses the names or sees no GPU: then no record is replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
# cuda-bindings looks for driver functions that an older driver lacks: no error of ours.
MORE = {"memcheck": ("--report-api-errors", "no")}
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # past the end of a tensor lies nobody's memory
POLL = 0.05  # seconds


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


@dataclass(frozen=True)
class Seen:
    """What came of it. `trouble` is empty if it ended, watched something, and found nothing."""

    watch: Watch
    said: str
    aside: str
    trouble: str

    @property
    def text(self) -> str:
        lines = [f"$ {UNCACHED}=1 {shlex.join(self.watch.command('python'))}", self.said.rstrip()]
        if self.trouble:
            lines += [self.aside.rstrip(), f"-- {self.trouble}"]
        return "".join(f"{line}\n" for line in lines if line)


@dataclass
class Running:
    """A sanitizer at work, in a process group of its own."""

    watch: Watch
    out: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    aside: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.watch.command(sys.executable), env={**os.environ, UNCACHED: "1"},
            stdout=self.out, stderr=self.aside, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """It, and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self, late: float) -> Seen:
        if late:
            self.stop()
        said, aside = map(_read, (self.out, self.aside))
        return Seen(self.watch, said, aside, trouble(said, aside, self.process.returncode, late))


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def trouble(said: str, aside: str, status: int, late: float = 0.0) -> str:
    """What is wrong with a part, in a line. `late`: the seconds after which it was stopped."""
    turns = re.findall(r"^\d+/\d+ .+", aside, re.M)
    under_way = turns[-1] if turns else "before its first call"
    if late:
        return f"did not end in {late:g} s: {under_way}"
    refused = re.search(r"^touch: .+", said, re.M)
    if refused:
        return refused[0]
    counts = [int(n) for n in re.findall(r": (\d+) binaries, forward and backward$", said, re.M)]
    if status or not counts:
        last = (aside.strip().splitlines() or ["it said nothing"])[-1]
        return f"ended with status {status}, {under_way}: {last}"
    ends = re.findall(r"^=+ .*SUMMARY: .+", said, re.M)
    if len(ends) != 1 or re.search(r"^=+ (Error:|Internal)|returned an error", said, re.M):
        return "the sanitizer did not watch to the end"
    if not re.search(r": 0 (errors|hazards)\b", ends[0]):
        return f"found something: {ends[0].strip('= ')}"
    return "" if any(counts) else "nothing ran: there are fewer calls than parts"


def see(watches: Sequence[Watch], workers: int, limit: float) -> Iterator[Seen]:
    """Each when it has ended. Whoever stops early stops all that is under way."""
    waiting, running = list(reversed(watches)), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Running(waiting.pop()))
            time.sleep(POLL)
            for one in list(running):
                ended = one.process.poll() is not None
                if ended or time.monotonic() - one.begun > limit:
                    seen = one.end(late=0.0 if ended else limit)
                    running.remove(one)
                    yield seen
    finally:
        for one in running:
            one.stop()


def keep(record: str, tool: str, parts: int, found: Sequence[Seen]) -> None:
    of_tool = sorted((s for s in found if s.watch.tool == tool), key=lambda s: s.watch.part)
    path = Path(f"{record}-{tool}.txt")
    so_far = path.with_name(f"{path.name}.part")
    so_far.write_text("".join(seen.text for seen in of_tool), encoding="utf-8")
    if len(of_tool) == parts:
        so_far.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="OP or BACKEND", help="none: all")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated; none: all")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="parts at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a part")
    parser.add_argument("--record", required=True, help="the records' path, without -TOOL.txt")
    given = parser.parse_args(arguments)
    if not all(number > 0 for number in (given.parts, given.workers, given.limit)):
        parser.error("--parts, --workers and --limit must be more than 0.")
    if not Path(given.record).parent.is_dir():
        parser.error(f"--record: there is no folder {Path(given.record).parent}.")
    if shutil.which("compute-sanitizer") is None:
        parser.error("there is no compute-sanitizer on the PATH; it comes with the CUDA toolkit.")
    names, parts = tuple(given.names), range(1, given.parts + 1)
    tools = dict.fromkeys(given.tool or TOOLS)
    watches = [Watch(tool, names, part, given.parts) for tool in tools for part in parts]
    found: list[Seen] = []
    with closing(see(watches, given.workers, given.limit)) as ends:
        for seen in ends:
            if seen.trouble.startswith("touch: "):
                parser.error(seen.trouble)
            found.append(seen)
            done = f"{len(found)}/{len(watches)} {seen.watch.tool} part {seen.watch.part}"
            print(f"{done}: {seen.trouble or 'nothing found'}", flush=True)
            keep(given.record, seen.watch.tool, given.parts, found)
    return 1 if any(seen.trouble for seen in found) else 0


if __name__ == "__main__":
    # else it would end us at once, and leave the sanitizers running
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
