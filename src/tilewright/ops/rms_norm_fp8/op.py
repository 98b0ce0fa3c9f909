"""rms_norm_fp8: the declaration and the public function."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright import checks, fp8, fp8_norms, library, norms
from tilewright.errors import InputError
from tilewright.fp8_norms import PEAK, ones
from tilewright.ops.rms_norm_fp8 import reference
from tilewright.shapes import random_shape
from tilewright.spec import Args, Backend, BadInput, Case, Cost, Op, Rounding, normal, sum_path

HERE = "tilewright.ops.rms_norm_fp8"
EPS = {torch.float64: torch.finfo(torch.float64).eps}  # of the dtype computed in, as rms_norm
EPS_FLOAT32 = torch.finfo(torch.float32).eps


def rms_norm_fp8(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    format: str = "e4m3",
    scaling: str = "row",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm quantised to fp8 in the same kernel: (q, scale), and q.float() * scale is the norm.

    The float32 result is quantised, without a rounding to the input's dtype. format is "e4m3"
    (torch.float8_e4m3fn) or "e5m2" (torch.float8_e5m2). scale is float32: the largest magnitude
    over the format's largest number; 1 where that is zero or not finite. It has shape (..., 1) with
    scaling="row", (..., ceil(columns / 128)) with "group", () with "tensor". q saturates; what is
    not finite becomes NaN. Forward only: backward through it raises.

    >>> import torch, tilewright
    >>> q, scale = tilewright.rms_norm_fp8(torch.tensor([[3.0, 4.0]]), 2, eps=0.0)
    >>> q.float(), scale
    (tensor([[320., 448.]]), tensor([[0.0025]]))
    """
    if not isinstance(input, torch.Tensor):
        checks.tensor("rms_norm_fp8", "input", input)
    shape = norms.sizes("rms_norm_fp8", normalized_shape)
    if eps is None:
        eps = EPS.get(input.dtype, EPS_FLOAT32)
    rest = (eps, weight_offset, format, scaling, backend)
    if len(shape) != 1:
        x, w = norms.flattened("rms_norm_fp8", shape, {"input": input}, {"weight": weight})
        q, scale = _rms_norm_fp8(x, w, rest)
        return q.view(input.shape), scale
    if not input.dim() or shape[0] != input.size(-1):
        raise norms.wrong_shape("rms_norm_fp8", input, shape)
    return _rms_norm_fp8(input, weight, rest)  # type: ignore[no-any-return]


def check(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    format: str,
    scaling: str,
) -> None:
    checks.floating("rms_norm_fp8", "input", input)
    checks.has_dims("rms_norm_fp8", "input", input)
    norms.check_parameter("rms_norm_fp8", "weight", weight, input)
    checks.number("rms_norm_fp8", "eps", eps, at_least=0.0)
    checks.number("rms_norm_fp8", "weight_offset", weight_offset)
    fp8.check_options("rms_norm_fp8", format, scaling)


