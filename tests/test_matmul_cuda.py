"""ops/matmul/cuda_impl.cu, its text, run on a CPU: clusters of blocks as fibers (tests/emulated).

Numbers are small integers, so any order of sums is exact. What is not emulated: time, banks, and
whether the hardware reads a descriptor as PTX's manual says.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from test_nvrtc import ptx_of
from tilewright import gpu
from tilewright.ops.matmul import cuda_impl, launches
from tilewright.toolkit import nvrtc, recording
from tilewright.toolkit.cuda_args import instance
from tilewright.toolkit.launch import Described
from tilewright.toolkit.matmul_call import see

HERE = Path(__file__).parent
FOLDER = Path(cuda_impl.__file__).parent
H200 = gpu.pretend("h200")

# element, result, consumers, columns, stages, a by rows, b by rows, blocks one below another and
# along K
Instance = tuple[str, str, int, int, int, bool, bool, int, int]
INSTANCES: tuple[Instance, ...] = (
    ("bf16", "bf16", 2, 64, 3, True, False, 1, 1),
    ("bf16", "bf16", 2, 144, 3, True, False, 2, 1),
    ("f16", "f16", 2, 112, 2, True, False, 1, 3),
    ("f16", "float", 2, 112, 3, False, True, 2, 1),
    ("bf16", "bf16", 2, 192, 3, True, True, 1, 2),
    ("bf16", "float", 2, 80, 3, False, False, 2, 1),
    ("f16", "f16", 2, 112, 2, True, True, 2, 1),
    ("bf16", "bf16", 1, 64, 4, True, False, 1, 4),
    ("bf16", "bf16", 1, 40, 3, True, False, 1, 1),
    ("f16", "float", 1, 48, 3, False, True, 1, 2),
)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "float": torch.float32}
# (rows, columns, depth, matrices): for two consumers, and for one
SHAPES = {
    2: ((130, 200, 264, 1), (300, 328, 200, 1), (65, 136, 328, 2), (100, 8, 200, 1)),
    1: ((64, 136, 328, 2), (40, 8, 264, 1), (8, 400, 264, 3)),
}
MARGIN = 256 * 1024  # elements around the result
GRID = 4  # blocks, so that some have several tiles; or a tile for each, at other seeds

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler for a CPU is here"
)


class Tensor(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 3),
        ("strides", ctypes.c_longlong * 3),
        ("box", ctypes.c_int * 2),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("c", ctypes.c_void_p),
        ("a", Tensor),
        ("b", Tensor),
        ("sizes", cuda_impl.Sizes),
        ("grid", ctypes.c_uint),
        ("seed", ctypes.c_uint),
    ]


def build(folder: Path, text: str, wanted: Iterable[int]) -> Path:
    (folder / "cuda_impl.cu").write_text(text)
    spelled = (
        f"INSTANCE({i}, {', '.join(str(parameter).lower() for parameter in INSTANCES[i])})"
        for i in wanted
    )
    # our own headers behind the emulated ones of the same name
    includes = [HERE / "emulated", folder]
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    command += [f"-DINSTANCES={' '.join(spelled)}", *(f"-I{path}" for path in includes)]
    command += [str(HERE / "emulated" / "matmul.cpp"), "-o", str(folder / "matmul.so")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / "matmul.so"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = (FOLDER / "cuda_impl.cu").read_text()
    return build(tmp_path_factory.mktemp("emulated"), text, range(len(INSTANCES)))


def boxed(x: torch.Tensor, like: Described) -> Tensor:
    """A tensor as its description tells TMA."""
    size = like.dtype.itemsize
    sizes, strides = tuple(reversed(like.shape)), tuple(reversed(like.strides))
    return Tensor(
        x.data_ptr(),
        (ctypes.c_longlong * 3)(*sizes),
        (ctypes.c_longlong * 3)(*(step * size for step in strides)),
        (ctypes.c_int * 2)(like.block[2], like.block[1]),
    )


def operand(count: int, rows: int, columns: int, by_rows: bool, dtype: Any, rng: Any) -> Any:
    shape = (count, rows, columns) if by_rows else (count, columns, rows)
    x = torch.randint(-2, 3, shape, generator=rng).to(dtype)
    return x if by_rows else x.mT


def run(
    library: Path, which: int, shape: tuple[int, int, int, int], seed: int,
    stacked: tuple[bool, bool] = (True, True),
) -> str:  # fmt: skip
    """What is wrong with a call that the host side has planned; empty: nothing."""
    name, out_name, consumers, columns, stages, a_by_rows, b_by_rows, tall, deep = INSTANCES[which]
    m, n, k, count = shape
    rng = torch.Generator().manual_seed(seed)
    dtype, out = DTYPES[name], DTYPES[out_name]
    a = operand(count if stacked[0] else 1, m, k, a_by_rows, dtype, rng)
    b = operand(count if stacked[1] else 1, k, n, b_by_rows, dtype, rng)
    room = torch.full((count * m * n + 2 * MARGIN,), torch.nan, dtype=out)
    c = room[MARGIN:-MARGIN].view(count, m, n)
    product = see(a if count > 1 else a[0], b if count > 1 else b[0])
    assert product is not None
    cluster = launches.Cluster(consumers * 64, columns, tall, deep)
    found = cuda_impl.plan(H200, product, dtype, cluster, most_stages=stages)
    call = Call(
        c.data_ptr(), boxed(a, found.a), boxed(b, found.b), found.sizes,
        found.blocks if seed % 2 or deep > 1 else min(found.blocks, GRID), seed,
    )  # fmt: skip
    shared = ctypes.c_int()
    launch = ctypes.CDLL(str(library)).launch_matmul
    launch.restype = ctypes.c_char_p
    error = launch(which, ctypes.byref(call), ctypes.byref(shared)).decode()
    if not error and shared.value > found.shared:
        error = f"{shared.value} bytes of shared memory, and {found.shared} were asked for"
    if not error and not torch.equal(c, (a.double() @ b.double()).to(out)):
        error = "other numbers"
    if not error and not room[:MARGIN].isnan().all() & room[-MARGIN:].isnan().all():
        error = "something is written outside of the result"
    return str(error)


@pytest.mark.drawn(seconds=0.7)
@needs_a_compiler
@pytest.mark.parametrize(
    ("which", "shape"),
    [
        *((i, shape) for i, instance in enumerate(INSTANCES) for shape in SHAPES[instance[2]]),
        (5, (136, 204, 264, 1)),  # rows of float32 are whole 16 bytes with four columns
    ],
    ids=str,
)
def test_the_text_of_the_kernel_is_exact(
    library: Path, which: int, shape: tuple[int, int, int, int]
) -> None:
    assert run(library, which, shape, seed=which) == ""


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason="cuda-core or libnvrtc is not here")
def test_the_text_compiles_and_spills_nothing() -> None:
    """Whole calls, as the host side binds them: NVRTC needs no GPU."""
    for (m, n, k), by_columns in (((512, 3584, 18_944), True), ((4096, 4096, 4096), False)):
        a = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
        b = torch.empty(n, k, dtype=a.dtype, device="meta").mT
        b = b if by_columns else torch.empty(k, n, dtype=a.dtype, device="meta")
        with recording.recording() as requests:
            cuda_impl.prepare(H200, a, b, None, "ieee", None, False)
        (request,) = requests
        built = nvrtc.compile(request.source, request.kernel, 90)
        assert (built.spill_bytes, built.static_shared) == (0, 0)
        assert request.dynamic_shared <= H200.shared_per_block


# What touches a tensor: TMA's and ordinary loads and stores. Shared memory is the block's own.
TOUCHES = re.compile(
    r"\b(cp\.async\.bulk\.tensor|(ld|st|red|atom)(\.\w+)*\.global|prefetch\.global)"
)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason="cuda-core or libnvrtc is not here")
@pytest.mark.parametrize("which", range(len(INSTANCES)))
def test_it_looks_ahead_waits_and_touches(which: int) -> None:
    """In this order: what is touched before, the kernel before may still write."""
    name, out, *numbers = INSTANCES[which]
    types = f"tilewright::{name}", out if out == "float" else f"tilewright::{out}"
    kernel = instance("tilewright::matmul_tiles", *types, *numbers)
    ptx = ptx_of(cuda_impl.SOURCE, kernel)
    waited = ptx.index("griddepcontrol.wait")
    ahead = [found.start() for found in re.finditer(r"cp\.async\.bulk\.prefetch\.tensor", ptx)]
    touched = [found.start() for found in TOUCHES.finditer(ptx)]
    assert ahead and max(ahead) < waited < min(touched)
    assert ptx.count("griddepcontrol.wait") == 1


@needs_a_compiler
@pytest.mark.parametrize("stacked", [(True, False), (False, True)])
def test_one_matrix_for_a_stack(library: Path, stacked: tuple[bool, bool]) -> None:
    assert run(library, 1, (72, 136, 72, 3), seed=0, stacked=stacked) == ""


# One mistake each, and the instance in which it shows, in one of two shapes.
PAIRED, DEEP, TURNED, LARGE, SMALL = 1, 2, 6, (300, 328, 328, 1), (68, 72, 200, 1)
PLANTED: dict[str, tuple[int, str, str]] = {
    "products are not waited for": (PAIRED, "wait_for_products<1>();", "wait_for_products<2>();"),
    "a stage is free for oneself alone": (PAIRED, "rank<P>() : lane)", "rank<P>() : 0)"),
    "blocks leave one another": (
        PAIRED,
        "for (int i = 0; i < P::STAGES; ++i, ring",
        "for (; false; ring",
    ),
    "stages are full at first": (PAIRED, "ring.phase ^ 1);  // at", "ring.phase);  //"),
    "a block's rows are those of its neighbour": (PAIRED, "row * P::TALL + below", "row * P::TALL"),
    "both fetch the same share": (TURNED, "i % P::TALL != rank<P>()", "i % P::TALL != 0"),
    "a step is half as deep": (PAIRED, "A_BY_ROWS ? 32 :", "A_BY_ROWS ? 16 :"),
    "sums of the tile before stay": (PAIRED, "!is_first || i", "true"),
    "the matrix has no last row": (PAIRED, "row + line < sizes.m && ", ""),
    "the matrix has no last column": (PAIRED, " && at.column + column < sizes.n", ""),
    "the tile has no last column": (PAIRED, " && column < P::COLUMNS", ""),
    "rows are read before they are there": (PAIRED, "    __syncwarp();\n#pragma unroll", ""),
    "too few bytes are expected": (PAIRED, "expect(full, sizes.bytes)", "expect(full, P::A_BYTES)"),
    "sums are left before stages are read": (
        DEEP,
        "cluster_arrive();  // all have read their stages\n  cluster_wait();",
        "",
    ),
    "sums are read before they are left": (
        DEEP,
        "cluster_arrive();  // and left their sums\n  cluster_wait();",
        "",
    ),
    "the kernel before is not waited for": (PAIRED, "  wait_for_kernel_before();\n", ""),
    "L2 is told of fewer steps": (PAIRED, "EARLY = 2;", "EARLY = 1;"),
    "L2 is told of more steps": (PAIRED, "EARLY = 2;", "EARLY = 3;"),
    "L2 is told nothing": (PAIRED, "min(first_step<P>(sizes) + EARLY, end_step<P>(sizes))", "0"),
    "L2 is told of another part": (
        DEEP,
        "int step = first_step<P>(sizes); step < end; ++step) {\n    boxes",
        "int step = 0; step < end; ++step) {\n    boxes",
    ),
    "L2 is told of the last steps": (
        PAIRED,
        "boxes_of_b<P>(at, step, sizes, [&](int,",
        "boxes_of_b<P>(at, end_step<P>(sizes) - 1 - step, sizes, [&](int,",
    ),
    "L2 is told of more steps than there are": (
        DEEP,
        "min(first_step<P>(sizes) + EARLY, end_step<P>(sizes))",
        "first_step<P>(sizes) + EARLY",
    ),
    "all threads tell L2": (PAIRED, "threadIdx.x == WORKERS * WORKER && sizes", "sizes"),
    "L2 is told where a block has several tiles": (PAIRED, " && sizes.pieces <= stride", ""),
    "L2 is told too late": (
        PAIRED,
        "  if (threadIdx.x == WORKERS * WORKER && sizes",
        "  wait_for_kernel_before();\n  if (threadIdx.x == WORKERS * WORKER && sizes",
    ),
    "a part is added twice": (DEEP, "(part - (part > home)) * P::SUMS + i", "i"),
    "parts overlap": (DEEP, "rank<P>() * sizes.steps / P::DEEP", "0"),
    "a turned operand goes on too far": (TURNED, "B_BY_ROWS ? 2 * ATOM", "B_BY_ROWS ? 4 * ATOM"),
}


@pytest.mark.drawn(seconds=2.6)
@needs_a_compiler
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)
@pytest.mark.parametrize("which", [PAIRED, DEEP, TURNED])
def test_without_mistakes_nothing_is_seen(
    library: Path, which: int, shape: tuple[int, int, int, int]
) -> None:
    assert not any(run(library, which, shape, seed) for seed in range(3))


@pytest.mark.drawn(seconds=2.6)
@needs_a_compiler
@pytest.mark.parametrize("name", PLANTED)
def test_mistakes_are_seen(name: str, tmp_path: Path) -> None:
    which, right, wrong = PLANTED[name]
    text = (FOLDER / "cuda_impl.cu").read_text()
    assert text.count(right) == 1
    library = build(tmp_path, text.replace(right, wrong), (which,))
    assert any(run(library, which, shape, seed) for shape in (SMALL, LARGE) for seed in range(3))
