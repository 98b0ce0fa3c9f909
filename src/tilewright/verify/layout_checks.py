"""Checks of how tensors may lie in memory: hostile layouts, writing in place, far offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from tilewright.lab import workers
from tilewright.library import call
from tilewright.spec import FLOATS, Args, Op, as_tuple, on_meta
from tilewright.toolkit import memory
from tilewright.verify import compare, layouts
from tilewright.verify import offsets as sparse_offsets
from tilewright.verify.compare import Verdict
from tilewright.verify.context import Context, Part
from tilewright.verify.record import Result

BEHIND = 64  # elements after what is written in place
BASE = (3, 2, 128)  # what is laid out: small, with two leading dims and whole 16-byte vectors


def hostile_layouts(c: Context) -> Iterator[Part]:
    """Eight layouts: the bits of the contiguous path of the same alignment class, and right."""
    for variant, name, dtype in itertools.product(c.op.variants, layouts_of(c.op), FLOATS):
        yield Part(_case(name, variant), dtype, partial(_layout, c, variant, name, dtype))


def _layout(
    c: Context, variant: Mapping[str, Any], name: str, dtype: torch.dtype
) -> Iterator[Result]:
    judge, case = partial(_judge, c), _case(name, variant)
    args = _laid_out(c, variant, layouts.LAYOUTS[name], dtype)
    if not c.serves(args):
        return
    twins = _contiguous(c, args)
    for phase in ("forward", "backward") if c.op.autograd else ("forward",):
        verdict, got = judge(phase, args)
        _, bits = judge(phase, twins)
        if verdict.passed and not compare.same_bits(got, bits):
            verdict = Verdict(message="not the bits of the contiguous path")
        yield c.result("layouts", case, dtype, phase, verdict)
    # the incoming gradient takes the layout as well
    if c.op.autograd and name in layouts.SAME_VALUES:
        plain = compare.random_like(as_tuple(c.op.outputs(*twins)), c.seed)
        verdict, _ = judge("backward", twins, [layouts.LAYOUTS[name](g) for g in plain])
        yield c.result("layouts", f"{case}, gradient", dtype, "backward", verdict)


def in_place(c: Context) -> Iterator[Part]:
    """Written over its input, in every layout without overlap: the bits of the forward, no more."""
    if c.op.in_place is None:
        return
    for variant, name, dtype in itertools.product(c.op.variants, layouts_of(c.op), FLOATS):
        if name != "expanded":
            yield Part(_case(name, variant), dtype, partial(_in_place, c, variant, name, dtype))


def _in_place(
    c: Context, variant: Mapping[str, Any], name: str, dtype: torch.dtype
) -> Iterator[Result]:
    args = _laid_out(c, variant, layouts.LAYOUTS[name], dtype)
    if c.serves(args):
        verdict = _written_in_place(c, args)
        yield c.result("in place", _case(name, variant), dtype, "forward", verdict)


def _case(name: str, variant: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{k}={v}" for k, v in variant.items())])


def layouts_of(op: Op) -> list[str]:
    """The layouts whose number of dims the op takes."""
    base = torch.empty(BASE)
    return [n for n, lay in layouts.LAYOUTS.items() if not op.ranks or lay(base).dim() in op.ranks]


def _laid_out(c: Context, variant: Any, layout: layouts.Layout, dtype: torch.dtype) -> Args:
    """Arguments of which the layout argument is laid out so."""
    place = c.op.arguments.index(c.op.layout_argument)
    hostile = layout(c.inputs({"shape": BASE}, dtype, c.seed)[place])
    # the other tensors of the call take the hostile one's shape
    plain = c.inputs({"shape": tuple(hostile.shape), **variant}, dtype, c.seed)
    return (*plain[:place], hostile, *plain[place + 1 :])


def _contiguous(c: Context, args: Args) -> Args:
    place = c.op.arguments.index(c.op.layout_argument)
    return (*args[:place], _twin(args[place]), *args[place + 1 :])


def _twin(laid: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, as aligned as the tensor: another binary may contract products to fused
    multiply-adds otherwise, and float32 shows it."""
    twin = laid.contiguous().clone()
    return twin if layouts.is_aligned(laid) else layouts.misaligned(twin)


def _judge(c: Context, phase: str, args: Args, grads: Any = None) -> tuple[Verdict, Any]:
    if phase == "forward":
        return compare.forward(c.op, args, c.backend, interpreted=c.interpreted)
    return compare.backward(c.op, args, c.backend, c.seed, interpreted=c.interpreted, grads=grads)


def _written_in_place(c: Context, args: Args) -> Verdict:
    """Whether the arguments, written over, hold the forward's bits, and nothing else is touched."""
    assert c.op.in_place is not None
    count = len(as_tuple(c.op.outputs(*on_meta(args))))  # its first arguments are written
    rooms, targets = zip(*map(_in_a_room, args[:count]), strict=True)
    starts = [room.clone() for room in rooms]
    with torch.no_grad():
        with memory.guarded() as guard:
            copies = map(_twin, targets)
            wanted = as_tuple(call(c.op, (*copies, *args[count:]), c.backend))
        verdict = Verdict(message="; ".join(guard.faults()))
        wanted_rooms = [start.clone() for start in starts]
        for room, target, values in zip(wanted_rooms, targets, wanted, strict=True):
            geometry = (target.shape, target.stride(), target.storage_offset())
            room.as_strided(*geometry).copy_(values)
        for _ in range(3):  # the dispatcher's way, the short way, and once more
            for room, start in zip(rooms, starts, strict=True):
                room.copy_(start)
            call(c.op.in_place, (*targets, *args[count:]), c.backend)
            if not compare.same_bits(rooms, wanted_rooms):
                verdict = Verdict(message="not the bits of the forward, or more than those")
    return verdict


def _in_a_room(laid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All the memory that a tensor is a view of, and some behind it; and the view."""
    geometry = (laid.shape, laid.stride(), laid.storage_offset())
    values = laid.new_empty(0).set_(laid.untyped_storage())
    behind = values.new_full((BEHIND,), -1.0)  # what reaches past the end must show there
    room = torch.cat((values, behind))
    room[room.isnan()] = -1.0  # what lies around the view must stay, and a NaN would anyway
    return room, room.as_strided(*geometry)


def offsets(c: Context) -> Iterator[Part]:
    """Strides that take offsets past 2^31, in a process: a 32-bit offset may crash it."""
    for number, variant in enumerate(c.op.variants):
        case = _case("stride 2^24 x 130 rows", variant)
        yield Part(case, torch.float16, partial(_offsets, c, number, case))


def _offsets(c: Context, number: int, case: str) -> Iterator[Result]:
    shape = sparse_offsets.ROWS, sparse_offsets.COLUMNS
    dims = {"shape": shape, **c.op.variants[number]}
    if c.serves(c.inputs(dims, torch.float16, c.seed)):
        # a GPU's worker may be lost, and a new process would take seconds to find the GPU
        look = (
            sparse_offsets.wrong_here
            if c.device == "cuda" and workers.inside
            else (sparse_offsets.wrong)
        )
        message = look(c.op.name, c.backend, c.device, number)
        yield c.result("offsets", case, torch.float16, "", Verdict(message=message))
