"""What a call really launched: its kernels, read off a captured CUDA graph.

A backend that quietly hands its work to torch still returns right results; only the kernels tell.
The names come from the driver, not from our own launcher.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilewright.bench.clock import capture
from tilewright.bench.timing import Call

KERNEL, COPY, SET = 0, 1, 2  # CUgraphNodeType


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("dims", ctypes.c_uint * 7),  # grid, block, bytes of shared memory
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def launched(bind: Callable[[], Call]) -> tuple[str, ...] | None:
    """The kernels, copies and fills of one call, in order; None if it cannot be captured."""
    captured = capture(lambda: [bind()], keep_graph=True)
    if captured is None:
        return None
    graph = ctypes.c_void_p(captured.graph.raw_cuda_graph())
    driver, count = _driver(), ctypes.c_size_t()
    driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
    names = []
    for node in nodes:
        kind = ctypes.c_int()
        driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == KERNEL:
            names.append(_kernel_name(driver, node or 0))
        elif kind.value in (COPY, SET):
            names.append("copy" if kind.value == COPY else "fill")
    return tuple(names)


def _kernel_name(driver: Any, node: int) -> str:
    facts, name = _KernelNode(), ctypes.c_char_p()
    driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(facts))
    if facts.function:
        driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(facts.function))
    elif facts.kernel:
        driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(facts.kernel))
    return short((name.value or b"?").decode())


def short(symbol: str) -> str:
    """A C++ symbol without its arguments: "void at::native::f<float>(int)" is "at::native::f"."""
    text = torch._C._demangle(symbol) if symbol.startswith("_Z") else symbol
    while "<" in text and ">" in text:
        text, found = re.subn(r"<[^<>]*>", "", text)
        if not found:
            break
    return text.split("(")[0].split(" ")[-1] or symbol


def saw(expected: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether every kernel that a backend said it launches was launched."""
    seen = {_bare(name) for name in names}
    return all(_bare(kernel) in seen for kernel in expected)


def strangers(expected: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """What was launched beside them: part of the work may have been handed to somebody else."""
    declared = {_bare(kernel) for kernel in expected}
    return tuple(name for name in names if _bare(name) not in declared)


def _bare(name: str) -> str:
    return short(name).split("::")[-1]


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("cuda") or "libcuda.so.1")
