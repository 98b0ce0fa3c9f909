"""geglu of two tensors and of a packed one: the declarations and the public functions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from tilewright import gated, library
from tilewright.errors import InputError
from tilewright.gated import Errors, halves, joined
from tilewright.ops.geglu import reference
from tilewright.spec import Args, Autograd, Backend, BadInput, Case, Cost, Op, Rounding

HERE = "tilewright.ops.geglu"
APPROXIMATIONS = ("tanh", "none")
FLOPS = 10.0  # five for the argument of the sigmoid; exponential, sum, reciprocal, two products

SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = SLOPE * 0.044715
SATURATED_TANH = 5.1  # from here on the sigmoid is 1 in float32
SATURATED_ERF = 6.0  # and the error function 1 or -1


def geglu(
    gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh", *, backend: str | None = None
) -> torch.Tensor:
    """gelu(gate, approximate) * up, computed in float32 and rounded once. The result is contiguous.

    approximate="tanh" is what Gemma's layers compute, "none" has the error function in its place.
    Gate and up may be chunks of one tensor, which are read where they are; `geglu_packed` takes
    that tensor itself and returns its gradient in one piece.

    >>> import torch, tilewright
    >>> tilewright.geglu(torch.tensor([0.0, 1.0, 64.0]), torch.tensor([5.0, 2.0, 0.5]))
    tensor([ 0.0000,  1.6824, 32.0000])
    """
    return _geglu(gate, up, (approximate, backend))  # type: ignore[no-any-return]


def geglu_packed(
    x: torch.Tensor,
    order: str = "gate_up",
    approximate: str = "tanh",
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """gelu(gate, approximate) * up of the two halves of x's last dim: (..., 2n) -> (..., n).

    order="gate_up" has the gate in the first half, "up_gate" in the second.

    >>> import torch, tilewright
    >>> tilewright.geglu_packed(torch.tensor([[1.0, 64.0, 2.0, 0.5]]), approximate="none")
    tensor([[ 1.6827, 32.0000]])
    """
    return _geglu_packed(x, (order, approximate, backend))  # type: ignore[no-any-return]


def check(gate: torch.Tensor, up: torch.Tensor, approximate: str) -> None:
    gated.check("geglu", gate, up)
    gated.check_option("geglu", "approximate", approximate, APPROXIMATIONS)


def check_packed(x: torch.Tensor, order: str, approximate: str) -> None:
    gated.check_packed("geglu_packed", x, order)
    gated.check_option("geglu_packed", "approximate", approximate, APPROXIMATIONS)


def check_backward(grad: torch.Tensor, gate: torch.Tensor, *_: Any) -> None:
    gated.check_grad("geglu_backward", grad, gate)


def check_packed_backward(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> None:
    gated.check_grad_packed("geglu_packed_backward", grad, x)


def _approximate(dims: Mapping[str, Any]) -> str:
    return "none" if dims.get("erf") else "tanh"  # on a command line "none" would be no word


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    return *gated.inputs(dims, dtype, device, rng), _approximate(dims)


def inputs_packed(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    return *gated.inputs_packed(dims, dtype, device, rng), _approximate(dims)


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    return *gated.exact_inputs(dims, dtype, device, rng), _approximate(dims)


def exact_inputs_packed(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    return *gated.exact_inputs_packed(dims, dtype, device, rng), _approximate(dims)


def sample(rng: random.Random) -> dict[str, Any]:
    return {**gated.sample(rng), "erf": rng.random() < 0.5}


def sample_packed(rng: random.Random) -> dict[str, Any]:
    return {**gated.sample_packed(rng), "erf": rng.random() < 0.5}


def errors(x: torch.Tensor, approximate: str) -> Errors:
    return _errors_of_tanh(x) if approximate == "tanh" else _errors_of_erf(x)


def _errors_of_tanh(x: torch.Tensor) -> Errors:
    """gelu(x) = x s, s = sigmoid(z), z = 2u: swiglu's bounds with the errors of z.

    z errs relatively by six roundings, log2 e among them, so exp(-z) by six |z|, of which (1 - s)
    reaches s. gelu' = s + x z' s (1 - s), and 1 - s errs absolutely, as long as it is not 0.
    Absolute errors are the definition's: 1 + tanh(u), as it is written, cancels, in any precision.
    """

    def steepness(x: torch.Tensor) -> torch.Tensor:
        return 1 + x.abs() * (SLOPE + 3 * CUBIC * x * x)

    z = x * (SLOPE + CUBIC * x * x)
    relative = 16 + 8 * (-z).clamp(min=0)
    reach = torch.sigmoid(z) * steepness(x.clamp(max=SATURATED_TANH))
    near = x.clamp(-SATURATED_TANH, SATURATED_TANH)
    slope = 2 * relative * reach + steepness(near)
    return Errors(relative, near.abs(), slope)


def _errors_of_erf(x: torch.Tensor) -> Errors:
    """gelu(x) = x p, p = (1 + erf(x / sqrt 2)) / 2, gelu' = p + x phi(x).

    Near -1 erf cancels: p errs absolutely, by two ulps of the error function and a rounding, until
    erf is -1 in float32 and p is 0; halves take an approximation that errs by three units, its
    exponential included. phi's exponent, x^2 / 2, errs by three roundings.
    """
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    slope = 8 + x.abs() * density * (16 + 2 * x * x)
    near = x.abs().clamp(max=SATURATED_ERF)
    return Errors(torch.full_like(x, 8), 4 * near, slope)


def tolerance(
    rounding: Rounding, outputs: Args, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, ...]:
    return (gated.tolerance(rounding, outputs[0], gate, up, errors(gate, approximate)),)


def tolerance_packed(
    rounding: Rounding, outputs: Args, x: torch.Tensor, order: str, approximate: str
) -> tuple[torch.Tensor, ...]:
    return tolerance(rounding, outputs, *halves(x, order), approximate)


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Any, gate: Any, up: Any, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    e = errors(gate, approximate)
    return gated.tolerance_backward(rounding, outputs, grad, gate, up, e)


def tolerance_packed_backward(
    rounding: Rounding, outputs: Args, grad: Any, x: Any, order: str, approximate: str
) -> tuple[torch.Tensor, ...]:
    gradients, operands = halves(outputs[0], order), halves(x, order)
    bounds = tolerance_backward(rounding, gradients, grad, *operands, approximate)
    return (joined(bounds, order),)


CASES = (
    Case("erf", {"shape": (3, 1000), "erf": True}),
    Case("erf-large", {"shape": (3, 257), "erf": True, "scale": 1000.0}),
    *gated.CASES,
    Case("Gemma-2-9B, erf", {"shape": (2048, 14_336), "erf": True}, "model"),
    Case("sweep-14336, erf", {"shape": (16_384, 14_336), "erf": True}, "sweep"),
)
CASES_PACKED = (
    Case("erf", {"shape": (3, 1000), "erf": True}),
    *gated.CASES_PACKED,
)


def _wrong_approximation(op: str, *shapes: tuple[int, ...]) -> BadInput:
    return BadInput(
        "unknown approximation",
        lambda f, device: f(*(torch.ones(s, device=device) for s in shapes), approximate="erf"),
        InputError,
        (op, "approximate", "'erf'", "'tanh'", "'none'"),
    )


BACKWARD = Op(
    name="geglu_backward",
    summary="gradients of geglu",
    schema="(Tensor grad, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)",
    reference=reference.geglu_backward,
    outputs=gated.outputs_backward,
    check=check_backward,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_backward", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:geglu_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)

PACKED_BACKWARD = Op(
    name="geglu_packed_backward",
    summary="gradient of geglu_packed, in one piece",
    schema="(Tensor grad, Tensor x, str order, str approximate) -> Tensor",
    reference=reference.geglu_packed_backward,
    outputs=lambda grad, x, order, approximate: gated.output(x),
    check=check_packed_backward,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_packed_backward"),
        Backend("torch", "torch", f"{HERE}.reference:geglu_packed_backward", dtypes=None),
    ),
    tolerance=tolerance_packed_backward,
    layout_argument="grad",
)

OP = Op(
    name="geglu",
    summary="gelu(gate) * up, with a tanh or the error function",
    schema="(Tensor gate, Tensor up, str approximate) -> Tensor",
    reference=reference.geglu,
    outputs=gated.output,
    check=check,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:geglu", dtypes=None),
    ),
    public=geglu,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    variants=({}, {"erf": True}),
    cost=lambda dims, dtype: Cost(FLOPS * math.prod(dims["shape"])),
    as_called=lambda backend, gate, up, approximate: geglu(gate, up, approximate, backend=backend),
    autograd=Autograd(
        BACKWARD,
        keep=("gate", "up"),
        saved=lambda kept, dtype, rest, needs: (*kept, *rest),
        gradients=(("gate",), ("up",)),
    ),
    layout_argument="gate",
    errors=(*gated.errors("geglu"), _wrong_approximation("geglu", (2, 8), (2, 8))),
)

PACKED = Op(
    name="geglu_packed",
    summary="gelu(gate) * up of the halves of one tensor",
    schema="(Tensor x, str order, str approximate) -> Tensor",
    reference=reference.geglu_packed,
    outputs=gated.output_packed,
    check=check_packed,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_packed"),
        Backend("torch", "torch", f"{HERE}.reference:geglu_packed", dtypes=None),
    ),
    public=geglu_packed,
    inputs=inputs_packed,
    exact_inputs=exact_inputs_packed,
    sample=sample_packed,
    tolerance=tolerance_packed,
    cases=CASES_PACKED,
    cost=lambda dims, dtype: Cost(FLOPS * math.prod(dims["shape"]) / 2),
    as_called=lambda backend, x, order, approximate: geglu_packed(
        x, order, approximate, backend=backend
    ),
    autograd=Autograd(
        PACKED_BACKWARD,
        keep=("x",),
        saved=lambda kept, dtype, rest, needs: (*kept, *rest),
        gradients=(("x",),),
    ),
    layout_argument="x",
    errors=(*gated.errors_packed("geglu_packed"), _wrong_approximation("geglu_packed", (2, 8))),
)

OPS = (OP, PACKED)
_geglu = library.register_with_backward(OP)
_geglu_packed = library.register_with_backward(PACKED)
