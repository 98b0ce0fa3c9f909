"""matmul: the declaration and the public function."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tilewright import checks, library, multiplying
from tilewright.errors import InputError, sentence
from tilewright.ops.matmul import bounds, reference
from tilewright.shapes import LLAMA_3_8B, LLAMA_3_70B, QWEN_2_5_7B, Model
from tilewright.spec import Args, Autograd, Backend, Case, Cost, Op, Tuning, normal

HERE = "tilewright.ops.matmul"
COLUMNS = 48  # of b, where a case does not say

Tensor = torch.Tensor
Dims = Mapping[str, Any]

_always_deterministic = torch.are_deterministic_algorithms_enabled


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    block: tuple[int, int, int] | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """a @ b by torch.matmul's rules: vectors, matrices, stacks of matrices that broadcast.

    float16, bfloat16 and float32, summed in float32; float64 on the torch backend. Operands may lie
    in memory by rows, by columns or with any strides: nothing is copied, but for stacks of three
    levels or more. out_dtype: float32 for halves, whose sums are then not rounded. precision:
    "ieee" or "tf32" products of float32; None: as torch.get_float32_matmul_precision() says. Under
    autocast operands are cast to its dtype, as torch casts them.

    block=(rows, columns, depth), powers of two, are the tiles of the portable Triton kernel, which
    then serves the call wherever it runs: on a GPU, and in Triton's interpreter. deterministic=True
    leaves no call on a GPU to cuBLAS that a kernel of ours takes, unless it is asked for; None: as
    torch.are_deterministic_algorithms_enabled() says. Every bit of a kernel of ours repeats.

    >>> import torch, tilewright
    >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> tilewright.matmul(a, b)
    tensor([[1., 4.],
            [3., 8.]])
    """
    if not isinstance(a, Tensor):
        checks.tensor("matmul", "a", a)
    if precision is None:
        is_float32 = a.dtype is torch.float32
        precision = multiplying.torchs_precision() if is_float32 else "ieee"
    elif a.dtype is not torch.float32:
        precision = multiplying.precision_of("matmul", precision, a.dtype)
    if deterministic is None:
        deterministic = _always_deterministic()
    if block is not None:
        block, backend = _tiles(a, block, backend)
    return _matmul(a, b, (out_dtype, precision, block, deterministic, backend))  # type: ignore[no-any-return]


def _tiles(a: Tensor, block: Any, backend: str | None) -> tuple[Any, str | None]:
    """A block that can be looked up, and the backend whose tiles it names."""
    if backend not in (None, "triton"):
        got, wants = f"is {backend!r} beside a block", "be 'triton', whose tiles a block names"
        raise InputError(sentence("matmul", "backend", got, wants, "Leave one of them out."))
    if isinstance(block, list):
        block = tuple(block)
    return block, "triton" if a.is_cuda else backend


def no_block(a: Tensor, b: Tensor, out_dtype: Any, precision: str, block: Any, *_: Any) -> Any:
    return None if block is None else "a block was given: it names tiles of the portable kernel"


# --- inputs --------------------------------------------------------------------------------------


def inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """a of dims["shape"], and b. Both lie by rows, by columns or strided."""
    shape, sizes = _shapes(dims)

    def laid(sizes: tuple[int, ...], way: str) -> Tensor:
        if way == "column" and len(sizes) > 1:
            return normal((*sizes[:-2], sizes[-1], sizes[-2]), rng).to(dtype).to(device).mT
        x = normal((*sizes[:-1], 2 * sizes[-1]) if way == "strided" else sizes, rng)
        x = x.to(dtype).to(device)
        return x[..., ::2] if way == "strided" else x

    a, b = laid(shape, dims.get("a", "row")), laid(sizes, dims.get("b", "row"))
    precision = multiplying.precision_of("matmul", dims.get("precision") or "ieee", dtype)
    out_dtype, block = dims.get("out_dtype"), dims.get("block")
    wide = out_dtype if dtype in multiplying.HALVES else None
    return a, b, wide, precision, block, dims.get("deterministic", False)


def _shapes(dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """a's, and b's: dims["n"] columns, or none at all if that is None, as a vector; in front of it
    dims["stack"], one leading dim or several."""
    shape, n, stack = tuple(dims["shape"]), dims.get("n", COLUMNS), dims.get("stack", ())
    lead = (stack,) if isinstance(stack, int) else stack
    return shape, (*lead, shape[-1], n) if n is not None else shape[-1:]


def exact_inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Small integers, most of them 0: their sums stay below 2^8, which bfloat16 holds."""
    a, b, *rest = inputs(dims, dtype, device, rng)

    def integers(x: Tensor) -> Tensor:
        whole = torch.randint(-2, 3, x.shape, generator=rng)
        return x.copy_(whole * (torch.rand(x.shape, generator=rng) < 0.25))

    return integers(a), integers(b), *rest


