"""rms_norm_swiglu: the declaration and the public function.

A norm whose result is gated, as the output of a linear-attention or state-space layer is, in one
kernel: neither the normed rows nor silu(gate) go through memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from tilewright import checks, library
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.ops.rms_norm_swiglu import reference
from tilewright.shapes import LLAMA_3_8B, PLAN_COLUMNS, QWEN_2_5_7B, by_tokens, random_shape
from tilewright.spec import (
    Args,
    Autograd,
    Backend,
    BadInput,
    Case,
    Cost,
    Op,
    Rounding,
    normal,
    sum_path,
)

HERE = "tilewright.ops.rms_norm_swiglu"
NAME = "rms_norm_swiglu"
EPS = {torch.float64: torch.finfo(torch.float64).eps}  # of the dtype computed in, as torch does
EPS_FLOAT32 = torch.finfo(torch.float32).eps
FLUSHED = 2.0**-126  # a sigmoid below it may be zero


def rms_norm_swiglu(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate) over the last dim, where silu(g) = g * sigmoid(g).

    `gate` has x's shape and dtype, `weight` one number for each column, of x's dtype or float32.
    Half precision is computed in float32 and rounded once, at the end, to x's dtype. eps=None is
    the epsilon of the dtype computed in, as in rms_norm. Under autocast x's dtype is kept.

    >>> import torch, tilewright
    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])
    >>> tilewright.rms_norm_swiglu(x, gate, eps=0.0)
    tensor([[0.0000, 0.8271]])
    """
    if not isinstance(x, torch.Tensor):
        checks.tensor(NAME, "x", x)
    if eps is None:
        eps = EPS.get(x.dtype, EPS_FLOAT32)
    return _rms_norm_swiglu(x, gate, weight, (eps, backend))  # type: ignore[no-any-return]


