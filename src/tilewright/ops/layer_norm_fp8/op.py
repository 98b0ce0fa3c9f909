"""layer_norm_fp8: the declaration and the public function."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright import checks, fp8, fp8_norms, library, norms
from tilewright.errors import DTypeError, InputError
from tilewright.fp8_norms import PEAK, ones
from tilewright.ops.layer_norm_fp8 import reference
from tilewright.shapes import random_shape
from tilewright.spec import (
    Args,
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

HERE = "tilewright.ops.layer_norm_fp8"


def layer_norm_fp8(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    format: str = "e4m3",
    scaling: str = "row",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """layer_norm quantised to fp8 in the same kernel: (q, scale), q.float() * scale is the norm.

    The float32 result is quantised, without a rounding to the input's dtype. format is "e4m3"
    (torch.float8_e4m3fn) or "e5m2" (torch.float8_e5m2). scale is float32: the largest magnitude
    over the format's largest number; 1 where that is zero or not finite. It has shape (..., 1) with
    scaling="row", (..., ceil(columns / 128)) with "group", () with "tensor". q saturates; what is
    not finite becomes NaN. Forward only: backward through it raises.

    >>> import torch, tilewright
    >>> q, scale = tilewright.layer_norm_fp8(torch.tensor([[1003.0, 1005.0]]), 2, eps=0.0)
    >>> q.float(), scale
    (tensor([[-448.,  448.]]), tensor([[0.0022]]))
    """
    if not isinstance(input, torch.Tensor):
        checks.tensor("layer_norm_fp8", "input", input)
    shape = norms.sizes("layer_norm_fp8", normalized_shape)
    rest = (eps, format, scaling, backend)
    if len(shape) != 1:
        x, w, b = norms.flattened(
            "layer_norm_fp8", shape, {"input": input}, {"weight": weight, "bias": bias}
        )
        q, scale = _layer_norm_fp8(x, w, b, rest)
        return q.view(input.shape), scale
    if not input.dim() or shape[0] != input.size(-1):
        raise norms.wrong_shape("layer_norm_fp8", input, shape)
    return _layer_norm_fp8(input, weight, bias, rest)  # type: ignore[no-any-return]


def check(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    format: str,
    scaling: str,
) -> None:
    checks.floating("layer_norm_fp8", "input", input)
    checks.has_dims("layer_norm_fp8", "input", input)
    norms.check_parameter("layer_norm_fp8", "weight", weight, input)
    norms.check_parameter("layer_norm_fp8", "bias", bias, input)
    norms.check_parameter_dtypes("layer_norm_fp8", input, weight, bias)
    checks.number("layer_norm_fp8", "eps", eps, at_least=0.0)
    fp8.check_options("layer_norm_fp8", format, scaling)


def outputs(
    input: torch.Tensor, weight: Any, bias: Any, eps: float, format: str, scaling: str
) -> Any:
    return fp8.empty_outputs(input, format, scaling)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    """`mean` counts in deviations, of which `scale` is one."""
    shape, bad = dims["shape"], dims.get("bad")
    x = (normal(shape, rng) + dims.get("mean", 0.0)) * dims.get("scale", 1.0)
    if bad is not None:  # in the middle row, or another: its number, or a whole row of zeros
        x[dims.get("bad_row", len(x) // 2), slice(None) if bad == 0 else shape[-1] // 2] = bad
    kind = dims.get("weight_dtype") or dtype
    weight, bias = (
        normal(shape[-1:], rng).to(kind).to(device) if dims.get(name, True) else None
        for name in ("weight", "bias")
    )
    options = dims.get("format", "e4m3"), dims.get("scaling", "row")
    return x.to(dtype).to(device), weight, bias, dims.get("eps", 1e-5), *options


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Half of a row is 2^k above its mean, half below, and eps is 0: the norm is +-w + b exactly.

    A row of odd length cannot be halved; it is constant, and its norm b. The largest b makes the
    scale 1/16.
    """
    (*leading, n), options = dims["shape"], (dims.get("format", "e4m3"), dims.get("scaling", "row"))
    halves = torch.arange(n) % 2 * 2 - 1 if n % 2 == 0 else torch.zeros(n, dtype=torch.long)
    sign = halves[torch.rand(*leading, n, generator=rng).argsort(-1)]
    mean = torch.tensor([0, -1, 3, 100])[torch.randint(0, 4, (*leading, 1), generator=rng)]
    power = torch.randint(-3, 4, (*leading, 1), generator=rng)
    x = ((mean + sign) * 2.0**power).to(dtype).to(device)
    weight, bias = (torch.randint(-14, 15, (n,), generator=rng).float() for _ in range(2))
    weight[:: fp8.GROUP], bias[:: fp8.GROUP] = 0.0, 28.0
    if options[0] == "e5m2":
        weight, bias = weight * 2.0**7, bias * 2.0**7
    return x, weight.to(dtype).to(device), bias.to(dtype).to(device), float(n % 2), *options


def bit_inputs(device: str) -> Iterator[tuple[str, Args]]:
    """Every float16 number as a bias, under rows of zeros: the norm is the bias, exactly."""
    for name, options, bias in fp8.every_float16(device):
        x = torch.zeros(2, len(bias), dtype=torch.float16, device=device)
        yield name, (x, None, bias.to(device), 1e-5, *options)


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
        "format": rng.choice(list(fp8.FORMATS)),
        "scaling": rng.choice(fp8.SCALINGS),
    }


