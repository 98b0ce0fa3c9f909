"""rope of q and k in one launch, its backward and its form in place, in CUDA C++ (cuda_impl.cu).

A thread keeps its part of a token's tables in registers and turns that part of several heads; their
packs of 16 bytes are all on their way at once. Every element is read once and written once, in any
style. Limits: float32, float16, bfloat16; heads of up to 512 elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import nvrtc, rotary
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance
from tilewright.toolkit.cuda_rows import ceil
from tilewright.toolkit.heads import Heads

SOURCE = nvrtc.Source.beside(__file__)
MOST_THREADS = 256


@dataclass(frozen=True)
class Launch:
    threads: int
    heads: int  # of each thread
    units: int
    copied_units: int

    @property
    def tokens(self) -> int:
        """Of a block."""
        return self.threads // (self.units + self.copied_units)

    def groups(self, heads: int) -> int:
        """Blocks that share a set of tokens."""
        return ceil(heads, self.heads)


def launch(call: rotary.Call, vec: int, *, in_place: bool = False) -> Launch | None:
    """Four heads a thread, two without 16-byte loads; None: a block is too small for a head.

    Of two, four and eight heads, and of one to eight threads that share a token's unit, four and
    one were within a percent of the fastest from 160 MiB on (H200, 2026-11).
    """
    units = call.rotary_dim // 2 // vec
    copied = 0 if in_place else ceil(call.rest, 2 * vec)
    if units + copied > MOST_THREADS:
        return None
    threads = 128 if units + copied <= 128 else MOST_THREADS
    return Launch(threads, 4 if vec > 1 else 2, units, copied)


def refuses(gpu: Gpu, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> str | None:
    if q.shape[-1] > 2 * MOST_THREADS:
        wanted = 2 * MOST_THREADS
        return f"q has heads of {q.shape[-1]} elements; its blocks hold up to {wanted}"
    return None


class StridesArgument(ctypes.Structure):
    """`struct Strides` of the .cu file."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "token", "head")]


class SideArgument(ctypes.Structure):
    """`struct Side`."""

    _fields_ = [("to", StridesArgument), ("from", StridesArgument), ("heads", ctypes.c_int32)]


class SizesArgument(ctypes.Structure):
    """`struct Sizes`."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("token_count", "tokens", "table_rows")),
        *((name, ctypes.c_int32) for name in ("q_groups", "groups", "units")),
        *((name, ctypes.c_int32) for name in ("copied_units", "head_dim", "rotary_dim", "back")),
        *((name, ctypes.c_int64) for name in ("table_batch", "table_row")),
        *((name, ctypes.c_int64) for name in ("position_batch", "position_token")),
    ]


def _side(made: Heads, given: Heads) -> SideArgument:
    to, start = (StridesArgument(*part.strides) for part in (made, given))
    return SideArgument(to, start, given.heads)


def _bind(
    gpu: Gpu,
    call: rotary.Call,
    heads: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    style: str,
    *,
    back: bool,
    in_place: bool,
) -> Callable[..., None]:
    """`run(q_out, k_out, q, k, cos, sin, position_ids)`."""
    q, k = call.given
    reads, writes = rotary.STYLES[style]
    if back:
        reads, writes = writes, reads
    vec = rotary.vector_width(call, *heads, cos, sin)
    choice = launch(call, vec, in_place=in_place)
    assert choice is not None  # `refuses` was asked
    q_groups = choice.groups(q.heads)
    groups = q_groups + choice.groups(k.heads)
    sizes = SizesArgument(
        *(call.tokens, q.tokens, call.table_rows, q_groups, groups, choice.units),
        *(choice.copied_units, q.dim, call.rotary_dim, back),
        *(*call.table_strides, *call.position_strides),
    )
    dtype = heads[0].dtype
    names = TYPE_NAMES[dtype], TYPE_NAMES[cos.dtype]
    wide = position_ids is not None and position_ids.dtype == torch.int64
    positions = (position_ids, None) if wide else (None, position_ids)
    kernel = nvrtc.bind(
        SOURCE,
        instance("rope", *names, vec, reads, writes, call.full_table, choice.heads),
        grid=(ceil(call.tokens, choice.tokens) * groups, 1, 1),
        block=choice.threads,
        tensors=[dtype, dtype, *heads, cos, sin, *positions],
        scalars=[*map(_side, call.made, call.given), sizes],
        gpu=gpu,
    )
    if position_ids is None or wide:
        return lambda *tensors: kernel(*tensors, None)
    return lambda *tensors: kernel(*tensors[:-1], None, tensors[-1])


def _prepare(
    gpu: Gpu,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    style: str,
    rotary_dim: int,
    layout: str,
    *,
    back: bool,
) -> Callable[..., Any]:
    call = rotary.describe(q, k, cos, position_ids, rotary_dim, layout)
    new_q, new_k = rotary.new_results(call, q, k)
    if not (q.numel() or k.numel()):
        return lambda *_: (new_q(), new_k())
    kernel = _bind(gpu, call, [q, k], cos, sin, position_ids, style, back=back, in_place=False)

    def run(q: Any, k: Any, cos: Any, sin: Any, positions: Any, *_: Any) -> tuple[Any, Any]:
        q_out, k_out = new_q(), new_k()
        kernel(q_out, k_out, q, k, cos, sin, positions)
        return q_out, k_out

    return run


@rotary.on_heads
def prepare(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return _prepare(gpu, *args, back=False)


@rotary.on_heads
def prepare_backward(gpu: Gpu, *args: Any) -> Callable[..., Any]:
    return _prepare(gpu, *args, back=True)


@rotary.on_heads_in_place
def prepare_in_place(
    gpu: Gpu,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    style: str,
    rotary_dim: int,
    layout: str,
) -> Callable[..., None]:
    if not (q.numel() or k.numel()) or not rotary_dim:
        return lambda *_: None
    if style == "to_halves":  # what one thread writes another may still have to read
        apart = prepare(gpu, q, k, cos, sin, position_ids, style, rotary_dim, layout)
        return rotary.written_back(apart)
    call = rotary.describe(q, k, cos, position_ids, rotary_dim, layout, in_place=True)
    kernel = _bind(gpu, call, [q, k], cos, sin, position_ids, style, back=False, in_place=True)

    def run(q: Any, k: Any, cos: Any, sin: Any, positions: Any, *_: Any) -> None:
        kernel(q, k, q, k, cos, sin, positions)

    return run
