"""The driver half of `nvrtc.bind`: a loaded kernel and its launch shape as `run(*tensors)`.

The driver reads arguments through a `void **`, built once per thread, and the launch shape from a
struct, built once per stream; a call only writes the pointers, launches and looks at the result.
Every result is looked at: a launch that fails without a word leaves an output full of whatever was
in memory before. cuda-bindings builds the struct; the call itself goes to the driver's function by
ctypes, which has four words to convert where cuda-bindings wraps eleven (0.3 us less; H200 host,
2026-11).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.errors import LaunchError
from tilewright.toolkit.launch import CUDA_OF_FOLLOWING, MAX_STREAMS, Described, Shot
from tilewright.toolkit.tensor_map import Maps

CUDA_OF_LAUNCH_EX = 11080  # the CUDA release that brought cuLaunchKernelEx
DEFAULT_SHARED = 44 * 1024  # more must be asked for: 48 KiB, less what a kernel declares itself
PORTABLE_CLUSTER = 8  # more blocks in a cluster than this must be asked for

Run = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched, in the words of error messages."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int  # dynamic bytes
    cluster: int
    follows: bool = False  # it waits by itself for what the kernel before it wrote

    def __str__(self) -> str:
        cluster = f", cluster {self.cluster}" if self.cluster > 1 else ""
        return (
            f"{self.kernel} with grid {self.grid}, block {self.block}{cluster} "
            f"and {self.shared} bytes of dynamic shared memory"
        )


class Address(int):
    """Where a struct of cuda-bindings lies; keeps it alive."""

    owner: Any

    @classmethod
    def of(cls, struct: Any) -> Address:
        address = cls(struct.getPtr())
        address.owner = struct
        return address


class Arguments(threading.local):
    """The `void **` of one binding; per thread, so that no thread launches another's pointers."""

    def __init__(self, pointer_count: int, scalars: tuple[Any, ...]) -> None:
        self.pointers = [ctypes.c_void_p() for _ in range(pointer_count)]
        copies = [type(s).from_buffer_copy(s) for s in scalars]
        self.storage = [*self.pointers, *copies]
        addresses = [ctypes.addressof(value) for value in self.storage]
        self.array = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self.array)
        # one look-up of a thread's data per call
        self.pack: tuple[Any, ...] = (*self.pointers, self.address)


