"""The state of the GPU as the driver tells it: clocks, power, temperature, and what limits it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

FIELDS = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "sm_max_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "limited_by": "clocks_event_reasons.active",
}
REASONS = {  # NVML's bits
    0x2: "application clocks set",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks set",
}


def state() -> dict[str, Any]:
    """Of the first GPU that this process sees, read from nvidia-smi; empty without it.

    Nothing is ever set.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [tool, f"--id={_first_visible()}", *query],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return parse(done.stdout) if done.returncode == 0 else {}


def _first_visible() -> str:
    """nvidia-smi numbers all GPUs, CUDA those it may see; both know a GPU's UUID."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def parse(line: str) -> dict[str, Any]:
    """One line of nvidia-smi's CSV; what it cannot tell is None."""
    cells = [cell.strip() for cell in line.strip().split(",")]
    if len(cells) != len(FIELDS):
        return {}
    found: dict[str, Any] = dict(zip(FIELDS, cells, strict=True))
    for name in FIELDS:
        if name in ("driver", "limited_by"):
            continue
        try:
            found[name] = float(found[name])
        except ValueError:
            found[name] = None
    try:
        bits = int(found["limited_by"], 16)
    except ValueError:
        found["limited_by"], found["locked"] = None, None
        return found
    found["limited_by"] = [words for bit, words in REASONS.items() if bits & bit]
    # The driver does not tell whether somebody locked the clocks; it tells when a setting holds
    # them below what the load allows.
    found["locked"] = bool(bits & 0x2)
    return found
