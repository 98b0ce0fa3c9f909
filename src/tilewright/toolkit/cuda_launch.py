"""The driver half of `nvrtc.bind`: a loaded kernel and its launch shape as `run(*tensors)`.

The driver reads arguments through a `void **`. It is built once per thread; a call only writes the
pointers into it, launches and looks at the result. Every result is looked at: a launch that fails
without a word leaves an output full of whatever was in memory before.
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

DEFAULT_SHARED = 48 * 1024  # more dynamic shared memory than this must be asked for

Run = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched, in the words of error messages."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int  # dynamic bytes
    cluster: int

    def __str__(self) -> str:
        cluster = f", cluster {self.cluster}" if self.cluster > 1 else ""
        return (
            f"{self.kernel} with grid {self.grid}, block {self.block}{cluster} "
            f"and {self.shared} bytes of dynamic shared memory"
        )


class Arguments(threading.local):
    """The `void **` of one binding; per thread, so that no thread launches another's pointers."""

    def __init__(self, pointer_count: int, scalars: tuple[Any, ...], shape: Shape) -> None:
        self.pointers = [ctypes.c_void_p() for _ in range(pointer_count)]
        copies = [type(s).from_buffer_copy(s) for s in scalars]
        self.storage = [*self.pointers, *copies]
        addresses = [ctypes.addressof(value) for value in self.storage]
        self.array = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self.array)
        self.pack: tuple[Any, ...] = (
            *self.pointers,
            self.address,
        )  # one look-up of a thread's data per call
        self.config = _cluster_config(shape) if shape.cluster > 1 else None


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
    arguments = Arguments(len(tensors), tuple(scalars), shape)
    function = driver.CUfunction(int(loaded.handle))
    no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
    stream_of = torch._C._cuda_getCurrentRawStream
    launch_kernel, launch_cluster = driver.cuLaunchKernel, driver.cuLaunchKernelEx
    gx, gy, gz = shape.grid
    block, shared = shape.block, shape.shared

    def submit() -> Any:
        stream, address = stream_of(index), arguments.address
        if arguments.config is not None:
            arguments.config.hStream = stream
            return launch_cluster(arguments.config, function, address, 0)[0]
        return launch_kernel(function, gx, gy, gz, block, 1, 1, shared, stream, address, 0)[0]

    def retry(error: Any) -> None:
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

    def making(*args: Any) -> torch.Tensor:
        assert makes is not None
        made = makes()
        many(made, *args[: len(tensors) - 1])
        return made

    # Spelled out for one and two inputs: each Python call costs 0.2 us of the 10 we have.
    def from_one(a: torch.Tensor, *_: Any) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        first, second, address = arguments.pack
        first.value = made.data_ptr()
        second.value = a.data_ptr()
        (error,) = launch_kernel(
            function, gx, gy, gz, block, 1, 1, shared, stream_of(index), address, 0
        )
        if error:
            retry(error)
        return made

    def from_two(a: torch.Tensor, b: torch.Tensor | None, *_: Any) -> torch.Tensor:
        made = makes()  # type: ignore[misc]
        first, second, third, address = arguments.pack
        first.value = made.data_ptr()
        second.value = a.data_ptr()
        third.value = None if b is None else b.data_ptr()
        (error,) = launch_kernel(
            function, gx, gy, gz, block, 1, 1, shared, stream_of(index), address, 0
        )
        if error:
            retry(error)
        return made

    run: Run = many
    if makes is not None:
        spelled_out: dict[int, Run] = {2: from_one, 3: from_two} if shape.cluster == 1 else {}
        run = spelled_out.get(len(tensors), making)
    run.loaded = loaded  # type: ignore[attr-defined]  # its library lives as long as the callable
    return run


def _load(loaded: Any, shape: Shape, index: int, shared_limit: int) -> None:
    """Load the code now, since nothing may be loaded during graph capture; opt in to shared memory.

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
    if shape.shared > DEFAULT_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared_limit, kernel, index)
        if error != driver.CUresult.CUDA_SUCCESS:
            _raise(shape, error)


def _cluster_config(shape: Shape) -> Any:
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = attribute.value.clusterDim
    dims.x, dims.y, dims.z = shape.cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
    config.sharedMemBytes = shape.shared
    config.attrs = [attribute]
    config.numAttrs = 1
    return config


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


def _raise(shape: Shape, error: Any) -> None:
    raise LaunchError(f"{shape}: the driver answered {getattr(error, 'name', error)}")


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
