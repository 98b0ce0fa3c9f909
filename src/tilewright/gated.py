"""What gated activations, act(gate) * up, share: checks, inputs, cases, mistakes, error bounds.

Gate and up are two tensors, or two halves of the last dim of one packed tensor, as a fused
projection leaves them. Functions whose name ends in `_packed` are about the latter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilewright import checks
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.shapes import MODELS, by_tokens, random_shape
from tilewright.spec import Args, BadInput, Case, Rounding, normal

ORDERS = ("gate_up", "up_gate")
TINY32 = torch.finfo(torch.float32).tiny

Tensor = torch.Tensor
Dims = Mapping[str, Any]


# --- checks and outputs --------------------------------------------------------------------------


def check(op: str, gate: Tensor, up: Tensor) -> None:
    checks.floating(op, "gate", gate)
    checks.floating(op, "up", up)
    checks.same_shape(op, "up", up, gate.shape, "the gate's")
    checks.same_dtype(op, "up", up, "gate", gate)
    checks.same_device(op, "up", up, "gate", gate)


def check_packed(op: str, x: Tensor, order: str) -> None:
    checks.floating(op, "x", x)
    checks.has_dims(op, "x", x)
    if x.shape[-1] % 2:
        wants = "have an even last dim, gate and up side by side"
        fix = "Pass what a fused gate-and-up projection returns."
        raise InputError(sentence(op, "x", f"has shape {tuple(x.shape)}", wants, fix))
    check_option(op, "order", order, ORDERS)


def check_option(op: str, name: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        names = ", ".join(repr(each) for each in known)
        fix = f"Leave it out for {known[0]!r}."
        raise InputError(sentence(op, name, f"is {value!r}", f"be one of {names}", fix))


def check_grad(op: str, grad: Tensor, gate: Tensor) -> None:
    checks.same_shape(op, "grad", grad, gate.shape, "the gate's")
    checks.same_device(op, "grad", grad, "gate", gate)


def check_grad_packed(op: str, grad: Tensor, x: Tensor) -> None:
    checks.same_shape(op, "grad", grad, half_shape(x.shape), "that of half of x")
    checks.same_device(op, "grad", grad, "x", x)


def wide(t: Tensor) -> Tensor:
    """In the dtype that is computed in."""
    return t if t.dtype == torch.float64 else t.float()


def halves(x: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of a packed tensor."""
    first, second = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return (first, second) if order == "gate_up" else (second, first)


def joined(gate_and_up: tuple[Tensor, Tensor], order: str) -> Tensor:
    """The packed tensor that has these halves."""
    gate, up = gate_and_up
    return torch.cat((gate, up) if order == "gate_up" else (up, gate), -1)


def half_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2)


