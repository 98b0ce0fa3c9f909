"""What is installed here, what does not fit together, and the one line that mends each fault."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright import __version__, dispatch
from tilewright import gpu as gpus
from tilewright.errors import CacheError, TilewrightError
from tilewright.gpu import Gpu
from tilewright.ops import registry
from tilewright.spec import FLOATS, on_meta

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # "ok", "note" or "fault"
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3])


def examine(arch: str | None = None) -> list[Finding]:
    """Every finding, in the order a reader wants them."""
    found: list[Finding] = []
    for look in LOOKS:
        found += look()
    found += _ops(gpus.pretend(arch) if arch else gpus.detect())
    return found


def _python() -> Iterator[Finding]:
    detail = (
        f"tilewright {__version__}, Python {platform.python_version()} on {platform.platform()}"
    )
    yield Finding("tilewright", "ok", detail)


def _torch() -> Iterator[Finding]:
    text = torch.__version__
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if _numbers(text)[:2] < OLDEST["torch"]:
        yield Finding("torch", "fault", f"{text} is too old", 'pip install "torch>=2.11"')
    else:
        yield Finding("torch", "ok", f"{text}, {build}")
    if not torch.version.cuda and shutil.which("nvidia-smi"):
        yield Finding(
            "torch",
            "fault",
            "a CPU build on a machine with an NVIDIA GPU",
            "pip install --force-reinstall torch  (a CUDA build)",
        )


def _gpu() -> Iterator[Finding]:
    gpu = gpus.detect()
    if gpu is None:
        detail = "none: CPU tensors run the torch backend, or Triton's interpreter"
        yield Finding("GPU", "note", detail, "set TRITON_INTERPRET=1 to run kernels on the CPU")
        return
    peak = f"{gpu.bandwidth / 1e12:.2f} TB/s datasheet" if gpu.bandwidth else "peaks unknown"
    yield Finding("GPU", "ok", f"{gpu.name}, SM {gpu.sm}, {gpu.sm_count} SMs, {peak}")
    yield Finding("driver", "ok", _driver())
    if dispatch.interpreting():
        yield Finding(
            "TRITON_INTERPRET",
            "fault",
            "set on a machine with a GPU: kernels run in the interpreter, a million times slower",
            "unset TRITON_INTERPRET",
        )
    triton = version("triton")
    if triton and _numbers(triton)[:2] == (3, 6) and not _c_compiler():
        yield Finding(
            "C compiler",
            "fault",
            "none found, and Triton 3.6 builds its launcher with one",
            "install gcc (apt-get install gcc), or a newer torch and triton",
        )


def _driver() -> str:
    try:
        from cuda.bindings import driver

        _, number = driver.cuDriverGetVersion()
        return f"supports CUDA {number // 1000}.{number % 1000 // 10}"
    except Exception as e:
        return f"version not readable ({type(e).__name__})"


def _c_compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _triton() -> Iterator[Finding]:
    installed = version("triton") or version("triton-windows")
    if installed is None:
        yield Finding("triton", "fault", "not installed", "pip install triton")
        return
    if _numbers(installed)[:2] < OLDEST["triton"]:
        yield Finding("triton", "fault", f"{installed} is too old", 'pip install "triton>=3.6"')
        return
    from tilewright.toolkit import launch

    ways = {
        "direct": "kernels called through Triton's C launcher",
        "run": "kernels called through CompiledKernel.run",
        "jit": "kernels called through kernel[grid]: about 10 us more per launch",
    }
    slow = launch.route() == "jit" and bool(torch.version.cuda)  # a CPU build launches nothing
    detail = f"{installed}, {ways[launch.route()]}" if torch.version.cuda else installed
    yield Finding("triton", "note" if slow else "ok", detail)
    wanted = _pinned_by_torch()
    if wanted and torch.version.cuda and _numbers(wanted) != _numbers(installed):
        yield Finding(
            "triton",
            "fault",
            f"{installed} is installed, and torch {torch.__version__} asks for {wanted}",
            f"pip install triton=={wanted}",
        )


def _pinned_by_torch() -> str | None:
    for line in importlib.metadata.requires("torch") or ():
        match = re.match(r"triton==([\d.]+)", line.replace(" ", ""))
        if match:
            return match.group(1)
    return None


def _numpy() -> Iterator[Finding]:
    installed, triton = version("numpy"), version("triton")
    if installed is None:
        yield Finding(
            "numpy", "fault", "not installed; the interpreter needs it", "pip install numpy"
        )
    elif triton and _numbers(triton)[:2] == (3, 6) and _numbers(installed)[:2] >= (2, 4):
        detail = f"{installed}: the interpreter of Triton 3.6 fails on numpy 2.4 and newer"
        yield Finding("numpy", "note", detail, 'pip install "numpy<2.4" to verify on the CPU')
    else:
        yield Finding("numpy", "ok", installed)


def _nvrtc() -> Iterator[Finding]:
    from tilewright.toolkit import nvrtc

    missing = nvrtc.unavailable()
    if missing:
        yield Finding("NVRTC", "note", missing, 'pip install "tilewright[cuda]"')
        return
    core = version("cuda-core")
    yield Finding("NVRTC", "ok", f"{nvrtc.nvrtc_version()}, cuda-core {core}")


def _cache() -> Iterator[Finding]:
    from tilewright.toolkit import cubin_cache

    try:
        path = cubin_cache.folder()
        for existing in (p for p in (cubin_cache.root(), path) if p.exists()):
            cubin_cache.check_ours(existing)
        state = f"mode {path.stat().st_mode & 0o777:o}" if path.exists() else "not made yet"
        yield Finding("cache folder", "ok", f"{path} ({state})")
    except (CacheError, OSError) as e:
        yield Finding("cache folder", "fault", str(e), "chmod 700 it, or set TILEWRIGHT_CACHE_DIR")


def _variable() -> Iterator[Finding]:
    try:
        name = dispatch.from_environment()
    except TilewrightError as e:
        yield Finding(dispatch.VARIABLE, "fault", str(e), f"unset {dispatch.VARIABLE}")
        return
    if name:
        yield Finding(dispatch.VARIABLE, "note", f"every op is asked to run on {name}")


def _ops(gpu: Gpu | None) -> Iterator[Finding]:
    """What each op would run on here, in each dtype."""
    for op in registry().values():
        assert op.inputs is not None
        picks: dict[str, list[str]] = {}
        for dtype in FLOATS:
            args = on_meta(tuple(op.inputs({"shape": (8, 4096)}, dtype, "cpu", torch.Generator())))
            name = "torch"
            try:
                if gpu is not None:
                    name = dispatch.choose(op, args, gpu=gpu).backend.name
            except TilewrightError as e:
                yield Finding(f"op {op.name}", "fault", str(e), f"unset {dispatch.VARIABLE}")
                break
            picks.setdefault(name, []).append(str(dtype).removeprefix("torch."))
        else:
            detail = "; ".join(f"{name} for {', '.join(dtypes)}" for name, dtypes in picks.items())
            yield Finding(f"op {op.name}", "ok", detail)


LOOKS: tuple[Callable[[], Any], ...] = (
    _python,
    _torch,
    _gpu,
    _triton,
    _numpy,
    _nvrtc,
    _cache,
    _variable,
)


def source_digest() -> str:
    """A hash of this package's files: which code made a record."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """The commit that is checked out, "-dirty" with changes in it; None outside of a checkout."""
    root, git = Path(__file__).parents[2], shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def environment() -> dict[str, Any]:
    """The block that every record carries."""
    gpu = gpus.detect()
    return {
        "tilewright": __version__,
        "commit": commit(),
        "source": source_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numpy": version("numpy"),
        "cuda_core": version("cuda-core"),
        "gpu": gpu.name if gpu else None,
        "sm": gpu.sm if gpu else None,
        "interpreter": dispatch.interpreting(),
        "cores": os.cpu_count(),
    }
