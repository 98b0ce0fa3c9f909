"""Which route a matmul takes: ours for Hopper, ours for few rows, the portable one, or cuBLAS.

A tuned GPU has a table of measured times (`tuned`), of which the nearest shape's is carried over by
the model of `launches`; on any other GPU the rules of `_rule` speak. Every backend asks here why it
should yield to one further down.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright import dispatch, tuned
from tilewright.gpu import Gpu
from tilewright.ops.matmul import launches
from tilewright.ops.matmul.launches import HALVES
from tilewright.spec import Args, Choice
from tilewright.toolkit.matmul_call import Product, flat, see

NAME = "matmul"
HERE = "tilewright.ops.matmul"
MEASURED = 90  # the SM whose GPUs the rules without a table are for


def product_of(a: torch.Tensor, b: torch.Tensor) -> Product:
    found = see(a, b) or see(*flat(a, b))
    assert found is not None
    return found


def choices(gpu: Gpu, *args: Any) -> tuple[Choice, ...]:
    """Who can serve a call; among equals the first is taken."""
    found = [Choice("gluon", (columns,)) for columns in launches.STEP_US]
    everybody = (Choice("skinny"), *found, Choice("triton"), Choice("torch"))
    return tuple(c for c in everybody if c.backend == "torch" or _serves(c.backend, gpu, args))


def _serves(backend: str, gpu: Gpu, args: Args) -> bool:
    op: Any = dispatch.load(f"{HERE}.op:OP")
    named = op.backend(backend)
    return named is not None and (
        dispatch.refusal(named, op, args, args[0], gpu, pretending=True) is None
    )


def expected(gpu: Gpu, choice: Choice, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> float:
    """Microseconds, by the model."""
    product = product_of(a, b)
    if choice.backend == "gluon":
        tiles = launches.hopper_tiles(product, a.dtype, gpu, *choice.launch)
        return launches.hopper_us(product, tiles, a.dtype, gpu)
    if choice.backend == "skinny":
        return launches.skinny_us(product, a.dtype)
    return launches.any_us(product, a.dtype, gpu)


def place(
    a: torch.Tensor, b: torch.Tensor, out_dtype: Any, precision: str, *rest: Any
) -> tuple[str, tuple[float, ...]]:
    """The kind of a call, and log2 of its sizes. Halves are alike, and so are their layouts but for
    that of b; a stack of products is taken for more rows."""
    product = product_of(a, b)
    kind = "half" if a.dtype in HALVES else precision
    layout = "T" if product.b.by_columns else "N"
    sizes = product.m * product.count, product.n, product.k
    return f"{kind} {layout}", tuple(math.log2(max(size, 1)) for size in sizes)


def part(rng: torch.Generator, a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Any:
    """Some rows by some columns of a product of two matrices: the first, the last, and others."""

    def some(size: int) -> torch.Tensor:
        drawn = torch.randint(size, (min(size, 256),), generator=rng)
        return torch.cat((drawn, torch.tensor([0, size - 1]))).to(a.device)

    rows, columns = some(a.shape[0]), some(b.shape[1])
    return (a[rows], b[:, columns], *rest), lambda c: c[rows][:, columns]


def decision(gpu: Gpu, args: Args) -> tuned.Decision | None:
    """What the table of this GPU says; None: it has none that knows such a call."""
    if tuned.table(gpu, NAME) is None:
        return None
    model = {choice: expected(gpu, choice, *args) for choice in choices(gpu, *args)}
    return tuned.decide(gpu, NAME, place(*args), model)


def launch(backend: str, gpu: Gpu, *args: Any) -> tuple[int, ...]:
    """The launch of a backend's quickest choice; (): as it decides itself."""
    forced = tuned.forced()
    if forced is not None and forced.backend == backend:
        return forced.launch
    found = decision(gpu, args)
    return found.best[backend][0].launch if found and backend in found.best else ()


def _rule(backend: str, gpu: Gpu, args: Args) -> str | None:
    """Without a table: why not this backend."""
    a, b, *_, deterministic = args
    rows = product_of(a, b).m
    if backend == "gluon" and rows <= launches.MOST_ROWS:
        return f"a has {rows} rows, of the {launches.ROWS} of a tile"
    if gpu.sm != MEASURED and not deterministic:
        return f"cuBLAS is taken where no table says better (it was measured on SM {MEASURED})"
    if backend == "triton" and not deterministic:
        return "cuBLAS is quicker than it where it was measured"
    return None


def _yields(backend: str, gpu: Gpu, args: Args) -> str | None:
    if args[4] is not None:
        return None  # a block was given: the portable kernel it is
    found = decision(gpu, args)
    if found is None or (args[5] and found.choice.backend == "torch"):
        return _rule(backend, gpu, args)
    return found.against(backend)


def yields_gluon(gpu: Gpu, *args: Any) -> str | None:
    return _yields("gluon", gpu, args)


def yields_skinny(gpu: Gpu, *args: Any) -> str | None:
    return _yields("skinny", gpu, args)


def yields_triton(gpu: Gpu, *args: Any) -> str | None:
    return _yields("triton", gpu, args)


def yields_gluon_backward(gpu: Gpu, grad: torch.Tensor, a: torch.Tensor, *rest: Any) -> str | None:
    rows = math.prod(a.shape[:-1])
    if rows <= launches.MOST_ROWS:
        return f"a has {rows} rows, of the {launches.ROWS} of a tile"
    return None


def yields_triton_backward(gpu: Gpu, *args: Any) -> str | None:
    deterministic = args[5]
    return None if deterministic else "cuBLAS is quicker than it where it was measured"
