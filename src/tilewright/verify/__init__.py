"""The correctness harness: `tilewright verify`, and what the tests stand on."""

from tilewright.verify.checks import CHECKS
from tilewright.verify.context import Context
from tilewright.verify.record import Result
from tilewright.verify.runner import plan, run

__all__ = ["CHECKS", "Context", "Result", "plan", "run"]
