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
Triton's launch hooks are honoured, added (knobs.runtime.launch_enter_hook.add, as profilers do) or
assigned: while there is one, the launch goes through CompiledKernel's own runner.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tilewright.errors import LaunchError
from tilewright.toolkit import recording

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_STREAMS = 256  # launchers remembered per binding
MAX_ADDRESSES = 1024  # descriptors remembered per binding and tensor
CUDA_OF_FOLLOWING = 12030  # the release whose graphs know kernels that wait for one another

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Run = Callable[..., Any]


def bind(
    kernel: Any,
    grid: Sequence[int],
    tensors: Sequence[torch.Tensor | torch.dtype | Described | None],
    scalars: Sequence[int | float],
    constants: dict[str, Any],
    *,
    aligned: bool,
    num_warps: int,
    num_stages: int = 1,
    registers: int | None = None,
    follows: bool = False,
    absent: int = 0,
    makes: Callable[[], torch.Tensor] | None = None,
) -> Run:
    """Compile `kernel` for these arguments and return `run(*tensors)` for tensors of this layout.

    The kernel's parameters are `tensors`, `absent` more pointers that are always null, `scalars`,
    then `constants` by name. A dtype stands for an output that does not exist yet, a `Described`
    for a tensor that the kernel gets as a TMA descriptor. `aligned` says that every pointer is a
    multiple of 16 bytes; if not, the binary assumes it of none, so that one serves all. `registers`
    is the most that a thread may have, for more blocks on an SM. A kernel that `follows` is
    launched before what the kernel in front of it wrote can be seen, and waits for that by itself.
    With `makes`, an allocator, `run` takes the tensors after the first, makes that one and returns
    it; what follows the tensors in a call is ignored.
    """
    full_grid: Any = (*grid, 1, 1)[:3]
    name = getattr(kernel, "__name__", None) or kernel.fn.__name__
    if any(size > limit for size, limit in zip(full_grid, MAX_GRID, strict=True)):
        raise LaunchError(f"{name}: grid {full_grid} exceeds what CUDA can launch, {MAX_GRID}")
    # Explicit, because Triton's default is about to change and it warns until told.
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    if registers is not None:
        options["maxnreg"] = registers
    if follows:
        options["launch_pdl"] = True
    rest = (*[None] * absent, *scalars)
    pointers = tuple(_pointer(t, aligned) for t in tensors)
    described = {i: pointers[i] for i, t in enumerate(tensors) if isinstance(t, Described)}
    requests = recording.active()
    if requests is not None:
        arguments = (*pointers, *rest)
        requests.append(
            recording.Request(
                "gluon" if is_gluon(kernel) else "triton",
                kernel,
                arguments,
                tuple(constants.items()),
                tuple(options.items()),
            )
        )
        return recording.not_launchable
    recording.binding(name)
    if follows and not driver_knows_followers():
        del options["launch_pdl"]  # its wait then returns at once
    if is_interpreted(kernel):
        run = _described(_interpreted(kernel, full_grid, rest, constants), described)
        return run if makes is None else _making(run, makes, len(tensors) - 1)
    return _compiled(kernel, full_grid, pointers, rest, constants, options, makes, described)


@dataclass(frozen=True)
class Pointer:
    """What Triton specialises a tensor argument on: its dtype and its address modulo 16."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1

    @staticmethod
    def ptr_range() -> int:
        return 0


@dataclass(frozen=True)
class Described:
    """A tensor that a kernel reads by TMA: what its descriptor says beside the address.

    Encoding one takes the host some microseconds.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements; the last is 1, the others are whole 16 bytes
    block: tuple[int, ...]
    gluon: bool = False  # for a Gluon kernel


def _described(run: Run, descriptors: dict[int, Any]) -> Run:
    """`run`, with a descriptor of the tensor at each of these places."""
    if not descriptors:
        return run

    def described_run(*tensors: Any) -> Any:
        given = list(tensors)
        for place, like in descriptors.items():
            given[place] = copy.copy(like)
            given[place].base = tensors[place]
        return run(*given)

    return described_run