def make_run(
    loaded: Any,
    shape: Shape,
    tensors: Sequence[Any],
    scalars: Sequence[Any],
    index: int,
    shared_limit: int,
    makes: Callable[[], torch.Tensor] | None,
) -> Run:
    """`run(*tensors)` for device `index`; `loaded` is cuda-core's Kernel."""
    driver = _driver()
    _load(loaded, shape, index, shared_limit)
    arguments = Arguments(len(tensors), tuple(scalars))
    function, launch = int(loaded.handle), _launch_function()
    no_context = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)
    stream_of = torch._C._cuda_getCurrentRawStream
    on_stream: dict[int, tuple[Address]] = {}

    def before() -> tuple[Address]:
        """Where the launch shape on the current stream lies."""
        stream = stream_of(index)
        if len(on_stream) > MAX_STREAMS:
            on_stream.clear()
        on_stream[stream] = found = (Address.of(_config(shape, stream)),)
        return found

    def submit() -> int:
        (config,) = on_stream.get(stream_of(index)) or before()
        return launch(config, function, arguments.address, None)

    def retry(error: int) -> None:
        if error == no_context:  # a thread that has not touched CUDA yet
            _make_context_current(shape, index)
            error = submit()
        if error:
            _raise(shape, error)

    def many(*tensors: torch.Tensor | None) -> None:
        for pointer, tensor in zip(arguments.pointers, tensors, strict=True):
            pointer.value = None if tensor is None else tensor.data_ptr()
        error = submit()
        if error:
            retry(error)

    # Of a tensor that is described the kernel gets a map by value: an entry of the `void **` leads
    # to it, where for others it leads to a pointer.
    maps = {place: Maps(t) for place, t in enumerate(tensors) if isinstance(t, Described)}

    def described(*given: torch.Tensor | None) -> None:
        held = {place: of.at(given[place].data_ptr()) for place, of in maps.items()}  # type: ignore[union-attr]
        for place, tensor in enumerate(given):
            if place in held:
                arguments.array[place] = held[place]
            else:
                arguments.pointers[place].value = None if tensor is None else tensor.data_ptr()
        error = submit()
        if error:
            retry(error)

    def from_two_described(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        first, _, _, address = arguments.pack
        array, map_a, map_b = arguments.array, maps[1].at(a.data_ptr()), maps[2].at(b.data_ptr())
        first.value, array[1], array[2] = made.data_ptr(), map_a, map_b
        (config,) = on_stream.get(stream_of(index)) or before()
        error = launch(config, function, address, None)
        if error:
            retry(error)
        return made

    # Spelled out for one, two and three inputs: each Python call costs 0.2 us of the 10 we have.
    def fire(config: int, made: int, given: int) -> None:
        first, second, address = arguments.pack
        first.value, second.value = made, given
        error = launch(config, function, address, None)
        if error:
            retry(error)

    def from_one(a: torch.Tensor, *_: Any) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        (config,) = on_stream.get(stream_of(index)) or before()
        fire(config, made.data_ptr(), a.data_ptr())
        return made

    def from_two(a: torch.Tensor, b: torch.Tensor | None, *_: Any) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        first, second, third, address = arguments.pack
        first.value, second.value = made.data_ptr(), a.data_ptr()
        third.value = None if b is None else b.data_ptr()
        (config,) = on_stream.get(stream_of(index)) or before()
        error = launch(config, function, address, None)
        if error:
            retry(error)
        return made

    def from_three(
        a: torch.Tensor, b: torch.Tensor | None, c: torch.Tensor | None, *_: Any
    ) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        first, second, third, fourth, address = arguments.pack
        first.value, second.value = made.data_ptr(), a.data_ptr()
        third.value = None if b is None else b.data_ptr()
        fourth.value = None if c is None else c.data_ptr()
        (config,) = on_stream.get(stream_of(index)) or before()
        error = launch(config, function, address, None)
        if error:
            retry(error)
        return made

    run: Run = described if maps else many
    if makes is not None and maps:
        assert (len(tensors), *maps) == (3, 1, 2), "it makes a result of two that are described"
        run = from_two_described
    elif makes is not None:
        spelled_out: dict[int, Run] = {2: from_one, 3: from_two, 4: from_three}
        run = spelled_out[len(tensors)]
        if run is from_one:
            run.shot = Shot(makes, fire, on_stream.get, before, ())  # type: ignore[attr-defined]
    run.loaded = loaded  # type: ignore[attr-defined]  # its library lives as long as the callable
    return run


def _load(loaded: Any, shape: Shape, index: int, shared_limit: int) -> None:
    """Load the code now, since nothing may be loaded during graph capture; opt in to large sizes.

    The opt-in is a property of the kernel, not of a launch: always the same limit, so that a later
    binding with less does not take it from an earlier one.
    """
    driver = _driver()
    kernel = driver.CUkernel(int(loaded.handle))
    error, _ = driver.cuKernelGetFunction(kernel)
    if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        _make_context_current(shape, index)
        error, _ = driver.cuKernelGetFunction(kernel)
    if error != driver.CUresult.CUDA_SUCCESS:
        _raise(shape, error)
    limits = driver.CUfunction_attribute
    wanted = {}
    if shape.shared > DEFAULT_SHARED:
        wanted[limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = shared_limit
    if shape.cluster > PORTABLE_CLUSTER:
        wanted[limits.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
    for attribute, value in wanted.items():
        (error,) = driver.cuKernelSetAttribute(attribute, value, kernel, index)
        if error != driver.CUresult.CUDA_SUCCESS:
            _raise(shape, error)


def resident_blocks(loaded: Any, shape: Shape, index: int, shared_limit: int, sm_count: int) -> int:
    """How many blocks of this shape the whole GPU runs at a time: the grid of a persistent kernel.

    Clusters must ask: which SMs can share one is a property of the piece of silicon.
    """
    driver = _driver()
    _load(loaded, shape, index, shared_limit)
    error, function = driver.cuKernelGetFunction(driver.CUkernel(int(loaded.handle)))
    if error == driver.CUresult.CUDA_SUCCESS and shape.cluster > 1:
        error, clusters = driver.cuOccupancyMaxActiveClusters(function, _config(shape, 0))
        blocks = clusters * shape.cluster
    elif error == driver.CUresult.CUDA_SUCCESS:
        error, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, shape.block, shape.shared
        )
        blocks *= sm_count
    if error != driver.CUresult.CUDA_SUCCESS:
        _raise(shape, error)
    if not blocks:
        raise LaunchError(f"{shape}: the GPU cannot hold a single one")
    return int(blocks)


def _config(shape: Shape, stream: int) -> Any:
    """The driver's CUlaunchConfig."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
    config.sharedMemBytes, config.hStream = shape.shared, stream
    attributes, ids = [], driver.CUlaunchAttributeID
    if shape.cluster > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = cluster.value.clusterDim
        dims.x, dims.y, dims.z = shape.cluster, 1, 1
        attributes.append(cluster)
    if shape.follows and _driver_version() >= CUDA_OF_FOLLOWING:
        early = driver.CUlaunchAttribute()
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _driver_version() -> int:
    error, version = _driver().cuDriverGetVersion()
    return int(version) if error == _driver().CUresult.CUDA_SUCCESS else 0


@cache
def _launch_function() -> Callable[..., int]:
    """cuLaunchKernelEx(config, function, arguments, extra) as a callable of four addresses."""
    driver = _driver()
    error, address, _ = driver.cuGetProcAddress(b"cuLaunchKernelEx", CUDA_OF_LAUNCH_EX, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not address:
        raise LaunchError(f"the driver has no cuLaunchKernelEx ({error}); update it to CUDA 12")
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(int(address))


def _make_context_current(shape: Shape, index: int) -> None:
    """torch's context is the device's primary one; make it this thread's."""
    error, context = _primary_context(index)
    if error == _driver().CUresult.CUDA_SUCCESS:
        (error,) = _driver().cuCtxSetCurrent(context)
    if error != _driver().CUresult.CUDA_SUCCESS:
        _raise(shape, error)


@cache
def _primary_context(index: int) -> tuple[Any, Any]:
    """(error, context); retained once per process: torch keeps it alive as long."""
    driver = _driver()
    error, device = driver.cuDeviceGet(index)
    if error != driver.CUresult.CUDA_SUCCESS:
        return error, None
    error, context = driver.cuDevicePrimaryCtxRetain(device)
    return error, context


def _raise(shape: Shape, error: int) -> None:
    try:
        name = _driver().CUresult(error).name
    except ValueError:
        name = f"error {error}"
    raise LaunchError(f"{shape}: the driver answered {name}")


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