SIZES = (1, 2, 3, 8, 15, 16, 17, 31, 33, 48, 64, 65, 72, 129, 136)
LAYOUTS = ("row", "row", "column", "strided")


WHOLE = (8, 16, 24, 48, 64, 72, 136)  # 16 bytes of halves, as some kernels want them


def sample(rng: random.Random) -> dict[str, Any]:
    whole = rng.random() < 0.5
    m, n = (rng.choice(WHOLE if whole else (*SIZES, 0)) for _ in range(2))
    m = max(m, 1)
    k = rng.choice((*(WHOLE if whole else (*SIZES, *SIZES, 0)), 200, 520))
    layouts = LAYOUTS[:3] if whole else LAYOUTS
    dims: dict[str, Any] = {
        "n": n,
        "a": rng.choice(layouts),
        "b": rng.choice(layouts),
        "out_dtype": rng.choice([None, None, torch.float32]),
        "precision": rng.choice([None, "tf32"]),
        "block": rng.choice([None] * 5 + [(16, 32, 16), (32, 16, 64)]),
    }
    stacks: list[dict[str, Any]] = [
        *({"shape": (m, k)} for _ in range(4)),
        {"shape": (k,)},
        {"shape": (k,), "n": None},
        {"shape": (m, k), "n": None},
        {"shape": (k,), "stack": 2},
        {"shape": (2, min(m, 33), k)},
        {"shape": (2, 3, min(m, 17), k)},
        {"shape": (3, min(m, 33), k), "stack": 3},
        {"shape": (min(m, 33), k), "stack": 2},
        {"shape": (2, 1, min(m, 17), k), "stack": 3},
        {"shape": (1, 2, min(m, 17), k), "stack": (2, 1)},
    ]
    return {**dims, **rng.choice(stacks)}


# --- cost and gradients --------------------------------------------------------------------------

UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    shape, other = _shapes(dims)
    products = math.prod(multiplying.result_shape(shape, other)) * shape[-1]
    unit = "tf32" if dims.get("precision") == "tf32" else "fp32"
    return Cost(2.0 * products, UNITS.get(dtype, unit))


def beside_torch(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, *_: Any) -> bool:
    """Halves err by the rounding of each result. float32 errs by its sums, whose order is torch's
    own: of few results, or of short sums, the largest error is luck."""
    return (out_dtype or a.dtype) in multiplying.HALVES


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    out_dtype, precision, _, deterministic = rest
    return *kept, out_dtype, precision, deterministic, bool(needs.get("a")), bool(needs.get("b"))


# --- cases ---------------------------------------------------------------------------------------


