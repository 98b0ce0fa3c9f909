"""softmax: the declaration and the public function."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from tilewright import checks, library
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.ops.softmax import reference
from tilewright.shapes import EDGE_COLUMNS, PLAN_COLUMNS, SWEEP_COLUMNS, random_shape
from tilewright.spec import (
    FLOATS,
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

HERE = "tilewright.ops.softmax"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """exp(x - max) / sum along `dim`, as torch.nn.functional.softmax; computed in float32.

    `dtype` is the dtype the input is cast to first, and the result's: float32 of a half-precision
    input is fused into the kernel. Under autocast the result is float32 on every device; torch has
    that rule on GPUs only.

    >>> import torch, tilewright
    >>> tilewright.softmax(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if dim.__class__ is not int:
        dim = checks.index("softmax", "dim", dim, "Use dim=-1.")
    if dtype is not None:
        checks.tensor("softmax", "input", input)
        fused = dtype is torch.float32 and input.is_floating_point()
        if not fused and dtype in DTYPES and dtype != input.dtype:
            input = input.to(dtype)
    return _softmax(input, (dim, dtype, backend))  # type: ignore[no-any-return]


def check(input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> None:
    checks.floating("softmax", "input", input)
    checks.has_dims("softmax", "input", input)
    if not -input.dim() <= dim < input.dim():
        raise InputError(
            sentence(
                "softmax",
                "dim",
                f"is {dim}, out of range for shape {tuple(input.shape)}",
                f"lie in [{-input.dim()}, {input.dim() - 1}]",
                "Use dim=-1 for the last dim.",
            )
        )
    if dtype is not None and dtype not in DTYPES:
        wants = f"be a floating dtype: {', '.join(map(str, DTYPES))}"
        raise DTypeError(sentence("softmax", "dtype", f"is {dtype!r}", wants, "Leave it out."))


def check_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> None:
    checks.same_shape("softmax_backward", "grad", grad, output.shape, "the output's")
    checks.same_device("softmax_backward", "grad", grad, "output", output)


def autocast(input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> Args:
    """Float32, as torch's rule for softmax on GPUs; float64 is left alone."""
    return input, dim, dtype or (None if input.dtype == torch.float64 else torch.float32)


def last_dim_only(input: torch.Tensor, dim: int, dtype: torch.dtype | None) -> str | None:
    if dim % input.dim() != input.dim() - 1:
        return f"dim is {dim}; it reduces the last dim, {input.dim() - 1}, only"
    return kernel_result(input, dim, dtype)


def kernel_result(*args: Any) -> str | None:
    """Kernels write what they read: float64 is torch's. The last argument is the result's dtype."""
    dtype = args[-1]
    if dtype is not None and dtype not in FLOATS:
        return f"the result is {dtype}; it takes float32, float16 and bfloat16"
    return None


def last_dim_only_backward(
    grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> str | None:
    if grad.dtype != output.dtype:
        return f"grad is {grad.dtype} and output {output.dtype}; it takes one dtype for both"
    return last_dim_only(output, dim, dtype)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    x = normal(dims["shape"], rng) * dims.get("scale", 3.0)
    dim = dims.get("dim", len(dims["shape"]) - 1)
    if dims.get("masked"):  # as attention masks a row: -inf but for its last quarter
        x.narrow(dim, 0, x.shape[dim] * 3 // 4).fill_(-math.inf)
    return x.to(dtype).to(device), dim, dims.get("dtype")


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """A power of two of zeros, -inf elsewhere: every result is 0 or a power of two."""
    shape, dim = dims["shape"], dims.get("dim", len(dims["shape"]) - 1)
    n = shape[dim]
    alive = 2 ** int(torch.randint(0, int(math.log2(n)) + 1 if n else 1, (), generator=rng))
    order = torch.rand(shape, generator=rng).argsort(dim).argsort(dim)
    x = torch.where(order < alive, 0.0, -math.inf)
    return x.to(dtype).to(device), dim, dims.get("dtype")


def sample(rng: random.Random) -> dict[str, Any]:
    shape = random_shape(rng)
    dim = len(shape) - 1
    if len(shape) > 1 and rng.random() < 0.25:
        shape = (rng.randint(1, 3), rng.randint(1, 48), rng.randint(1, 12))
        dim = rng.randrange(len(shape))
    out = torch.float32 if rng.random() < 0.2 else None
    return {"shape": shape, "dim": dim, "scale": rng.choice([0.1, 3.0, 30.0]), "dtype": out}


def tolerance(
    rounding: Rounding, outputs: Args, input: torch.Tensor, dim: int, dtype: Any
) -> tuple[torch.Tensor, ...]:
    (y,) = outputs
    distance = input.amax(dim, keepdim=True) - input if input.numel() else input
    distance = torch.nan_to_num(distance, nan=0.0, posinf=0.0, neginf=0.0)
    path = sum_path(input.shape[dim])
    relative = rounding.u_out + rounding.u32 * (2 * distance + path + 8)
    return (y * relative + rounding.tiny,)


def tolerance_backward(
    rounding: Rounding,
    outputs: Args,
    grad: torch.Tensor,
    output: torch.Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """dx = y (g - sum g y) on the *rounded* y: y's own rounding enters each factor once."""
    path = sum_path(output.shape[dim])
    reach = grad.abs() + (grad * output).abs().sum(dim, keepdim=True)
    # y comes from the forward, whose relative error also grows with the distance from the maximum
    # (104 natural logs from 1 to the smallest float32); what flushes to zero costs `tiny` a term
    y_error = rounding.u_in + rounding.u32 * (2 * 104 + path + 8)
    relative = rounding.u_out + 2 * y_error + rounding.u32 * (path + 16)
    flushed = 1 + reach + output * grad.abs().sum(dim, keepdim=True)
    return (output * reach * relative + rounding.tiny * flushed,)


CASES = (
    Case("large-logits", {"shape": (3, 257), "scale": 3000.0}),
    Case("to-float32", {"shape": (3, 1000), "dtype": torch.float32}),
    Case("masked", {"shape": (3, 1000), "masked": True}),
    Case("masked-columns", {"shape": (1500, 3), "dim": 0, "masked": True}),
    Case("first-dim", {"shape": (300, 40), "dim": 0}),
    Case("middle-dim", {"shape": (2, 130, 3), "dim": 1}),
    Case("wide", {"shape": (2, 65_536)}),
    Case("widest", {"shape": (1, 262_144)}),
    Case("wide-odd", {"shape": (2, 70_001)}),
    Case("masked-wide", {"shape": (2, 40_000), "masked": True}),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 2048, 4096, 8192, 16384, 32768)),
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in EDGE_COLUMNS),
    *(Case(f"scores-{t}", {"shape": (32, t, t)}, "model") for t in (512, 2048)),
    Case("vocabulary", {"shape": (2048, 128_256)}, "model"),
    *(Case(f"decode-{t}", {"shape": (t * 32, 1, 4096)}, "decode") for t in (1, 16, 128)),
    *(Case(f"prefill-{t}", {"shape": (32, t, t)}, "prefill") for t in (512, 2048, 4096)),
    *(Case(f"plan-{n}", {"shape": (5, n)}, "plan") for n in PLAN_COLUMNS),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP_COLUMNS),
)

ERRORS = (
    BadInput(
        "integer tensor",
        lambda softmax, device: softmax(torch.ones(2, 4, dtype=torch.int64, device=device)),
        DTypeError,
        ("softmax", "input", "int64", "float16", "input.float()"),
    ),
    BadInput(
        "0-dim tensor",
        lambda softmax, device: softmax(torch.tensor(1.0, device=device)),
        InputError,
        ("softmax", "input", "0-dimensional", "input[None]"),
    ),
    BadInput(
        "dim out of range",
        lambda softmax, device: softmax(torch.ones(2, 4, device=device), 2),
        InputError,
        ("softmax", "dim", "(2, 4)", "[-2, 1]", "dim=-1"),
    ),
    BadInput(
        "integer dtype",
        lambda softmax, device: softmax(torch.ones(2, 4, device=device), -1, torch.int32),
        DTypeError,
        ("softmax", "dtype", "int32", "floating"),
    ),
    BadInput(
        "float8 dtype",
        lambda softmax, device: softmax(torch.ones(2, 4, device=device), -1, torch.float8_e4m3fn),
        DTypeError,
        ("softmax", "dtype", "float8_e4m3fn", "torch.float16"),
    ),
    BadInput(
        "unknown backend",
        lambda softmax, device: softmax(torch.ones(2, 4, device=device), backend="cuda_v3"),
        InputError,
        ("softmax", "backend", "cuda_v3", "cuda_v2"),
    ),
)

BACKWARD = Op(
    name="softmax_backward",
    summary="gradient of softmax from its output",
    schema="(Tensor grad, Tensor output, int dim, ScalarType input_dtype) -> Tensor",
    reference=reference.softmax_backward,
    outputs=lambda grad, output, dim, input_dtype: torch.empty_like(
        output, dtype=input_dtype, memory_format=torch.contiguous_format
    ),
    check=check_backward,
    backends=(
        Backend(
            "cuda_v2",
            "cuda",
            f"{HERE}.cuda_impl:prepare_backward",
            accepts=last_dim_only_backward,
            limits=f"{HERE}.cuda_impl:refuses_backward",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_backward", accepts=kernel_result),
        Backend("torch", "torch", f"{HERE}.reference:softmax_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="softmax",
    summary="softmax along any dim",
    schema="(Tensor input, int dim, ScalarType? dtype) -> Tensor",
    reference=reference.softmax,
    outputs=lambda input, dim, dtype: torch.empty_like(
        input, dtype=dtype or input.dtype, memory_format=torch.contiguous_format
    ),
    check=check,
    backends=(
        Backend(
            "cuda_v2",
            "cuda",
            f"{HERE}.cuda_impl:prepare_v2",
            accepts=last_dim_only,
            limits=f"{HERE}.cuda_impl:refuses",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare", accepts=kernel_result),
        Backend("cuda_v1", "cuda", f"{HERE}.cuda_impl:prepare_v1", accepts=last_dim_only),
        Backend("torch", "torch", f"{HERE}.reference:softmax", dtypes=None),
    ),
    public=softmax,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    rounds_as_reference=True,
    variants=({}, {"dim": -2}),
    cost=lambda dims, dtype: Cost(5.0 * math.prod(dims["shape"])),
    as_called=lambda backend, x, dim, dtype: softmax(x, dim, dtype, backend=backend),
    baselines={"vendor": lambda x, dim, dtype: torch.nn.functional.softmax(x, dim, dtype=dtype)},
    autograd=Autograd(
        BACKWARD,
        keep=("output",),
        saved=lambda kept, dtype, rest, needs: (*kept, rest[0], dtype),
        gradients=(("input",),),
    ),
    autocast=autocast,
    errors=ERRORS,
)

OPS = (OP,)
_softmax = library.register_with_backward(OP)
