"""Which route a matmul takes: ours for Hopper, ours for few rows, the portable one, or cuBLAS.

A tuned GPU has a table of measured times (`tuned`), of which those of near shapes are carried over
by the model of `launches`; on any other GPU the rules of `_rule` speak. Every backend asks here why
it should yield to one further down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright import dispatch, tuned
from tilewright.gpu import Gpu
from tilewright.multiplying import HALVES, factors_of_da, factors_of_db
from tilewright.ops.matmul import launches
from tilewright.spec import Args, Choice, on_meta
from tilewright.toolkit.matmul_call import Product, seen
from tilewright.toolkit.rows import VECTOR_BYTES

NAME = "matmul"
HERE = "tilewright.ops.matmul"
FEW = "a has {} rows; it multiplies so few only where a table says that it is quicker"
MEASURED = 90  # the SM whose GPUs the rules without a table are for
MOST_DECIDED = 4096
MUCH = 2**33  # products of a tf32 call: 2048 x 2048 x 2048 was the smallest that was measured

# what a call's layout was told, by which table: every backend asks when a shape is new
_decided: dict[Any, tuple[object, tuned.Decision | None]] = {}


def choices(gpu: Gpu, *args: Any) -> tuple[Choice, ...]:
    """Who can serve a call; among equals the first is taken."""
    product = seen(*args[:2])
    found: dict[str, Callable[[], Sequence[tuple[int, ...]]]] = {
        "skinny": lambda: launches.strip_launches(product, gpu),
        "gluon": lambda: [(columns,) for columns in launches.STEP_US],
        "cuda": lambda: [(columns,) for columns in launches.widths(product)],
        "triton": lambda: [()],
    }
    able = [name for name in found if _serves(name, gpu, args)]
    ours = (Choice(name, launch) for name in able for launch in found[name]())
    return *ours, Choice("torch")


def _serves(backend: str, gpu: Gpu, args: Args) -> bool:
    op: Any = dispatch.load(f"{HERE}.op:OP")
    named = op.backend(backend)
    return named is not None and (
        dispatch.refusal(named, op, args, args[0], gpu, pretending=not args[0].is_cuda) is None
    )


def expected(gpu: Gpu, choice: Choice, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> float:
    """Microseconds, by the model."""
    return _expected(gpu, choice, seen(a, b), a.dtype)


def _expected(gpu: Gpu, choice: Choice, product: Product, dtype: torch.dtype) -> float:
    if choice.backend == "gluon":
        tiles = launches.hopper_tiles(product, dtype, gpu, *choice.launch)
        return launches.hopper_us(product, tiles, dtype, gpu)
    if choice.backend == "cuda":
        found = launches.cluster(product, dtype, gpu, *choice.launch)
        return launches.cluster_us(product, found, dtype, gpu)
    if choice.backend == "skinny":
        return launches.skinny_us(product, dtype, gpu, *choice.launch)
    return launches.any_us(choice.backend, product, dtype, gpu)


def place(
    a: torch.Tensor, b: torch.Tensor, out_dtype: Any, precision: str, block: Any, *rest: Any
) -> tuple[str, tuple[float, ...]]:
    """The kind of a call, and log2 of its sizes. Halves are alike, and so are the layouts of a; a
    stack over one b is taken for more rows."""
    product = seen(a, b)
    words = ["half" if a.dtype in HALVES else precision, "T" if product.b.by_columns else "N"]
    if product.b.inner_stride or product.b.outer_stride:
        words.append("stack")
    if out_dtype not in (None, a.dtype):
        words.append("wide")
    if block is not None:
        words.append("block")
    sizes = product.m * product.count, product.n, product.k
    return " ".join(words), tuple(math.log2(max(size, 1)) for size in sizes)


def part(rng: torch.Generator, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
    """Some rows by some columns of a product of two matrices: the first, the last, and others."""

    def some(size: int) -> torch.Tensor:
        drawn = torch.randint(size, (min(size, 256),), generator=rng)
        return torch.cat((drawn, torch.tensor([0, size - 1]))).to(a.device)

    rows, columns = some(a.shape[0]), some(b.shape[1])
    return (a[rows], b[:, columns], *rest), lambda c: c[rows][:, columns]


def decision(gpu: Gpu, args: Args) -> tuned.Decision | None:
    """What the table of this GPU says; None: it has none that knows such a call."""
    table = tuned.table(gpu, NAME)
    if table is None:
        return None
    layouts = ((x.shape, x.stride(), x.dtype, x.data_ptr() % VECTOR_BYTES) for x in args[:2])
    key = (gpu, args[0].is_cuda, *layouts, args[2:])  # of meta tensors nothing is missing
    known = _decided.get(key)
    if known is None or known[0] is not table:
        if len(_decided) >= MOST_DECIDED:
            _decided.clear()
        known = _decided[key] = (table, _decide(gpu, args))
    return known[1]


def _decide(gpu: Gpu, args: Args) -> tuned.Decision | None:
    product, dtype = seen(*args[:2]), args[0].dtype
    model = {choice: _expected(gpu, choice, product, dtype) for choice in choices(gpu, *args)}
    return tuned.decide(gpu, NAME, place(*args), model)


def launch(backend: str, gpu: Gpu, *args: Any) -> tuple[int, ...]:
    """The launch of a backend's quickest choice; (): as it decides itself."""
    forced = tuned.forced()
    if forced is not None and forced.backend == backend:
        return forced.launch
    found = decision(gpu, args)
    return found.best[backend][0].launch if found and backend in found.best else ()


