"""CUDA C++ without nvcc: `.cu` text to cubin by NVRTC, kept on disk, launched through the driver.

`compile` needs neither a GPU nor a host compiler nor a CUDA header: the kernels include only the
files of `include/tilewright`, so libnvrtc and two wheels (cuda-core, cuda-bindings) are the whole
toolchain. `bind` turns a template instance into `run(*tensors)` for one layout. The argument array
that the driver reads is built once per thread and only the pointers in it change: 6.4 us of CPU per
launch against 9.6 us for arguments packed on each call (H200 host, 2026-11).
cuda and platformdirs are imported on first use, so that importing this file costs nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.errors import BuildError, LaunchError
from tilewright.toolkit import cubin_cache, recording
from tilewright.toolkit.cuda_launch import Run, Shape, make_run, resident_blocks
from tilewright.toolkit.launch import Described

if TYPE_CHECKING:
    from tilewright.gpu import Gpu

INCLUDE = Path(__file__).parent / "include"
INCLUDED = re.compile(r'^#include "tilewright/(\w+\.cuh)"', re.M)
STANDARD = "c++17"
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
WHEELS = 'pip install cuda-core "cuda-bindings==13.*" "nvidia-cuda-nvrtc==13.*"'

# Only what changes code generation, by cuda-core's names; nothing that names a file or a command.
FLAGS = frozenset({"fma", "ftz", "prec_div", "prec_sqrt", "use_fast_math", "max_register_count"})

Flags = tuple[tuple[str, Any], ...]


# --- compile -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A `.cu` file; its text and the texts of the headers it includes decide `digest`."""

    package_file: Path

    @staticmethod
    def beside(module_file: str) -> Source:
        """The `.cu` file of the same name next to a module: `Source.beside(__file__)`."""
        return Source(Path(module_file).with_suffix(".cu"))

    @cached_property
    def text(self) -> str:
        return Path(self.package_file).read_text(encoding="utf-8")

    @cached_property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Of ours, those that are included, by it or by one another: name and text."""
        found: dict[str, str] = {}
        left = INCLUDED.findall(self.text)
        while left:
            name = left.pop()
            path = INCLUDE / "tilewright" / name
            if name not in found and path.exists():  # what is missing the compiler will name
                found[name] = path.read_text(encoding="utf-8")
                left += INCLUDED.findall(found[name])
        return tuple(sorted(found.items()))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.text, self.headers]).encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code and what the assembler said about it."""

    cubin: bytes
    lowered_name: str
    registers: int
    spill_bytes: int  # stores + loads
    static_shared: int
    log: str


_compiled: dict[tuple[str, str, int, Flags], Compiled] = {}
_gates: dict[tuple[str, str, int, Flags], threading.Lock] = {}
_lock = threading.Lock()
_importing = threading.Lock()


def arch_name(sm: int) -> str:
    """NVRTC's name: the "a" variants where an SM has instructions that no later one keeps."""
    return f"sm_{sm}a" if sm in (90, 100, 103) else f"sm_{sm}"


def compile(source: Source, kernel: str, sm: int, flags: Flags = ()) -> Compiled:
    """`kernel`, a name expression such as "rms_norm_rows<f16, 8, 4, true>", as a cubin for `sm`.

    `flags` are (cuda-core option, value) pairs out of FLAGS. The result comes from memory, else
    from disk, else from NVRTC; threads that want the same kernel at once compile it once.
    """
    unknown = sorted(name for name, _ in flags if name not in FLAGS)
    if unknown:
        raise BuildError(f"{kernel}: flags {unknown} are not among {sorted(FLAGS)}")
    wanted = (source.digest, kernel, sm, flags)
    with _lock:
        gate = _gates.setdefault(wanted, threading.Lock())
    with gate:
        if wanted not in _compiled:
            _compiled[wanted] = _from_disk_or_compiler(source, kernel, sm, flags)
        return _compiled[wanted]


