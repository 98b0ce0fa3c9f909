"""What verify does not ask of matmul: torch's rules, precision, blocks, autocast, launch choices.

Kernels run in Triton's interpreter, which is chosen before Triton is imported: in a process of its
own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
import torch

import tilewright
from tilewright import InputError, UnsupportedError, dispatch, gpu, library, matmul, multiplying
from tilewright.dims import meta_inputs
from tilewright.matrix import reachable
from tilewright.ops.matmul import op, reference, triton_impl
from tilewright.ops.matmul.triton_impl import launch
from tilewright.spec import FLOATS, Cost
from tilewright.toolkit import matmul_call, recording
from tilewright.toolkit.matmul_call import see

SOURCE = Path(__file__).parents[1] / "src"
H200 = gpu.pretend("h200")
EVERY_GPU = [gpu.pretend(f"sm_{sm}") for sm in gpu.ARCHS]
HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


def interpret(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]


def captured(*args: Any, **options: Any) -> dict[str, Any]:
    """The arguments with which the public function calls its op."""
    seen: list[Any] = []
    library.capturing[get_ident()] = seen
    try:
        with pytest.raises(library.Captured):
            matmul(*args, **options)
    finally:
        library.capturing.clear()
    _, values, _ = seen[0]
    return dict(zip((*op.OP.arguments, "backend"), values, strict=True))


# --- torch's rules -------------------------------------------------------------------------------

SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5,)),
    ((5,), (2, 5, 3)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 2)),
    ((1, 4, 5), (1, 5, 3)),
    ((2, 4, 5), (1, 1, 5, 3)),
    ((0, 5), (5, 3)),
    ((4, 0), (0, 3)),
    ((0,), (0,)),
    ((2, 4, 5), (0, 1, 5, 3)),
    ((4, 5), (5, 0)),
]


@pytest.mark.parametrize(("first", "second"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [SINGLE, torch.float64, BFLOAT], ids=str)
def test_shapes_values_and_gradients_are_torchs(
    first: tuple[int, ...], second: tuple[int, ...], dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=rng).to(dtype).requires_grad_() for s in (first, second))
    ours, theirs = matmul(a, b), torch.matmul(a, b)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn(ours.shape, generator=rng).to(dtype)
    for got, wanted in zip(
        torch.autograd.grad(ours, (a, b), grad),
        torch.autograd.grad(theirs, (a, b), grad),
        strict=True,
    ):
        assert got.dtype == dtype
        # torch rounds every term of a sum over a stack to bfloat16
        rough = {"rtol": 0.05, "atol": 0.05} if dtype == BFLOAT else {}
        torch.testing.assert_close(got, wanted, **rough)


@pytest.mark.parametrize("wants", ["a", "b"])
def test_a_gradient_that_nobody_wants_is_not_made(wants: str) -> None:
    a, b = torch.randn(4, 5, requires_grad=wants == "a"), torch.randn(5, 3)
    b.requires_grad_(wants == "b")
    saved = op.saved((a, b), a.dtype, (None, "ieee", None, False), {wants: True})
    da, db = reference.matmul_backward(torch.ones(4, 3), *saved)
    assert (da.numel() > 0, db.numel() > 0) == (wants == "a", wants == "b")
    matmul(a, b).sum().backward()
    assert (a.grad is None) == (wants == "b")


def test_a_wider_result_is_not_rounded() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=rng).bfloat16() for _ in range(2))
    wide = matmul(a, b, out_dtype=SINGLE)
    torch.testing.assert_close(wide, a.float() @ b.float())
    assert not torch.equal(wide, wide.bfloat16().float())
    leaf = a.clone().requires_grad_()
    matmul(leaf, b, out_dtype=SINGLE).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == BFLOAT
    assert matmul(a, b, out_dtype=BFLOAT).dtype == BFLOAT


@pytest.mark.parametrize("other", [SINGLE, HALF, BFLOAT], ids=str)
def test_autocast_casts_as_torch_does(other: torch.dtype) -> None:
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3).to(other)
    with torch.autocast("cpu", BFLOAT):
        ours, theirs = matmul(a, b), torch.matmul(a, b)
        wide = matmul(a, b, out_dtype=SINGLE)
    assert ours.dtype == theirs.dtype == BFLOAT
    assert wide.dtype == SINGLE
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == SINGLE
    with torch.autocast("cpu", BFLOAT), pytest.raises(tilewright.DTypeError, match="float64"):
        matmul(a, b.double())


def test_compiles_without_a_break() -> None:
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (4, 7):
        a, b = torch.randn(m, 5, requires_grad=True), torch.randn(5, 3)
        torch.testing.assert_close(compiled(a, b), matmul(a, b))
    torch.testing.assert_close(compiled(a, b, block=(16, 16, 16)), matmul(a, b))


# --- options -------------------------------------------------------------------------------------


@pytest.fixture
def _torchs_settings() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_torchs_settings")
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_precision_follows_torch_for_float32_alone(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 2, dtype=dtype)
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        exact = setting == "highest" or dtype != SINGLE
        assert captured(x, x)["precision"] == ("ieee" if exact else "tf32")
        assert captured(x, x, precision="ieee")["precision"] == "ieee"
    assert captured(x, x, precision="tf32")["precision"] == ("tf32" if dtype == SINGLE else "ieee")


@pytest.mark.usefixtures("_torchs_settings")
def test_torch_multiplies_as_it_is_told_and_then_as_before() -> None:
    for setting in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(setting)
        for precision in multiplying.PRECISIONS:
            with multiplying.torch_multiplies(precision):
                assert multiplying.torchs_precision() == precision
            assert torch.get_float32_matmul_precision() == setting
            with pytest.raises(ZeroDivisionError), multiplying.torch_multiplies(precision):
                _ = 1 / 0
            assert torch.get_float32_matmul_precision() == setting


NEWER_NAME = """
import torch
from tilewright import multiplying

