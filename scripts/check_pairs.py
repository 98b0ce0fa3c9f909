"""Time every pair of blocks that matmul's CUDA kernel may have, beside `gluon` and cuBLAS.

    python scripts/check_pairs.py [--record FILE] [--quick]

The products are those of bench's sweep and prefill, in bfloat16; --quick takes only those where
`gluon` is slower than cuBLAS by more than it should be. Every choice is checked and timed as
`tilewright tune` does it. A column is COLUMNS, or COLUMNSxTALLxWIDExLAYERS.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tilewright import gpu
from tilewright.ops import registry
from tilewright.ops.matmul import launches
from tilewright.ops.matmul.routes import seen
from tilewright.spec import Args, Choice
from tilewright.tuning.measure import measure
from tilewright.tuning.plan import Job
from tilewright.tuning.run import instruments

NEIGHBOURS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2))  # tall, wide, layers
QUICK = ("1024", "Qwen2.5-7B qkv, 512", "Qwen2.5-7B o, 512", "Qwen2.5-7B down, 512")
QUICK += ("Llama-3-70B qkv, 512", "Llama-3-8B gate_up, 512", "Llama-3-8B o, 512", "4096")


class Paired(Job):
    def expected(self, gpu: gpu.Gpu, args: Args) -> dict[Choice, float]:
        found = {
            choice: us
            for choice, us in super().expected(gpu, args).items()
            if choice.backend in ("gluon", "torch")
        }
        product, dtype = seen(*args[:2]), args[0].dtype
        for columns in launches.PAIRED:
            for neighbours in NEIGHBOURS:
                pair = launches.Pair(columns, *neighbours)
                us = launches.pair_us(product, pair, dtype, gpu)
                found[Choice("cuda", (columns, *neighbours))] = us
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    on = gpu.detect() if torch.cuda.is_available() else None
    if on is None or on.sm != 90:
        parser.error("it takes a GPU of SM 90.")
    tools, op, rows = instruments(on, 0), registry()["matmul"], []
    for case in op.cases:
        if case.group not in ("sweep", "prefill") or "precision" in case.dims:
            continue
        if given.quick and not case.name.startswith(QUICK):
            continue
        found = measure(Paired(op, case, torch.bfloat16), tools).bucket
        times = {choice: timed.us for choice, timed in found.times.items()}
        cublas = times[Choice("torch")]
        quickest = sorted(times, key=lambda choice: times[choice])
        told = ", ".join(f"{c} {times[c]:.1f} ({cublas / times[c]:.3f})" for c in quickest)
        print(f"{case.name} ({found.dims}): {told}", flush=True)
        rows.append({"case": case.name, "times": {str(c): us for c, us in times.items()}})
        for choice, why in found.refused.items():
            print(f"  REFUSED {choice}: {why}", flush=True)
    if given.record:
        given.record.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