def check(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    checks.floating(NAME, "x", x)
    checks.has_dims(NAME, "x", x)
    checks.floating(NAME, "gate", gate)
    checks.same_shape(NAME, "gate", gate, x.shape, "that of x")
    checks.same_dtype(NAME, "gate", gate, "x", x)
    checks.same_device(NAME, "gate", gate, "x", x)
    if weight is not None:
        checks.floating(NAME, "weight", weight)
        checks.same_shape(NAME, "weight", weight, x.shape[-1:], "the last dim of x")
        checks.same_device(NAME, "weight", weight, "x", x)
        if weight.dtype not in (x.dtype, torch.float32):
            got, its = (str(t.dtype).removeprefix("torch.") for t in (weight, x))
            wants = f"have x's dtype, {its}, or float32"
            fix = "Convert it: weight.to(x.dtype)."
            raise DTypeError(sentence(NAME, "weight", f"has dtype {got}", wants, fix))
    checks.number(NAME, "eps", eps, at_least=0.0)


def check_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
    checks.same_shape(f"{NAME}_backward", "grad", grad, x.shape, "that of x")
    checks.same_device(f"{NAME}_backward", "grad", grad, "x", x)


def outputs(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def outputs_backward(grad: Any, x: Any, gate: Any, weight: Any, eps: float, need: bool) -> Any:
    dx, dgate = outputs(x), outputs(x)
    if not need or weight is None:
        return dx, dgate, x.new_empty(0)
    return dx, dgate, torch.empty_like(weight, memory_format=torch.contiguous_format)


def one_dtype(x: torch.Tensor, gate: Any, weight: torch.Tensor | None, *_: Any) -> str | None:
    if weight is not None and weight.dtype != x.dtype:
        return f"weight is {weight.dtype} and x {x.dtype}; it takes one dtype for both"
    return None


def one_dtype_backward(grad: Any, x: Any, gate: Any, weight: Any, *_: Any) -> str | None:
    if grad.dtype != x.dtype:
        return f"grad is {grad.dtype} and x {x.dtype}; it takes one dtype for both"
    return one_dtype(x, gate, weight)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    shape = dims["shape"]
    x = (normal(shape, rng) * dims.get("scale", 1.0)).to(dtype).to(device)
    gate = (normal(shape, rng) * dims.get("gate_scale", 1.0)).to(dtype).to(device)
    kind, weight = dims.get("weight_dtype") or dtype, None
    if dims.get("weight", True):
        weight = normal(shape[-1:], rng).to(kind).to(device)
    return x, gate, weight, dims.get("eps", 1e-6)


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Rows of +-2^k and eps 0: the norm is +-1 exactly. Gates whose sigmoid is 0, 1/2 or 1."""
    shape = dims["shape"]
    sign = torch.randint(0, 2, shape, generator=rng) * 2 - 1
    power = torch.randint(-3, 4, (*shape[:-1], 1), generator=rng)
    x = (sign * 2.0**power).to(dtype).to(device)
    gates = torch.tensor([64.0, 96.0, 128.0, 0.0, -1024.0])
    gate = gates[torch.randint(0, len(gates), shape, generator=rng)].to(dtype).to(device)
    weight = torch.randint(-4, 5, shape[-1:], generator=rng).to(dtype).to(device)
    return x, gate, weight, 0.0


def sample(rng: random.Random) -> dict[str, Any]:
    return {
        "shape": random_shape(rng),
        "weight": rng.random() < 0.85,
        "weight_dtype": rng.choice([None, None, None, torch.float32]),
        "eps": rng.choice([1e-6, 1e-5, 0.0]),
        "scale": rng.choice([0.01, 1.0, 100.0]),
        "gate_scale": rng.choice([1.0, 1.0, 10.0, 100.0]),
    }


def _exponent_error(gate: torch.Tensor) -> torch.Tensor:
    """Roundings of e^-gate that reach sigmoid(gate): none where the 1 beside it is larger."""
    return 2 * gate.abs() * torch.sigmoid(-gate)


def tolerance(
    rounding: Rounding, outputs: Args, x: Any, gate: Any, weight: Any, eps: Any
) -> tuple[torch.Tensor, ...]:
    """float32 inside, a sum of non-negative terms, one rounding.

    The relative error of silu is that of e^-gate, whose exponent is rounded twice, where it
    outweighs the 1 beside it; its other roundings and those of the norm are constants.
    """
    (y,) = outputs
    inside = (sum_path(max(x.shape[-1], 2)) / 2 + 16 + _exponent_error(gate)) * rounding.u32
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    w = torch.ones_like(x[..., :1]) if weight is None else weight
    silu = gate * torch.sigmoid(gate)
    steps = rounding.tiny * (1 + (w * silu).abs()) + FLUSHED * (gate * normed * w).abs()
    return (y.abs() * (rounding.u_out + inside) + steps,)


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Any, x: Any, gate: Any, weight: Any, eps: float,
    need: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dx = rstd (h - xh mean(h xh)) with h = dy w silu(gate), dgate = dy w xh silu'(gate),
    dw = sum over rows of dy silu(gate) xh; all sums in float32.

    Terms of both signs meet in dx and dw, and within silu' = sigma + silu (1 - sigma): their errors
    are in proportion to the terms, not to the results.
    """
    dx, dgate, dw = outputs
    n, rows = max(x.shape[-1], 2), max(math.prod(x.shape[:-1]), 2)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normed = (x * rstd).abs()
    weighed = grad.abs() if weight is None else (grad * weight).abs()
    sigma = torch.sigmoid(gate)
    carried = (sum_path(n) + 24 + _exponent_error(gate)) * rounding.u32
    silu_error = gate.abs() * (sigma * carried + FLUSHED)
    slope_error = (1 + gate.abs()) * (sigma * carried + FLUSHED)

    h_error = weighed * silu_error
    around = rstd * (h_error + normed * (h_error * normed).mean(-1, keepdim=True))
    of_dx = dx.abs() * rounding.u_out + around + rounding.tiny * (1 + rstd)
    of_dgate = dgate.abs() * rounding.u_out + weighed * normed * slope_error + 2 * rounding.tiny
    if not dw.numel():
        return of_dx, of_dgate, torch.zeros_like(dw)
    # a partial sums up to sqrt(rows) terms one after another (probabilistic), then a tree
    in_order = math.sqrt(rows) * rounding.u32 * (gate * sigma).abs()
    terms = (grad * normed).abs() * (silu_error + in_order)
    of_dw = dw.abs() * rounding.u_out + terms.reshape(-1, x.shape[-1]).sum(0) + rounding.tiny
    return of_dx, of_dgate, of_dw


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    (x, gate, weight), (eps,) = kept, rest
    return x, gate, weight, eps, bool(needs.get("weight")) and weight is not None


COLUMNS = (
    *(1, 2, 3, 7, 8, 9, 17, 31, 33, 63, 65, 127, 129, 255, 257, 513, 1000, 1023, 1025),
    *(2047, 2049, 4097),
)
SWEEP = (8192, 1024, 2048, 3584, 4096, 5120, 11_008, 14_336, 16_384, 18_944, 28_672)
CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("mixed", {"shape": (3, 1024), "weight_dtype": torch.float32}),
    Case("large-gates", {"shape": (3, 1024), "gate_scale": 200.0}),
    # more tiles and rows than the interpreter's 17 SMs keep resident, or an H200
    Case("many-rows", {"shape": (1200, 48)}),
    Case("wide-walk", {"shape": (20, 9_000)}),
    Case("many-rows-h200", {"shape": (33_000, 48)}, "plan"),
    Case("wide-walk-h200", {"shape": (140, 33_000)}, "plan"),
    Case("wide", {"shape": (2, 33_000)}),
    Case("widest", {"shape": (1, 262_144)}),
    Case("wide-odd", {"shape": (2, 70_001)}),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 1024, 2048, 4096, 8192, 16384)),
    Case("loop-4104", {"shape": (2, 4104)}),  # the shortest that goes through a loop, of five steps
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in COLUMNS),
    *(Case(m.name, {"shape": (2048, m.hidden)}, "model") for m in (LLAMA_3_8B, QWEN_2_5_7B)),
    *(
        Case(f"{m.name}, intermediate", {"shape": (2048, m.intermediate)}, "model")
        for m in (LLAMA_3_8B, QWEN_2_5_7B)
    ),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.hidden)),
    *(Case(f"plan-{n}", {"shape": (5, n)}, "plan") for n in (*PLAN_COLUMNS, 32_768)),
    # more of the longest rows than an H200 has clusters for
    Case("widest-walk", {"shape": (40, 262_144)}, "plan"),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP),
)