def output(gate: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def output_packed(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(half_shape(x.shape))


def outputs_backward(grad: Tensor, gate: Tensor, up: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return output(gate), output(up)


def one_dtype(grad: Tensor, x: Tensor, *_: Any) -> str | None:
    """What a kernel of one element type refuses in a backward."""
    if grad.dtype != x.dtype:
        return f"grad is {grad.dtype} and its operands {x.dtype}; it takes one dtype for all"
    return None


# --- inputs --------------------------------------------------------------------------------------


def inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> tuple[Tensor, Tensor]:
    shape = dims["shape"]
    gate = (normal(shape, rng) * dims.get("scale", 1.0)).to(dtype).to(device)
    up = normal(shape, rng).to(dtype).to(device)
    if dims.get("chunks"):  # views of one packed tensor
        gate, up = torch.cat((gate, up), -1).chunk(2, -1)
    return gate, up


def inputs_packed(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> tuple[Tensor, str]:
    shape = even(dims["shape"])
    x = (normal(shape, rng) * dims.get("scale", 1.0)).to(dtype).to(device)
    return x, dims.get("order", ORDERS[0])


def even(shape: Sequence[int]) -> tuple[int, ...]:
    """With one more column if they do not make two halves."""
    return (*shape[:-1], shape[-1] + shape[-1] % 2)


def exact_inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> tuple[Tensor, Tensor]:
    """Gates that pass whole or are zero, and small whole numbers: the products are exact."""
    shape = dims["shape"]
    gate = torch.randint(0, 3, shape, generator=rng) * 64
    up = torch.randint(-4, 5, shape, generator=rng)
    return gate.to(dtype).to(device), up.to(dtype).to(device)


def exact_inputs_packed(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> Args:
    order = dims.get("order", ORDERS[0])
    half = {**dims, "shape": half_shape(even(dims["shape"]))}
    return joined(exact_inputs(half, dtype, device, rng), order), order


def sample(rng: random.Random) -> dict[str, Any]:
    dims = {"shape": random_shape(rng), "scale": rng.choice([0.01, 1.0, 5.0, 100.0])}
    return {**dims, "chunks": rng.random() < 0.2}


def sample_packed(rng: random.Random) -> dict[str, Any]:
    dims = {"shape": even(random_shape(rng)), "scale": rng.choice([0.01, 1.0, 5.0, 100.0])}
    return {**dims, "order": rng.choice(ORDERS)}


# --- cases ---------------------------------------------------------------------------------------

COLUMNS = (1, 3, 8, 9, 33, 64, 129, 256, 511, 1000, 1024, 1025, 2049, 4097)
SWEEP = {n: 2**27 // n for n in (4096, 8192, 18_944, 28_672)}

CASES = (
    Case("large-gates", {"shape": (3, 257), "scale": 1000.0}),
    Case("huge-gates", {"shape": (3, 40), "scale": 1e25}),  # infinite in float16
    Case("chunks", {"shape": (5, 264), "chunks": True}),
    Case("chunks-wide", {"shape": (3, 2056), "chunks": True}),
    Case("five-dims", {"shape": (2, 1, 3, 2, 65)}),
    Case("one-dim", {"shape": (70_001,)}),
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in COLUMNS),
    *(Case(m.name, {"shape": (2048, m.intermediate)}, "model") for m in MODELS.values()),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.intermediate)),
    Case("sweep-14336", {"shape": (16_384, 14_336)}, "sweep"),
    *(Case(f"sweep-{n}", {"shape": (rows, n)}, "sweep") for n, rows in SWEEP.items()),
)

CASES_PACKED = (
    Case("large-gates", {"shape": (3, 514), "scale": 1000.0}),
    Case("up-gate", {"shape": (3, 528), "order": "up_gate"}),
    Case("one-row", {"shape": (2 * 1033,)}),
    Case("many-rows", {"shape": (1200, 48)}),
    Case("five-dims", {"shape": (2, 1, 3, 2, 66)}),
    *(Case(f"columns-{n}", {"shape": (3, 2 * n)}) for n in (1, 8, 127, 128, 136, 1024, 1032, 2049)),
    *(Case(m.name, {"shape": (2048, m.gate_up_size)}, "model") for m in MODELS.values()),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.gate_up_size)),
    Case("sweep-14336", {"shape": (16_384, 28_672)}, "sweep"),
    Case("sweep-4096", {"shape": (SWEEP[4096], 8192)}, "sweep"),
)


# --- mistakes ------------------------------------------------------------------------------------


def _ones(device: str, *shape: int) -> Tensor:
    return torch.ones(shape or (2, 8), device=device)


def errors(op: str) -> tuple[BadInput, ...]:
    return (
        BadInput(
            "integer tensor",
            lambda f, device: f(_ones(device).int(), _ones(device).int()),
            DTypeError,
            (op, "gate", "int32", "float16", "gate.float()"),
        ),
        BadInput(
            "not a tensor",
            lambda f, device: f(_ones(device), [1.0]),
            DTypeError,
            (op, "up", "list", "torch.Tensor"),
        ),
        BadInput(
            "up of another shape",
            lambda f, device: f(_ones(device), _ones(device, 8)),
            InputError,
            (op, "up", "(8,)", "(2, 8)", "the gate's"),
        ),
        BadInput(
            "up of another dtype",
            lambda f, device: f(_ones(device), _ones(device).half()),
            DTypeError,
            (op, "up", "float16", "gate's, float32", "up.to(gate.dtype)"),
        ),
        BadInput(
            "up on another device",
            lambda f, device: f(_ones(device), _ones("meta")),
            InputError,
            (op, "up", "meta", "up.to(gate.device)"),
        ),
        BadInput(
            "unknown backend",
            lambda f, device: f(_ones(device), _ones(device), backend="tritn"),
            InputError,
            (op, "backend", "tritn", "triton"),
        ),
    )


def errors_packed(op: str) -> tuple[BadInput, ...]:
    return (
        BadInput(
            "integer tensor",
            lambda f, device: f(_ones(device).int()),
            DTypeError,
            (op, "x", "int32", "float16", "x.float()"),
        ),
        BadInput(
            "not a tensor",
            lambda f, device: f([1.0, 2.0]),
            DTypeError,
            (op, "x", "list", "torch.Tensor"),
        ),
        BadInput(
            "0-dim tensor",
            lambda f, device: f(torch.tensor(1.0, device=device)),
            InputError,
            (op, "x", "0-dimensional", "x[None]"),
        ),
        BadInput(
            "odd last dim",
            lambda f, device: f(_ones(device, 2, 7)),
            InputError,
            (op, "x", "(2, 7)", "even last dim", "projection"),
        ),
        BadInput(
            "unknown order",
            lambda f, device: f(_ones(device), "gate-up"),
            InputError,
            (op, "order", "'gate-up'", "'up_gate'"),
        ),
        BadInput(
            "unknown backend",
            lambda f, device: f(_ones(device), backend="tritn"),
            InputError,
            (op, "backend", "tritn", "triton"),
        ),
    )


# --- error bounds --------------------------------------------------------------------------------


class Errors(NamedTuple):
    """How far float32 arithmetic may be from act and act', in units of float32's roundoff."""

    relative: Tensor  # of act, in act's own size
    absolute: Tensor  # of act, what cancels included
    slope: Tensor  # of act', absolute


def tolerance(rounding: Rounding, y: Tensor, gate: Tensor, up: Tensor, e: Errors) -> Tensor:
    """act(gate) * up in float32, rounded once.

    The last term: exp and reciprocals below the smallest normal float32 may become zero.
    """
    inside = (e.relative * y.abs() + e.absolute * up.abs()) * rounding.u32
    flushed = TINY32 * (1 + gate.abs()) * up.abs()
    return y.abs() * rounding.u_out + inside + flushed + rounding.tiny


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Tensor, gate: Tensor, up: Tensor, e: Errors
) -> tuple[Tensor, Tensor]:
    """dgate = grad act'(gate) up, and dup = grad act(gate), which is a forward's bound."""
    dgate, dup = outputs
    reach = (grad * up).abs()
    inside = (4 * dgate.abs() + e.slope * reach) * rounding.u32
    flushed = TINY32 * ((1 + gate.abs()) * reach + up.abs())
    bound = dgate.abs() * rounding.u_out + inside + flushed + rounding.tiny
    return bound, tolerance(rounding, dup, gate, grad, e)
