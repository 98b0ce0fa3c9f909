"""layer_norm: the declaration and the public function.

What the weight and the bias may be beside the input; the result has the input's dtype:

| input | weight and bias |
| --- | --- |
| float32 | float32 |
| float16 | both float16, or both float32 |
| bfloat16 | both bfloat16, or both float32 |
| float64 (torch backend) | both float64, or both float32 |
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright import checks, library, norms
from tilewright.errors import DTypeError, InputError
from tilewright.ops.layer_norm import reference
from tilewright.shapes import (
    EDGE_COLUMNS,
    MODELS,
    PLAN_COLUMNS,
    SWEEP_COLUMNS,
    by_tokens,
    random_shape,
)
from tilewright.spec import (
    Args,
    Autograd,
    Backend,
    BadInput,
    Case,
    Cost,
    Op,
    Rounding,
    deviations_away,
    normal,
    sum_path,
)

HERE = "tilewright.ops.layer_norm"


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias over the trailing `normalized_shape` dims.

    torch.nn.functional.layer_norm's signature. Half precision is computed in float32 and rounded
    once, at the end, to the input's dtype, which autocast does not change. Weight and bias have one
    dtype, the input's or float32. A mean far above the deviation costs no digits: it is taken out
    before squares are summed.

    >>> import torch, tilewright
    >>> tilewright.layer_norm(torch.tensor([[1003.0, 1005.0]]), 2, eps=0.0)
    tensor([[-1.,  1.]])
    """
    if not isinstance(input, torch.Tensor):
        checks.tensor("layer_norm", "input", input)
    if normalized_shape.__class__ is not tuple:
        normalized_shape = norms.sizes("layer_norm", normalized_shape)
    if len(normalized_shape) != 1:  # type: ignore[arg-type]
        flat, flat_weight, flat_bias = norms.flattened(
            "layer_norm",
            tuple(normalized_shape),  # type: ignore[arg-type]
            {"input": input},
            {"weight": weight, "bias": bias},
        )
        y: torch.Tensor = _layer_norm(flat, flat_weight, flat_bias, (eps, backend))
        return y.view(input.shape)
    if not input.dim() or normalized_shape[0] != input.size(-1):  # type: ignore[index]
        raise norms.wrong_shape("layer_norm", input, normalized_shape)
    return _layer_norm(input, weight, bias, (eps, backend))  # type: ignore[no-any-return]


