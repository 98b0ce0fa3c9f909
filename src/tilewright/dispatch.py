"""Which backend serves a call, and why not the others.

`choose` walks an op's backends in order of preference and collects a reason for each one it passes
over. A backend that the user names (per call, with `use_backend`, or in TILEWRIGHT_BACKEND) is used
or refused aloud: automatic choice may fall back, an explicit one never does.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from tilewright import gpu as gpus
from tilewright.errors import InputError, UnsupportedError
from tilewright.gpu import Gpu
from tilewright.spec import Args, Backend, Op, as_tuple, on_meta
from tilewright.spec import Choice as Launch

VARIABLE = "TILEWRIGHT_BACKEND"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

# None, or ((op name or "*", backend name), ...): hashable, because it is part of every plan's key
Override = tuple[tuple[str, str], ...]
override: ContextVar[Override | None] = ContextVar("tilewright_backend", default=None)


@dataclass(frozen=True)
class Choice:
    """The backend of one call, and what each refused backend lacked."""

    op: str
    backend: Backend
    refused: tuple[tuple[str, str], ...]
    gpu: Gpu | None
    asked_by: str  # "automatic", "backend=", "use_backend" or the variable's name

    def __str__(self) -> str:
        where = self.gpu.name if self.gpu else "the CPU"
        lines = [f"{self.op} on {where}: {self.backend.name} ({self.asked_by})"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


@contextmanager
def use_backend(name: str | None = None, **by_op: str) -> Iterator[None]:
    """Run the calls inside on one backend: `use_backend("triton")`, or `softmax="cuda_v1"` alone.

    A backward runs on the same backend where it has one of that name that can serve it. Inside
    `torch.compile`d code, use the `backend=` argument: a compiled graph outlives this block.
    """
    for wanted in (*by_op.values(), *([name] if name is not None else [])):
        _known_or_raise(wanted, "use_backend")
    for op in by_op:
        if op not in _ops:
            close = difflib.get_close_matches(op, _ops, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            names = ", ".join(_ops)
            raise InputError(f"use_backend: op is {op!r}; it must be one of {names}.{hint}")
    pairs = tuple(by_op.items()) + ((("*", name),) if name is not None else ())
    token = override.set(pairs + (override.get() or ()))
    try:
        yield
    finally:
        override.reset(token)


@lru_cache(maxsize=1)
def from_environment() -> str | None:
    """TILEWRIGHT_BACKEND, read once, at the first call that must choose."""
    name = os.environ.get(VARIABLE) or None
    if name is not None:
        _known_or_raise(name, VARIABLE)
    return name


@lru_cache(maxsize=1)
def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def requested(op: Op, backend: str | None) -> tuple[str | None, str]:
    """The backend a user asked for, if any, and where."""
    if backend is not None:
        _known_or_raise(backend, op.name)
        return backend, "backend="
    for name, wanted in override.get() or ():
        if name in ("*", op.name, op.public_name):
            return wanted, "use_backend"
    wanted_by_variable = from_environment()
    if wanted_by_variable is not None:
        return wanted_by_variable, VARIABLE
    return None, "automatic"


def choose(op: Op, args: Args, *, backend: str | None = None, gpu: Gpu | None = None) -> Choice:
    """The backend for these arguments. `gpu` pretends that they lie on that GPU."""
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    target, pretending = gpu or _gpu_of(tensor), gpu is not None
    wanted, asked_by = requested(op, backend)
    if wanted is not None:
        named = op.backend(wanted)
        lacks: str | None = "it has no such backend"
        if named is not None:
            lacks = refusal(named, op, args, tensor, target, pretending=pretending)
        if lacks and op.public:
            raise UnsupportedError(_cannot(op, wanted, asked_by, lacks, args, target, pretending))
        if lacks:  # a backward: the forward was asked for by name, and was served
            wanted, asked_by = None, "automatic"
    refused = []
    for candidate in op.backends:
        if wanted is not None and candidate.name != wanted:
            refused.append((candidate.name, f"{wanted} was asked for ({asked_by})"))
            continue
        reason = refusal(candidate, op, args, tensor, target, pretending=pretending)
        if reason is None and wanted is None and candidate.yields is not None:
            reason = load(candidate.yields)(target, *args)
        if reason is None:
            for other in op.backends[op.backends.index(candidate) + 1 :]:
                reason = refusal(other, op, args, tensor, target, pretending=pretending)
                if wanted is not None:
                    reason = f"{wanted} was asked for ({asked_by})"
                refused.append(
                    (other.name, reason or f"{candidate.name} comes first and serves it")
                )
            return Choice(op.name, candidate, tuple(refused), target, asked_by)
        refused.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise UnsupportedError(f"{op.name}: no backend serves this call. {reasons}")


def refusal(
    backend: Backend, op: Op, args: Args, tensor: torch.Tensor, gpu: Gpu | None, *, pretending: bool
) -> str | None:
    """Why `backend` cannot serve these arguments, or None."""
    if backend.technology == "torch":
        return None
    if gpu is None:
        interpreter = " (on the CPU under TRITON_INTERPRET=1)"
        return (
            f"{op.layout_argument} is on {tensor.device.type}, and {backend.technology} kernels "
            f"run on CUDA devices{interpreter if backend.technology == 'triton' else ''}"
        )
    if not pretending:
        missing = _missing(backend.technology)
        if missing:
            return missing
        if tensor.device.type == "cpu" and backend.technology != "triton":
            return f"the interpreter runs Triton kernels only, not {backend.technology}"
    if not backend.min_sm <= gpu.sm <= backend.max_sm:
        above = f" to {backend.max_sm}" if backend.max_sm < 999 else " and newer"
        return f"it is written for SM {backend.min_sm}{above}, and {gpu.name} is SM {gpu.sm}"
    if backend.dtypes is not None and tensor.dtype not in backend.dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in backend.dtypes)
        return (
            f"{op.layout_argument} is {str(tensor.dtype).removeprefix('torch.')}; it takes {names}"
        )
    one_row = backend.flattens and all(
        a.is_contiguous() for a in args if isinstance(a, torch.Tensor)
    )
    if not one_row and _longest(tensor) > backend.max_size:
        return (
            f"{op.layout_argument} has shape {tuple(tensor.shape)}; its kernels number rows and "
            f"columns in 32 bits, up to {backend.max_size:,}"
        )
    reason = backend.accepts(*args)
    if reason is None and backend.limits is not None:
        try:
            limits = load(backend.limits)
        except (ImportError, AttributeError) as e:
            if backend.technology != "gluon":
                raise
            # it is experimental: what was renamed there must not take other backends along
            return f"it is not written for the Gluon of this Triton ({e})"
        reason = limits(gpu, *args)
    return reason


def _longest(tensor: torch.Tensor) -> int:
    """The longest dim, or the number of rows if there are more."""
    rows = math.prod(tensor.shape[:-1])
    return max(rows, *tensor.shape) if tensor.dim() else 1


def prepare(op: Op, args: Args, backend: str | None) -> Callable[..., Any]:
    """`run(*args, backend)` for every call of this layout, on the chosen backend.

    The backend comes along because a caller has it at the end of its arguments, and cutting it off
    would cost each call a copy of them; plans take what they need from the front.
    """
    choice = choose(op, args, backend=backend)
    entry = load(choice.backend.entry)
    if choice.backend.technology == "torch":
        direct = choice.backend.direct and load(choice.backend.direct)(*args)
        return direct or _by_torch(op, args, entry)
    run: Callable[..., Any] = entry(choice.gpu, *args)
    return run


def _by_torch(op: Op, args: Args, entry: Callable[..., Any]) -> Callable[..., Any]:
    """Eager torch picks strides of its own; the declaration promises some to torch.compile."""
    found = op.outputs(*on_meta(args))
    declared = () if found is None else as_tuple(found)
    strides = [d.stride() for d in declared]

    def as_declared(result: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        if result.stride() == stride:
            return result
        kept = torch.empty_strided(result.shape, stride, dtype=result.dtype, device=result.device)
        return kept.copy_(result)

    def run(*args: Any) -> Any:
        # the op keeps its dtype, or its rule has been applied: nobody shall cast inside
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            results = entry(*args[:-1])
        if isinstance(results, tuple):
            return tuple(map(as_declared, results, strides))
        return results if results is None else as_declared(results, strides[0])

    return run


def launches(op: Op, backend: str, args: Args, gpu: Gpu | None) -> list[Launch]:
    """What a table may name of this backend, for a call that it serves."""
    found: list[Launch] = load(op.tuning.choices)(gpu, *args) if op.tuning else []
    return [choice for choice in found if choice.backend == backend and choice.launch]


@cache
def load(entry: str) -> Callable[..., Any]:
    module, _, function = entry.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _gpu_of(tensor: torch.Tensor) -> Gpu | None:
    if tensor.device.type == "cuda":
        return gpus.detect(tensor.device.index or 0)
    if tensor.device.type == "cpu" and interpreting():
        return gpus.interpreter()
    return None


@cache
def _missing(technology: str) -> str | None:
    """What is not installed, with the command that installs it."""
    if technology in ("triton", "gluon") and importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if technology == "cuda":
        for module in ("cuda.core", "cuda.bindings"):
            try:
                found = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                found = None
            if found is None:
                return f'{module} is not installed (pip install "tilewright[cuda]")'
    return None


_ops: dict[str, None] = {}  # every op name that use_backend takes
_names: dict[str, None] = {}  # every backend name any op declares, in order


def declare(op: Op) -> None:
    """Make an op's backend names known, so that a misspelt one can be told from one it lacks."""
    _ops.update(dict.fromkeys(name for name in (op.public_name, op.name) if name))
    _names.update(dict.fromkeys(b.name for b in op.backends))


def _known_or_raise(name: str, where: str) -> None:
    if isinstance(name, str) and name in _names:
        return
    close = difflib.get_close_matches(str(name), _names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InputError(
        f"{where}: backend is {name!r}; it must be one of {', '.join(_names)}.{hint} "
        "Leave it out for the automatic choice."
    )


def _cannot(
    op: Op, wanted: str, asked_by: str, why: str, args: Args, gpu: Gpu | None, pretending: bool
) -> str:
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    works = [
        b.name
        for b in op.backends
        if refusal(b, op, args, tensor, gpu, pretending=pretending) is None
    ]
    return (
        f"{op.name}: backend {wanted!r} ({asked_by}) cannot serve this call: {why}. "
        f"What would work: {', '.join(works)}."
    )


def reset() -> None:
    """Forget what was read from the environment (for tests)."""
    from_environment.cache_clear()
    interpreting.cache_clear()
    _missing.cache_clear()
