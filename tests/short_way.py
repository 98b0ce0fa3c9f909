"""Plans lent to CPU tensors: the short ways around the dispatcher, tested without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tilewright import library, ops
from tilewright.spec import Op
from tilewright.toolkit.launch import Shot

IN_PLACE = {op.in_place.name: op.in_place for op in ops.registry().values() if op.in_place}
EVERY_OP = {**ops.every_op(), **IN_PLACE}
# where a public function finds its op's caller
HOLDERS = [
    ("tilewright.ops.relu.op", "relu"),
    ("tilewright.ops.relu.op", "relu_"),
    ("tilewright.ops.softmax.op", "softmax"),
    ("tilewright.ops.rms_norm.op", "rms_norm"),
    ("tilewright.ops.rms_norm.op", "add_rms_norm"),
    ("tilewright.ops.layer_norm.op", "layer_norm"),
    ("tilewright.ops.layer_norm_fp8.op", "layer_norm_fp8"),
    ("tilewright.ops.rms_norm_fp8.op", "rms_norm_fp8"),
    ("tilewright.ops.rms_norm_swiglu.op", "rms_norm_swiglu"),
    ("tilewright.ops.rope.op", "rope"),
    ("tilewright.ops.rope.op", "rope_"),
    ("tilewright.ops.swiglu.op", "swiglu"),
    ("tilewright.ops.swiglu.op", "swiglu_packed"),
    ("tilewright.ops.geglu.op", "geglu"),
    ("tilewright.ops.geglu.op", "geglu_packed"),
    ("tilewright.ops.matmul.op", "matmul"),
]


def silently(op: Op) -> Callable[..., None]:
    """Writes as a CUDA kernel does, unseen by torch: the reference would bump the versions itself.

    `data` shares a tensor's memory, but not its version.
    """
    count = op.tensor_count

    def run(*args: Any) -> None:
        tensors = (None if t is None else t.data for t in args[:count])
        op.reference(*tensors, *args[count : len(op.arguments)])

    return run


def _shot(op: Op, x: torch.Tensor, rest: tuple[Any, ...]) -> Shot:
    """What a launcher leaves for a contiguous input: `launch` sees two addresses, as a GPU does."""
    like = op.outputs(x.detach(), *rest[:-1])
    made: dict[int, torch.Tensor] = {}

    def makes() -> torch.Tensor:
        y = torch.empty_like(like)
        made[y.data_ptr()] = y
        return y

    size, dtype, bytes_of = x.shape, x.dtype, x.numel() * x.element_size()

    def launch(to: int, at: int) -> None:
        memory = (ctypes.c_char * bytes_of).from_address(at)
        given = torch.frombuffer(memory, dtype=dtype).view(size)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            made.pop(to).copy_(op.reference(given, *rest[:-1]))
        READY_LAUNCHES[op.name] += 1

    return Shot(makes, launch, lambda _: None, lambda: (), (), HOOKS)


READY_LAUNCHES: Counter[str] = Counter()
PLAN_RUNS: Counter[str] = Counter()
HOOKS: list[Any] = []  # as Triton's: a launch that finds something here is not made directly


def short_way(op: Op, with_shots: bool) -> Callable[..., Any]:
    """`library`'s caller for `op`, over plans that appear with the first call that succeeds."""
    missed = threading.local()

    def run(*args: Any) -> Any:
        PLAN_RUNS[op.name] += 1
        return silently(op)(*args) if op.name in IN_PLACE else op.reference(*args[:-1])

    class Plans(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            missed.key = None if key in self else key
            return super().get(key, default)

    plans, operator = Plans(), getattr(torch.ops.tilewright, op.name).default

    def slow(*given: Any) -> Any:
        args = (*given[:-1], *given[-1])
        key, missed.key = getattr(missed, "key", None), None
        op.check(*args[:-1])
        result = operator(*args)
        if key is not None:
            plans[key] = library.Plan(run)
            x, rest = args[0], given[-1]
            kept = op.autograd.keep if op.autograd else ()  # as `library` asks
            if with_shots and kept == ("output",) and x.is_contiguous():
                apply = library._c_apply(library._autograd_function(op, (x.dtype, rest)))
                plans[key] = library.Plan(run, _shot(op, x, rest), apply)
        return result

    function = library._autograd_function(op)
    return library._caller(op, plans, slow, operator, function)