def _ones(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 8, device=device), torch.ones(8, device=device)


ERRORS = (
    BadInput(
        "not a tensor",
        lambda norm, device: norm([1.0], _ones(device)[0]),
        DTypeError,
        (NAME, "x", "list", "torch.Tensor"),
    ),
    BadInput(
        "gate that is no tensor",
        lambda norm, device: norm(_ones(device)[0], 1.0),
        DTypeError,
        (NAME, "gate", "float", "torch.Tensor"),
    ),
    BadInput(
        "integer tensor",
        lambda norm, device: norm(_ones(device)[0].int(), _ones(device)[0]),
        DTypeError,
        (NAME, "x", "int32", "float16", "x.float()"),
    ),
    BadInput(
        "0-dim tensor",
        lambda norm, device: norm(*[torch.tensor(1.0, device=device)] * 2),
        InputError,
        (NAME, "x", "0-dimensional", "x[None]"),
    ),
    BadInput(
        "gate of another shape",
        lambda norm, device: norm(_ones(device)[0], _ones(device)[1]),
        InputError,
        (NAME, "gate", "(8,)", "(2, 8)"),
    ),
    BadInput(
        "gate of another dtype",
        lambda norm, device: norm(_ones(device)[0], _ones(device)[0].half()),
        DTypeError,
        (NAME, "gate", "float16", "float32", "gate.to(x.dtype)"),
    ),
    BadInput(
        "gate on another device",
        lambda norm, device: norm(_ones(device)[0], torch.ones(2, 8, device="meta")),
        InputError,
        (NAME, "gate", "meta", "gate.to(x.device)"),
    ),
    BadInput(
        "weight of another size",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, _ones(device)[1][:4]),
        InputError,
        (NAME, "weight", "(4,)", "(8,)"),
    ),
    BadInput(
        "weight of a third dtype",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, _ones(device)[1].half()),
        DTypeError,
        (NAME, "weight", "float16", "weight.to(x.dtype)"),
    ),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, torch.ones(8, device="meta")),
        InputError,
        (NAME, "weight", "meta", "weight.to(x.device)"),
    ),
    BadInput(
        "negative eps",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, eps=-1e-6),
        InputError,
        (NAME, "eps", "-1e-06", "0 or more"),
    ),
    BadInput(
        "eps that is no number",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, eps="small"),
        DTypeError,
        (NAME, "eps", "'small'", "number"),
    ),
    BadInput(
        "unknown backend",
        lambda norm, device: norm(*[_ones(device)[0]] * 2, backend="tritn"),
        InputError,
        (NAME, "backend", "tritn", "triton"),
    ),
)


def _called(backend: Any, x: Any, gate: Any, weight: Any, eps: float) -> Any:
    return rms_norm_swiglu(x, gate, weight, eps, backend=backend)


BACKWARD = Op(
    name="rms_norm_swiglu_backward",
    summary="gradients of rms_norm_swiglu",
    schema="(Tensor grad, Tensor x, Tensor gate, Tensor? weight, float eps, bool weight_grad) -> "
    "(Tensor, Tensor, Tensor)",
    reference=reference.rms_norm_swiglu_backward,
    outputs=outputs_backward,
    check=check_backward,
    backends=(
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_backward_impl:prepare",
            accepts=one_dtype_backward,
            limits=f"{HERE}.cuda_backward_impl:refuses",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_backward"),
        Backend("torch", "torch", f"{HERE}.reference:rms_norm_swiglu_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="rms_norm_swiglu",
    summary="x / rms(x) * weight * silu(gate) over the last dim, in one kernel",
    schema="(Tensor x, Tensor gate, Tensor? weight, float eps) -> Tensor",
    reference=reference.rms_norm_swiglu,
    outputs=outputs,
    check=check,
    backends=(
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_impl:prepare",
            accepts=one_dtype,
            limits=f"{HERE}.cuda_impl:refuses",
            may_spill=32,  # NVRTC 13.0 on SM 90, float32 rows that are walked over; 13.4: none
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare"),
        Backend("torch", "torch", f"{HERE}.reference:rms_norm_swiglu", dtypes=None),
    ),
    public=rms_norm_swiglu,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    rounds_as_reference=True,
    layout_argument="x",
    cost=lambda dims, dtype: Cost(9.0 * math.prod(dims["shape"])),
    as_called=_called,
    autograd=Autograd(BACKWARD, ("x", "gate", "weight"), saved, (("x",), ("gate",), ("weight",))),
    errors=ERRORS,
)

OPS = (OP,)
_rms_norm_swiglu = library.register_with_backward(OP)
