"""rms_norm and its residual-add form: the declarations and the public function.

One public function stands on two registered ops, because an optional output makes a bad schema.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright import checks, library, norms
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.ops.rms_norm import reference
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
    normal,
    sum_path,
)

HERE = "tilewright.ops.rms_norm"
CASTINGS = ("torch", "llama", "gemma")
EPS = {torch.float64: torch.finfo(torch.float64).eps}  # of the dtype computed in, as torch does
EPS_FLOAT32 = torch.finfo(torch.float32).eps


def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: str = "torch",
    backend: str | None = None,
) -> Any:
    """x / rms(x) * (weight + weight_offset) over the trailing `normalized_shape` dims.

    torch.nn.functional.rms_norm's signature first. With `residual` it returns (output, new
    residual): the norm of input + residual, and that sum. Half precision is computed in float32.

    casting="torch" and "gemma" round once, at the end, to the input's dtype (Gemma's weight is
    stored minus one: weight_offset=1.0). casting="llama" rounds the normalised value to the
    input's dtype before it meets the weight, and returns what that product promotes to. eps=None is
    the epsilon of the dtype computed in, as torch does. Under autocast the input's dtype is kept.

    >>> import torch, tilewright
    >>> tilewright.rms_norm(torch.tensor([[3.0, 4.0]]), 2, eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    if not isinstance(input, torch.Tensor):
        checks.tensor("rms_norm", "input", input)
    if normalized_shape.__class__ is not tuple:
        normalized_shape = norms.sizes("rms_norm", normalized_shape)
    if eps is None:
        eps = EPS.get(input.dtype, EPS_FLOAT32)
    if len(normalized_shape) != 1:  # type: ignore[arg-type]
        return _over_several_dims(
            input,
            tuple(normalized_shape),  # type: ignore[arg-type]
            weight,
            eps,
            residual,
            weight_offset,
            casting,
            backend,  # type: ignore[arg-type]
        )
    if not input.dim() or normalized_shape[0] != input.size(-1):  # type: ignore[index]
        raise norms.wrong_shape("rms_norm", input, normalized_shape)
    if residual is None:
        return _rms_norm(input, weight, (eps, weight_offset, casting, backend))
    return _add_rms_norm(input, residual, weight, (eps, weight_offset, casting, backend))


def _over_several_dims(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    weight_offset: float,
    casting: str,
    backend: str | None,
) -> Any:
    """normalized_shape of several dims: flatten them into one."""
    flat, other, flat_weight = norms.flattened(
        "rms_norm", shape, {"input": input, "residual": residual}, {"weight": weight}
    )
    if other is None:
        y = _rms_norm(flat, flat_weight, (eps, weight_offset, casting, backend))
        return y.view(input.shape)
    y, total = _add_rms_norm(flat, other, flat_weight, (eps, weight_offset, casting, backend))
    return y.view(input.shape), total.view(input.shape)


def check(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> None:
    checks.floating("rms_norm", "input", input)
    checks.has_dims("rms_norm", "input", input)
    norms.check_parameter("rms_norm", "weight", weight, input)
    checks.number("rms_norm", "eps", eps, at_least=0.0)
    checks.number("rms_norm", "weight_offset", weight_offset)
    if not isinstance(casting, str) or casting not in CASTINGS:
        names = ", ".join(repr(name) for name in CASTINGS)
        raise InputError(
            sentence("rms_norm", "casting", f"is {casting!r}", f"be one of {names}", "See help().")
        )


def check_add(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> None:
    check(input, *rest)
    checks.floating("rms_norm", "residual", residual)
    checks.same_shape("rms_norm", "residual", residual, input.shape, "the input's")
    checks.same_dtype("rms_norm", "residual", residual, "input", input)
    checks.same_device("rms_norm", "residual", residual, "input", input)


def check_backward(
    grad: torch.Tensor, grad_residual: torch.Tensor | None, input: torch.Tensor, *rest: Any
) -> None:
    for name, value in (("grad", grad), ("grad_residual", grad_residual)):
        if value is not None:
            checks.same_shape("rms_norm_backward", name, value, input.shape, "the input's")
            checks.same_device("rms_norm_backward", name, value, "input", input)


def outputs(input: torch.Tensor, weight: Any, eps: float, offset: float, casting: str) -> Any:
    dtype = reference.result_dtype(input, weight, casting)
    return torch.empty_like(input, dtype=dtype, memory_format=torch.contiguous_format)


def outputs_add(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> Any:
    total = torch.empty_like(input, memory_format=torch.contiguous_format)
    return outputs(input, *rest), total


def outputs_backward(
    grad: Any, grad_residual: Any, input: Any, weight: Any, eps: float, offset: float, need: bool
) -> Any:
    dx = torch.empty_like(input, memory_format=torch.contiguous_format)
    if not need or weight is None:
        return dx, input.new_empty(0)
    return dx, torch.empty_like(weight, memory_format=torch.contiguous_format)


def one_dtype(input: torch.Tensor, weight: torch.Tensor | None, *_: Any) -> str | None:
    if weight is not None and weight.dtype != input.dtype:
        return f"weight is {weight.dtype} and input {input.dtype}; it takes one dtype for both"
    return None


def one_dtype_add(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> str | None:
    return one_dtype(input, *rest)


def one_dtype_backward(
    grad: Any, grad_residual: Any, input: Any, weight: Any, *_: Any
) -> str | None:
    for name, value in (("grad", grad), ("grad_residual", grad_residual)):
        if value is not None and value.dtype != input.dtype:
            return f"{name} is {value.dtype} and input {input.dtype}; it takes one dtype for both"
    return one_dtype(input, weight)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    shape = dims["shape"]
    x = (normal(shape, rng) * dims.get("scale", 1.0)).to(dtype).to(device)
    kind, weight = dims.get("weight_dtype") or dtype, None
    if dims.get("weight", True):
        weight = normal(shape[-1:], rng).to(kind).to(device)
    casting = dims.get("casting", "torch")
    return x, weight, dims.get("eps", 1e-6), dims.get("offset", 0.0), casting


def inputs_add(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    x, *rest = inputs(dims, dtype, device, rng)
    return x, normal(dims["shape"], rng).to(dtype).to(device), *rest


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Rows of +-2^k and eps 0: the norm is +-1 exactly, in any order of summation."""
    shape = dims["shape"]
    sign = torch.randint(0, 2, shape, generator=rng) * 2 - 1
    power = torch.randint(-3, 4, (*shape[:-1], 1), generator=rng)
    x = (sign * 2.0**power).to(dtype).to(device)
    weight = torch.randint(-4, 5, shape[-1:], generator=rng).to(dtype).to(device)
    return x, weight, 0.0, float(dims.get("offset", 0.0)), dims.get("casting", "torch")


def exact_inputs_add(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    x, *rest = exact_inputs(dims, dtype, device, rng)
    return x, x * torch.randint(0, 2, (), generator=rng).to(x), *rest


def sample(rng: random.Random) -> dict[str, Any]:
    return {
        "shape": random_shape(rng),
        "weight": rng.random() < 0.85,
        "weight_dtype": rng.choice([None, None, None, torch.float32]),
        "casting": rng.choice(CASTINGS),
        "offset": rng.choice([0.0, 0.0, 1.0]),
        "eps": rng.choice([1e-6, 1e-5, 0.0]),
        "scale": rng.choice([0.01, 1.0, 100.0]),
    }


def tolerance(
    rounding: Rounding, outputs: Args, input: Any, weight: Any, eps: Any, offset: Any, casting: str
) -> tuple[torch.Tensor, ...]:
    """float32 inside, a sum of non-negative terms, one rounding ("llama": a second one)."""
    (y,) = outputs
    n = max(input.shape[-1], 2)
    inside = (sum_path(n) / 2 + 8) * rounding.u32
    first = rounding.u_in if casting == "llama" else 0.0
    scale = 1.0 if weight is None else (weight + offset).abs()
    steps = rounding.tiny * (1 + scale)
    if casting == "llama":  # the first rounding is to the input's dtype, which may be coarser
        steps = steps + rounding.tiny_in * scale
    return (y.abs() * (rounding.u_out + first + inside) + steps,)


def tolerance_add(
    rounding: Rounding, outputs: Args, input: Any, residual: Any, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """The sum is rounded before the norm: once in the element, once more through the rms."""
    y, total = outputs
    weight, eps, offset, _ = rest
    (bound,) = tolerance(rounding, (y,), total, *rest)
    rstd = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    scale = 1.0 if weight is None else (weight + offset).abs()
    bound = bound + 2 * rounding.u_in * y.abs() + rounding.tiny_in * rstd * scale
    return bound, rounding.u_in * total.abs() + rounding.tiny


def tolerance_backward(
    rounding: Rounding, outputs: Args, grad: Any, grad_residual: Any, input: Any, weight: Any,
    eps: float, offset: float, need: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dx = rstd (g - xh mean(g xh)), dw = sum over rows of dy xh; both sums in float32.

    After a residual add the saved sum carries its own rounding into every factor.
    """
    dx, dw = outputs
    n, rows = max(input.shape[-1], 2), max(math.prod(input.shape[:-1]), 2)
    rstd = torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + eps)
    normed = input * rstd
    g = grad if weight is None else grad * (weight + offset)
    reach = rstd * (g.abs() + normed.abs() * (g * normed).abs().mean(-1, keepdim=True))
    if grad_residual is not None:
        reach = reach + grad_residual.abs()
    carried = 0.0 if grad_residual is None else 4 * rounding.u_in
    inside = (sum_path(n) + 16) * rounding.u32 + carried
    bound = dx.abs() * rounding.u_out + reach * inside + rounding.tiny * (1 + rstd)
    if not dw.numel():
        return bound, torch.zeros_like(dw)
    terms = (grad * normed).abs().reshape(-1, input.shape[-1]).sum(0)
    # a partial sums up to sqrt(rows) terms one after another (probabilistic), then a tree
    inside = (sum_path(n) + 16 + math.sqrt(rows)) * rounding.u32 + carried
    return bound, dw.abs() * rounding.u_out + terms * inside + rounding.tiny


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    (input, weight), (eps, offset, _) = kept, rest
    return None, input, weight, eps, offset, bool(needs.get("weight")) and weight is not None


def saved_add(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    """The sum stands in for input and residual; its own gradient comes second."""
    return saved(kept, dtype, rest, needs)[1:]


CASES = (
    Case("eps-zero", {"shape": (3, 64), "eps": 0.0}),
    Case("no-weight", {"shape": (3, 1024), "weight": False}),
    Case("llama", {"shape": (3, 1024), "casting": "llama"}),
    Case("llama-mixed", {"shape": (3, 1024), "casting": "llama", "weight_dtype": torch.float32}),
    Case("gemma", {"shape": (3, 1024), "casting": "gemma", "offset": 1.0}),
    # more tiles and rows than the interpreter's 17 SMs keep resident, or an H200
    Case("many-rows", {"shape": (1200, 48)}),
    Case("wide-walk", {"shape": (20, 9_000)}),
    Case("many-rows-h200", {"shape": (33_000, 48)}, "plan"),
    Case("wide-walk-h200", {"shape": (140, 33_000)}, "plan"),
    Case("wide", {"shape": (2, 33_000)}),
    Case("widest", {"shape": (1, 262_144)}),
    Case("wide-odd", {"shape": (2, 70_001)}),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 2048, 4096, 8192, 16384, 32768)),
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in EDGE_COLUMNS),
    *(Case(m.name, {"shape": (2048, m.hidden)}, "model") for m in MODELS.values()),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.hidden)),
    *(Case(f"plan-{n}", {"shape": (5, n)}, "plan") for n in PLAN_COLUMNS),
    # more of the longest rows than an H200 has clusters for
    Case("widest-walk", {"shape": (40, 262_144)}, "plan"),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP_COLUMNS),
)
CASES_ADD = tuple(c for c in CASES if not c.name.startswith("columns") or c.name == "columns-129")