def _pointer(tensor: torch.Tensor | torch.dtype | Described | None, aligned: bool) -> Any:
    if tensor is None:
        return None
    if isinstance(tensor, Described):
        base = Pointer(tensor.dtype, True)
        sizes = list(tensor.shape), list(tensor.strides), list(tensor.block)
        if tensor.gluon:
            from tilewright.toolkit.gluon_compat import descriptor

            return descriptor(base, *sizes)
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(base, *sizes)
    return Pointer(tensor if isinstance(tensor, torch.dtype) else tensor.dtype, aligned)


class Shot(NamedTuple):
    """A bound kernel with one input, in parts, for the caller that cannot afford one more call.

    `library` allocates with `makes` and calls `launch` with what comes before the pointers on the
    current stream (`on_stream(stream)`, or `before()` if that is new), the two addresses and
    `tail`, unless one of the containers of hooks holds something.
    """

    makes: Callable[[], torch.Tensor]
    launch: Callable[..., None]
    on_stream: Callable[[int], Any]
    before: Callable[[], tuple[Any, ...]]
    tail: tuple[Any, ...]
    entering: Any = ()
    leaving: Any = ()
    assigned: Any = ()


def is_gluon(kernel: Any) -> bool:
    told = getattr(kernel, "is_gluon", None)
    return bool(told()) if callable(told) else False


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
    pointers: tuple[Any, ...],
    rest: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
    makes: Callable[[], torch.Tensor] | None,
    described: dict[int, Any],
) -> Run:
    way = route()
    if way == "jit":
        launcher = kernel[grid]

        def jit(*tensors: torch.Tensor | None) -> None:
            launcher(*tensors, *rest, **constants, **options)

        run = _described(jit, described)
        return run if makes is None else _making(run, makes, len(pointers) - 1)
    compiled = kernel.warmup(*pointers, *rest, **constants, grid=grid, **options)
    launch = compiled.run  # loads the binary now, so that nothing is loaded during capture
    tail = (*rest, *(constants[name] for name in kernel.arg_names[len(pointers) + len(rest) :]))
    return _direct_caller(compiled, launch, grid, tail, way, len(pointers), makes, described)


def _making(run: Run, makes: Callable[[], torch.Tensor], inputs: int) -> Run:
    """`run` for a kernel whose first tensor is new on each call, and the result."""

    def run_and_return(*args: Any) -> torch.Tensor:
        made = makes()
        run(made, *args[:inputs])
        return made

    return run_and_return


def _direct_caller(
    compiled: Any,
    launch: Any,
    grid: tuple[int, int, int],
    tail: tuple[Any, ...],
    way: str,
    pointers: int,
    makes: Callable[[], torch.Tensor] | None,
    described: dict[int, Any],
) -> Run:
    assert _current_stream is not None
    index, stream = torch.cuda.current_device(), _current_stream
    head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
    if way == "direct" and not (launch.global_scratch_size or launch.profile_scratch_size):
        # C launcher, 3.6: grid, stream, function, cooperative, pdl, scratch x2, metadata, hooks x3
        flags = (launch.launch_cooperative_grid, launch.launch_pdl, None, None)
        head = (compiled.function, *flags, compiled.packed_metadata, None, None, None)
        launch = launch.launch
    on_stream: dict[int, tuple[Any, ...]] = {}  # what comes before the pointers, by stream

    def before() -> tuple[Any, ...]:
        number = stream(index)
        found = on_stream.get(number)
        if found is None:
            if len(on_stream) > MAX_STREAMS:
                on_stream.clear()
            found = on_stream[number] = (*grid, number, *head)
        return found

    entering, leaving, assigned = _hooks()
    with_hooks = compiled[grid]
    find = on_stream.get
    if described:
        encoding = _encoding(compiled, launch, described)
        if encoding is not None:
            launch, encoded = encoding
        with_descriptors = _described(lambda *tensors: tensors, described)

        def by_tma(*tensors: Any) -> None:
            if entering or leaving or assigned:
                with_hooks(*with_descriptors(*tensors), *tail)
            elif encoding is None:
                launch(*before(), *map(_address, with_descriptors(*tensors)), *tail)
            else:
                launch(*before(), *encoded(tensors), *tail)

        return by_tma if makes is None else _making(by_tma, makes, pointers - 1)

    def many(*tensors: Any) -> None:
        if entering or leaving or assigned:
            with_hooks(*tensors, *tail)
        else:
            pointers = [None if t is None else t.data_ptr() for t in tensors]
            launch(*before(), *pointers, *tail)

    if makes is None:
        return many

    # Spelled out for one and two inputs: each Python call costs 0.2 us of the 10 we have. Adding
    # tuples is 0.2 us quicker than unpacking them into the call one after another.
    def from_one(a: Any, *_: Any) -> torch.Tensor:
        made = makes()
        if entering or leaving or assigned:
            with_hooks(made, a, *tail)
        else:
            launch(*((find(stream(index)) or before()) + (made.data_ptr(), a.data_ptr()) + tail))
        return made

    def from_two(a: Any, b: Any, *_: Any) -> torch.Tensor:
        made = makes()
        if entering or leaving or assigned:
            with_hooks(made, a, b, *tail)
        else:
            pointers = (made.data_ptr(), a.data_ptr(), None if b is None else b.data_ptr())
            launch(*((find(stream(index)) or before()) + pointers + tail))
        return made

    from_one.shot = Shot(makes, launch, find, before, tail, *_hooks())  # type: ignore[attr-defined]
    spelled_out: dict[int, Run] = {2: from_one, 3: from_two}
    return spelled_out.get(pointers) or _making(many, makes, pointers - 1)