def _edges() -> Iterator[Case]:
    for name, (a, b) in {
        "nn": ("row", "row"),
        "nt": ("row", "column"),
        "tn": ("column", "row"),
        "tt": ("column", "column"),
        "strided": ("strided", "strided"),
    }.items():
        yield Case(name, {"shape": (72, 96), "n": 80, "a": a, "b": b})
        yield Case(f"{name}-odd", {"shape": (67, 35), "n": 131, "a": a, "b": b})
    for m in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129):
        yield Case(f"rows-{m}", {"shape": (m, 64), "n": 64})
    for n in (1, 8, 17, 127, 128, 129, 257):
        yield Case(f"columns-{n}", {"shape": (33, 64), "n": n})
    for k in (0, 1, 8, 31, 63, 65, 130, 1100):
        yield Case(f"depth-{k}", {"shape": (33, k), "n": 40})
    yield Case("groups", {"shape": (600, 16), "n": 200})  # of tiles, the last one cut short
    yield Case("deep", {"shape": (17, 4200), "n": 33})
    yield Case("no-columns", {"shape": (5, 16), "n": 0})
    yield Case("vector-matrix", {"shape": (65,), "n": 33})
    yield Case("matrix-vector", {"shape": (33, 72), "n": None})
    yield Case("vectors", {"shape": (1030,), "n": None})
    yield Case("stack", {"shape": (3, 33, 40), "n": 24, "stack": 3})
    yield Case("stack-columns", {"shape": (3, 33, 40), "n": 24, "stack": 3, "b": "column"})
    yield Case("stack-of-a", {"shape": (2, 3, 17, 40), "n": 24})
    yield Case("stack-of-b", {"shape": (33, 40), "n": 24, "stack": 3})
    yield Case("broadcast", {"shape": (3, 1, 17, 40), "n": 24, "stack": 2})
    yield Case("three-levels", {"shape": (2, 1, 3, 9, 40), "n": 24, "stack": (2, 1)})
    yield Case("to-float32", {"shape": (33, 200), "n": 40, "out_dtype": torch.float32})
    yield Case("deep-to-float32", {"shape": (17, 2100), "n": 33, "out_dtype": torch.float32})
    yield Case("tf32", {"shape": (67, 200), "n": 80, "precision": "tf32"})
    yield Case("few-rows-tf32", {"shape": (17, 72), "n": 40, "precision": "tf32"})
    yield Case("few-rows-deep", {"shape": (17, 2056), "n": 72})
    yield Case("few-rows-deep-nt", {"shape": (40, 2056), "n": 72, "b": "column"})
    yield Case("few-rows-tn", {"shape": (24, 520), "n": 72, "a": "column"})
    yield Case("block", {"shape": (70, 100), "n": 40, "block": (32, 16, 32)})


def _plans() -> Iterator[Case]:
    """For a GPU to run: what blocks that stay deal out, whole tiles and cut ones, of each width;
    and few rows."""
    for name, (m, k, n) in {
        "one-wave": (1000, 1000, 1000),
        "two-waves": (1100, 264, 2400),
        "wide-cut": (300, 4104, 2568),
        "wide-cut-late": (2200, 2048, 2304),
        "narrow": (130, 200, 8200),
        "tall": (8200, 328, 136),
    }.items():
        for a, b in itertools.product(("row", "column"), repeat=2):
            dims = {"shape": (m, k), "n": n, "a": a, "b": b}
            yield Case(f"{name}-{a}-{b}", dims, "plan")
    for m in (16, 24, 40):  # deep, with a strip of columns that is cut short
        for a, b in itertools.product(("row", "column"), repeat=2):
            dims = {"shape": (m, 2056), "n": 136, "a": a, "b": b}
            yield Case(f"few-{m}-{a}-{b}", dims, "plan")
    # few tiles, whose parts along K meet in clusters of two to four
    for m, k, n, b in (
        *((1, 1024, 1024, "column"), (1, 1024, 1024, "row"), (96, 1024, 1024, "column")),
        *((96, 1024, 1024, "row"), (96, 4096, 1024, "column"), (192, 4096, 1024, "column")),
        *((192, 8192, 2048, "column"), (384, 8192, 2048, "column"), (768, 4096, 1024, "column")),
        *((96, 14_336, 5120, "column"), (32, 3072, 3072, "column"), (96, 3072, 3072, "column")),
    ):
        yield Case(f"few-tiles-{m}-{k}-{n}-{b}", {"shape": (m, k), "n": n, "b": b}, "plan")
    dims = {"shape": (300, 4104), "n": 2568, "b": "column"}
    yield Case("wide-cut-tf32", {**dims, "precision": "tf32"}, "plan")
    yield Case("wide-cut-to-float32", {**dims, "out_dtype": torch.float32}, "plan")
    yield Case("stack-of-many", {"shape": (5, 300, 264), "n": 520, "stack": 5}, "plan")
    yield Case("stack-of-b-only", {"shape": (300, 264), "n": 520, "stack": 5}, "plan")


def _projections(m: Model) -> dict[str, tuple[int, int]]:
    """(columns, depth) of the matrices of a decoder's layer."""
    return {
        "qkv": (m.qkv_size, m.hidden),
        "o": (m.hidden, m.q_size),
        "gate_up": (m.gate_up_size, m.hidden),
        "down": (m.hidden, m.intermediate),
    }


