"""What one check found. A run is a list of these; tables, JSON and exit codes are made from it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

BY_CASE = ("cases", "layouts", "in place", "nan", "empty", "offsets")  # checks that --case narrows


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

    @property
    def line(self) -> str:
        """Say what was run and what is wrong with it."""
        why = self.message or f"error is {self.ratio:.2f} of its tolerance"
        return f"{self.op} {self.backend} {self.check} {self.case} {self.dtype} {self.phase}: {why}"

    def repro(self, device: str) -> str:
        """The command that runs this one case again."""
        words = ["tilewright", "verify", self.op, "--device", device, "--only", self.check]
        words += ["--backend", self.backend]
        if self.check in BY_CASE:
            words += ["--case", self.case.removesuffix(", gradient")]
        if self.check == "launches":  # the last word is the launch
            words += ["--case", self.case.rpartition(" ")[0]]
        if self.seed is not None:
            words += ["--seed", str(self.seed), "--cases", "1"]
        return shlex.join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
