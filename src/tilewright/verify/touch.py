"""python -m tilewright.verify.touch: every binary once, for a sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tilewright.verify.touch [OP or BACKEND ...]
    compute-sanitizer --tool synccheck python -m tilewright.verify.touch --smallest [...]
    compute-sanitizer --tool memcheck python -m tilewright.verify.touch --part 3/15 [...]

Walks the cases that verify takes on a GPU, forward and backward, aligned and not, of every op and
backend or the named ones, and runs a call if its launchers ask for a binary that no earlier call
has run. It compares nothing: a sanitizer slows kernels down a hundredfold, and the references are
what would take the time.

--smallest gives each binary the smallest of its cases. synccheck (2025.3) itself reads memory that
is not there as soon as two clusters of sixteen blocks share SMs, if a block so much as waits at an
mbarrier of its own; few rows keep clusters apart.

--part N/OF runs every OF-th of these calls, from the N-th on: all parts side by side are the whole,
for ops whose binaries take long to compile.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tilewright import dispatch
from tilewright.library import call
from tilewright.ops import registry
from tilewright.spec import FLOATS, Args, Case, Op, as_tuple
from tilewright.toolkit import recording
from tilewright.verify import layouts
from tilewright.verify.checks import Context, edge_cases
from tilewright.verify.compare import with_leaves
from tilewright.verify.runner import backends_on


def binaries(op: Op, args: Args, backend: str) -> set[str]:
    """What the launchers of this call would compile, as text."""
    choice = dispatch.choose(op, args, backend=backend)
    with recording.recording() as requests:
        dispatch.load(choice.backend.entry)(choice.gpu, *args)
    return {_binary(request) for request in requests}


def _binary(request: recording.Request) -> str:
    pointers = [a for a in request.arguments if not isinstance(a, (int, float))]
    return repr((recording.kernel_name(request), pointers, request.constants, request.options))


def touch(
    op: Op, args: Args, backend: str, seen: set[str], is_ours: Callable[[], bool] = lambda: True
) -> int:
    """Run the call, both phases it has, unless all it needs has run, or `is_ours` leaves it to
    somebody else. Returns the new binaries that ran."""
    outputs = as_tuple(op.outputs(*args))
    wanted = binaries(op, args, backend)
    if op.autograd is not None:
        backward = op.autograd.op
        twin = backend if backward.backend(backend) else backward.backends[0].name
        wanted |= binaries(backward, op.backward_call(args, outputs, outputs), twin)
    new = len(wanted - seen)
    seen |= wanted
    if not new or not is_ours():
        return 0
    if op.autograd is None:
        call(op, args, backend)
    else:
        given, leaves = with_leaves(op, args)
        results = as_tuple(call(op, given, backend))
        torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])
    return new


def _misaligned(a: Any) -> Any:
    is_float = isinstance(a, torch.Tensor) and a.is_floating_point()
    return layouts.misaligned(a) if is_float else a


def size(case: Case) -> int:
    return math.prod(case.dims["shape"])


def main(arguments: list[str]) -> int:
    names = list(arguments)
    smallest = "--smallest" in names
    if smallest:
        names.remove("--smallest")
    part, parts = 1, 1
    if "--part" in names:
        at = names.index("--part")
        given = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", "".join(names[at + 1 : at + 2]))
        if given is None or int(given[1]) > int(given[2]):
            print("touch: --part wants two numbers, as in 3/15: the third of fifteen parts.")
            return 2
        part, parts = int(given[1]), int(given[2])
        del names[at : at + 2]
    known = {backend for name in registry() for backend in backends_on(name, "cuda")}
    for unknown in [name for name in names if name not in known | registry().keys()]:
        print(
            f"touch: no op or backend is named {unknown!r}; there are the ops "
            f"{', '.join(registry())}, the backends {', '.join(sorted(known))}, --smallest and "
            "--part."
        )
        return 2
    pairs = [
        (op, backend)
        for op in [name for name in registry() if name in names] or registry()
        for backend in backends_on(op, "cuda")
        if backend in (known.intersection(names) or known)
    ]
    for idle in [name for name in names if not any(name in pair for pair in pairs)]:
        print(f"touch: {idle} has nothing to run; no op that is named has a backend that is.")
        return 2
    ran: Counter[tuple[str, str]] = Counter()
    seen: dict[str, set[str]] = {name: set() for name, _ in pairs}  # backends share binaries
    turns = itertools.count()

    def is_ours() -> bool:
        return next(turns) % parts == part - 1

    for name, backend in pairs:
        op = registry()[name]
        context = Context(op, backend, "cuda", False, 0, 0)
        edge = edge_cases(context)
        if smallest:
            edge.sort(key=size)
        for case, dtype, aligned in itertools.product(edge, FLOATS, (True, False)):
            args = context.inputs(case.dims, dtype, 0)
            if not aligned:
                args = tuple(map(_misaligned, args))
            if context.serves(args):
                ran[name, backend] += touch(op, args, backend, seen[name], is_ours)
    torch.cuda.synchronize()
    for (name, backend), count in ran.items():
        print(f"{name} {backend}: {count} binaries, forward and backward")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