def tolerance(
    rounding: Rounding, outputs: Args, input: Any, weight: Any, bias: Any, eps: float,
    format: str, scaling: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The norm is off as layer_norm is in float32; fp8.error_bounds says what that does to both.

    Rows of halves may take their moments around zero while the mean is within a deviation, or
    around their first element: the variance is a difference then, and so is what is normed.
    """
    y = reference.unrounded(input, weight, bias, eps)
    mean, first = input.mean(-1, keepdim=True), input[..., :1]
    centred = input - mean
    variance = centred.pow(2).mean(-1, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    path = sum_path(max(input.shape[-1], 2))
    away = deviations_away(rounding, mean, variance, 1.0)
    loss = 1 + away + 1.5 * away.pow(2)  # of a variance that is a difference, in its root
    apart = (input - first).abs().mean(-1, keepdim=True) * rstd + away
    far = path * fp8.U32 * input.abs().mean(-1, keepdim=True) * rstd  # a mean of 10^6 deviations
    error = (path + 8) * fp8.U32 * ((centred * rstd).abs() * loss + 1 + apart + far)
    factor = 1.0 if weight is None else weight.abs()
    error = error * factor + 2 * fp8.U32 * y.abs()
    error = error + torch.finfo(torch.float32).tiny * (1 + factor)
    return fp8.error_bounds(y, error, format, scaling)


FAR = {"mean": 1000.0}  # deviations: float32 squares of such a row keep no digit of its variance
CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("eps-zero-tensor", {"shape": (5, 250), "eps": 0.0, "scaling": "tensor"}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("mixed", {"shape": (3, 1024), "weight_dtype": torch.float32}),
    Case("no-bias", {"shape": (3, 1000), "bias": False}),
    Case("neither", {"shape": (3, 1000), "weight": False, "bias": False, "scaling": "group"}),
    *(Case(f"far-mean-{s}", {"shape": (7, 999), "scaling": s, **FAR}) for s in fp8.SCALINGS),
    *(
        Case(f"far-mean-wide-{s}", {"shape": (2, 33_000), "scaling": s, **FAR})
        for s in fp8.SCALINGS
    ),
    # more tiles than the interpreter's 17 SMs keep resident
    Case("walk", {"shape": (4800, 48)}),
    Case("walk-group", {"shape": (40, 8000), "scaling": "group"}),
    Case(
        "walk-tensor",
        {
            "shape": (1200, 48),
            "scaling": "tensor",
            "weight": False,
            "bias": False,
            **PEAK,
        },
    ),
    # below and beyond what one pass over halves may be away from zero
    *(
        Case(f"mean-{mean}-{n}", {"shape": (7, n), "mean": mean, "weight": False, "bias": False})
        for mean in (0.9, 1.1, 2.5)
        for n in (1000, 4096)
    ),
    *(Case(f"far-mean-packs-{s}", {"shape": (7, 1000), **FAR, "scaling": s}) for s in fp8.SCALINGS),
    *fp8_norms.CASES,
)


ERRORS = (
    *fp8_norms.mistakes("layer_norm_fp8"),
    BadInput(
        "bias of another size",
        lambda norm, device: norm(ones(device)[0], 8, None, ones(device)[1][:4]),
        InputError,
        ("layer_norm_fp8", "bias", "(4,)", "(8,)"),
    ),
    BadInput(
        "weight and bias of two dtypes",
        lambda norm, device: norm(
            ones(device)[0].half(),
            8,
            ones(device)[1],
            ones(device)[1].half(),
        ),
        DTypeError,
        ("layer_norm_fp8", "bias", "float16", "float32"),
    ),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(ones(device)[0], (8,), torch.ones(8, device="meta")),
        InputError,
        ("layer_norm_fp8", "weight", "meta", "input", "weight.to(input.device)"),
    ),
)


def _called(
    backend: Any, x: Any, weight: Any, bias: Any, eps: float, format: str, scaling: str
) -> Any:
    return layer_norm_fp8(
        x, x.shape[-1:], weight, bias, eps, format=format, scaling=scaling, backend=backend
    )


OP = Op(
    name="layer_norm_fp8",
    summary="layer_norm quantised to fp8, with its scales",
    schema="(Tensor input, Tensor? weight, Tensor? bias, float eps, str format, str scaling) "
    "-> (Tensor, Tensor)",
    reference=reference.layer_norm_fp8,
    outputs=outputs,
    check=check,
    backends=(
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_impl:prepare",
            min_sm=89,
            accepts=fp8_norms.one_dtype,
            limits=f"{HERE}.cuda_impl:refuses",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare", min_sm=89),
        Backend("torch", "torch", f"{HERE}.reference:layer_norm_fp8", dtypes=None),
    ),
    public=layer_norm_fp8,
    inputs=inputs,
    exact_inputs=exact_inputs,
    bit_inputs=bit_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    variants=tuple({"scaling": scaling} for scaling in fp8.SCALINGS),
    cost=lambda dims, dtype: Cost(13.0 * math.prod(dims["shape"])),
    as_called=_called,
    errors=ERRORS,
)

OPS = (OP,)
_layer_norm_fp8 = library.register_with_backward(OP)
