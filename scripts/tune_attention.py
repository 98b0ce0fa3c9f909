"""Find the launch choices of attention's Gluon forward: `src/tilewright/tuned/`.

    python scripts/tune_attention.py --record results/h200/tune-attention.json [--write]

On an H200 this takes two minutes. Each candidate is held against float64 on sizes that fill no tile
before it is timed; one that is wrong, or does not compile, is out. Then all of them compute the
same calls, 16,384 tokens of 2,048 columns, interleaved, beside cuDNN; the table gets the quickest
for each length, its neighbour's if that is within half a hundredth: fewer binaries, less noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright import doctor, gpu
from tilewright.ops import registry
from tilewright.ops.attention import gluon_impl
from tilewright.ops.attention.gluon_impl import Launch
from tilewright.verify import compare

TOKENS, COLUMNS = 16_384, 2_048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
TILES = {  # consumers, keys, stages
    64: ((3, 128, 2), (2, 128, 2), (2, 64, 4)),
    128: ((2, 128, 2),),
    256: ((2, 64, 2),),
}
NEIGHBOUR = 1.005
RUNS = 10
TABLE = Path(gluon_impl.__file__).parents[2] / "tuned" / gluon_impl.TABLE

Job = tuple[int, bool, Launch]


def candidates(dim: int) -> list[Launch]:
    ways = itertools.product(TILES[dim], (False, True), (False, True), ("pairs", "one"))
    return [Launch(*tile, turns, lazy, order) for tile, turns, lazy, order in ways]


@contextmanager
def chosen(choice: Launch) -> Iterator[None]:
    """All calls that are prepared inside take this choice."""
    asked = gluon_impl.launch
    gluon_impl.launch = lambda *_, **__: choice
    try:
        yield
    finally:
        gluon_impl.launch = asked


def prepared(choice: Launch, *args: Any) -> Callable[[], Any]:
    """The kernel as it would be launched, past the library's memory of earlier choices."""
    with chosen(choice):
        run = gluon_impl.prepare(gpu.detect(0), *args)
    return lambda: run(*args)


def arguments(dim: int, causal: bool, batch: int, heads: int, tokens: int) -> tuple[Any, ...]:
    op = registry()["attention"]
    dims = {"shape": (batch, heads, tokens, dim), "causal": causal}
    rng = torch.Generator("cuda").manual_seed(0)
    assert op.inputs is not None
    return op.inputs(dims, torch.bfloat16, "cuda", rng)


def wrong(job: Job) -> str:
    """Why a candidate is out; '' if it is right."""
    dim, causal, choice = job
    op = registry()["attention"]
    for tokens, heads in ((333, 3), (640, 2)):
        args = arguments(dim, causal, 2, heads, tokens)
        try:
            got = prepared(choice, *args)()
        except Exception as e:
            return f"{type(e).__name__}: {str(e)[:200]}"
        for ours, (what, truth, bound) in zip(got, compare.forward_truth(op, args), strict=True):
            verdict = compare.within(ours, truth, bound, what, truncates=False)
            if not verdict.passed:
                return f"{what}: {verdict.message or f'{verdict.ratio:.1f} of its tolerance'}"
    prepared(choice, *arguments(dim, causal, 1, 2, 512))  # the binary without a tail
    return ""


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def timed(graphs: dict[Any, torch.cuda.CUDAGraph]) -> dict[Any, float]:
    """Medians in microseconds, interleaved; what L2 held is pushed out by reads between runs."""
    other = torch.empty(64 * 2**20, device="cuda")
    events: dict[Any, list[Any]] = {name: [] for name in graphs}
    for _ in range(RUNS + 2):
        for name, graph in graphs.items():
            other.sum()
            pair = torch.cuda.Event(True), torch.cuda.Event(True)
            pair[0].record()
            graph.replay()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {
        name: 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs[2:])
        for name, pairs in events.items()
    }


def measure(dim: int, causal: bool, tokens: int, right: list[Launch]) -> dict[str, Any]:
    args = arguments(dim, causal, TOKENS // tokens, COLUMNS // dim, tokens)
    q, k, v = args[:3]
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        sdpa = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        graphs["cudnn"] = captured(sdpa)
    graphs |= {choice: captured(prepared(choice, *args)) for choice in right}
    times = timed(graphs)
    row = {"dim": dim, "causal": causal, "tokens": tokens, "cudnn_us": times.pop("cudnn")}
    choices = [{"launch": asdict(choice), "us": us} for choice, us in times.items()]
    return {**row, "candidates": sorted(choices, key=lambda c: c["us"])}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The quickest of each length; lengths that may share a choice do."""
    found = []
    for dim, causal in itertools.product(TILES, (False, True)):
        cells = [r for r in rows if (r["dim"], r["causal"]) == (dim, causal)]
        times = [{json.dumps(c["launch"]): c["us"] for c in r["candidates"]} for r in cells]
        first = 0
        while first < len(cells):
            last = first  # the longest stretch that one choice may serve
            for end in range(first, len(cells)):
                stretch = times[first : end + 1]
                may = {
                    choice: math.prod(t[choice] / min(t.values()) for t in stretch)
                    for choice in stretch[0]
                    if all(t[choice] <= NEIGHBOUR * min(t.values()) for t in stretch)
                }
                if not may:
                    break
                last, best = end, min(may, key=lambda choice: may[choice])
            up_to = None if last == len(cells) - 1 else cells[last]["tokens"]
            entry = {"columns": dim, "borders": causal, "keys_up_to": up_to}
            found.append({**entry, "launch": json.loads(best)})
            first = last + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="the table, too")
    parser.add_argument("--workers", type=int, default=15, help="processes that compile and check")
    options = parser.parse_args()
    jobs = [(dim, causal, c) for dim in TILES for causal in (False, True) for c in candidates(dim)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        verdicts = dict(zip(jobs, pool.map(wrong, jobs, chunksize=1), strict=True))
    out = [
        {"dim": dim, "causal": causal, "launch": asdict(choice), "why": why}
        for (dim, causal, choice), why in verdicts.items()
        if why
    ]
    rows = []
    for dim, causal, tokens in itertools.product(TILES, (False, True), LENGTHS):
        right = [c for c in candidates(dim) if not verdicts[dim, causal, c]]
        rows.append(measure(dim, causal, tokens, right))
        best = rows[-1]["candidates"][0]
        ratio = rows[-1]["cudnn_us"] / best["us"]
        name = f"D{dim} T{tokens} {'causal' if causal else 'full'}"
        print(f"{name}: {ratio:.3f} of cuDNN's speed,", *best["launch"].values(), flush=True)
    choices = table(rows)
    environment = doctor.environment()
    text = {"environment": environment, "cells": rows, "out": out, "choices": choices}
    options.record.write_text(json.dumps(text) + "\n")
    if options.write:
        found = {"found_on": environment["gpu"], "choices": choices}
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(out)} of {len(jobs)} candidates are out; {len(choices)} choices")


if __name__ == "__main__":
    main()