def _by_model() -> Iterator[Case]:
    """x @ weight.T, as a linear layer multiplies; prefill also by weights that lie by rows."""

    def case(m: Model, which: str, tokens: int, group: str, name: str, b: str = "column") -> Case:
        n, k = _projections(m)[which]
        return Case(name, {"shape": (tokens, k), "n": n, "b": b}, group)

    for which in _projections(LLAMA_3_8B):
        yield case(LLAMA_3_8B, which, 2048, "model", f"{LLAMA_3_8B.name} {which}")
    for group, counts in (("decode", (1, 16, 64)), ("prefill", (512, 2048, 8192))):
        for m, tokens in itertools.product((LLAMA_3_8B, LLAMA_3_70B, QWEN_2_5_7B), counts):
            for which in _projections(m):
                name = f"{m.name} {which}, {tokens} tokens"
                yield case(m, which, tokens, group, name)
                if group == "prefill":
                    yield case(m, which, tokens, group, f"{name}, NN", "row")


def _sweep() -> Iterator[Case]:
    for size, b in itertools.product((4096, 1024, 2048, 8192, 16_384), ("row", "column")):
        name = f"{size} {'NT' if b == 'column' else 'NN'}"
        yield Case(name, {"shape": (size, size), "n": size, "b": b}, "sweep")
    for size in (4096, 8192):
        dims = {"shape": (size, size), "n": size, "b": "row", "precision": "tf32"}
        yield Case(f"{size} NN tf32", dims, "sweep")


CASES = (*_edges(), *_plans(), *_by_model(), *_sweep())
# One case of each tile and of most kinds of operands; the first in every dtype.
COMPILED = (
    *("nn", "nt", "tn", "tt", "rows-16", "deep", "tf32", "few-rows-tf32", "to-float32"),
    *("4096 NN", "Llama-3-8B qkv, 512 tokens", "4096 NN tf32", "wide-cut-row-column"),
)

# And of each kind of cluster: one below another, and parts along K for one consumer and for two.
COMPILED_CLUSTERS = (
    *("wide-cut-late-column-row", "wide-cut-to-float32", "few-40-row-column", "few-40-column-row"),
)


# Rows by (columns, depth) of b. Layers of models in shapes.py, and some between them.
GRID_ROWS = (
    *(1, 4, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024),
    *(2048, 4096, 8192),
)
GRID_LAYERS = (
    *((1024, 1024), (2048, 2048), (4096, 1024), (1024, 4096), (8192, 2048), (2048, 8192)),
    *((4608, 3584), (3584, 18_944), (6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)),
    *((8192, 8192), (57_344, 8192), (8192, 28_672), (128_256, 4096)),
    *((5120, 3072), (16_384, 3072), (6144, 5120), (5120, 14_336), (3072, 3072), (10_240, 4096)),
    *((10_240, 8192), (3584, 3584), (37_888, 3584)),
)
# of some, b that lies by rows, at fewer numbers of them
FEWER_ROWS = (1, 16, 48, 96, 192, 384, 768, 2048, 8192)
GRID_BY_ROWS = (
    *((1024, 1024), (4608, 3584), (6144, 4096), (28_672, 4096), (8192, 8192), (10_240, 8192)),
)


def _grid() -> Iterator[Case]:
    for (n, k), m in itertools.product(GRID_LAYERS, GRID_ROWS):
        if m * n <= 2**29:  # a vocabulary of more rows is nobody's
            yield Case(f"{m} x {n} x {k} NT", {"shape": (m, k), "n": n, "b": "column"}, "tune")
    for (n, k), m in itertools.product(GRID_BY_ROWS, FEWER_ROWS):
        yield Case(f"{m} x {n} x {k} NN", {"shape": (m, k), "n": n, "b": "row"}, "tune")


TUNING = Tuning(
    cases=tuple(_grid()),
    dtypes=(torch.bfloat16,),
    choices=f"{HERE}.routes:choices",
    expected=f"{HERE}.routes:expected",
    place=f"{HERE}.routes:place",
    part=f"{HERE}.routes:part",
)