def cache_key(source: Source, kernel: str, sm: int, flags: Flags = ()) -> dict[str, str]:
    """Everything the cubin depends on; stored in the entry and compared when it is read."""
    return {
        "format": "1",
        "source": source.digest,
        "kernel": kernel,
        "arch": arch_name(sm),
        "flags": json.dumps(sorted(flags)),
        "standard": STANDARD,
        "nvrtc": nvrtc_version(),
    }


def _from_disk_or_compiler(source: Source, kernel: str, sm: int, flags: Flags) -> Compiled:
    missing = unavailable()
    if missing:
        raise BuildError(f"{kernel}: {missing}")
    key = cache_key(source, kernel, sm, flags)
    entry = cubin_cache.load(key)
    if entry is not None:
        facts, cubin = entry
        return Compiled(cubin=cubin, **facts)
    compiled = _run_nvrtc(source, kernel, sm, flags)
    facts = asdict(compiled)
    cubin_cache.store(key, facts, facts.pop("cubin"))
    return compiled


@cache
def _cuda_core() -> Any:
    """cuda.core, which two threads must not begin to import at the same time: one sees a part."""
    with _importing:
        import cuda.core

        return cuda.core


def _run_nvrtc(source: Source, kernel: str, sm: int, flags: Flags) -> Compiled:
    core = _cuda_core()
    options = core.ProgramOptions(
        name=source.package_file.name,
        arch=arch_name(sm),
        std=STANDARD,
        include_path=[str(INCLUDE)],
        ptxas_options=["-v"],
        no_cache=True,  # NVRTC's own: what it finds there comes without a word of ptxas
        **dict(flags),
    )
    logs = io.StringIO()
    try:
        code = core.Program(source.text, "c++", options).compile(
            "cubin", name_expressions=(kernel,), logs=logs
        )
    except Exception as error:  # cuda-core's error classes are not public
        raise BuildError(
            f"{kernel} of {source.package_file.name} does not compile for {arch_name(sm)}:\n{error}"
        ) from error
    name = code.symbol_mapping[kernel]
    lowered = name.decode() if isinstance(name, bytes) else str(name)
    log = logs.getvalue().replace("\0", "")
    return Compiled(bytes(code.code), lowered, *_resources(log, lowered), log)


def _resources(log: str, lowered: str) -> tuple[int, int, int]:
    """(registers, spilled bytes, static shared memory) from what `ptxas -v` wrote."""
    for part in log.split("Compiling entry function ")[1:]:
        if not part.startswith(f"'{lowered}'"):
            continue
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(
            rf"Function properties for {re.escape(lowered)}\s.*?(\d+) bytes spill stores, "
            r"(\d+) bytes spill loads",
            part,
            re.DOTALL,
        )
        shared = re.search(r"(\d+) bytes smem", part)
        if registers and spills:
            spilled = int(spills[1]) + int(spills[2])
            return int(registers[1]), spilled, int(shared[1]) if shared else 0
    raise BuildError(f"ptxas said nothing about {lowered}; its log was:\n{log}")


@cache
def nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


@cache
def unavailable() -> str | None:
    """What CUDA C++ lacks on this machine and the command that brings it, or None."""
    try:
        import cuda.bindings.nvrtc  # noqa: F401

        _cuda_core()
    except ImportError as error:
        return f"CUDA C++ kernels need cuda-core and cuda-bindings ({error}): {WHEELS}"
    try:
        nvrtc_version()
    except Exception as error:  # the loader's own error class differs between releases
        return f"CUDA C++ kernels need libnvrtc ({error}): {WHEELS}"
    return None


# --- launch --------------------------------------------------------------------------------------


