"""CUDA C++ on a machine without a GPU: compiling, the disk cache, how launches are made."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import gpu as gpus
from tilewright import matrix
from tilewright.errors import BuildError, CacheError, LaunchError
from tilewright.ops.layer_norm import cuda_backward_impl as layer_norm_backward
from tilewright.ops.layer_norm import cuda_impl as layer_norm
from tilewright.ops.rms_norm import cuda_backward_impl as rms_norm_backward
from tilewright.ops.rms_norm import cuda_impl as rms_norm
from tilewright.ops.rms_norm_swiglu import cuda_backward_impl as rms_norm_swiglu_backward
from tilewright.ops.rms_norm_swiglu import cuda_impl as rms_norm_swiglu
from tilewright.ops.softmax import cuda_impl as softmax
from tilewright.toolkit import cubin_cache, cuda_launch, cuda_partials, nvrtc, recording

SMS = (75, 80, 86, 89, 90, 100, 120)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROOT = Path(nvrtc.__file__).parents[2]

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
posix_only = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners or modes here")

TINY = """
template <class T, int N> __global__ void scale(T* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x] * N;
  __syncthreads();
  x[threadIdx.x] = s[threadIdx.x ^ 1];
}
"""
# 64 values that are all alive at once: cannot live in 24 registers.
GREEDY = """
__global__ void greedy(float* x) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 32 + threadIdx.x] = v[i] * v[(i * 7 + 1) % 64];
}
"""


def pretend_gpu(sm: int = 90) -> Any:
    return gpus.pretend(f"sm_{sm}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and nothing remembered from the others."""
    folder = tmp_path / "home" / "cache"
    monkeypatch.setenv(cubin_cache.VARIABLE, str(folder))
    for name in ("_compiled", "_gates", "_kernels"):
        monkeypatch.setattr(nvrtc, name, {})
    monkeypatch.setattr(cubin_cache, "_warned", set())
    return folder


@pytest.fixture
def source(tmp_path: Path) -> nvrtc.Source:
    return write_source(tmp_path, TINY)


def write_source(folder: Path, text: str, name: str = "tiny.cu") -> nvrtc.Source:
    path = folder / name
    path.write_text(text)
    return nvrtc.Source(path)