def _ones(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 8, device=device), torch.ones(8, device=device)


ERRORS = (
    BadInput(
        "eps that is no number",
        lambda rms_norm, device: rms_norm(_ones(device)[0], 8, eps="small"),
        DTypeError,
        ("rms_norm", "eps", "'small'", "number"),
    ),
    BadInput(
        "negative eps",
        lambda rms_norm, device: rms_norm(_ones(device)[0], 8, eps=-1e-6),
        InputError,
        ("rms_norm", "eps", "-1e-06", "0 or more"),
    ),
    BadInput(
        "integer tensor",
        lambda norm, device: norm(torch.ones(2, 8, dtype=torch.int32, device=device), (8,)),
        DTypeError,
        ("rms_norm", "input", "int32", "float16", "input.float()"),
    ),
    BadInput(
        "0-dim tensor",
        lambda norm, device: norm(torch.tensor(1.0, device=device), (1,)),
        InputError,
        ("rms_norm", "normalized_shape", "()", "trailing"),
    ),
    BadInput(
        "wrong last dim",
        lambda norm, device: norm(torch.ones(2, 8, device=device), (7,)),
        InputError,
        ("rms_norm", "normalized_shape", "(7,)", "(2, 8)", "input.shape[-1:]"),
    ),
    BadInput(
        "weight of another size",
        lambda norm, device: norm(torch.ones(2, 8, device=device), (8,), _ones(device)[1][:4]),
        InputError,
        ("rms_norm", "weight", "(4,)", "(8,)"),
    ),
    BadInput(
        "integer weight",
        lambda norm, device: norm(*_ones(device)[:1], (8,), _ones(device)[1].int()),
        DTypeError,
        ("rms_norm", "weight", "int32"),
    ),
    BadInput(
        "weight on another device",
        lambda norm, device: norm(_ones(device)[0], (8,), torch.ones(8, device="meta")),
        InputError,
        ("rms_norm", "weight", "meta", "input", "weight.to(input.device)"),
    ),
    BadInput(
        "residual of another shape",
        lambda norm, device: norm(_ones(device)[0], (8,), residual=_ones(device)[1]),
        InputError,
        ("rms_norm", "residual", "(8,)", "(2, 8)"),
    ),
    BadInput(
        "unknown casting",
        lambda norm, device: norm(_ones(device)[0], (8,), casting="liger"),
        InputError,
        ("rms_norm", "casting", "liger", "'llama'"),
    ),
    BadInput(
        "unknown backend",
        lambda norm, device: norm(_ones(device)[0], (8,), backend="tritn"),
        InputError,
        ("rms_norm", "backend", "tritn", "triton"),
    ),
)