for setting in ("tf32", "ieee"):
    torch.backends.cuda.matmul.fp32_precision = setting
    assert multiplying.torchs_precision() == setting
    for precision in multiplying.PRECISIONS:
        with multiplying.torch_multiplies(precision):
            assert multiplying.torchs_precision() == precision
        assert torch.backends.cuda.matmul.fp32_precision == setting
"""


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has the older name"
)
def test_a_precision_that_was_set_by_its_newer_name_is_heeded() -> None:
    interpret(NEWER_NAME)


@pytest.mark.usefixtures("_torchs_settings")
def test_deterministic_follows_torch() -> None:
    x = torch.zeros(2, 2)
    assert captured(x, x)["deterministic"] is False
    torch.use_deterministic_algorithms(True)
    assert captured(x, x)["deterministic"] is True
    assert captured(x, x, deterministic=False)["deterministic"] is False


def test_a_block_is_a_tuple_and_names_its_backend_on_a_gpu() -> None:
    x = torch.zeros(2, 2)
    found = captured(x, x, block=[16, 32, 64])
    assert (found["block"], found["backend"]) == ((16, 32, 64), None)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(2, 2, device="cuda")
        assert op._tiles(there, (16, 16, 16), None) == ((16, 16, 16), "triton")
    torch.testing.assert_close(matmul(x, x, block=(16, 16, 16)), x)


def test_a_block_that_this_gpu_cannot_hold_is_refused_aloud() -> None:
    args = (torch.empty(2, 2, device="meta"),) * 2
    call = (*args, None, "ieee", (128, 128, 128), False)
    multiplying.check(*call)
    dispatch.choose(op.OP, call, backend="triton", gpu=gpu.pretend("h200"))
    with pytest.raises(UnsupportedError, match=r"131072 bytes .* has 101376"):
        dispatch.choose(op.OP, call, backend="triton", gpu=gpu.pretend("rtx4090"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_block_that_passes_fits_the_largest_sm(dtype: torch.dtype) -> None:
    sizes = [2**i for i in range(4, 12)]
    taken = 0
    for block in ((m, n, k) for m in sizes for n in sizes for k in sizes):
        try:
            multiplying._check_block(block, dtype)
        except InputError:
            continue
        choice = launch(64, 64, 64, 1, dtype, "ieee", True, H200, block)
        assert choice.block == block
        assert choice.stages * multiplying.block_bytes(block, dtype.itemsize) <= 227 * gpu.KIB
        taken += 1
    assert taken > 50


# --- how operands are seen -----------------------------------------------------------------------


def layout(x: matmul_call.Operand) -> str:
    return "rows" if x.by_rows else "columns" if x.by_columns else "strided"


def test_operands_are_seen_as_they_lie() -> None:
    a, b = torch.empty(6, 8), torch.empty(8, 10)
    for left, right, wanted in (
        (a, b, ("rows", "rows")),
        (a, torch.empty(10, 8).t(), ("rows", "columns")),
        (torch.empty(8, 6).t(), b, ("columns", "rows")),
        (torch.empty(6, 16)[:, ::2], torch.empty(16, 20)[::2, ::2], ("strided", "strided")),
        (torch.empty(8), torch.empty(8), ("rows", "columns")),
        (torch.empty(1, 8).expand(6, 8), b, ("rows", "rows")),
    ):
        p = see(left, right)
        assert p is not None
        assert (layout(p.a), layout(p.b)) == wanted
        assert p.shape == torch.matmul(left, right).shape


def test_rows_of_a_stack_over_one_matrix_are_one_matrix() -> None:
    p = see(torch.empty(2, 3, 4, 8), torch.empty(8, 5))
    assert p is not None
    assert (p.m, p.count) == (24, 1)
    p = see(torch.empty(3, 4, 2, 8).transpose(1, 2), torch.empty(8, 5))  # rows of two levels
    assert p is not None
    assert (p.m, p.count) == (4, 6) or (p.m, p.count) == (2, 12)


def test_stacks_broadcast_without_a_copy_up_to_two_levels() -> None:
    p = see(torch.empty(3, 1, 4, 8), torch.empty(2, 8, 5))
    assert p is not None
    assert (p.outer, p.inner) == (3, 2)
    assert (p.a.outer_stride, p.a.inner_stride) == (32, 0)
    assert (p.b.outer_stride, p.b.inner_stride) == (0, 40)
    a, b = torch.randn(2, 1, 3, 4, 8), torch.randn(5, 1, 8, 6)
    assert see(a, b) is None
    flat = matmul_call.flat(a, b)
    torch.testing.assert_close(torch.matmul(*flat).view(2, 5, 3, 4, 6), torch.matmul(a, b))


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_of_nought_and_one(size: int) -> None:
    for m, k, n in ((size, 8, 8), (8, size, 8), (8, 8, size), (size, size, size)):
        p = see(torch.empty(m, k), torch.empty(k, n))
        assert p is not None
        assert p.is_empty == (m * n == 0)
        assert layout(p.a) != "strided" != layout(p.b)


# --- launch choices ------------------------------------------------------------------------------


@pytest.mark.parametrize("on", EVERY_GPU, ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_choice_fits_its_gpu(on: gpu.Gpu, dtype: torch.dtype) -> None:
    for m in (1, 16, 33, 128, 1000, 8192):
        for n, k in ((1, 64), (128, 8192), (4096, 4096)):
            ways = (("ieee", True), ("tf32", True), ("ieee", False))
            for (precision, whole), by_rows in itertools.product(ways, (False, True)):
                choice = launch(m, n, k, 1, dtype, precision, whole, on, b_by_rows=by_rows)
                needs = choice.stages * multiplying.block_bytes(choice.block, dtype.itemsize)
                assert needs <= on.shared_per_block
                assert choice.splits * choice.block_k <= max(k, choice.block_k)


def test_choices_of_an_h200() -> None:
    def chosen(m: int, n: int, k: int, count: int = 1, dtype: torch.dtype = BFLOAT) -> Any:
        return launch(m, n, k, count, dtype, "ieee", True, H200)

    def by_rows(m: int, on: gpu.Gpu = H200, dtype: torch.dtype = BFLOAT) -> tuple[int, ...]:
        return launch(m, m, m, 1, dtype, "ieee", True, on, b_by_rows=True).block

    assert chosen(4096, 4096, 4096).block == (128, 256, 64)
    assert by_rows(4096) == (128, 256, 32)
    assert by_rows(2048) == (128, 128, 64)
    assert by_rows(4096, dtype=SINGLE) == chosen(4096, 4096, 4096, dtype=SINGLE).block
    assert by_rows(4096, gpu.pretend("sm_89")) == (128, 128, 64)  # no room for so wide a tile
    assert chosen(2048, 2048, 2048).block == (128, 128, 64)
    assert chosen(512, 512, 512).block == (64, 64, 64)
    assert chosen(128, 128, 512, 200).block == (128, 256, 64)
    assert chosen(16, 4096, 4096).block_m == 16
    assert chosen(4096, 4096, 4096).splits == 1
    assert chosen(16, 4096, 4096).splits > 1  # few tiles of deep sums
    assert chosen(16, 4096, 512).splits == 1
    assert chosen(16, 4096, 4096, 64).splits == 1
    assert chosen(4096, 4096, 4096, dtype=SINGLE).block_k < 64


def test_every_tile_is_compiled() -> None:
    """Every choice that an H200 can take of a table is one of the compile matrix."""
    tables = {
        *(("bfloat16", c.block) for c in (*triton_impl.HALVES, triton_impl.SHORT_STEPS)),
        *(("bfloat16", c.block) for c in triton_impl.ONE_BY_ONE),
        *(("float32", c.block) for c in (*triton_impl.TF32, *triton_impl.WITHOUT)),
    }
    found = set()
    for wanted in reachable(["matmul"], [90]):
        if wanted.kernel == "_matmul":
            c = dict(wanted.request.constants)
            found.add((wanted.dtype, (c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"])))
    assert tables <= found


def test_results_do_not_depend_on_how_operands_lie() -> None:
    """The same tiles, whatever the strides: verify compares the bits of small ones. Steps may be
    shorter, as long as they are whole: a tensor core adds 16 deep after 16 deep of halves."""
    a, b = (torch.empty(4096, 4096, dtype=BFLOAT, device="meta") for _ in range(2))
    chosen = set()
    for left in (a, a.t()):
        for right in (b, b.t()):
            with recording.recording() as requests:
                triton_impl.prepare(H200, left, right, None, "ieee", None, False)
            c = dict(requests[0].constants)
            chosen.add((c["BLOCK_M"], c["BLOCK_N"], len(requests)))
            assert c["BLOCK_K"] == (32 if right is b else 64)
    assert len(chosen) == 1


# --- kernels -------------------------------------------------------------------------------------

FAR_B = """
import torch, tilewright

