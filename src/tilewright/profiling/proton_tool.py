"""Proton, Triton's own profiler, over the same call, in this process: which kernels, how long.

It writes a tree of frames as JSON, a .hatchet file; the frames without children are the kernels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.errors import InputError, UnsupportedError
from tilewright.profiling import call
from tilewright.profiling.kernel import Timing

TIME, COUNT = "time (ns)", "count"
INSTEAD = "Use the tool torch, which shows the same kernels."


def run(watched: call.Run, calls: int, out: Path | None = None) -> list[Timing]:
    """Kernels of `calls` calls; the tree stays in `out` if one is named."""
    with tempfile.TemporaryDirectory() as folder:
        path = hatchet_path(out) if out is not None else Path(folder) / "call.hatchet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # so that what is read is new
        _watch(watched, calls, path.with_suffix(""))
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UnsupportedError(f"profile: proton left no readable file ({e}). {INSTEAD}") from e
    found = timings(tree)
    if not found:
        raise InputError(f"profile: proton saw no kernel. {INSTEAD}")
    return found


def hatchet_path(out: Path) -> Path:
    """The name that proton gives the file: it adds its suffix."""
    return out if out.suffix == ".hatchet" else out.with_name(f"{out.name}.hatchet")


def _watch(watched: call.Run, calls: int, name: Path) -> None:
    try:
        import triton.profiler as proton

        session = proton.start(str(name))
    except Exception as e:  # an import, a driver, CUPTI: each raises its own kind
        raise UnsupportedError(f"profile: proton cannot start ({e}). {INSTEAD}") from e
    if session is None:
        raise UnsupportedError(f"profile: proton is switched off here. {INSTEAD}")
    try:
        proton.deactivate(session)
        call.repeat(
            watched,
            calls,
            lambda: proton.activate(session),
            lambda: proton.deactivate(session),
        )
    finally:
        proton.finalize(session)


def timings(tree: list[Any]) -> list[Timing]:
    """Kernels by name. The tree's last entry describes devices and has no frame."""
    count: dict[str, int] = {}
    total: dict[str, float] = {}
    for node in _leaves([root for root in tree if "frame" in root]):
        name, metrics = node["frame"]["name"], node["metrics"]
        count[name] = count.get(name, 0) + int(metrics[COUNT])
        total[name] = total.get(name, 0.0) + float(metrics[TIME]) / 1e3
    return [Timing(name, count[name], total[name]) for name in count if count[name]]


def _leaves(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        if node.get("children"):
            yield from _leaves(node["children"])
        elif TIME in node.get("metrics", {}) and COUNT in node["metrics"]:
            yield node
