"""relu: the declaration and the public function."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from tilewright import checks, library
from tilewright.errors import DTypeError, InputError
from tilewright.ops.relu import reference
from tilewright.shapes import EDGE_COLUMNS, MODELS, by_tokens, random_shape
from tilewright.spec import Args, Autograd, Backend, BadInput, Case, Cost, Op, Rounding, normal

HERE = "tilewright.ops.relu"


def relu(input: torch.Tensor, inplace: bool = False, *, backend: str | None = None) -> torch.Tensor:
    """max(input, 0), as torch.nn.functional.relu; a NaN stays a NaN.

    >>> import torch, tilewright
    >>> tilewright.relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if inplace:
        return _in_place(input, backend)
    return _relu(input, (backend,))  # type: ignore[no-any-return]


def _in_place(input: torch.Tensor, backend: str | None) -> torch.Tensor:
    checks.tensor("relu", "input", input)
    differentiated = torch.is_grad_enabled() and input.requires_grad
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if torch.compiler.is_compiling() or differentiated or transformed or input.is_neg():
        # copy_ is what autograd and torch.compile know how to functionalise
        return input.copy_(_relu(input, (backend,)))
    checks.writable("relu", "input", input)
    library.write_in_place(_relu_, (input,), (backend,))
    return input


def check(input: torch.Tensor) -> None:
    checks.floating("relu", "input", input)


def check_in_place(input: torch.Tensor) -> None:
    check(input)
    checks.no_overlap("relu", "input", input)


def check_backward(grad: torch.Tensor, output: torch.Tensor) -> None:
    checks.same_shape("relu_backward", "grad", grad, output.shape, "the output's")
    checks.same_device("relu_backward", "grad", grad, "output", output)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: torch.Generator) -> Args:
    x = normal(dims["shape"], rng) * dims.get("scale", 1.0)
    return (x.to(dtype).to(device),)


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    return (torch.randint(-2, 3, dims["shape"], generator=rng).to(dtype).to(device),)


def sample(rng: random.Random) -> dict[str, Any]:
    return {"shape": random_shape(rng), "scale": rng.choice([0.01, 1.0, 1000.0])}


def tolerance(rounding: Rounding, outputs: Args, *args: Any) -> tuple[torch.Tensor, ...]:
    """Zero: relu and its backward only select."""
    return tuple(torch.zeros_like(o) for o in outputs)


CASES = (
    *(Case(f"columns-{n}", {"shape": (3, n)}) for n in EDGE_COLUMNS),
    Case("one-dim", {"shape": (70_001,)}),
    Case("five-dims", {"shape": (2, 1, 3, 2, 65)}),
    *(Case(m.name, {"shape": (2048, m.intermediate)}, "model") for m in MODELS.values()),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.intermediate)),
    *(Case(f"sweep-{n}", {"shape": (2**n // 8192, 8192)}, "sweep") for n in (27, 21, 23, 25, 29)),
)

ERRORS = (
    BadInput(
        "integer tensor",
        lambda relu, device: relu(torch.ones(4, dtype=torch.int32, device=device)),
        DTypeError,
        ("relu", "input", "int32", "float16", "input.float()"),
    ),
    BadInput(
        "not a tensor",
        lambda relu, device: relu([1.0, 2.0]),
        DTypeError,
        ("relu", "input", "list", "torch.Tensor"),
    ),
    BadInput(
        "in place on an expanded tensor",
        lambda relu, device: relu(torch.ones(1, 4, device=device).expand(3, 4), inplace=True),
        InputError,
        ("relu", "input", "overlap itself", "inplace=False", "clone"),
    ),
    BadInput(
        "unknown backend",
        lambda relu, device: relu(torch.ones(4, device=device), backend="tritn"),
        InputError,
        ("relu", "backend", "tritn", "triton"),
    ),
)

BACKWARD = Op(
    name="relu_backward",
    summary="gradient of relu from its output",
    schema="(Tensor grad, Tensor output) -> Tensor",
    reference=reference.relu_backward,
    outputs=lambda grad, output: torch.empty_like(output),
    check=check_backward,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_backward", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:relu_backward", dtypes=None),
    ),
    tolerance=tolerance,
    layout_argument="grad",
)

IN_PLACE = Op(
    name="relu_",
    summary="relu written over its input",
    schema="(Tensor(a!) input) -> ()",
    reference=reference.relu_in_place,
    outputs=lambda input: None,
    check=check_in_place,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare_in_place", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:relu_in_place", dtypes=None),
    ),
    public=relu,
    tolerance=tolerance,
)

OP = Op(
    name="relu",
    summary="max(x, 0): the bandwidth yardstick",
    schema="(Tensor input) -> Tensor",
    reference=reference.relu,
    outputs=lambda input: torch.empty_like(input),
    check=check,
    backends=(
        Backend("triton", "triton", f"{HERE}.triton_impl:prepare", flattens=True),
        Backend("torch", "torch", f"{HERE}.reference:relu", dtypes=None),
    ),
    public=relu,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    cost=lambda dims, dtype: Cost(0.0),
    as_called=lambda backend, input: relu(input, backend=backend),
    baselines={"vendor": torch.nn.functional.relu},
    autograd=Autograd(
        BACKWARD,
        keep=("output",),
        saved=lambda kept, dtype, rest, needs: kept,
        gradients=(("input",),),
    ),
    in_place=IN_PLACE,
    errors=ERRORS,
)

OPS = (OP,)
_relu = library.register_with_backward(OP)
_relu_ = library.register(IN_PLACE)