def _rule(backend: str, gpu: Gpu, args: Args) -> str | None:
    """Without a table that knows such a call: why not this backend."""
    a, b, *_, deterministic = args
    product = seen(a, b)
    if backend in ("gluon", "cuda") and product.m <= launches.MOST_ROWS:
        return FEW.format(product.m)
    if backend in ("gluon", "cuda"):
        other = "cuda" if backend == "gluon" else "gluon"
        ours, its = (_expected(gpu, Choice(name), product, a.dtype) for name in (backend, other))
        if its < ours and _serves(other, gpu, args):
            return f"the model finds {other} quicker: {its:.1f} us, not {ours:.1f}"
    if deterministic:
        return None
    if gpu.sm != MEASURED:
        return f"cuBLAS is taken where no table says better; ours were measured on SM {MEASURED}"
    if backend == "triton":
        return "cuBLAS is quicker than the portable kernel where both were measured"
    if a.dtype == torch.float32 and product.m * product.n * product.k < MUCH:
        return "cuBLAS is taken for tf32 products smaller than those that were measured"
    return None


def _yields(backend: str, gpu: Gpu, args: Args) -> str | None:
    if args[4] is not None:
        return None  # a block was given: the portable kernel it is
    found = (ours if args[5] else decision)(gpu, args)
    return found.against(backend) if found is not None else _rule(backend, gpu, args)


def ours(gpu: Gpu, args: Args) -> tuned.Decision | None:
    """What the table says if cuBLAS is no route; None: it knows no such call of our kernels."""
    found = decision(gpu, args)
    return found and _without_cublas(found)


def _without_cublas(found: tuned.Decision) -> tuned.Decision | None:
    """The same of our kernels alone: every bit of theirs repeats."""
    every = ((found.choice, found.us), *found.others)
    ours = [one for one in every if one[0].backend != "torch"]
    if not ours:
        return None
    (choice, us), *others = ours
    return replace(found, choice=choice, us=us, others=tuple(others))


def yields_gluon(gpu: Gpu, *args: Any) -> str | None:
    return _yields("gluon", gpu, args)


def yields_skinny(gpu: Gpu, *args: Any) -> str | None:
    return _yields("skinny", gpu, args)


def yields_cuda(gpu: Gpu, *args: Any) -> str | None:
    return _yields("cuda", gpu, args)


def yields_triton(gpu: Gpu, *args: Any) -> str | None:
    return _yields("triton", gpu, args)


def yields_gluon_backward(
    gpu: Gpu, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: Any, precision: str,
    deterministic: bool, need_a: bool, need_b: bool,
) -> str | None:  # fmt: skip
    """Both of its products by the table, or by the rows of a."""
    grad, a, b = on_meta((grad.to("meta", a.dtype), a, b))
    wanted = ((factors_of_da, need_a), (factors_of_db, need_b))
    calls = [factors(grad, a, b)[:2] for factors, is_wanted in wanted if is_wanted]
    found = [decision(gpu, (*call, None, precision, None, deterministic)) for call in calls]
    if deterministic or None in found:
        rows = seen(a, b).m
        return FEW.format(rows) if rows <= launches.MOST_ROWS else None
    times = [{name: us for name, (_, us) in one.best.items()} for one in found if one]
    ours, theirs = (sum(time.get(name, math.inf) for time in times) for name in ("gluon", "torch"))
    if theirs < ours:
        return f"cuBLAS is quicker by the table of {gpu.name}: {theirs:.1f} us, not {ours:.1f}"
    return None


def yields_triton_backward(gpu: Gpu, *args: Any) -> str | None:
    deterministic = args[5]
    told = "cuBLAS is quicker than the portable kernel where both were measured"
    return None if deterministic else told