def _torch_rms_norm(x: Any, weight: Any, eps: float, offset: float, casting: str) -> Any:
    if offset or casting == "llama":
        raise InputError("torch's rms_norm has no weight_offset and no casting of Llama's")
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_add_rms_norm(x: Any, residual: Any, *rest: Any) -> Any:
    total = x + residual
    return _torch_rms_norm(total, *rest), total


def _called(backend: Any, x: Any, weight: Any, eps: float, offset: float, casting: str) -> Any:
    return rms_norm(
        x, x.shape[-1:], weight, eps, weight_offset=offset, casting=casting, backend=backend
    )


def _called_add(backend: Any, x: Any, r: Any, w: Any, eps: float, offset: float, cast: str) -> Any:
    return rms_norm(
        x, x.shape[-1:], w, eps, residual=r, weight_offset=offset, casting=cast, backend=backend
    )


BACKWARD = Op(
    name="rms_norm_backward",
    summary="gradients of rms_norm and add_rms_norm",
    schema="(Tensor grad, Tensor? grad_residual, Tensor input, Tensor? weight, float eps, "
    "float weight_offset, bool weight_grad) -> (Tensor, Tensor)",
    reference=reference.rms_norm_backward,
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
        Backend("torch", "torch", f"{HERE}.reference:rms_norm_backward", dtypes=None),
    ),
    tolerance=tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="rms_norm",
    summary="x / rms(x) * weight over the trailing dims",
    schema="(Tensor input, Tensor? weight, float eps, float weight_offset, str casting) -> Tensor",
    reference=reference.rms_norm,
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
        Backend("torch", "torch", f"{HERE}.reference:rms_norm", dtypes=None),
    ),
    public=rms_norm,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    rounds_as_reference=True,
    cost=lambda dims, dtype: Cost(4.0 * math.prod(dims["shape"])),
    as_called=_called,
    baselines={"vendor": _torch_rms_norm},
    autograd=Autograd(BACKWARD, ("input", "weight"), saved, (("input",), ("weight",))),
    errors=ERRORS,
)