class FakeCompiler:
    """Counts what would be compiled, so that cache tests need no NVRTC."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, nvrtc.Flags]] = []

    def __call__(
        self, source: nvrtc.Source, kernel: str, sm: int, flags: nvrtc.Flags
    ) -> nvrtc.Compiled:
        self.calls.append((kernel, sm, flags))
        return nvrtc.Compiled(b"\x7fELF\n\x00cubin" * 50, f"_Z{kernel}", 10, 0, 256, "a log\n")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(nvrtc, "_run_nvrtc", fake)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.0")
    return fake


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def forget() -> None:
    """As a new process would start."""
    nvrtc._compiled.clear()
    nvrtc._gates.clear()


def entries(home: Path) -> list[Path]:
    return sorted((home / "cubin").iterdir())


# --- importing -----------------------------------------------------------------------------------


def test_importing_loads_neither_cuda_nor_platformdirs() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # torch itself imports cuda.bindings where it is installed
        "import tilewright.toolkit.nvrtc, tilewright.ops.rms_norm.cuda_impl\n"
        "import tilewright.ops.softmax.cuda_impl\n"
        "new = {m for m in set(sys.modules) - before}\n"
        "found = [m for m in new if m.split('.')[0] in ('cuda', 'platformdirs')]\n"
        "assert not found, found"
    )
    run_python(code)


def run_python(code: str, **env: str) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": path, **env},
        check=True,
        timeout=120,
    )


# --- compiling -----------------------------------------------------------------------------------


def test_arch_names() -> None:
    names = [nvrtc.arch_name(sm) for sm in SMS]
    assert names == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]


@needs_nvrtc
@pytest.mark.parametrize("sm", SMS)
def test_a_kernel_compiles_for_every_sm(source: nvrtc.Source, sm: int) -> None:
    compiled = nvrtc.compile(source, "scale<float, 3>", sm)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert 4 <= compiled.registers <= 64
    assert compiled.static_shared == 256
    assert compiled.spill_bytes == 0
    assert nvrtc.arch_name(sm) in compiled.log


@needs_nvrtc
def test_template_instances_are_told_apart(source: nvrtc.Source) -> None:
    three = nvrtc.compile(source, "scale<float, 3>", 90)
    half = nvrtc.compile(source, "scale<int, 5>", 90)
    assert three.lowered_name != half.lowered_name
    assert three.lowered_name.startswith("_Z") and three.lowered_name.encode() in three.cubin


@needs_nvrtc
def test_spills_are_seen(tmp_path: Path) -> None:
    greedy = write_source(tmp_path, GREEDY)
    tight = nvrtc.compile(greedy, "greedy", 90, (("max_register_count", 24),))
    roomy = nvrtc.compile(greedy, "greedy", 90)
    assert tight.registers <= 24 < roomy.registers
    assert tight.spill_bytes > 0 == roomy.spill_bytes


@needs_nvrtc
def test_a_mistake_shows_the_compilers_log(tmp_path: Path) -> None:
    broken = write_source(tmp_path, "__global__ void broken(float* x) { x[0] = nonsense; }")
    with pytest.raises(BuildError, match="nonsense"):
        nvrtc.compile(broken, "broken", 90)


@needs_nvrtc
def test_headers_of_ours_are_found(tmp_path: Path) -> None:
    text = '#include "tilewright/reduce.cuh"\n__global__ void k(float* x) '
    text += "{ x[0] = tilewright::Max::join(x[0], x[threadIdx.x]); }"
    assert nvrtc.compile(write_source(tmp_path, text), "k", 75).registers > 0


def test_flags_outside_the_list_are_refused(source: nvrtc.Source, compiler: FakeCompiler) -> None:
    with pytest.raises(BuildError, match="pre_include"):
        nvrtc.compile(source, "k", 90, (("pre_include", "/etc/passwd"),))
    assert not compiler.calls


def test_missing_wheels_are_named(source: nvrtc.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    nvrtc.unavailable.cache_clear()
    try:
        with pytest.raises(BuildError, match="pip install cuda-core"):
            nvrtc.compile(source, "scale<float, 3>", 90)
    finally:
        nvrtc.unavailable.cache_clear()


# --- the ops' kernels ----------------------------------------------------------------------------

# Both sides of every threshold of both launch functions, aligned and odd.
COLUMNS = (
    *(1, 8, 31, 33, 64, 65, 256, 257, 512, 520, 1024, 1025, 1032, 4096, 4097, 8192, 8193, 8200),
    *(16384, 16385, 16392, 32768, 32769, 32776, 262144),
)


def requests_of(dtype: torch.dtype, gpu: Any) -> dict[str, recording.Request]:
    """Every instance that the launchers reach; what they refuse is left out, as dispatch does."""
    with recording.recording() as requests:
        for n in COLUMNS:
            x = torch.empty(64, n, dtype=dtype, device="meta")
            w = torch.empty(n, dtype=dtype, device="meta")
            if not rms_norm.refuses(gpu, x, w):
                rms_norm.prepare(gpu, x, w, 1e-6, 0.0, "torch")
            if not rms_norm.refuses_add(gpu, x, x, w):
                rms_norm.prepare_add(gpu, x, x, w, 1e-6, 1.0, "llama")
            if not rms_norm_backward.refuses(gpu, x, x, x, w):
                rms_norm_backward.prepare(gpu, x, x, x, w, 1e-6, 0.0, True)
            if not rms_norm_swiglu.refuses(gpu, x, x, w):
                rms_norm_swiglu.prepare(gpu, x, x, w, 1e-6)
            if not rms_norm_swiglu_backward.refuses(gpu, x, x, x, w):
                rms_norm_swiglu_backward.prepare(gpu, x, x, x, w, 1e-6, True)
            if not layer_norm.refuses(gpu, x, w, w):
                layer_norm.prepare(gpu, x, w, w, 1e-6)
            if not layer_norm_backward.refuses(gpu, x, x, w):
                layer_norm_backward.prepare(gpu, x, x, w, w, 1e-6, True, True)
            if not softmax.refuses_backward(gpu, x, x):
                softmax.prepare_backward(gpu, x, x, 1, dtype)
            for out in (None, torch.float32):
                softmax.prepare_v1(gpu, x, 1, out)
                if not softmax.refuses(gpu, x):
                    softmax.prepare_v2(gpu, x, 1, out)
    return {request.kernel: request for request in requests}


@pytest.fixture(scope="module")
def ledger() -> matrix.Ledger:
    return matrix.Ledger(ROOT.parent / "results" / "compile")


def wanted_on(sm: int) -> list[matrix.Wanted]:
    return [
        matrix.Wanted("", "cuda", str(dtype), "", sm, request, tensor_cores=False)
        for dtype in DTYPES
        for request in requests_of(dtype, pretend_gpu(sm)).values()
    ]


@pytest.mark.drawn(seconds=4.9)
@needs_nvrtc
@pytest.mark.parametrize("sm", SMS)
def test_every_kernel_of_the_ops_compiles_without_spilling(sm: int, ledger: matrix.Ledger) -> None:
    """One binary of every kernel is compiled; of the others the ledger knows by their hash."""
    wanted = wanted_on(sm)
    first = {w.kernel.split("<")[0]: w for w in wanted}
    now = [w for w in wanted if w.key not in ledger.known or w in first.values()]
    built = [*map(matrix.build, now), *(ledger.known[w.key] for w in wanted if w not in now)]
    assert {b.key for b in built} == {w.key for w in wanted}
    assert {w.kernel.split("<")[0] for w in now} == {w.kernel.split("<")[0] for w in wanted}
    assert {b.kernel: b.violation for b in built if b.violation or b.spills} == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_reach_few_kernels(dtype: torch.dtype) -> None:
    names = list(requests_of(dtype, pretend_gpu()))
    groups = ("rms_norm_rows", "rms_norm_wide", "rms_norm_backward", "add_rms_norm", "softmax_v2")
    for prefix in (
        *groups,
        "layer_norm_rows",
        "rms_norm_swiglu_rows",
        "rms_norm_swiglu_wide",
        "rms_norm_swiglu_backward",
        "layer_norm_wide",
        "layer_norm_backward",
        "softmax_backward",
    ):
        per_output: dict[str, int] = {}
        for name in names:
            if name.startswith(prefix):
                first = name.split("<")[1].split(",")[0]
                per_output[first] = per_output.get(first, 0) + 1
        assert per_output and max(per_output.values()) <= 12, per_output


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_name_is_a_template_of_its_source(dtype: torch.dtype) -> None:
    for kernel, request in requests_of(dtype, pretend_gpu()).items():
        assert f"{kernel.split('<')[0]}(" in request.source.text


def test_empty_inputs_need_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "bind", None)
    gpu = pretend_gpu()
    for shape in ((0, 8), (4, 0)):
        x, w = torch.empty(shape), torch.ones(shape[-1])
        assert rms_norm.prepare(gpu, x, w, 1e-6, 0.0, "torch")(x, w).shape == shape
        total = rms_norm.prepare_add(gpu, x, x, w, 1e-6, 0.0, "torch")(x, x, w)[1]
        assert total.shape == shape
        dx, dw = rms_norm_backward.prepare(gpu, x, None, x, w, 1e-6, 0.0, True)(x, None, x, w)
        assert dx.shape == shape and torch.equal(dw, torch.zeros(shape[-1]))
        assert rms_norm_swiglu.prepare(gpu, x, x, w, 1e-6)(x, x, w).shape == shape
        dx, dg, dw = rms_norm_swiglu_backward.prepare(gpu, x, x, x, w, 1e-6, True)(x, x, x, w)
        assert dx.shape == dg.shape == shape and torch.equal(dw, torch.zeros(shape[-1]))
        assert softmax.prepare_v1(gpu, x, 1, torch.float32)(x).shape == shape
        assert softmax.prepare_backward(gpu, x, x, 1, torch.float32)(x, x).shape == shape
        assert layer_norm.prepare(gpu, x, w, None, 1e-6)(x, w, None).shape == shape
        run = layer_norm_backward.prepare(gpu, x, x, w, w, 1e-6, True, False)
        dx, dw, db = run(x, x, w, w)
        assert dx.shape == shape and torch.equal(dw, torch.zeros(shape[-1])) and not db.numel()


# --- the disk cache ------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing(
    source: nvrtc.Source, compiler: FakeCompiler, quiet: None
) -> None:
    first = nvrtc.compile(source, "scale<float, 3>", 90)
    assert nvrtc.compile(source, "scale<float, 3>", 90) is first  # from memory
    forget()
    assert nvrtc.compile(source, "scale<float, 3>", 90) == first  # from disk, field by field
    assert len(compiler.calls) == 1


def test_threads_compile_a_kernel_once(source: nvrtc.Source, compiler: FakeCompiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: nvrtc.compile(source, "k", 90), range(32)))
    assert len(compiler.calls) == 1


def test_everything_that_changes_the_code_changes_the_key(
    tmp_path: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path, TINY)
    keys = [nvrtc.cache_key(source, "k", 90)]
    keys.append(nvrtc.cache_key(write_source(tmp_path, TINY + " ", "other.cu"), "k", 90))
    keys.append(nvrtc.cache_key(source, "k2", 90))
    keys.append(nvrtc.cache_key(source, "k", 80))
    keys.append(nvrtc.cache_key(source, "k", 90, (("use_fast_math", True),)))
    keys.append(nvrtc.cache_key(source, "k", 90, (("max_register_count", 32),)))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.4")
    keys.append(nvrtc.cache_key(source, "k", 90))
    including = write_source(tmp_path, '#include "tilewright/a.cuh"\n' + TINY, "including.cu")
    include = tmp_path / "include" / "tilewright"
    include.mkdir(parents=True)
    monkeypatch.setattr(nvrtc, "INCLUDE", include.parent)
    (include / "a.cuh").write_text('#include "tilewright/b.cuh"\n')
    for text in ("// a header of a header", "// another"):
        (include / "b.cuh").write_text(text)
        keys.append(nvrtc.cache_key(nvrtc.Source(including.package_file), "k", 90))
    assert len({cubin_cache.file_name(key) for key in keys}) == len(keys)
    (include / "c.cuh").write_text("// nobody includes it")
    assert nvrtc.cache_key(nvrtc.Source(including.package_file), "k", 90) == keys[-1]


def edit_header(blob: bytes) -> bytes:
    head, _, cubin = blob.partition(b"\n")
    header = json.loads(head)
    header["facts"]["registers"] += 1
    return json.dumps(header).encode() + b"\n" + cubin


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda blob: blob[:-7],
    "header only": lambda blob: blob[: blob.index(b"\n") + 1],
    "torn header": lambda blob: blob[:20],
    "empty": lambda blob: b"",
    "garbage": lambda blob: b"\xff\x00 not json\n" + blob,
    "a flipped bit": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "other facts": edit_header,
    "not a table": lambda blob: b"[1, 2]\n" + blob,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_one_warning(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path, damage: str
) -> None:
    first = nvrtc.compile(source, "k", 90)
    (entry,) = entries(home)
    whole = entry.read_bytes()
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            entry.write_bytes(DAMAGES[damage](whole))
            forget()
            assert nvrtc.compile(source, "k", 90) == first
    assert [entry.name in str(w.message) for w in caught] == [True]
    assert len(compiler.calls) == 4
    assert entry.read_bytes() == whole  # the recompilation repaired it


def test_an_entry_under_another_name_is_a_miss(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path
) -> None:
    nvrtc.compile(source, "k", 90)
    (entry,) = entries(home)
    entry.rename(entry.with_name(cubin_cache.file_name(nvrtc.cache_key(source, "k2", 90))))
    with pytest.warns(RuntimeWarning, match="another kernel's key"):
        assert nvrtc.compile(source, "k2", 90).lowered_name == "_Zk2"
    assert len(compiler.calls) == 2


def test_an_unreadable_entry_is_compiled_again(
    source: nvrtc.Source, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    nvrtc.compile(source, "k", 90)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            forget()
            nvrtc.compile(source, "k", 90)
    assert len(caught) == 1 and "Permission denied" in str(caught[0].message)
    assert len(compiler.calls) == 3


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        nvrtc.compile(source, "k", 90)
        nvrtc.compile(source, "k2", 90)
    assert len(caught) == 1
    assert not entries(home)


def test_a_cache_that_cannot_be_made_costs_a_warning(
    source: nvrtc.Source, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cubin_cache.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning) as caught:
        nvrtc.compile(source, "k", 90)
        nvrtc.compile(source, "k2", 90)
    assert len(caught) == 1 and len(compiler.calls) == 2


@posix_only
def test_the_folder_is_made_private(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path
) -> None:
    before = os.umask(0)
    try:
        nvrtc.compile(source, "k", 90)
    finally:
        os.umask(before)
    for path in (home.parent, home, home / "cubin"):
        assert path.stat().st_mode & 0o777 == 0o700, path


@posix_only
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_others_can_write_is_refused(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path, mode: int, inner: bool
) -> None:
    nvrtc.compile(source, "k", 90)
    forget()
    path = home / "cubin" if inner else home
    path.chmod(mode)
    with pytest.raises(CacheError) as refused:
        nvrtc.compile(source, "k", 90)
    message = str(refused.value)
    assert f"chmod 700 {path}" in message and cubin_cache.VARIABLE in message
    assert f"{mode:o}" in message
    assert len(compiler.calls) == 1
    path.chmod(0o700)
    nvrtc.compile(source, "k", 90)  # the fix works
    assert len(compiler.calls) == 1


@posix_only
def test_a_folder_of_somebody_else_is_refused(
    source: nvrtc.Source, compiler: FakeCompiler, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.compile(source, "k", 90)
    forget()
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(CacheError, match=cubin_cache.VARIABLE) as refused:
        nvrtc.compile(source, "k", 90)
    assert str(home) in str(refused.value) and f"uid {mine}" in str(refused.value)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_is_refused(
    source: nvrtc.Source,
    compiler: FakeCompiler,
    home: Path,
    tmp_path: Path,
    inner: bool,
    dangling: bool,
) -> None:
    target, link = tmp_path / "target", home / "cubin" if inner else home
    if not dangling:
        target.mkdir(mode=0o700)
    link.parent.mkdir(parents=True, mode=0o700)
    link.symlink_to(target, target_is_directory=True)
    with pytest.raises(CacheError, match="symlink") as refused:
        nvrtc.compile(source, "k", 90)
    assert str(link) in str(refused.value) and cubin_cache.VARIABLE in str(refused.value)


def test_the_variable_is_read_at_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cubin_cache.VARIABLE, str(tmp_path / "a"))
    assert cubin_cache.folder() == tmp_path / "a" / "cubin"
    monkeypatch.setenv(cubin_cache.VARIABLE, str(tmp_path / "b"))
    assert cubin_cache.folder() == tmp_path / "b" / "cubin"
    monkeypatch.delenv(cubin_cache.VARIABLE)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.folder() == tmp_path / "xdg" / "tilewright" / "cubin"


HAMMER = """
from tilewright.toolkit import cubin_cache
key, size = {"kernel": "k"}, 300_000
for i in range(50):
    cubin_cache.store(key, {"round": i}, bytes([i]) * size)
    facts, cubin = cubin_cache.load(key)
    assert cubin == bytes([facts["round"]]) * size
