"""torch.profiler over the same call, in this process: which kernels, how long, and a timeline.

It needs no counters and so no permission. Each call gets a profiler of its own, so that the flush
of L2 between two calls is in none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilewright.errors import InputError
from tilewright.profiling import call
from tilewright.profiling.kernel import Timing


def run(watched: call.Run, calls: int, trace: Path | None = None) -> list[Timing]:
    """Kernels of `calls` calls; the last call's timeline goes to `trace`, for a Chrome browser."""
    import torch.profiler as torch_profiler

    activities = [torch_profiler.ProfilerActivity.CPU, torch_profiler.ProfilerActivity.CUDA]
    seen: list[Any] = []

    def begin() -> None:
        seen.append(torch_profiler.profile(activities=activities))
        seen[-1].start()

    call.repeat(watched, calls, begin, lambda: seen[-1].stop())
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        seen[-1].export_chrome_trace(str(trace))
    found = timings(event for profiler in seen for event in profiler.events())
    if not found:
        raise InputError(
            "profile: torch.profiler saw no kernel. Its CUPTI may be in use by another profiler, "
            "or this torch was built without it."
        )
    return found


def timings(events: Iterable[Any]) -> list[Timing]:
    """Kernels, copies and fills on the device, by name; ranges that a user marks are no kernels."""
    lengths: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        on_device = str(event.device_type).endswith("CUDA")
        if on_device and not getattr(event, "is_user_annotation", False):
            lengths[event.name].append(event.time_range.elapsed_us())
    return [Timing(name, len(each), sum(each)) for name, each in lengths.items()]
