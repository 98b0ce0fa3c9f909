"""One name for each Gluon call whose name differs between Triton versions, from 3.6 on.

Gluon is experimental: what a kernel takes from it comes through here.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate, base_value

__all__ = [
    "barrier",
    "descriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "record",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# Triton 3.9 has the old names too: they raise.
_RENAMED = hasattr(tma, "async_load")
tma_load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
tma_store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of a partition's warps


def record(cls: type) -> Any:
    """A class that kernels may hold and hand on: its fields in order, as a dataclass has them.

    A field is a value of a kernel, or a constant: what is no value becomes one.
    """
    names = tuple(cls.__annotations__)

    def __init__(self, *fields):  # type: ignore[no-untyped-def]
        for name, value in zip(names, fields, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    cls.__init__ = gluon.constexpr_function(__init__)  # type: ignore[misc]
    return _aggregate(cls)


def descriptor(base: Any, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """Of tiles that lie in shared memory as wgmma reads them: 128 bytes of a row, swizzled, or all
    of a shorter one."""
    size = base.dtype.itemsize
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, block[-1] * size), element_bitwidth=8 * size, rank=len(block)
    )
    return TensorDescriptor(base, shape, strides, block, layout)