def _called(
    backend: Any, a: Any, b: Any, out_dtype: Any, precision: str, block: Any, deterministic: bool
) -> Any:
    return matmul(
        a, b, out_dtype=out_dtype, precision=precision, block=block, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip


def _torch_matmul(a: Any, b: Any, out_dtype: Any, precision: str, *_: Any) -> Any:
    if out_dtype not in (None, a.dtype):
        raise InputError("torch.matmul has no out_dtype")
    if a.dtype != torch.float32 or multiplying.torchs_precision() == precision:
        return torch.matmul(a, b)
    with multiplying.torch_multiplies(precision):
        return torch.matmul(a, b)


BACKWARD = Op(
    name="matmul_backward",
    summary="gradients of matmul",
    schema="(Tensor grad, Tensor a, Tensor b, ScalarType? out_dtype, str precision, "
    "bool deterministic, bool need_a, bool need_b) -> (Tensor, Tensor)",
    reference=reference.matmul_backward,
    outputs=multiplying.outputs_backward,
    check=multiplying.check_backward,
    backends=(
        Backend(
            "gluon",
            "gluon",
            f"{HERE}.gluon_impl:prepare_backward",
            min_sm=90,
            max_sm=90,
            limits=f"{HERE}.gluon_impl:refuses_backward",
            yields=f"{HERE}.routes:yields_gluon_backward",
            tensor_cores=("_matmul_on_hopper",),
        ),
        Backend(
            "triton",
            "triton",
            f"{HERE}.triton_impl:prepare_backward",
            yields=f"{HERE}.routes:yields_triton_backward",
            tensor_cores=("_matmul",),
        ),
        Backend("torch", "torch", f"{HERE}.reference:matmul_backward", dtypes=None),
    ),
    tolerance=bounds.tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="matmul",
    summary="a @ b, of vectors, matrices and stacks that broadcast",
    schema="(Tensor a, Tensor b, ScalarType? out_dtype, str precision, int[]? block, "
    "bool deterministic) -> Tensor",
    reference=reference.matmul,
    outputs=multiplying.outputs,
    check=multiplying.check,
    backends=(
        Backend(
            "gluon",
            "gluon",
            f"{HERE}.gluon_impl:prepare",
            min_sm=90,
            max_sm=90,
            accepts=no_block,
            limits=f"{HERE}.gluon_impl:refuses",
            yields=f"{HERE}.routes:yields_gluon",
            tensor_cores=("_matmul_on_hopper",),
        ),
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_impl:prepare",
            dtypes=multiplying.HALVES,
            min_sm=90,
            max_sm=90,
            accepts=no_block,
            limits=f"{HERE}.cuda_impl:refuses",
            yields=f"{HERE}.routes:yields_cuda",
            compiled=COMPILED_CLUSTERS,
        ),
        Backend(
            "skinny",
            "triton",
            f"{HERE}.skinny_impl:prepare",
            dtypes=multiplying.HALVES,
            min_sm=80,
            accepts=no_block,
            limits=f"{HERE}.skinny_impl:refuses",
            yields=f"{HERE}.routes:yields_skinny",
            tensor_cores=("_few_rows",),
        ),
        Backend(
            "triton",
            "triton",
            f"{HERE}.triton_impl:prepare",
            limits=f"{HERE}.triton_impl:refuses",
            yields=f"{HERE}.routes:yields_triton",
            tensor_cores=("_matmul",),
        ),
        Backend(
            "torch",
            "torch",
            f"{HERE}.reference:matmul",
            dtypes=None,
            direct=f"{HERE}.reference:direct",
        ),
    ),
    public=matmul,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=bounds.tolerance,
    beside_torch=beside_torch,
    cases=CASES,
    compiled=COMPILED,
    cost=cost,
    as_called=_called,
    baselines={"vendor": _torch_matmul},
    vendor_is_eager=True,
    autograd=Autograd(BACKWARD, ("a", "b"), saved, (("a",), ("b",))),
    autocast=multiplying.autocast,
    layout_argument="a",
    variants=({}, {"b": "column"}),
    errors=multiplying.ERRORS,
    tuning=TUNING,
)

OPS = (OP,)
_matmul = library.register_with_backward(OP)