"""


@pytest.mark.drawn(seconds=5.4, family="slow")
def test_processes_share_one_entry(home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run_python(HAMMER), range(4)))
    (entry,) = entries(home)  # and no temporary file is left
    found = cubin_cache.load({"kernel": "k"})
    assert found is not None and found[0] == {"round": 49}
    assert entry.name == cubin_cache.file_name({"kernel": "k"})


# --- launching -----------------------------------------------------------------------------------


def bind_tiny(source: nvrtc.Source, **changes: Any) -> cuda_launch.Run:
    options: dict[str, Any] = {
        "grid": (4, 1, 1),
        "block": 64,
        "tensors": [torch.float32, torch.empty(1)],
        "scalars": [ctypes.c_int32(7)],
        "gpu": pretend_gpu(),
    }
    return nvrtc.bind(source, "scale<float, 3>", **{**options, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (2**31, 1, 1)},
        {"grid": (1, 65536, 1)},
        {"grid": (1, 1, 65536)},
        {"grid": (0, 1, 1)},
        {"block": 1025},
        {"block": 0},
        {"shared": 232449},
        {"cluster": 3},
    ],
)
def test_impossible_launches_are_refused(source: nvrtc.Source, changes: dict[str, Any]) -> None:
    with recording.recording() as requests, pytest.raises(LaunchError, match="scale<float, 3>"):
        bind_tiny(source, **changes)
    assert not requests


def test_recording_touches_no_cuda(source: nvrtc.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(nvrtc, "compile", None)
    with recording.recording() as requests:
        run = bind_tiny(source, shared=1024, flags=(("use_fast_math", True),))
    (request,) = requests
    assert (request.technology, request.kernel) == ("cuda", "scale<float, 3>")
    assert (request.dynamic_shared, request.source) == (1024, source)
    assert request.options == (("use_fast_math", True),)
    assert run is recording.not_launchable


class FakeDriver:
    """The few driver calls of a launch; reads the arguments back out of memory as a GPU would."""

    class CUresult(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_CONTEXT = 201
        CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701

    CUfunction_attribute = types.SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="large clusters",
    )
    CUfunction = CUkernel = staticmethod(lambda handle: handle)
    CUlaunchAttributeID = types.SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
    )

    @staticmethod
    def CUlaunchAttribute() -> Any:  # noqa: N802
        value = types.SimpleNamespace(clusterDim=types.SimpleNamespace())
        return types.SimpleNamespace(value=value)

    def __init__(self) -> None:
        self.answers: list[Any] = []  # what the next launches return; then success
        self.launches: list[tuple[Any, ...]] = []
        self.configs: list[Any] = []
        self.attributes: list[tuple[Any, ...]] = []
        self.contexts: list[Any] = []
        self.residents = 1  # whether anything fits on the GPU
        self.version: tuple[int, int | None] = (0, 13000)

    def cuDriverGetVersion(self) -> tuple[int, int | None]:  # noqa: N802
        return self.version

    def cuOccupancyMaxActiveClusters(self, *_: Any) -> tuple[Any, int]:  # noqa: N802
        return 0, 30 * self.residents

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: Any) -> tuple[Any, int]:  # noqa: N802
        return 0, 3 * self.residents

    def CUlaunchConfig(self) -> Any:  # noqa: N802
        config = types.SimpleNamespace()
        self.configs.append(config)
        config.getPtr = lambda place=len(self.configs): place
        return config

    def launch(self, config: int, function: Any, arguments: int, extra: None) -> int:
        shape = self.configs[config - 1]
        grid = (shape.gridDimX, shape.gridDimY, shape.gridDimZ)
        block = (shape.blockDimX, shape.blockDimY, shape.blockDimZ)
        array = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        pointers = [ctypes.c_void_p.from_address(array[i]).value for i in range(2)]
        scalar = ctypes.c_int32.from_address(array[2]).value
        call = (function, *grid, *block, shape.sharedMemBytes, shape.hStream, pointers, scalar)
        self.launches.append(call)
        return self.answers.pop(0) if self.answers else 0

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, Any]:  # noqa: N802
        return 0, kernel

    def cuKernelSetAttribute(self, *call: Any) -> tuple[Any]:  # noqa: N802
        self.attributes.append(call)
        return (0,)

    def cuDeviceGet(self, index: int) -> tuple[Any, Any]:  # noqa: N802
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, Any]:  # noqa: N802
        return 0, f"context {device}"

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any]:  # noqa: N802
        self.contexts.append(context)
        return (0,)


@pytest.fixture
def driver(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    cuda_launch._primary_context.cache_clear()
    monkeypatch.setattr(cuda_launch, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_launch, "_launch_function", lambda: fake.launch)
    monkeypatch.setattr(nvrtc, "_loaded", lambda *_: types.SimpleNamespace(handle=77))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 2, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 1000 + i, raising=False)
    return fake


def test_a_launch_carries_pointers_scalars_and_stream(
    source: nvrtc.Source, driver: FakeDriver
) -> None:
    run = bind_tiny(source, grid=(4, 3, 2), shared=100)
    a, b = torch.empty(3), torch.empty(3)
    run(a, b)
    run(b, a)
    assert driver.launches == [
        (77, 4, 3, 2, 64, 1, 1, 100, 1002, [a.data_ptr(), b.data_ptr()], 7),
        (77, 4, 3, 2, 64, 1, 1, 100, 1002, [b.data_ptr(), a.data_ptr()], 7),
    ]
    assert not driver.attributes


def test_null_pointers(source: nvrtc.Source, driver: FakeDriver) -> None:
    run = bind_tiny(source, tensors=[None, torch.empty(1)])
    a = torch.empty(3)
    run(a, a)
    run(None, a)
    assert [launch[-2] for launch in driver.launches] == [
        [a.data_ptr(), a.data_ptr()],
        [None, a.data_ptr()],
    ]


def test_threads_do_not_share_pointers(source: nvrtc.Source, driver: FakeDriver) -> None:
    run = bind_tiny(source)
    tensors = [torch.empty(1) for _ in range(8)]
    barrier = threading.Barrier(8)

    def many(mine: torch.Tensor) -> None:
        barrier.wait()
        for _ in range(200):
            run(mine, mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, tensors))
    assert len(driver.launches) == 1600
    assert all(first == second for *_, (first, second), _ in driver.launches)


def test_a_new_thread_gets_its_context_and_a_second_try(
    source: nvrtc.Source, driver: FakeDriver
) -> None:
    run = bind_tiny(source)
    driver.answers = [201]
    run(torch.empty(1), torch.empty(1))
    assert driver.contexts == ["context 2"] and len(driver.launches) == 2
    driver.answers = [201, 201]
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        run(torch.empty(1), torch.empty(1))


def test_a_refused_launch_raises_with_its_shape(source: nvrtc.Source, driver: FakeDriver) -> None:
    run = bind_tiny(source, shared=100)
    driver.answers = [701]
    with pytest.raises(LaunchError) as refused:
        run(torch.empty(1), torch.empty(1))
    for word in ("scale<float, 3>", "(4, 1, 1)", "block 64", "100 bytes", "OUT_OF_RESOURCES"):
        assert word in str(refused.value)
    assert len(driver.launches) == 1


def test_much_shared_memory_is_asked_for(source: nvrtc.Source, driver: FakeDriver) -> None:
    bind_tiny(source, shared=50_000)
    # the fake kernel has 256 static bytes, which count against the same limit
    assert driver.attributes == [("dynamic shared", 232448 - 256, 77, 2)]
    with pytest.raises(LaunchError, match="static"):
        bind_tiny(source, shared=232448)


def test_a_cluster_launch_carries_the_same(source: nvrtc.Source, driver: FakeDriver) -> None:
    a, b = torch.empty(3), torch.empty(3)
    bind_tiny(source, grid=(8, 1, 1), cluster=4)(a, b)
    pointers = [a.data_ptr(), b.data_ptr()]
    assert driver.launches == [(77, 8, 1, 1, 64, 1, 1, 0, 1002, pointers, 7)]


def test_large_clusters_are_asked_for(source: nvrtc.Source, driver: FakeDriver) -> None:
    bind_tiny(source, grid=(32, 1, 1), cluster=8)
    assert not driver.attributes
    bind_tiny(source, grid=(32, 1, 1), cluster=16)
    assert driver.attributes == [("large clusters", 1, 77, 2)]


@pytest.mark.parametrize(("cluster", "blocks"), [(1, 3 * 114), (4, 30 * 4)])
def test_how_many_blocks_run_at_a_time_is_asked(
    source: nvrtc.Source, driver: FakeDriver, cluster: int, blocks: int
) -> None:
    """Clusters ask the driver for clusters: which SMs can share one is not in a datasheet."""
    gpu = pretend_gpu()
    given: dict[str, Any] = {"block": 64, "gpu": gpu, "device": torch.device("cuda", 2)}
    found = nvrtc.resident(source, "scale<float, 3>", shared=100, cluster=cluster, **given)
    assert found == blocks
    with recording.recording():
        assert nvrtc.resident(source, "k", cluster=16, **given) == gpu.sm_count // 16 * 16
    driver.residents = 0
    with pytest.raises(LaunchError, match="cannot hold a single one"):
        nvrtc.resident(source, "scale<float, 3>", cluster=cluster, **given)


def test_a_kernel_that_walks_gets_no_more_blocks_than_run_at_a_time(
    source: nvrtc.Source, driver: FakeDriver
) -> None:
    a = torch.empty(3)
    # the fake GPU holds 30 clusters of 4
    for blocks, waves, launched in ((8, 1, 8), (4000, 1, 120), (4000, 3, 360), (200, 3, 200)):
        bind_tiny(source, grid=(blocks, 1, 1), cluster=4, waves=waves)(a, a)
        assert driver.launches.pop()[1] == launched
    bind_tiny(source, grid=(4000, 1, 1), cluster=4)(a, a)
    assert driver.launches.pop()[1] == 4000


@needs_nvrtc
def test_cluster_launches_say_so() -> None:
    shape = cuda_launch.Shape("k", (8, 1, 1), 64, 0, 4)
    config = cuda_launch._config(shape, 1234)
    assert (config.gridDimX, config.blockDimX, config.numAttrs) == (8, 64, 1)
    assert int(config.hStream) == 1234
    (attribute,) = config.attrs
    assert (attribute.value.clusterDim.x, attribute.value.clusterDim.y) == (4, 1)


def test_a_kernel_that_follows_says_so_where_gpu_and_driver_know_it(
    source: nvrtc.Source, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.empty(3)
    for sm, version, said in ((90, 13000, [6]), (80, 13000, []), (90, 12020, [])):
        monkeypatch.setattr(cuda_launch, "_driver_version", lambda version=version: version)
        bind_tiny(source, gpu=pretend_gpu(sm), follows=True)(a, a)
        bind_tiny(source, gpu=pretend_gpu(sm))(a, a)
        followed, plain = driver.configs[-2:]
        assert [attribute.id for attribute in followed.attrs] == said
        assert followed.numAttrs == len(said) and plain.numAttrs == 0


def ptx_of(source: nvrtc.Source, kernel: str) -> str:
    """For SM 90. cuda-core would ask a driver for its version first."""
    from cuda.bindings import nvrtc as raw

    _, program = raw.nvrtcCreateProgram(source.text.encode(), b"kernel.cu", 0, [], [])
    raw.nvrtcAddNameExpression(program, kernel.encode())
    include = b"-I" + bytes(nvrtc.INCLUDE)
    options = [b"-arch=compute_90a", b"-std=" + nvrtc.STANDARD.encode(), include]
    (error,) = raw.nvrtcCompileProgram(program, len(options), options)
    assert error == raw.nvrtcResult.NVRTC_SUCCESS
    _, size = raw.nvrtcGetPTXSize(program)
    text = bytes(size)
    raw.nvrtcGetPTX(program, text)
    return text.decode()


def test_the_driver_says_how_old_it_is(driver: FakeDriver) -> None:
    cuda_launch._driver_version.cache_clear()
    driver.version = (0, 12020)
    assert cuda_launch._driver_version() == 12020
    cuda_launch._driver_version.cache_clear()
    driver.version = (driver.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, None)
    assert cuda_launch._driver_version() == 0
    cuda_launch._driver_version.cache_clear()


@needs_nvrtc
def test_sums_of_partials_follow_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that begins before another has ended and does not wait reads what is not there."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(nvrtc, "bind", lambda *args, **options: seen.update(options, args=args))
    like, modules = torch.empty(1, dtype=torch.bfloat16), (layer_norm_backward, rms_norm_backward)
    for module, n in ((modules[0], 64), (modules[1], 64), (rms_norm_swiglu_backward, 8192)):
        cuda_partials.bind_sum(module.SOURCE, 4, n, like, pretend_gpu(90), parameters=1)
        source, kernel = seen["args"]
        assert seen["follows"]
        ptx = ptx_of(source, kernel)
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
        assert "ld.global.nc" not in ptx  # of memory that nobody writes


def test_each_stream_has_a_launch_shape_of_its_own(
    source: nvrtc.Source, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bind_tiny(source)
    streams = iter([5, 6, 5, 6])
    now = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now[0])
    a = torch.empty(3)
    run = bind_tiny(source)
    for now[0] in streams:
        run(a, a)
    assert [launch[8] for launch in driver.launches] == [5, 6, 5, 6]
    assert len(driver.configs) == 2