ADD = Op(
    name="add_rms_norm",
    summary="residual + x, and its rms_norm, in one kernel",
    schema="(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset, "
    "str casting) -> (Tensor, Tensor)",
    reference=reference.add_rms_norm,
    outputs=outputs_add,
    check=check_add,
    backends=(
        Backend(
            "cuda",
            "cuda",
            f"{HERE}.cuda_impl:prepare_add",
            accepts=one_dtype_add,
            limits=f"{HERE}.cuda_impl:refuses_add",
        ),
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_add"),
        Backend("torch", "torch", f"{HERE}.reference:add_rms_norm", dtypes=None),
    ),
    public=rms_norm,
    inputs=inputs_add,
    exact_inputs=exact_inputs_add,
    sample=sample,
    tolerance=tolerance_add,
    cases=CASES_ADD,
    rounds_as_reference=True,
    cost=lambda dims, dtype: Cost(5.0 * math.prod(dims["shape"])),
    as_called=_called_add,
    baselines={"vendor": _torch_add_rms_norm},
    autograd=Autograd(
        BACKWARD, ("output 1", "weight"), saved_add, (("input", "residual"), ("weight",))
    ),
)

OPS = (OP, ADD)
_rms_norm = library.register_with_backward(OP)
_add_rms_norm = library.register_with_backward(ADD)
