"""rms_norm_fp8: the declaration and the public function."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright import checks, fp8, library, norms
from tilewright.errors import DTypeError, InputError
from tilewright.ops.rms_norm_fp8 import reference
from tilewright.shapes import EDGE_COLUMNS, MODELS, SWEEP_COLUMNS, by_tokens, random_shape
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
    if bad is not None:  # in the middle row: its number, or a whole row of zeros
        x[len(x) // 2, slice(None) if bad == 0 else shape[-1] // 2] = bad
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
    for name, options, weight in fp8.every_float16():
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


PEAK = {"bad": 1000.0}  # the largest magnitude, in a tile that is not the last of its program
_BAD = {"zero-row": 0.0, "nan": math.nan, "inf": math.inf}

CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("eps-zero-tensor", {"shape": (5, 250), "eps": 0.0, "scaling": "tensor"}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("mixed", {"shape": (3, 1024), "weight_dtype": torch.float32}),
    Case("gemma", {"shape": (3, 1024), "offset": 1.0}),
    # more tiles than the interpreter's 17 SMs keep resident
    Case("walk", {"shape": (4800, 48)}),
    Case("walk-group", {"shape": (150, 1100), "scaling": "group"}),
    Case("walk-tensor", {"shape": (2400, 48), "scaling": "tensor", "weight": False, **PEAK}),
    *(
        Case(f"{name}-{scaling}", {"shape": (5, 384), "bad": bad, "scaling": scaling})
        for name, bad in _BAD.items()
        for scaling in fp8.SCALINGS
    ),
    *(
        Case(f"{name}-{scaling}-{form}", {"shape": shape, "scaling": scaling, "format": form})
        for name, shape in (("wide", (2, 33_000)), ("wide-odd", (2, 40_001)), ("whole", (3, 2048)))
        for scaling in fp8.SCALINGS
        for form in fp8.FORMATS
    ),
    # than an H200 does
    Case("walk-h200", {"shape": (40_000, 48)}),
    Case("walk-h200-group", {"shape": (33_000, 1100), "scaling": "group"}),
    Case("walk-h200-tensor", {"shape": (33_000, 300), "scaling": "tensor"}),
    Case("widest", {"shape": (1, 262_144)}),
    Case("widest-group", {"shape": (1, 262_144), "scaling": "group"}),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 2048, 4096, 8192, 16384, 32768)),
    *(Case(f"group-{n}", {"shape": (2, n), "scaling": "group"}) for n in (256, 4096, 8192, 16384)),
    *(Case(f"tensor-{n}", {"shape": (2, n), "scaling": "tensor"}) for n in (64, 4096, 8192, 16384)),
    *(
        Case(f"columns-{n}", {"shape": (3, n), "scaling": fp8.SCALINGS[i % 3]})
        for i, n in enumerate(EDGE_COLUMNS)
    ),
    *(Case(m.name, {"shape": (2048, m.hidden)}, "model") for m in MODELS.values()),
    *(
        Case(f"Llama-3-8B, {s}", {"shape": (2048, 4096), "scaling": s}, "model")
        for s in ("group", "tensor")
    ),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.hidden)),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP_COLUMNS),
    *(
        Case(f"sweep-{n}-group", {"shape": (2**27 // n, n), "scaling": "group"}, "sweep")
        for n in SWEEP_COLUMNS
    ),
)


def _ones(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 8, device=device), torch.ones(8, device=device)


ERRORS = (
    BadInput(
        "unknown format",
        lambda norm, device: norm(_ones(device)[0], 8, format="fp8"),
        InputError,
        ("rms_norm_fp8", "format", "'fp8'", "'e4m3', 'e5m2'", "format='e4m3'"),
    ),
    BadInput(
        "a dtype for a format",
        lambda norm, device: norm(_ones(device)[0], 8, format=torch.float8_e4m3fn),
        InputError,
        ("rms_norm_fp8", "format", "torch.float8_e4m3fn", "'e4m3'"),
    ),
    BadInput(
        "unknown scaling",
        lambda norm, device: norm(_ones(device)[0], 8, scaling="column"),
        InputError,
        ("rms_norm_fp8", "scaling", "'column'", "'row', 'group', 'tensor'", "scaling='row'"),
    ),
    BadInput(
        "negative eps",
        lambda norm, device: norm(_ones(device)[0], 8, eps=-1e-6),
        InputError,
        ("rms_norm_fp8", "eps", "-1e-06", "0 or more"),
    ),
    BadInput(
        "integer tensor",
        lambda norm, device: norm(_ones(device)[0].int(), 8),
        DTypeError,
        ("rms_norm_fp8", "input", "int32", "float16", "input.float()"),
    ),
    BadInput(
        "an input that is fp8 already",
        lambda norm, device: norm(_ones(device)[0].to(torch.float8_e4m3fn), 8),
        DTypeError,
        ("rms_norm_fp8", "input", "float8_e4m3fn", "bfloat16"),
    ),
    BadInput(
        "wrong last dim",
        lambda norm, device: norm(_ones(device)[0], (7,)),
        InputError,
        ("rms_norm_fp8", "normalized_shape", "(7,)", "(2, 8)", "input.shape[-1:]"),
    ),
    BadInput(
        "weight of another size",
        lambda norm, device: norm(_ones(device)[0], (8,), _ones(device)[1][:4]),
        InputError,
        ("rms_norm_fp8", "weight", "(4,)", "(8,)"),
    ),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(_ones(device)[0], (8,), torch.ones(8, device="meta")),
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
