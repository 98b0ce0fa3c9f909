"""swiglu of two tensors and of a packed one: the declarations and the public functions."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright import gated, library
from tilewright.gated import Errors, halves, joined
from tilewright.ops.swiglu import reference
from tilewright.spec import Args, Autograd, Backend, Cost, Op, Rounding

HERE = "tilewright.ops.swiglu"
FLOPS = 5.0  # exponential, sum, reciprocal, two products
SATURATED = 17.0  # exp(-17) < 2^-24: a sigmoid is 1 in float32


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """silu(gate) * up, computed in float32 and rounded once. The result is contiguous.

    Gate and up may be chunks of one tensor, which are read where they are; `swiglu_packed` takes
    that tensor itself and returns its gradient in one piece.

    >>> import torch, tilewright
    >>> tilewright.swiglu(torch.tensor([0.0, 1.0, 64.0]), torch.tensor([5.0, 2.0, 0.5]))
    tensor([ 0.0000,  1.4621, 32.0000])
    """
    return _swiglu(gate, up, (backend,))  # type: ignore[no-any-return]


def swiglu_packed(
    x: torch.Tensor, order: str = "gate_up", *, backend: str | None = None
) -> torch.Tensor:
    """silu(gate) * up of the two halves of x's last dim: (..., 2n) -> (..., n).

    order="gate_up" has the gate in the first half, "up_gate" in the second.

    >>> import torch, tilewright
    >>> tilewright.swiglu_packed(torch.tensor([[1.0, 64.0, 2.0, 0.5]]))
    tensor([[ 1.4621, 32.0000]])
    """
    return _swiglu_packed(x, (order, backend))  # type: ignore[no-any-return]


def check(gate: torch.Tensor, up: torch.Tensor) -> None:
    gated.check("swiglu", gate, up)


def check_packed(x: torch.Tensor, order: str) -> None:
    gated.check_packed("swiglu_packed", x, order)


def check_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    gated.check_grad("swiglu_backward", grad, gate)


def check_packed_backward(grad: torch.Tensor, x: torch.Tensor, order: str) -> None:
    gated.check_grad_packed("swiglu_packed_backward", grad, x)


def errors(gate: torch.Tensor) -> Errors:
    """silu(x) = x s, s = 1 / (1 + e), e = exp(-x).

    e errs relatively by 2 |x| (the exponent times log2 e, a rounded constant) and the two ulps of
    exp2. Of that (1 - s) reaches s: nothing where x is large, all where it is small. The quotient's
    two ulps and four roundings add to it.

    silu' = s + x s (1 - s): each factor errs as s does, and 1 - s absolutely, by s's own error,
    which x multiplies. Where s is 1 in float32, 1 - s is 0, and the product nothing.
    """
    relative = 16 + 2 * (-gate).clamp(min=0)
    reach = torch.sigmoid(gate) * (1 + gate.clamp(max=SATURATED).abs())
    return Errors(relative, torch.zeros_like(gate), 2 * relative * reach)


def tolerance(
    rounding: Rounding, outputs: Args, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (gated.tolerance(rounding, outputs[0], gate, up, errors(gate)),)


def tolerance_packed(
    rounding: Rounding, outputs: Args, x: torch.Tensor, order: str
) -> tuple[torch.Tensor, ...]:
    return tolerance(rounding, outputs, *halves(x, order))


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Any, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gated.tolerance_backward(rounding, outputs, grad, gate, up, errors(gate))


def tolerance_packed_backward(
    rounding: Rounding, outputs: Args, grad: Any, x: torch.Tensor, order: str
) -> tuple[torch.Tensor, ...]:
    gradients = halves(outputs[0], order)
    bounds = tolerance_backward(rounding, gradients, grad, *halves(x, order))
    return (joined(bounds, order),)


BACKWARD = Op(
    name="swiglu_backward",
    summary="gradients of swiglu",
    schema="(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    reference=reference.swiglu_backward,
    outputs=gated.outputs_backward,
    check=check_backward,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_backward", flattens=True),
        Backend(
            "cuda", "cuda", f"{HERE}.cuda_impl:prepare_backward",
            accepts=gated.one_dtype, flattens=True,
        ),
        Backend("torch", "torch", f"{HERE}.reference:swiglu_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)  # fmt: skip

PACKED_BACKWARD = Op(
    name="swiglu_packed_backward",
    summary="gradient of swiglu_packed, in one piece",
    schema="(Tensor grad, Tensor x, str order) -> Tensor",
    reference=reference.swiglu_packed_backward,
    outputs=lambda grad, x, order: gated.output(x),
    check=check_packed_backward,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_packed_backward"),
        Backend(
            "cuda", "cuda", f"{HERE}.cuda_impl:prepare_packed_backward", accepts=gated.one_dtype
        ),
        Backend("torch", "torch", f"{HERE}.reference:swiglu_packed_backward", dtypes=None),
    ),
    tolerance=tolerance_packed_backward,
    layout_argument="grad",
)  # fmt: skip

OP = Op(
    name="swiglu",
    summary="silu(gate) * up",
    schema="(Tensor gate, Tensor up) -> Tensor",
    reference=reference.swiglu,
    outputs=gated.output,
    check=check,
    backends=(  # the same speed from 64 MiB on; below, and on the host, Triton's is ahead
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare", flattens=True),
        Backend("cuda", "cuda", f"{HERE}.cuda_impl:prepare", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:swiglu", dtypes=None),
    ),
    public=swiglu,
    inputs=gated.inputs,
    exact_inputs=gated.exact_inputs,
    sample=gated.sample,
    tolerance=tolerance,
    cases=gated.CASES,
    rounds_as_reference=True,
    cost=lambda dims, dtype: Cost(FLOPS * math.prod(dims["shape"])),
    as_called=lambda backend, gate, up: swiglu(gate, up, backend=backend),
    autograd=Autograd(
        BACKWARD,
        keep=("gate", "up"),
        saved=lambda kept, dtype, rest, needs: kept,
        gradients=(("gate",), ("up",)),
    ),
    layout_argument="gate",
    errors=gated.errors("swiglu"),
)

PACKED = Op(
    name="swiglu_packed",
    summary="silu(gate) * up of the halves of one tensor",
    schema="(Tensor x, str order) -> Tensor",
    reference=reference.swiglu_packed,
    outputs=gated.output_packed,
    check=check_packed,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_packed"),
        Backend("cuda", "cuda", f"{HERE}.cuda_impl:prepare_packed"),
        Backend("torch", "torch", f"{HERE}.reference:swiglu_packed", dtypes=None),
    ),
    public=swiglu_packed,
    inputs=gated.inputs_packed,
    exact_inputs=gated.exact_inputs_packed,
    sample=gated.sample_packed,
    tolerance=tolerance_packed,
    cases=gated.CASES_PACKED,
    rounds_as_reference=True,
    cost=lambda dims, dtype: Cost(FLOPS * math.prod(dims["shape"]) / 2),
    as_called=lambda backend, x, order: swiglu_packed(x, order, backend=backend),
    autograd=Autograd(
        PACKED_BACKWARD,
        keep=("x",),
        saved=lambda kept, dtype, rest, needs: (*kept, *rest),
        gradients=(("x",),),
    ),
    layout_argument="x",
    errors=gated.errors_packed("swiglu_packed"),
)

OPS = (OP, PACKED)
_swiglu = library.register_with_backward(OP)
_swiglu_packed = library.register_with_backward(PACKED)
