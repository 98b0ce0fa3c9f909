"""Compile requests instead of launches: how the compile matrix learns what can be reached.

Inside `recording()`, `launch.bind` and `nvrtc.bind` append what they were asked for and return a
callable that must not be called. `prepare` functions run unchanged on meta tensors, so the list of
kernels and launch choices is read off the launchers themselves.

Inside `listening()` kernels are compiled and launched as ever, and the listener hears the name of
each before that: whoever waits for a call that does not end can say which kernels it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_requests: ContextVar[list[Request] | None] = ContextVar("tilewright_requests", default=None)
_listeners: list[Callable[[str], None]] = []  # of the whole process: autograd has its own threads


@dataclass(frozen=True)
class Request:
    """One binary that a launcher wants."""

    technology: str  # "triton", "gluon" or "cuda"
    kernel: Any  # a JITFunction, or the CUDA C++ template instance's name
    arguments: tuple[Any, ...]  # Triton: what the kernel would be called with; CUDA: ()
    constants: tuple[tuple[str, Any], ...]  # constexprs
    options: tuple[tuple[str, Any], ...]  # num_warps, ... or NVRTC flags
    dynamic_shared: int = 0  # CUDA only: bytes beyond the static ones
    source: Any = None  # CUDA only: the nvrtc.Source


def active() -> list[Request] | None:
    return _requests.get()


@contextmanager
def recording() -> Iterator[list[Request]]:
    requests: list[Request] = []
    token = _requests.set(requests)
    try:
        yield requests
    finally:
        _requests.reset(token)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def binding(kernel: str) -> None:
    """Tell the listeners that a kernel is about to be compiled, and then launched."""
    for listener in _listeners:
        listener(kernel)


def not_launchable(*tensors: Any) -> None:
    raise AssertionError("this kernel was recorded for compilation only; it cannot be launched")


def kernel_name(request: Request) -> str:
    """The kernel's name as a profiler shows it, or the template instance's."""
    if isinstance(request.kernel, str):
        return request.kernel
    name = getattr(request.kernel, "__name__", None) or request.kernel.fn.__name__
    return str(name)
