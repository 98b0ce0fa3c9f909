"""torch's scaled_dot_product_attention in the terms of `attention`: four dims, and a bias.

torch takes any number of dims in front of the last two and broadcasts them, the heads among them;
its mask holds booleans, or numbers to add, and broadcasts to the scores. Views do nearly all of it:
five dims or more are copied where strides allow no view of four, and a mask of booleans becomes a
bias of its own size, never of the size that it broadcasts to.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilewright import checks
from tilewright.errors import DTypeError, InputError, sentence

Tensor = torch.Tensor
Shape = tuple[int, ...]
NAMES = ("query", "key", "value")


class Arranged(NamedTuple):
    """What `attention` takes, and the shape that its result has in torch."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    shape: Shape | None  # None: the result has it already


def arrange(
    op: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> Arranged:
    """Query, key and value of four dims, and a bias that broadcasts to their scores."""
    if mask is None and _fits(query, key, value, enable_gqa):
        return Arranged(query, key, value, None, None)
    check(op, query, key, value)
    dims = max(query.dim(), key.dim(), value.dim())
    lead = _leads(op, query, key, value, max(dims, 4), enable_gqa)
    bias, result = None, lead[0][max(4 - dims, 0) :]  # without the dims that nobody has
    if mask is not None:
        _check_mask(op, mask, query, (*result, query.shape[-2], key.shape[-2]))
        bias = _bias(mask, lead[0][:-1], query)
    shape = None if dims == 4 else (*result, query.shape[-2], value.shape[-1])
    query, key, value = map(_four_dims, (query, key, value), lead)
    return Arranged(query, key, value, bias, shape)


def _fits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """The usual call, with nothing to change and nothing wrong: asked first, to cost little."""
    if not query.__class__ is key.__class__ is value.__class__ is Tensor:
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # which have no shape
        return False
    q, k, v = query.shape, key.shape, value.shape
    return (
        len(q) == len(k) == len(v) == 4
        and k[:3] == v[:3]
        and (q[0], q[3]) == (k[0], k[3])
        and (q[1] == k[1] or (enable_gqa and k[1] > 0 and q[1] % k[1] == 0))
        and query.dtype is key.dtype is value.dtype
        and query.is_floating_point()
        and query.device == key.device == value.device
        and query.layout is key.layout is value.layout is torch.strided
    )


def check(
    op: str, query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str, str] = NAMES
) -> None:
    """Types, places, and the lengths that must agree: torch's kernel for CPUs lets some differ."""
    checks.floating(op, names[0], query)
    for name, x in zip(names[1:], (key, value), strict=True):
        checks.dense(op, name, x)
        checks.same_dtype(op, name, x, names[0], query)
        checks.same_device(op, name, x, names[0], query)
    for name, x in zip(names, (query, key, value), strict=True):
        if x.dim() < 2:
            wants = "have two dims or more, (..., tokens, elements of a head)"
            raise InputError(sentence(op, name, _shape(x), wants, f"Use {name}[None]."))
    if key.shape[-1] != query.shape[-1]:
        wants = f"have heads of {query.shape[-1]} elements, as {names[0]}, {tuple(query.shape)}"
        raise InputError(sentence(op, names[1], _shape(key), wants, "Check its dim -1."))
    if value.shape[-2] != key.shape[-2]:
        wants = f"have {key.shape[-2]} tokens, as {names[1]}, {tuple(key.shape)}"
        raise InputError(sentence(op, names[2], _shape(value), wants, "Check its dim -2."))


def as_autocast_says(*tensors: Any) -> tuple[Any, ...]:
    """Cast as autocast does for torch's function: all but float64 and booleans, to one dtype."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type != device:
            return x
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tuple(map(cast, tensors))


def _leads(
    op: str, query: Tensor, key: Tensor, value: Tensor, dims: int, enable_gqa: bool
) -> tuple[Shape, Shape, Shape]:
    """What stands before the last two of so many dims, broadcast: for query, key and value."""
    q, k, v = ((1,) * (dims - x.dim()) + tuple(x.shape[:-2]) for x in (query, key, value))
    if q == k == v:
        return q, k, v
    if q[-1] != k[-1] or k[-1] != v[-1]:
        _check_heads(op, query, key, value, (q[-1], k[-1], v[-1]), enable_gqa)
    try:
        if enable_gqa:  # the heads of key and value stay as few as they are
            batch = torch.broadcast_shapes(q[:-1], k[:-1], v[:-1])
            return (*batch, q[-1]), (*batch, k[-1]), (*batch, v[-1])
        lead = tuple(torch.broadcast_shapes(q, k, v))
    except RuntimeError:
        wants = "agree in the dims before the last two with key and value, or have 1 there"
        got = f"{_shape(query)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        fix = "Reshape or expand them."
        raise InputError(sentence(op, "query", got, wants, fix)) from None
    return lead, lead, lead


def _check_heads(
    op: str, query: Tensor, key: Tensor, value: Tensor, heads: Shape, enable_gqa: bool
) -> None:
    q, k, v = heads
    if enable_gqa:
        if k != v:
            wants = f"have key's {k} heads, {tuple(key.shape)}"
            raise InputError(sentence(op, "value", _shape(value), wants, "Pass as many of both."))
        if not k or q % k:
            wants = f"have heads that divide query's {q}, {tuple(query.shape)}"
            raise InputError(sentence(op, "key", _shape(key), wants, "Check dim -3."))
    elif q > k > 1 and k == v and not q % k:
        wants = f"have query's {q} heads, {tuple(query.shape)}, or 1"
        fix = f"Pass enable_gqa=True if {q // k} of query's heads share one of key's."
        raise InputError(sentence(op, "key", _shape(key), wants, fix))


def _check_mask(op: str, mask: Tensor, query: Tensor, scores: Shape) -> None:
    checks.dense(op, "attn_mask", mask)
    checks.same_device(op, "attn_mask", mask, "query", query)
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        got = f"has dtype {str(mask.dtype).removeprefix('torch.')}"
        wants = "be bool (True: takes part), float32 or query's dtype (added to the scores)"
        raise DTypeError(sentence(op, "attn_mask", got, wants, "Convert it: attn_mask.bool()."))
    behind = scores[max(len(scores) - mask.dim(), 0) :]
    fits = mask.dim() <= len(scores)
    # `in` is no question that a compiler answers for a size it does not know
    if not fits or any(n != 1 and n != m for n, m in zip(mask.shape, behind, strict=True)):
        wants = f"broadcast to the scores, {scores}"
        fix = "Each dim is the scores' or 1, counted from the last."
        raise InputError(sentence(op, "attn_mask", _shape(mask), wants, fix))


def _bias(mask: Tensor, batch: Shape, query: Tensor) -> Tensor:
    """Four dims, each 1 or the scores'; `batch` are the dims before the heads."""
    if mask.dtype is torch.bool:
        mask = torch.where(_once(mask), query.new_zeros(()), -math.inf)
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    lead = tuple(mask.shape[:-3])
    if lead != batch and math.prod(lead) != 1:
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.flatten(0, -4) if mask.dim() > 4 else mask


def _once(mask: Tensor) -> Tensor:
    """What an expanded mask holds in memory. Of numbers it would misplace the gradients."""
    expanded = [n > 1 and not stride for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    if not any(expanded):
        return mask
    return mask[tuple(slice(0, 1) if has else slice(None) for has in expanded)]


def _four_dims(x: Tensor, lead: Shape) -> Tensor:
    if tuple(x.shape[:-2]) != lead:
        x = x.expand(*lead, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 4 else x


def _shape(x: Tensor) -> str:
    return f"has shape {tuple(x.shape)}"
