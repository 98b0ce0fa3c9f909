"""What one check found. A run is a list of these; tables, JSON and exit codes are made from it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

IN_TURN = ("layouts", "in place", "nan")  # of which a quick run on a CPU takes a dtype each


@dataclass(frozen=True)
class Result:
    op: str
    check: str  # a name in checks.CHECKS
    backend: str
    case: str
    dtype: str
    phase: str  # "forward", "backward" or "" where there is no such thing
    passed: bool
    ratio: float = 0.0  # worst error over its tolerance; 1 is the limit
    error: float = 0.0  # worst absolute error against float64
    message: str = ""
    seed: int | None = None

    def repro(self, device: str) -> str:
        """The command that runs this one case again."""
        words = ["tilewright", "verify", self.op, "--device", device, "--only", self.check]
        words += ["--backend", self.backend]
        if self.check == "cases":
            words += ["--case", self.case]
        if self.check == "launches":  # the last word is the launch
            words += ["--case", self.case.rpartition(" ")[0]]
        if device == "cpu" and self.check in IN_TURN:
            words += ["--full"]  # a quick run may not take this dtype
        if self.seed is not None:
            words += ["--seed", str(self.seed), "--cases", "1"]
        return shlex.join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
