"""The argument checks that ops share, worded once."""

from __future__ import annotations

import numbers
import sys
from typing import Any, SupportsIndex

import torch

from tilewright.errors import DTypeError, InputError, sentence

MAX_FLOAT = int(sys.float_info.max)


def tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise DTypeError(
            sentence(
                op, name, f"is a {type(value).__name__}", "be a torch.Tensor", "Wrap it first."
            )
        )


def dense(op: str, name: str, value: torch.Tensor) -> None:
    """A tensor, neither nested nor sparse."""
    tensor(op, name, value)
    if value.is_nested:
        fix = f"Pad it: torch.nested.to_padded_tensor({name}, 0.0)."
        raise InputError(sentence(op, name, "is nested", "be a dense tensor", fix))
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        fix = f"Convert it: {name}.to_dense()."
        raise InputError(sentence(op, name, f"is {layout}", "be a dense tensor", fix))


def floating(op: str, name: str, value: torch.Tensor) -> None:
    """A dense tensor of floating-point numbers."""
    dense(op, name, value)
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise DTypeError(
            sentence(
                op,
                name,
                f"has dtype {_dtype(value)}",
                "be float32, float16 or bfloat16 (float64 on the torch backend)",
                f"Convert it: {name}.float().",
            )
        )


def number(op: str, name: str, value: Any, *, at_least: float | None = None) -> None:
    if not isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        fix = f"Pass {name}.item()." if isinstance(value, torch.Tensor) else "Pass a float."
        got = f"is {value!r}, a {type(value).__name__}"
        raise DTypeError(sentence(op, name, got, "be a number", fix))
    if isinstance(value, int) and abs(value) > MAX_FLOAT:
        raise InputError(sentence(op, name, "is an int", "fit in a float", "Pass a float."))
    if at_least is not None and not value >= at_least:  # type: ignore[operator]
        wants = f"be {at_least:g} or more"
        raise InputError(sentence(op, name, f"is {value}", wants, "Check its sign."))


def flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        got = f"is {value!r}, a {type(value).__name__}"
        raise DTypeError(sentence(op, name, got, "be True or False", "Pass a bool."))


def index(op: str, name: str, value: Any, fix: str) -> int:
    """A whole number of any type that Python takes as an index, as an int."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if not isinstance(value, SupportsIndex) or isinstance(value, torch.Tensor):
        got = f"is {value!r}, a {type(value).__name__}"
        raise DTypeError(sentence(op, name, got, "be an int", fix))
    return int(value)


def has_dims(op: str, name: str, value: torch.Tensor) -> None:
    if value.dim() == 0:
        raise InputError(
            sentence(op, name, "is 0-dimensional", "have at least one dim", f"Use {name}[None].")
        )


def same_device(op: str, name: str, value: torch.Tensor, other: str, there: torch.Tensor) -> None:
    if value.device != there.device:
        raise InputError(
            sentence(
                op,
                name,
                f"is on {value.device} but {other} on {there.device}",
                "be on the same device",
                f"Move it: {name}.to({other}.device).",
            )
        )


def same_shape(op: str, name: str, value: torch.Tensor, wanted: tuple[int, ...], why: str) -> None:
    if tuple(value.shape) != tuple(wanted):
        raise InputError(
            sentence(
                op,
                name,
                f"has shape {tuple(value.shape)}",
                f"have shape {tuple(wanted)}, {why}",
                f"Reshape or slice {name}.",
            )
        )


def same_dtype(op: str, name: str, value: torch.Tensor, other: str, there: torch.Tensor) -> None:
    if value.dtype != there.dtype:
        raise DTypeError(
            sentence(
                op,
                name,
                f"has dtype {_dtype(value)}",
                f"have {other}'s, {_dtype(there)}",
                f"Convert it: {name}.to({other}.dtype).",
            )
        )


def no_overlap(op: str, name: str, value: torch.Tensor) -> None:
    """For writing in place: no two elements may share memory."""
    dims = zip(value.shape, value.stride(), strict=True)
    extents = sorted((stride, size) for size, stride in dims if size > 1)
    reach = 0  # the furthest element reached by the smaller strides
    for stride, size in extents:
        if stride <= reach:
            raise InputError(
                sentence(
                    op,
                    name,
                    f"may overlap itself (shape {tuple(value.shape)}, strides {value.stride()})",
                    "have every element in memory of its own to be written in place",
                    f"Pass inplace=False, or {name}.clone().",
                )
            )
        reach += (size - 1) * stride


def writable(op: str, name: str, value: torch.Tensor) -> None:
    """For writing in place where autograd is not told how: nothing may need a gradient."""
    fix = f"Pass inplace=False, or {name}.detach()."
    if torch.is_grad_enabled() and value.requires_grad:
        wants = "need no gradient to be written in place"
        raise InputError(sentence(op, name, "requires grad", wants, fix))
    if torch.compiler.is_compiling():
        return
    if value.is_inference() and not torch.is_inference_mode_enabled():
        wants = "be an ordinary one to be written in place here"
        fix = f"Pass inplace=False, or {name}.clone()."
        raise InputError(sentence(op, name, "is an inference tensor", wants, fix))


def apart(op: str, name: str, value: torch.Tensor, other: str, there: torch.Tensor) -> None:
    """For writing two tensors in place: their elements may lie among each other, never on."""
    if value.device.type == "meta" or not (value.numel() and there.numel()):
        return
    if value.untyped_storage()._cdata != there.untyped_storage()._cdata:
        return
    if value.element_size() != there.element_size():  # their strides cannot be compared
        raise shared(op, name, other)
    first, second = sorted((value, there), key=lambda t: t.storage_offset())
    distance = int(second.storage_offset() - first.storage_offset())
    if distance >= _extent(first) or _in_one_period(first, second, distance):
        return
    raise shared(op, name, other)


def shared(op: str, name: str, other: str) -> InputError:
    wants = f"have no element in common with {other} to be written in place"
    fix = f"Pass inplace=False, or {name}.clone()."
    return InputError(sentence(op, name, f"may share memory with {other}", wants, fix))


def _extent(value: torch.Tensor, below: float = float("inf")) -> int:
    """Elements from the first to the last, along the strides that are below a limit."""
    dims = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in dims if stride < below)


def _in_one_period(first: torch.Tensor, second: torch.Tensor, distance: int) -> bool:
    """Parts of one fused tensor: both repeat with the same period, and fit into it side by side."""
    periods = [t.stride(i) for t in (first, second) for i in range(t.dim()) if t.shape[i] > 1]
    for period in sorted(set(periods)):
        steps = [
            {stride for stride, size in zip(t.stride(), t.shape, strict=True)
             if size > 1 and stride >= period}
            for t in (first, second)
        ]  # fmt: skip
        side_by_side = _extent(first, period) <= distance
        side_by_side = side_by_side and distance + _extent(second, period) <= period
        if side_by_side and all(stride % period == 0 for each in steps for stride in each):
            return True
    return False


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