def bind(
    source: Source,
    kernel: str,
    *,
    grid: tuple[int, int, int],
    block: int,
    tensors: Sequence[torch.Tensor | torch.dtype | Described | None],
    scalars: Sequence[Any],
    gpu: Gpu,
    shared: int = 0,
    cluster: int = 1,
    waves: int = 0,
    follows: bool = False,
    flags: Flags = (),
    makes: Callable[[], torch.Tensor] | None = None,
) -> Run:
    """Compile `kernel` for `gpu` and return `run(*tensors)`, which launches it.

    The kernel's parameters are one pointer for each of `tensors` (None: null; a dtype stands for
    an output that does not exist yet; of one that is `Described` it gets a TensorMap by value),
    then `scalars`: ctypes instances, structs included. `run` takes the tensors in that order and
    launches on the current stream of their device. With `makes`, an allocator, `run` takes the one
    to three tensors after the first, makes that one and returns it; what follows the tensors in a
    call is ignored. A kernel that walks over its work gets no more blocks than run at a time,
    `waves` times. One that `follows` is launched before what the kernel before it wrote can be
    seen, and waits for that by itself (`wait_for_kernel_before`); GPUs older than SM 90
    know only plain launches.
    """
    shape = Shape(kernel, grid, block, shared, cluster, follows and gpu.sm >= 90)
    _check(shape, gpu)
    requests = recording.active()
    if requests is not None:
        requests.append(
            recording.Request("cuda", kernel, (), (), flags, dynamic_shared=shared, source=source)
        )
        return recording.not_launchable
    recording.binding(kernel)
    there = (t.get_device() for t in tensors if isinstance(t, torch.Tensor))
    index = next(there, None)
    if index is None:  # the tensors' device is the current one (`library` guards it)
        index = torch.cuda.current_device()
    loaded, shared_limit = _built(source, shape, gpu, flags)
    if waves:
        most = waves * resident_blocks(loaded, shape, index, shared_limit, gpu.sm_count)
        shape = replace(shape, grid=(min(grid[0], most), *grid[1:]))
    return make_run(loaded, shape, tensors, scalars, index, shared_limit, makes)


def resident(
    source: Source,
    kernel: str,
    *,
    block: int,
    gpu: Gpu,
    device: torch.device,
    shared: int = 0,
    cluster: int = 1,
    flags: Flags = (),
) -> int:
    """How many blocks of `kernel` this GPU runs at a time, in whole clusters.

    Where nothing is launched, on meta tensors, one for each SM stands in for it.
    """
    shape = Shape(kernel, (cluster, 1, 1), block, shared, cluster)
    _check(shape, gpu)
    if recording.active() is not None:
        return gpu.sm_count // cluster * cluster
    loaded, shared_limit = _built(source, shape, gpu, flags)
    return resident_blocks(loaded, shape, device.index or 0, shared_limit, gpu.sm_count)


def _built(source: Source, shape: Shape, gpu: Gpu, flags: Flags) -> tuple[Any, int]:
    """The loaded kernel, and how much dynamic shared memory it leaves to a block."""
    compiled = compile(source, shape.kernel, gpu.sm, flags)
    limit = gpu.shared_per_block - compiled.static_shared
    if shape.shared > limit:
        raise LaunchError(f"{shape}: {compiled.static_shared} static bytes leave {limit}")
    return _loaded(source, shape.kernel, gpu.sm, flags, compiled), limit


def _check(shape: Shape, gpu: Gpu) -> None:
    grid, limits = shape.grid, MAX_GRID
    if any(not 1 <= size <= limit for size, limit in zip(grid, limits, strict=True)):
        raise LaunchError(f"{shape}: CUDA launches grids of 1 to {limits}")
    if not 1 <= shape.block <= MAX_THREADS:
        raise LaunchError(f"{shape}: a block has 1 to {MAX_THREADS} threads")
    if not 0 <= shape.shared <= gpu.shared_per_block:
        raise LaunchError(f"{shape}: a block of SM {gpu.sm} has {gpu.shared_per_block}")
    if shape.cluster < 1 or grid[0] % shape.cluster:
        raise LaunchError(f"{shape}: the grid is not a whole number of clusters")


_kernels: dict[tuple[str, str, int, Flags], Any] = {}


def _loaded(source: Source, kernel: str, sm: int, flags: Flags, compiled: Compiled) -> Any:
    """cuda-core's Kernel; loaded once, because every layout of a call binds anew."""
    wanted = (source.digest, kernel, sm, flags)
    with _lock:
        if wanted not in _kernels:
            code = _cuda_core().ObjectCode.from_cubin(compiled.cubin, name=kernel)
            _kernels[wanted] = code.get_kernel(compiled.lowered_name)
        return _kernels[wanted]