rng = torch.Generator().manual_seed(0)
a, b = torch.randn(17, 130, generator=rng).half(), torch.randn(130, 24, generator=rng).half()
room = torch.empty(129 * 2**24 + 24, dtype=b.dtype)  # paged in where it is written
far = room.as_strided((130, 24), (2**24, 1)).copy_(b)
wanted = tilewright.matmul(a, b, backend="triton")
assert torch.equal(tilewright.matmul(a, far, backend="triton"), wanted)
columns = tilewright.matmul(b.t(), far, backend="triton")
assert torch.equal(tilewright.matmul(far.t(), b, backend="triton"), columns)
"""


@pytest.mark.drawn(seconds=3.8, family="slow")
def test_rows_of_b_may_lie_far_apart() -> None:
    """verify's check of offsets moves the rows of a."""
    interpret(FAR_B)


BLOCKS = """
import torch, tilewright

rng = torch.Generator().manual_seed(0)
a, b = (torch.randint(-2, 3, (70, 70), generator=rng).half() for _ in range(2))
wanted = tilewright.matmul(a, b, backend="torch")
for block in ((16, 16, 16), (64, 16, 32), (16, 128, 64), (128, 32, 128)):
    assert torch.equal(tilewright.matmul(a, b, block=block), wanted), block
"""


@pytest.mark.drawn(seconds=4.8, family="slow")
def test_blocks_that_are_asked_for() -> None:
    interpret(BLOCKS)


def test_cost_and_cases() -> None:
    assert op.cost({"shape": (4, 5), "n": 3}, BFLOAT) == Cost(120.0, "bf16")
    assert op.cost({"shape": (2, 4, 5), "n": 3, "stack": 2}, SINGLE).flops == 240.0
    assert op.cost({"shape": (5,), "n": None}, SINGLE).flops == 10.0
    assert op.cost({"shape": (4, 5), "precision": "tf32"}, SINGLE).unit == "tf32"
    names = [case.name for case in op.CASES]
    assert len(set(names)) == len(names)
    assert set(op.COMPILED) <= set(names)
    for case in op.CASES:
        a, b, *_ = meta_inputs(op.OP, case.dims, BFLOAT)
        if case.group not in ("edge", "plan"):
            assert a.stride(-1) == 1
            assert (b.stride(-2) == 1) == (case.dims["b"] == "column")
