"""Which binaries can be reached: the launchers are asked, on meta tensors, with a pretend GPU.

Nothing is listed twice by hand. Every declared case, in every dtype, forward and backward, on every
backend that would serve it on that SM, runs its `prepare` while `recording` notes what it binds.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright import dispatch, tuned
from tilewright import gpu as gpus
from tilewright.dims import meta_inputs
from tilewright.errors import InputError
from tilewright.gpu import Gpu
from tilewright.ops import registry
from tilewright.spec import FLOATS, Args, Case, Op
from tilewright.toolkit import recording
from tilewright.toolkit.launch import Pointer, is_gluon
from tilewright.toolkit.recording import Request, kernel_name

SMS = (75, 80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Wanted:
    """One binary of the matrix, with the first call that reaches it."""

    op: str
    backend: str
    dtype: str
    case: str
    sm: int
    request: Request
    tensor_cores: bool
    may_spill: int = 0

    @property
    def kernel(self) -> str:
        return kernel_name(self.request)

    @property
    def key(self) -> str:
        """A hash of what is compiled: source, signature, constants, options, SM, compiler."""
        return _digest(describe(self.request), self.sm, compiler(self.request.technology))


def reachable(ops: Sequence[str] = (), sms: Sequence[int] = SMS) -> Iterator[Wanted]:
    """Every distinct binary, SM by SM."""
    known_ops(ops)
    calls = {name: list(_calls(registry()[name])) for name in ops or registry()}
    for sm in sms:
        gpu = gpus.pretend(f"sm_{sm}")
        seen: set[str] = set()
        for name in calls:
            for wanted in _of_op(registry()[name], calls[name], gpu):
                identity = describe(wanted.request)
                if identity not in seen:
                    seen.add(identity)
                    yield wanted


def of_cases(calls: Iterable[tuple[Op, Case, torch.dtype]], sm: int) -> list[Wanted]:
    """The distinct binaries of these cases, forward and backward, on whole 16-byte rows."""
    gpu = gpus.pretend(f"sm_{sm}")
    found: dict[str, Wanted] = {}
    for op, case, dtype in calls:
        args = meta_inputs(op, case.dims, dtype)
        for wanted in _of_both(op, args, gpu, dtype, case.name):
            found.setdefault(describe(wanted.request), wanted)
    return list(found.values())


def known_ops(ops: Sequence[str]) -> None:
    for name in ops:
        if name not in registry():
            raise InputError(f"compile: op is {name!r}; it must be one of {', '.join(registry())}.")


# and the names of its case and of the only backend that it is for, if any
Call = tuple[Args, torch.dtype, str, str | None]


def _calls(op: Op) -> Iterator[Call]:
    """Every case in every dtype, aligned and not, or what `Op.compiled` says; for all SMs alike.
    And what a backend has compiled for it alone, in bfloat16."""
    for case, dtype in itertools.product(op.cases, FLOATS):
        if op.compiled and case.name not in op.compiled:
            continue
        every = not op.compiled or case.name == op.compiled[0]
        if every or dtype != torch.float16:
            meta = meta_inputs(op, case.dims, dtype)
            yield meta, dtype, case.name, None
            if every or case.group == "edge":
                yield _misaligned(meta), dtype, case.name, None
    for backend, case in itertools.product(op.backends, op.cases):
        if case.name in backend.compiled and case.name not in op.compiled:
            dtype = torch.bfloat16
            yield meta_inputs(op, case.dims, dtype), dtype, case.name, backend.name


def _of_op(op: Op, calls: Iterable[Call], gpu: Gpu) -> Iterator[Wanted]:
    for args, dtype, case, only in calls:
        if only is None:
            yield from _of_both(op, args, gpu, dtype, case)
        else:
            yield from _of_call(op, args, gpu, dtype, case, only)


def _of_both(op: Op, args: Args, gpu: Gpu, dtype: torch.dtype, case: str) -> Iterator[Wanted]:
    """Forward, in place and backward of one call."""
    yield from _of_call(op, args, gpu, dtype, case)
    if op.in_place is not None:
        yield from _of_call(op.in_place, args, gpu, dtype, case)
    if op.autograd is not None:
        yield from _of_call(*op.in_phase(args, "backward"), gpu, dtype, case)
        if op.returned is not None:  # of those who ask for every output
            every = replace(op, returned=None)
            yield from _of_call(*every.in_phase(args, "backward"), gpu, dtype, case)


def _of_call(
    op: Op, args: Args, gpu: Gpu, dtype: torch.dtype, case: str, only: str | None = None
) -> Iterator[Wanted]:
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    for backend in op.backends:
        if backend.technology == "torch" or only not in (None, backend.name):
            continue
        if dispatch.refusal(backend, op, args, tensor, gpu, pretending=True) is not None:
            continue
        with recording.recording() as requests:
            dispatch.load(backend.entry)(gpu, *args)
            of_tables = dispatch.launches(op, backend.name, args, gpu)
            for choice in of_tables if dtype != torch.float16 else ():
                with tuned.forcing(choice):
                    dispatch.load(backend.entry)(gpu, *args)
        for request in requests:
            name = str(dtype).removeprefix("torch.")
            on_cores = dtype != torch.float32 and kernel_name(request) in backend.tensor_cores
            on_cores = on_cores and gpu.arch.triton_tensor_cores
            yield Wanted(
                op.name, backend.name, name, case, gpu.sm, request, on_cores, backend.may_spill
            )


def _misaligned(args: Args) -> Args:
    """The same call on tensors whose rows allow no 16-byte load."""

    def off(a: Any) -> Any:
        if not isinstance(a, torch.Tensor) or a.dim() < 2:
            return a
        strides = tuple(s + 1 if i == a.dim() - 2 else s for i, s in enumerate(a.stride()))
        return torch.empty_strided(a.shape, strides, dtype=a.dtype, device="meta")

    return tuple(off(a) for a in args)


def describe(request: Request) -> str:
    """Everything that makes two requests the same binary, as text."""
    if request.technology == "cuda":
        binary = (request.kernel, request.source.digest, request.options)
        return repr((*binary, request.dynamic_shared) if request.dynamic_shared else binary)
    return repr(
        (
            kernel_name(request),
            _source(request.kernel),
            tuple(parameter.do_not_specialize for parameter in request.kernel.params),
            tuple(_kind(a) for a in request.arguments),
            request.constants,
            request.options,
        )
    )


def _kind(argument: Any) -> str:
    """What Triton specialises an argument on: kernels here specialise integers on nothing."""
    if isinstance(argument, Pointer):
        return repr(argument)
    if "gluon" in type(argument).__module__:  # a descriptor, which tells a kernel its tile
        return f"{argument.base!r} {argument.block_shape}"
    if isinstance(argument, int):
        return "i32" if -(2**31) <= argument < 2**31 else "i64"
    return type(argument).__name__


@cache
def _source(kernel: Any) -> str:
    """The text of every jit function that the kernel's module holds: it, and all it may call. Of a
    Gluon kernel also what those may call, and the PTX among the constants."""
    functions = _functions(kernel)
    if not is_gluon(kernel):
        return _digest(*(inspect.getsource(f.fn) for f in functions))
    found = dict.fromkeys(functions)
    for function in functions:
        found |= dict.fromkeys(_functions(function))
    constants = [
        f"{name} = {value.value!r}"
        for function in found
        for name, value in sorted(function.fn.__globals__.items())
        if type(value).__name__ == "constexpr"
    ]
    return _digest(*(inspect.getsource(f.fn) for f in found), *dict.fromkeys(constants))


def _functions(kernel: Any) -> list[Any]:
    names = kernel.fn.__globals__
    return [f for _, f in sorted(names.items()) if hasattr(f, "fn") and hasattr(f, "params")]


@cache
def compiler(technology: str) -> str:
    """The compiler and its version: a new one makes new binaries."""
    if technology == "cuda":
        from tilewright.toolkit import nvrtc

        return f"nvrtc {nvrtc.nvrtc_version()}"
    import triton

    return f"triton {triton.__version__}"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(str(p) for p in parts).encode()).hexdigest()[:24]