def check(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> None:
    checks.floating("layer_norm", "input", input)
    checks.has_dims("layer_norm", "input", input)
    norms.check_parameter("layer_norm", "weight", weight, input)
    norms.check_parameter("layer_norm", "bias", bias, input)
    norms.check_parameter_dtypes("layer_norm", input, weight, bias)
    checks.number("layer_norm", "eps", eps, at_least=0.0)


def check_backward(grad: torch.Tensor, input: torch.Tensor, *rest: Any) -> None:
    checks.same_shape("layer_norm_backward", "grad", grad, input.shape, "the input's")
    checks.same_device("layer_norm_backward", "grad", grad, "input", input)


def outputs(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def outputs_backward(
    grad: Any, input: Any, weight: Any, bias: Any, eps: float, weight_grad: bool, bias_grad: bool
) -> Any:
    def gradient(of: Any, wanted: bool) -> torch.Tensor:
        if not wanted or of is None:
            return input.new_empty(0)  # type: ignore[no-any-return]
        return torch.empty_like(of, memory_format=torch.contiguous_format)

    return outputs(input), gradient(weight, weight_grad), gradient(bias, bias_grad)


def one_dtype(input: torch.Tensor, weight: Any, bias: Any, *_: Any) -> str | None:
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != input.dtype:
            return f"{name} is {other.dtype} and input {input.dtype}; it takes one dtype for all"
    return None


def one_dtype_backward(grad: Any, input: Any, weight: Any, bias: Any, *_: Any) -> str | None:
    if grad.dtype != input.dtype:
        return f"grad is {grad.dtype} and input {input.dtype}; it takes one dtype for all"
    return one_dtype(input, weight, bias)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    """`mean` counts in deviations, of which `scale` is one."""
    shape = dims["shape"]
    x = ((normal(shape, rng) + dims.get("mean", 0.0)) * dims.get("scale", 1.0)).to(dtype)
    if "first" in dims:
        x[..., 0] = dims["first"]
    kind = dims.get("weight_dtype") or dtype
    weight, bias = (
        normal(shape[-1:], rng).to(kind).to(device) if dims.get(name, True) else None
        for name in ("weight", "bias")
    )
    return x.to(device), weight, bias, dims.get("eps", 1e-5)


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Half of a row is 2^k above its mean, half below, and eps is 0: the norm is +-1 exactly.

    Means are small multiples of 2^k, so every partial sum is exact, in any order. A row of odd
    length cannot be halved; it is constant, and its norm 0.
    """
    *leading, n = dims["shape"]
    halves = torch.arange(n) % 2 * 2 - 1 if n % 2 == 0 else torch.zeros(n, dtype=torch.long)
    sign = halves[torch.rand(*leading, n, generator=rng).argsort(-1)]
    mean = torch.tensor([0, -1, 3, 100])[torch.randint(0, 4, (*leading, 1), generator=rng)]
    power = torch.randint(-3, 4, (*leading, 1), generator=rng)
    x = ((mean + sign) * 2.0**power).to(dtype).to(device)
    weight, bias = (
        torch.randint(-4, 5, (n,), generator=rng).to(dtype).to(device) for _ in range(2)
    )
    return x, weight, bias, float(n % 2)


def sample(rng: random.Random) -> dict[str, Any]:
    mean, scale = rng.choice(
        [(0.0, 0.01), (0.0, 1.0), (0.0, 100.0), (3.0, 1.0), (1000.0, 1.0), (-1000.0, 0.01)]
    )
    return {
        "shape": random_shape(rng),
        "weight": rng.random() < 0.85,
        "bias": rng.random() < 0.85,
        "weight_dtype": rng.choice([None, None, None, torch.float32]),
        "eps": rng.choice([1e-5, 1e-6, 0.0]),
        "mean": mean,
        "scale": scale,
    }


def _rows(rounding: Rounding, input: Any, eps: float) -> tuple[Any, Any, Any, Any]:
    """(the normalised rows, 1 / deviation, what their float32 arithmetic errs at most, the mean).

    The mean is in deviations, and 0 where a kernel takes it out before it sums anything else.

    The mean comes out in two steps (notes.md), so the error is in proportion to the deviation. What
    the first step leaves is rounded once more: a mean of 10^6 deviations begins to show. Rows of
    halves may do without the first step while the squared mean is within 8 variances.
    """
    mean = input.mean(-1, keepdim=True)
    variance = (input - mean).pow(2).mean(-1, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    normed = (input - mean) * rstd
    path = sum_path(max(input.shape[-1], 2))
    far = path * Rounding.u32 * input.abs().mean(-1, keepdim=True) * rstd
    away = deviations_away(rounding, mean, variance, 8.0)
    loss = 1 + away + 1.5 * away.pow(2)  # of a variance that is a difference, in its root
    spread = normed.abs() * loss + 1 + away + far
    return normed, rstd, (path + 8) * Rounding.u32 * spread, away


def tolerance(
    rounding: Rounding, outputs: Args, input: Any, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...]:
    """The error of the normalised value through the weight, one addition, one rounding."""
    (y,) = outputs
    _, _, error, _ = _rows(rounding, input, eps)
    scale = 1.0 if weight is None else weight.abs()
    bound = y.abs() * (rounding.u_out + rounding.u32) + error * scale
    return (bound + rounding.tiny * (1 + scale),)


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Any, input: Any, weight: Any, bias: Any, eps: float,
    weight_grad: bool, bias_grad: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dx = rstd (g - mean(g) - xh mean(g xh)); dw and db sum dy xh and dy over the rows."""
    dx, dw, db = outputs
    n, rows = max(input.shape[-1], 2), max(math.prod(input.shape[:-1]), 2)
    normed, rstd, error, away = _rows(rounding, input, eps)
    g = (grad if weight is None else grad * weight).abs()

    def mean(terms: torch.Tensor) -> torch.Tensor:
        return terms.mean(-1, keepdim=True)

    sums = (sum_path(n) + 16) * rounding.u32
    reach = g + mean(g) + normed.abs() * mean(g * (normed.abs() + 1 + away))
    through = error * mean(g * normed.abs()) + normed.abs() * mean(g * error)
    bound_dx = dx.abs() * rounding.u_out + rstd * (reach * sums + through)

    # a partial sums up to sqrt(rows) terms one after another (probabilistic), then a tree
    sums = (sum_path(rows) + 16 + math.sqrt(rows)) * rounding.u32
    sums_w = (grad.abs() * (normed.abs() * sums + error)).sum_to_size(input.shape[-1:])
    sums_b = grad.abs().sum_to_size(input.shape[-1:]) * sums
    return (
        bound_dx + rounding.tiny * (1 + rstd),
        dw.abs() * rounding.u_out + (sums_w if dw.numel() else 0.0) + rounding.tiny,
        db.abs() * rounding.u_out + (sums_b if db.numel() else 0.0) + rounding.tiny,
    )


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    _, weight, bias = kept
    wants_weight = weight is not None and bool(needs.get("weight"))
    return *kept, *rest, wants_weight, bias is not None and bool(needs.get("bias"))


FAR = {"mean": 1000.0}  # deviations: float32 squares of such a row keep no digit of its variance

CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("no-bias", {"shape": (3, 1024), "bias": False}),
    Case("neither", {"shape": (3, 1024), "weight": False, "bias": False}),
    Case("float32-weight", {"shape": (3, 1024), "weight_dtype": torch.float32}),
    Case("far-mean", {"shape": (40, 1024), **FAR}),
    Case("far-mean-odd", {"shape": (40, 1000 - 1), **FAR}),
    Case("far-mean-loop", {"shape": (5, 9001), **FAR}),
    Case("far-mean-below", {"shape": (7, 4096), "mean": -1000.0, "scale": 0.01}),
    # more tiles and rows than the interpreter's 17 SMs keep resident, or an H200
    Case("many-rows", {"shape": (1200, 48)}),
    Case("wide-walk", {"shape": (20, 9_000)}),
    Case("many-rows-h200", {"shape": (33_000, 48)}, "plan"),
    Case("wide-walk-h200", {"shape": (140, 33_000)}, "plan"),
    Case("wide", {"shape": (2, 33_000)}),
    Case("far-mean-wide", {"shape": (2, 65_536), **FAR}),
    Case("widest", {"shape": (1, 262_144)}),
    Case("wide-odd", {"shape": (2, 70_001)}),
    # below and beyond what one pass over halves may be away from zero
    *(
        Case(f"mean-{mean}-{n}", {"shape": (9, n), "mean": mean})
        for mean in (2.0, 4.0)
        for n in (48, 4096, 33_024)
    ),
    # an outlier in the first element, which kernels may take for the mean
    *(Case(f"first-{n}", {"shape": (3, n), "first": 30_000.0}) for n in (48, 2048, 16384, 65536)),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 2048, 4096, 8192, 16384, 32768)),
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in EDGE_COLUMNS),
    *(Case(m.name, {"shape": (2048, m.hidden)}, "model") for m in MODELS.values()),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.hidden)),
    *(Case(f"plan-{n}", {"shape": (5, n)}, "plan") for n in PLAN_COLUMNS),
    # more of the longest rows than an H200 has clusters for, of halves and of floats
    *(Case(f"widest-walk-{n}", {"shape": (40, n)}, "plan") for n in (100_000, 262_144)),
    Case("far-mean-widest-walk", {"shape": (40, 200_000), **FAR}, "plan"),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP_COLUMNS),
)