def _address(t: Any) -> Any:
    """What Triton's launcher takes for a tensor, a descriptor or nothing."""
    return t.data_ptr() if isinstance(t, torch.Tensor) else t


def _encoding(
    compiled: Any, launch: Any, described: dict[int, Any]
) -> tuple[Any, Callable[[Sequence[Any]], list[Any]]] | None:
    """The C launcher below Triton's own encoding of descriptors, and `encoded(tensors)`, what it
    takes for them; None if this Triton does not have it where 3.6 does.

    A descriptor holds an address and what is the same for all calls of a binding, so each address
    is encoded once: that takes some microseconds, and allocators hand out the same ones again.
    """
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        raw = inspect.getclosurevars(launch).nonlocals["launcher"]
        meta = dict(zip(sorted(described), compiled.metadata.tensordesc_meta, strict=True))
    except (ImportError, TypeError, KeyError, AttributeError, ValueError):
        return None
    known: dict[int, dict[int, list[Any]]] = {place: {} for place in described}

    def encode(place: int, tensor: torch.Tensor) -> list[Any]:
        descriptor = copy.copy(described[place])
        descriptor.base = tensor
        if len(known[place]) > MAX_ADDRESSES:
            known[place].clear()
        found: list[Any] = make_tensordesc_arg(descriptor, meta[place])
        known[place][tensor.data_ptr()] = found
        return found

    def encoded(tensors: Sequence[Any]) -> list[Any]:
        given: list[Any] = []
        for place, tensor in enumerate(tensors):
            if tensor is None:
                given.append(None)
            elif place in known:
                given += known[place].get(tensor.data_ptr()) or encode(place, tensor)
            else:
                given.append(tensor.data_ptr())
        return given

    return raw, encoded


@lru_cache(maxsize=1)
def driver_knows_followers() -> bool:
    """Whether launches that follow can be captured in a graph here."""
    version = getattr(torch._C, "_cuda_getDriverVersion", None)  # a CPU build has none
    return version is not None and version() >= CUDA_OF_FOLLOWING


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
def _hooks() -> tuple[Any, Any, Any]:
    """Three containers that are empty while no launch hook is set.

    The hooks added on entering and on leaving a launch, and what was assigned to Triton's runtime
    knobs, hooks among them: the instance's own attributes.
    """
    from triton import knobs

    runtime = knobs.runtime
    chains = type(runtime).launch_enter_hook, type(runtime).launch_exit_hook
    return getattr(chains[0], "calls", ()), getattr(chains[1], "calls", ()), vars(runtime)


def programs(total: int, each: int) -> int:
    """How many programs cover `total` items, `each` at a time."""
    return -(-total // each)