def outputs(
    input: torch.Tensor, weight: Any, eps: float, offset: float, format: str, scaling: str
) -> Any:
    return fp8.empty_outputs(input, format, scaling)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    shape, bad = dims["shape"], dims.get("bad")
    x = normal(shape, rng) * dims.get("scale", 1.0)
    if bad is not None:  # in the middle row, or another: its number, or a whole row of zeros
        x[dims.get("bad_row", len(x) // 2), slice(None) if bad == 0 else shape[-1] // 2] = bad
    kind, weight = dims.get("weight_dtype") or dtype, None
    if dims.get("weight", True):
        weight = normal(shape[-1:], rng).to(kind).to(device)
    options = dims.get("format", "e4m3"), dims.get("scaling", "row")
    return x.to(dtype).to(device), weight, dims.get("eps", 1e-6), dims.get("offset", 0.0), *options


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Rows of +-2^k and eps 0: the norm is +-w exactly. The largest w makes the scale 1/16."""
    shape, options = dims["shape"], (dims.get("format", "e4m3"), dims.get("scaling", "row"))
    sign = torch.randint(0, 2, shape, generator=rng) * 2 - 1
    power = torch.randint(-3, 4, (*shape[:-1], 1), generator=rng)
    weight = torch.randint(-28, 29, shape[-1:], generator=rng).float()
    weight[:: fp8.GROUP] = 28.0
    if options[0] == "e5m2":
        weight *= 2.0**7
    return (
        (sign * 2.0**power).to(dtype).to(device), weight.to(dtype).to(device), 0.0, 0.0, *options
    )  # fmt: skip


def bit_inputs(device: str) -> Iterator[tuple[str, Args]]:
    """Every float16 number as a weight, under rows of ones: the norm is the weight, exactly."""
    for name, options, weight in fp8.every_float16(device):
        x = torch.ones(2, len(weight), dtype=torch.float16, device=device)
        yield name, (x, weight.to(device), 0.0, 0.0, *options)


def sample(rng: random.Random) -> dict[str, Any]:
    return {
        "shape": random_shape(rng),
        "weight": rng.random() < 0.85,
        "weight_dtype": rng.choice([None, None, None, torch.float32]),
        "offset": rng.choice([0.0, 0.0, 1.0]),
        "eps": rng.choice([1e-6, 1e-5, 0.0]),
        "scale": rng.choice([0.01, 1.0, 100.0]),
        "format": rng.choice(list(fp8.FORMATS)),
        "scaling": rng.choice(fp8.SCALINGS),
    }


def tolerance(
    rounding: Rounding, outputs: Args, input: Any, weight: Any, eps: float, offset: float,
    format: str, scaling: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The norm is off as rms_norm is in float32; fp8.error_bounds says what that does to both."""
    y = reference.unrounded(input, weight, eps, offset)
    factor = 1.0 if weight is None else (weight + offset).abs()
    inside = (sum_path(max(input.shape[-1], 2)) / 2 + 9) * fp8.U32
    error = y.abs() * inside + torch.finfo(torch.float32).tiny * (1 + factor)
    return fp8.error_bounds(y, error, format, scaling)


CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("eps-zero-tensor", {"shape": (5, 250), "eps": 0.0, "scaling": "tensor"}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("mixed", {"shape": (3, 1024), "weight_dtype": torch.float32}),
    Case("gemma", {"shape": (3, 1024), "offset": 1.0}),
    # more tiles than the interpreter's 17 SMs keep resident
    Case("walk", {"shape": (4800, 48)}),
    Case("walk-group", {"shape": (40, 8000), "scaling": "group"}),
    Case("walk-tensor", {"shape": (1200, 48), "scaling": "tensor", "weight": False, **PEAK}),
    *fp8_norms.CASES,
)


ERRORS = (
    *fp8_norms.mistakes("rms_norm_fp8"),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(ones(device)[0], (8,), torch.ones(8, device="meta")),
        InputError,
        ("rms_norm_fp8", "weight", "meta", "input", "weight.to(input.device)"),
    ),
)


def _called(
    backend: Any, x: Any, weight: Any, eps: float, offset: float, format: str, scaling: str
) -> Any:
    return rms_norm_fp8(
        x, x.shape[-1:], weight, eps, weight_offset=offset, format=format, scaling=scaling,
        backend=backend,
    )  # fmt: skip


OP = Op(
    name="rms_norm_fp8",
    summary="rms_norm quantised to fp8, with its scales",
    schema="(Tensor input, Tensor? weight, float eps, float weight_offset, str format, "
    "str scaling) -> (Tensor, Tensor)",
    reference=reference.rms_norm_fp8,
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
        Backend("torch", "torch", f"{HERE}.reference:rms_norm_fp8", dtypes=None),
    ),
    public=rms_norm_fp8,
    inputs=inputs,
    exact_inputs=exact_inputs,
    bit_inputs=bit_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    variants=tuple({"scaling": scaling} for scaling in fp8.SCALINGS),
    cost=lambda dims, dtype: Cost(10.0 * math.prod(dims["shape"])),
    as_called=_called,
    errors=ERRORS,
)

OPS = (OP,)
_rms_norm_fp8 = library.register_with_backward(OP)
