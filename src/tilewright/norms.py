"""The arguments that norms over trailing dims share: normalized_shape, weight and bias.

Kernels norm the last dim. A `normalized_shape` of several dims is flattened into one before the
call, and the result gets its shape back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from tilewright import checks
from tilewright.errors import DTypeError, InputError, sentence

Tensor = torch.Tensor
LAST_DIM = "Pass input.shape[-1:] for a norm over the last dim."


def sizes(op: str, normalized_shape: Any) -> tuple[int, ...]:
    """`normalized_shape`, an int or a sequence of ints, as a tuple."""
    several = isinstance(normalized_shape, Sequence)
    found = tuple(normalized_shape) if several else (normalized_shape,)
    if not all(isinstance(size, (SupportsIndex, torch.SymInt)) for size in found):
        got = f"is {normalized_shape!r}, a {type(normalized_shape).__name__}"
        wants = "be an int or a sequence of ints"
        raise DTypeError(sentence(op, "normalized_shape", got, wants, LAST_DIM))
    return found


def wrong_shape(op: str, input: Tensor, normalized_shape: Any) -> InputError:
    got = f"is {tuple(normalized_shape)} for an input of shape {tuple(input.shape)}"
    wants = "be the sizes of the input's trailing dims"
    return InputError(sentence(op, "normalized_shape", got, wants, LAST_DIM))


def flattened(
    op: str,
    shape: tuple[int, ...],
    rows: Mapping[str, Tensor | None],
    parameters: Mapping[str, Tensor | None],
) -> list[Any]:
    """The tensors with the dims of `shape` made one: the rows, the input first, then parameters.

    Rows are shaped like the input, parameters like `shape`; those that are None stay None.
    """
    given = {**rows, **parameters}
    for name, tensor in given.items():
        if tensor is not None:
            checks.floating(op, name, tensor)
    input = next(iter(rows.values()))
    assert input is not None
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise wrong_shape(op, input, shape)
    flat: list[Tensor | None] = []
    for name, tensor in given.items():
        if tensor is None:
            flat.append(None)
        elif name in parameters:
            checks.same_shape(op, name, tensor, shape, "the normalized_shape")
            flat.append(tensor.reshape(-1))
        else:
            checks.same_shape(op, name, tensor, input.shape, "the input's")
            flat.append(tensor.reshape(*tensor.shape[: -len(shape)], math.prod(shape)))
    return flat


def check_parameter(op: str, name: str, value: Tensor | None, input: Tensor) -> None:
    """A weight or a bias: one number for each column of the input, or None."""
    if value is not None:
        checks.floating(op, name, value)
        checks.same_shape(op, name, value, input.shape[-1:], "the normalized_shape")
        checks.same_device(op, name, value, "input", input)


def check_parameter_dtypes(op: str, input: Tensor, weight: Any, bias: Any) -> None:
    """Weight and bias have one dtype: the input's, or float32."""
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype not in (input.dtype, torch.float32):
            got = f"has dtype {_name(value)} and the input {_name(input)}"
            fix = f"Convert it: {name}.to(input.dtype)."
            raise DTypeError(sentence(op, name, got, "have the input's dtype or float32", fix))
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        checks.same_dtype(op, "bias", bias, "weight", weight)


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
