"""Neither a developer's own choice of backend or table nor luck decides what the tests see.

A run of the whole suite draws from the tests that are marked as `drawn`: families of many alike,
each of which takes long. What it draws is the same for a commit and another for the next, and the
budget is declared in `tilewright.lab.budget`. `--full` runs all, `--draw KEY` what that key draws;
a test that is named on the command line runs in any case.
"""

import atexit
import os
import sys

import pytest

# Workers have a core each; torch's threads, of which each would have one per core, wait for one
# another. OpenMP asks when torch is imported, here and in the commands that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tilewright.lab.budget import WHOLES
from tilewright.lab.draw import Piece, draw, key

PIECES = pytest.StashKey[list[Piece[pytest.Item]]]()
STATUS: list[int] = []  # the session's exit code, once it has one


@atexit.register  # before all others, so that it runs after them
def leave_quietly() -> None:
    """End here: Triton's bindings would print what an exception in a test still holds on to."""
    if STATUS:  # a session that did not come to its end leaves as ever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS[0])


def pytest_unconfigure(config: pytest.Config) -> None:
    session = getattr(config, "tilewright_session", None)
    if session is not None:
        STATUS[:] = [int(session.exitstatus)]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.tilewright_session = session  # type: ignore[attr-defined]


for variable in ("TILEWRIGHT_BACKEND", "TILEWRIGHT_TUNED"):
    os.environ.pop(variable, None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilewright")
    group.addoption("--full", action="store_true", help="run every drawn test")
    group.addoption("--draw", metavar="KEY", help="draw what this key draws; else the commit is it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "drawn(seconds, family): one of a family of tests; about how long it takes"
    )


def is_drawn_from(config: pytest.Config) -> bool:
    """Whether this is a run of the whole suite, or a key says what to draw."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return bool(config.option.draw) or not (config.option.full or named)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not is_drawn_from(config):
        return None
    return f"drawn tests: --draw {config.option.draw or key()}; --full runs all"


def pieces(items: list[pytest.Item]) -> list[Piece[pytest.Item]]:
    """The drawn tests among them; a family has a name, or is a function with its parameters."""
    found = []
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None:
            family = mark.kwargs.get("family") or item.nodeid.partition("[")[0]
            found.append(Piece(item, family, item.nodeid, mark.kwargs["seconds"]))
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose turn it is not."""
    every = config.stash[PIECES] = pieces(items)
    if not is_drawn_from(config):
        return
    taken = draw(every, WHOLES["tests", "cpu"], config.option.draw or key(), "tests")
    left = {piece.name for piece in every} - {piece.name for piece in taken}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