def _x(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(2, 8, device=device, dtype=dtype)


def _w(device: str, dtype: torch.dtype = torch.float32, n: int = 8) -> torch.Tensor:
    return torch.ones(n, device=device, dtype=dtype)


ERRORS = (
    BadInput(
        "eps that is no number",
        lambda norm, device: norm(_x(device), 8, eps="small"),
        DTypeError,
        ("layer_norm", "eps", "'small'", "number"),
    ),
    BadInput(
        "negative eps",
        lambda norm, device: norm(_x(device), 8, eps=-1e-6),
        InputError,
        ("layer_norm", "eps", "-1e-06", "0 or more"),
    ),
    BadInput(
        "integer tensor",
        lambda norm, device: norm(_x(device, torch.int32), 8),
        DTypeError,
        ("layer_norm", "input", "int32", "float16", "input.float()"),
    ),
    BadInput(
        "0-dim tensor",
        lambda norm, device: norm(torch.tensor(1.0, device=device), (1,)),
        InputError,
        ("layer_norm", "normalized_shape", "()", "trailing"),
    ),
    BadInput(
        "wrong last dim",
        lambda norm, device: norm(_x(device), (7,)),
        InputError,
        ("layer_norm", "normalized_shape", "(7,)", "(2, 8)", "input.shape[-1:]"),
    ),
    BadInput(
        "wrong trailing dims",
        lambda norm, device: norm(_x(device), (3, 8)),
        InputError,
        ("layer_norm", "normalized_shape", "(3, 8)", "(2, 8)", "input.shape[-1:]"),
    ),
    BadInput(
        "normalized_shape that is no size",
        lambda norm, device: norm(_x(device), 8.0),
        DTypeError,
        ("layer_norm", "normalized_shape", "8.0", "float", "int"),
    ),
    BadInput(
        "weight of another size",
        lambda norm, device: norm(_x(device), 8, _w(device, n=4)),
        InputError,
        ("layer_norm", "weight", "(4,)", "(8,)"),
    ),
    BadInput(
        "bias of another size",
        lambda norm, device: norm(_x(device), 8, None, _w(device, n=4)),
        InputError,
        ("layer_norm", "bias", "(4,)", "(8,)"),
    ),
    BadInput(
        "flat weight for two dims",
        lambda norm, device: norm(_x(device), (2, 8), _w(device, n=16)),
        InputError,
        ("layer_norm", "weight", "(16,)", "(2, 8)"),
    ),
    BadInput(
        "integer weight",
        lambda norm, device: norm(_x(device), 8, _w(device, torch.int32)),
        DTypeError,
        ("layer_norm", "weight", "int32"),
    ),
    BadInput(
        "integer bias",
        lambda norm, device: norm(_x(device), 8, None, _w(device, torch.int64)),
        DTypeError,
        ("layer_norm", "bias", "int64"),
    ),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(_x(device), 8, _w("meta")),
        InputError,
        ("layer_norm", "weight", "meta", "input", "weight.to(input.device)"),
    ),
    BadInput(
        "bias on another device",
        lambda norm, device: norm(_x(device), 8, _w(device), _w("meta")),
        InputError,
        ("layer_norm", "bias", "meta", "input", "bias.to(input.device)"),
    ),
    BadInput(
        "weight of another half precision",
        lambda norm, device: norm(_x(device, torch.float16), 8, _w(device, torch.bfloat16)),
        DTypeError,
        ("layer_norm", "weight", "bfloat16", "float16", "or float32", "weight.to(input.dtype)"),
    ),
    BadInput(
        "weight and bias of two dtypes",
        lambda norm, device: norm(
            _x(device, torch.float16), 8, _w(device, torch.float16), _w(device)
        ),
        DTypeError,
        ("layer_norm", "bias", "float32", "weight", "float16", "bias.to(weight.dtype)"),
    ),
    BadInput(
        "unknown backend",
        lambda norm, device: norm(_x(device), 8, backend="tritn"),
        InputError,
        ("layer_norm", "backend", "tritn", "triton"),
    ),
)


def _torch_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _called(backend: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return layer_norm(x, x.shape[-1:], weight, bias, eps, backend=backend)


BACKWARD = Op(
    name="layer_norm_backward",
    summary="gradients of layer_norm",
    schema="(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, float eps, "
    "bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
    reference=reference.layer_norm_backward,
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
        Backend("torch", "torch", f"{HERE}.reference:layer_norm_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="layer_norm",
    summary="(x - mean) / deviation * weight + bias over the trailing dims",
    schema="(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    reference=reference.layer_norm,
    outputs=outputs,
    check=check,
    backends=(
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_impl:prepare",
            accepts=one_dtype,
            limits=f"{HERE}.cuda_impl:refuses",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare"),
        Backend("torch", "torch", f"{HERE}.reference:layer_norm", dtypes=None),
    ),
    public=layer_norm,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    cost=lambda dims, dtype: Cost(7.0 * math.prod(dims["shape"])),
    as_called=_called,
    baselines={"vendor": _torch_layer_norm},
    autograd=Autograd(
        BACKWARD, ("input", "weight", "bias"), saved, (("input",), ("weight",), ("bias",))
    ),
    errors=ERRORS,
)

OPS = (OP,)
_layer_norm = library.register_with_backward(OP)
