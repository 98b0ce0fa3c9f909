"""python -m tilewright.profiling.once OP: one call, for a profiler to watch.

    ncu --profile-from-start off python -m tilewright.profiling.once softmax --shape 2048x4096

Makes the op's declared inputs, calls it until nothing is compiled or looked up any more, and then
lets the profiler see --calls calls and nothing else: it is started and stopped around each of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from tilewright import dims
from tilewright.errors import TilewrightError
from tilewright.profiling import call
from tilewright.profiling.request import PHASES, Request, op_of


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    try:
        request = Request(
            op=options.op,
            dims=dims.parse(op_of(options.op), options.shape, "profile"),
            dtype=options.dtype,
            phase=options.phase,
            backend=options.backend,
            calls=options.calls,
            seed=options.seed,
        )
        call.predict(request)  # says what is wrong with the request, with or without a GPU
        call.gpu_or_raise()
        profiler = torch.cuda.profiler
        call.repeat(call.make(request), request.calls, profiler.start, profiler.stop)
    except TilewrightError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilewright.profiling.once", description="One call, for a profiler to watch."
    )
    parser.add_argument("op", help="an op's name")
    parser.add_argument("--shape", default="2048x4096", help="k=v,..., e.g. 2048x4096,dim=0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--phase", choices=PHASES, default="forward")
    parser.add_argument("--backend", default="triton", help="a backend, a baseline, or eager")
    parser.add_argument("--calls", type=int, default=3, help="calls that the profiler sees")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
