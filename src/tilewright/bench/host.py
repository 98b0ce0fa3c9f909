"""python -m tilewright.bench.host: CPU time of one small call, ours beside torch's own op.

A call's CPU time is the time until it returns, the kernel launched but not awaited. All contenders
of an op are timed interleaved, in rotating order, in one run, so that drift hits all alike; the GPU
is drained before each burst, so that no call waits for room in its queue.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import tilewright
from tilewright import doctor
from tilewright.bench import timing
from tilewright.bench.rivals import sdpa
from tilewright.errors import UnsupportedError

ROWS, COLUMNS, EPS = 128, 1024, 1e-6
HEAD_DIM = 128
BURST = 25  # calls between two synchronisations

Contenders = dict[str, Callable[[], Any]]


def contenders(device: str, dtype: torch.dtype, grad: bool) -> dict[str, Contenders]:
    """Per op: torch's own first, then our backends."""
    x = torch.randn(ROWS, COLUMNS, device=device, dtype=dtype).requires_grad_(grad)
    w, b = (torch.randn(COLUMNS, device=device, dtype=dtype).requires_grad_(grad) for _ in "wb")
    gate = torch.randn_like(x).requires_grad_(grad)
    q, k = (
        torch.randn(ROWS, heads, HEAD_DIM, device=device, dtype=dtype).requires_grad_(grad)
        for heads in (COLUMNS // HEAD_DIM, COLUMNS // HEAD_DIM // 4)
    )
    sizes = (1, COLUMNS // HEAD_DIM, ROWS, HEAD_DIM)
    query, key, value = (
        torch.randn(sizes, device=device, dtype=dtype).requires_grad_(grad) for _ in "qkv"
    )
    cos, sin = (torch.randn(ROWS, 1, HEAD_DIM, device=device, dtype=dtype) for _ in "cs")
    tables = cos[:, 0], sin[:, 0]
    shape = (COLUMNS,)
    turns = cycle((x, x[1:]))
    ours = tilewright

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    return {
        "relu": {
            "torch": lambda: F.relu(x),
            "automatic": lambda: ours.relu(x),
        },
        "softmax": {
            "torch": lambda: F.softmax(x, -1),
            "automatic": lambda: ours.softmax(x, -1),
            "torch, two shapes in turn": lambda: F.softmax(next(turns), -1),
            "automatic, two shapes in turn": lambda: ours.softmax(next(turns), -1),
            "cuda_v1": lambda: ours.softmax(x, -1, backend="cuda_v1"),
            "cuda_v2": lambda: ours.softmax(x, -1, backend="cuda_v2"),
        },
        "rms_norm": {
            "torch": lambda: F.rms_norm(x, shape, w, EPS),
            "automatic": lambda: ours.rms_norm(x, shape, w, EPS),
            "cuda": lambda: ours.rms_norm(x, shape, w, EPS, backend="cuda"),
        },
        "layer_norm": {
            "torch": lambda: F.layer_norm(x, shape, w, b, EPS),
            "automatic": lambda: ours.layer_norm(x, shape, w, b, EPS),
        },
        "swiglu": {
            "torch": lambda: F.silu(x) * gate,
            "automatic": lambda: ours.swiglu(x, gate),
        },
        "geglu": {
            "torch": lambda: F.gelu(x, approximate="tanh") * gate,
            "automatic": lambda: ours.geglu(x, gate),
        },
        "rms_norm_swiglu": {
            "torch": lambda: F.rms_norm(x, shape, w, EPS) * F.silu(gate),
            "automatic": lambda: ours.rms_norm_swiglu(x, gate, w, EPS),
        },
        "rope": {
            "torch": lambda: [t * cos + _half_turned(t) * sin for t in (q, k)],
            "automatic": lambda: ours.rope(q, k, *tables, layout="thd"),
        },
        "attention": {
            "torch": attend,
            "sdpa-flash": timing.Within(sdpa.WAYS["flash"], attend),
            "sdpa-cudnn": timing.Within(sdpa.WAYS["cudnn"], attend),
            "automatic": lambda: ours.attention(query, key, value),
            "gluon": lambda: ours.attention(query, key, value, backend="gluon"),
        },
    }


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    """As the models of transformers write it."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _served(calls: Contenders) -> Contenders:
    """Those that this machine can run."""

    def runs(call: Callable[[], Any]) -> bool:
        try:
            call()
        except UnsupportedError:
            return False
        return True

    return {name: call for name, call in calls.items() if runs(call)}


def measure(calls: Contenders, count: int, wait: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Median, p20 and p80 of each contender's CPU time in microseconds, over `count` calls."""
    times: timing.Samples = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    clock = time.perf_counter_ns
    for name in timing.rotating(list(calls), -(-count // BURST)):
        taken = times[name]
        with timing.entered(calls[name]) as call:
            wait()
            call()  # the first call after a wait pays for it
            for _ in range(BURST):
                start = clock()
                call()
                taken.append((clock() - start) / 1e3)
    found: dict[str, dict[str, float]] = {}
    for name, taken in times.items():
        of = timing.stats(taken)
        facts = {"median_us": of.median, "p20_us": of.p20, "p80_us": of.p80, "calls": of.n}
        found[name] = facts
    for facts in found.values():
        facts["over_torch"] = facts["median_us"] / found["torch"]["median_us"]
    return found


def run(count: int) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = []
    for calls in contenders(device, torch.float16, False).values():  # clocks and caches, discarded
        measure(_served(calls), count, wait)
    for grad in (False, True):
        for op, calls in contenders(device, torch.float16, grad).items():
            for name, facts in measure(_served(calls), count, wait).items():
                rows.append({"op": op, "grad": grad, "contender": name, **facts})
    shape = {"rows": ROWS, "columns": COLUMNS, "dtype": "float16"}
    return {"environment": doctor.environment(), "case": shape, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of one small call")
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json and not options.json.parent.is_dir():  # said before the work, not after it
        parser.error(f"--json: {options.json.parent} is no folder. Name a file in one that is.")
    record = run(options.calls)
    for row in record["rows"]:
        kind = "with grad" if row["grad"] else "no grad"
        print(
            f"{row['op']:10s} {kind:10s} {row['contender']:29s} {row['median_us']:7.2f} us "
            f"{row['over_torch']:5.2f}x torch"
        )
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
