"""python -m tilewright.verify.touch: every binary once, for a sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tilewright.verify.touch [OP or BACKEND ...]
    compute-sanitizer --tool synccheck python -m tilewright.verify.touch --smallest [...]
    compute-sanitizer --tool memcheck python -m tilewright.verify.touch --part 3/15 [...]

Asks the launchers what the cases that verify takes on a GPU would compile, forward and backward,
aligned and not, and in every launch that a table may name, of every op and backend or the named
ones, and runs each call that wants a binary which no call before it does. It compares nothing: a
sanitizer slows kernels down a hundredfold, and the references are what would take the time.

--smallest gives each binary the smallest of its cases. synccheck (2025.3) itself reads memory that
is not there as soon as two clusters of sixteen blocks share SMs, if a block so much as waits at an
mbarrier of its own; few rows keep clusters apart.

--part N/OF runs every OF-th of these calls, from the N-th on: all parts side by side are the whole,
for ops whose binaries take long to compile. The call under way stands on the standard error.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import dispatch, tuned
from tilewright.dims import meta_inputs
from tilewright.library import call
from tilewright.ops import registry
from tilewright.spec import FLOATS, Args, Case, Choice, Op, as_tuple, on_meta
from tilewright.toolkit import recording
from tilewright.verify import layouts
from tilewright.verify.compare import with_leaves
from tilewright.verify.context import Context, edge_cases
from tilewright.verify.runner import backends_on


@dataclass(frozen=True)
class Call:
    """One call, and what it wants that no call before it did."""

    context: Context
    case: Case
    dtype: torch.dtype
    aligned: bool
    new: frozenset[str] = frozenset()
    launch: Choice | None = None  # as a table may want it, forward alone

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{self.context.op.name} {self.context.backend}: {self.case.name} {dtype}"
        name = name if self.launch is None else f"{name} {self.launch}"
        return name if self.aligned else f"{name} misaligned"

    def laid(self, args: Args) -> Args:
        return args if self.aligned else tuple(map(_misaligned, args))


class Blank:
    """Tensors without values, all over the same memory: launchers look at layouts and addresses."""

    def __init__(self, device: str) -> None:
        self._memory = torch.zeros(0, dtype=torch.uint8, device=device)

    def over(self, args: Args) -> Args:
        """Tensors on the meta device become tensors that have an address."""
        return tuple(self._placed(a) if isinstance(a, torch.Tensor) else a for a in args)

    def _placed(self, a: torch.Tensor) -> torch.Tensor:
        wanted = a.untyped_storage().nbytes()
        if wanted > len(self._memory):  # a multiple of every element's size
            self._memory = self._memory.new_zeros(-(-wanted // 16) * 16)
        return self._memory.view(a.dtype).as_strided(a.shape, a.stride(), a.storage_offset())


def calls(pairs: Iterable[tuple[str, str]], device: str, smallest: bool) -> Iterator[Call]:
    """The calls that between them want every binary, each at least one that is new."""
    blank = Blank(device)
    seen: dict[str, set[str]] = {}  # backends share binaries
    for name, backend in pairs:
        context = Context(registry()[name], backend, device, False, 0, 0)
        edge = edge_cases(context)
        if smallest:
            edge.sort(key=size)
        for case, dtype, aligned in itertools.product(edge, FLOATS, (True, False)):
            one = Call(context, case, dtype, aligned)
            args = one.laid(meta_inputs(context.op, case.dims, dtype))
            if not context.serves(blank.over(args)):
                continue
            for launch in (None, *context.launches(blank.over(args))):
                wanted = binaries(context.op, args, backend, blank, launch)
                new = wanted - seen.setdefault(name, set())
                seen[name] |= wanted
                if new:
                    yield replace(one, launch=launch, new=frozenset(new))


def binaries(
    op: Op, args: Args, backend: str, blank: Blank, launch: Choice | None = None
) -> set[str]:
    """What this call would compile in the phases that it has, as text."""
    forward, outputs = blank.over(args), blank.over(as_tuple(op.outputs(*on_meta(args))))
    if launch is not None:
        with tuned.forcing(launch):
            return _asked(op, forward, backend)
    wanted = _asked(op, forward, backend)
    if _has_backward(op, backend):
        assert op.autograd is not None
        backward = op.backward_call(forward, outputs, outputs)
        wanted |= _asked(op.autograd.op, backward, backend)
    return wanted


def _has_backward(op: Op, backend: str) -> bool:
    """Whether its gradients are its own: else they are another's, whose turn comes."""
    return op.autograd is not None and op.autograd.op.backend(backend) is not None


def _asked(op: Op, args: Args, backend: str) -> set[str]:
    choice = dispatch.choose(op, args, backend=backend)
    with recording.recording() as requests:
        if choice.backend.technology != "torch":
            dispatch.load(choice.backend.entry)(choice.gpu, *args)
    return {_binary(request) for request in requests}


def _binary(request: recording.Request) -> str:
    pointers = [a for a in request.arguments if not isinstance(a, (int, float))]
    return repr((recording.kernel_name(request), pointers, request.constants, request.options))


def run(one: Call) -> None:
    """The phases that the backend has."""
    op, backend = one.context.op, one.context.backend
    args = one.laid(one.context.inputs(one.case.dims, one.dtype, 0))
    if one.launch is not None:
        with tuned.forcing(one.launch):
            dispatch.prepare(op, args, backend)(*args, backend)
    elif not _has_backward(op, backend):
        call(op, args, backend)
    else:
        given, leaves = with_leaves(op, args)
        results = as_tuple(call(op, given, backend))
        torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])


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
    if not torch.cuda.is_available():
        print("touch: torch sees no GPU here, and a sanitizer watches kernels that run on one.")
        return 2
    plan = list(calls(pairs, "cuda", smallest))
    ran = Counter({(one.context.op.name, one.context.backend): 0 for one in plan})
    ours = plan[part - 1 :: parts]
    for turn, one in enumerate(ours, 1):
        print(f"{turn}/{len(ours)} {one}", file=sys.stderr, flush=True)
        run(one)
        torch.cuda.synchronize()
        ran[one.context.op.name, one.context.backend] += len(one.new)
    for (name, backend), count in ran.items():
        print(f"{name} {backend}: {count} binaries, forward and backward")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
