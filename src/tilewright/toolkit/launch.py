"""The launch cache's lower half: a Triton or Gluon kernel bound to one layout, called directly.

`kernel[grid](...)` re-derives the specialisation of every argument on each call: 16 to 21 us of
CPU. `bind` asks Triton for the compiled kernel once and returns a callable that hands pointers
straight to Triton's own C launcher: 5.7 us (H200 host, triton 3.6.0, 2026-11).

What the binary depends on (dtypes, 16-byte alignment of pointers, integers, constexprs, options,
device) is fixed at bind time; the callers' plan cache is keyed by all of it (`library.layout_key`),
and calls with the tensors' device current (`library` guards it). The stream is the current one of
that device, read per call.

Three ways to launch, best first; `route()` says which this Triton allows and `doctor` reports it:
  direct   the C function behind CompiledKernel.run (triton 3.6, whose argument order is known)
  run      CompiledKernel.run, the same in 3.6 ... 3.9
  jit      kernel[grid], if neither is there
Triton's launch hooks (profilers use them) are honoured: while any is set, the launch goes through
CompiledKernel's own runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from tilewright.errors import LaunchError
from tilewright.toolkit import recording

MAX_GRID = (2**31 - 1, 65535, 65535)

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Run = Callable[..., None]


def bind(
    kernel: Any,
    grid: Sequence[int],
    tensors: Sequence[torch.Tensor | torch.dtype | None],
    scalars: Sequence[int | float],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    absent: int = 0,
) -> Run:
    """Compile `kernel` for these arguments and return `run(*tensors)` for tensors of this layout.

    The kernel's parameters are `tensors`, `absent` more pointers that are always null, `scalars`,
    then `constants` by name. A dtype stands for an output that does not exist yet.
    """
    full_grid: Any = (*grid, 1, 1)[:3]
    name = getattr(kernel, "__name__", None) or kernel.fn.__name__
    if any(size > limit for size, limit in zip(full_grid, MAX_GRID, strict=True)):
        raise LaunchError(f"{name}: grid {full_grid} exceeds what CUDA can launch, {MAX_GRID}")
    # Explicit, because Triton's default is about to change and it warns until told.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    rest = (*[None] * absent, *scalars)
    requests = recording.active()
    if requests is not None:
        arguments = (*tensors, *rest)
        requests.append(
            recording.Request(
                "gluon" if _is_gluon(kernel) else "triton",
                kernel,
                arguments,
                tuple(constants.items()),
                tuple(options.items()),
            )
        )
        return recording.not_launchable
    if is_interpreted(kernel):
        return _interpreted(kernel, full_grid, rest, constants)
    return _compiled(kernel, full_grid, tuple(tensors), rest, constants, options)


def _is_gluon(kernel: Any) -> bool:
    is_gluon = getattr(kernel, "is_gluon", None)
    return bool(is_gluon()) if callable(is_gluon) else False


def is_interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def _interpreted(
    kernel: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], constants: dict[str, Any]
) -> Run:
    launcher = kernel[grid]

    def run(*tensors: torch.Tensor | None) -> None:
        launcher(*tensors, *rest, **constants)

    return run


def _compiled(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Any, ...],
    rest: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Run:
    way = route()
    if way == "jit":
        launcher = kernel[grid]

        def jit(*tensors: torch.Tensor | None) -> None:
            launcher(*tensors, *rest, **constants, **options)

        return jit
    compiled = kernel.warmup(*tensors, *rest, **constants, grid=grid, **options)
    launch = compiled.run  # loads the binary now, so that nothing is loaded during capture
    tail = (*rest, *(constants[name] for name in kernel.arg_names[len(tensors) + len(rest) :]))
    return _direct_caller(compiled, launch, grid, tail, way)


def _direct_caller(
    compiled: Any, launch: Any, grid: tuple[int, int, int], tail: tuple[Any, ...], way: str
) -> Run:
    assert _current_stream is not None
    index = torch.cuda.current_device()
    stream, hooked = _current_stream, _hooked()
    head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
    if way == "direct" and not (launch.global_scratch_size or launch.profile_scratch_size):
        # C launcher, 3.6: grid, stream, function, cooperative, pdl, scratch x2, metadata, hooks x3
        flags = (launch.launch_cooperative_grid, launch.launch_pdl, None, None)
        head = (compiled.function, *flags, compiled.packed_metadata, None, None, None)
        launch = launch.launch
    gx, gy, gz = grid
    with_hooks = compiled[grid]

    # Two and three pointers are spelled out: a list of pointers costs 0.4 us of the 10 we have.
    def run(a: Any, b: Any, c: Any = ABSENT, *more: Any) -> None:
        if hooked():
            with_hooks(*[t for t in (a, b, c, *more) if t is not ABSENT], *tail)
        elif c is ABSENT:
            launch(gx, gy, gz, stream(index), *head, a.data_ptr(), b.data_ptr(), *tail)
        elif not more and c is not None:
            pointers = a.data_ptr(), b.data_ptr(), c.data_ptr()
            launch(gx, gy, gz, stream(index), *head, *pointers, *tail)
        else:
            addresses = [None if t is None else t.data_ptr() for t in (a, b, c, *more)]
            launch(gx, gy, gz, stream(index), *head, *addresses, *tail)

    return run


ABSENT: Any = object()  # "no third tensor": None already means a null pointer


@lru_cache(maxsize=1)
def route() -> str:
    """How compiled Triton kernels are called here: "direct", "run" or "jit"."""
    if _current_stream is None:
        return "jit"
    try:
        import triton
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction
    except ImportError:
        return "jit"
    if not (hasattr(CompiledKernel, "run") and hasattr(JITFunction, "warmup")):
        return "jit"
    return "direct" if triton.__version__.split(".")[:2] == ["3", "6"] else "run"


@lru_cache(maxsize=1)
def _hooked() -> Callable[[], bool]:
    """A predicate: is any of Triton's launch hooks set right now?"""
    from triton import knobs

    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    enter_calls, leave_calls = getattr(enter, "calls", None), getattr(leave, "calls", None)
    if enter_calls is None or leave_calls is None:
        # older style: a hook is a plain attribute, None when unset

        def set_now() -> bool:
            return bool(runtime.launch_enter_hook) or bool(runtime.launch_exit_hook)

        return set_now

    def any_call() -> bool:
        return bool(
            enter_calls
            or leave_calls
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        )

    return any_call


def programs(total: int, each: int) -> int:
    """How many programs cover `total` items, `each` at a time."""
    return -(-total // each)
