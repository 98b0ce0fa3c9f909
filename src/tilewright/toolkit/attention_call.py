"""What an attention kernel is told about its tensors, forward and backward alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import memory
from tilewright.toolkit.heads import Heads, heads_of, result_strides
from tilewright.toolkit.launch import Described, programs
from tilewright.toolkit.rows import VECTOR_BYTES

NARROWEST, WIDEST = 32, 512  # columns of a tile; the widest head
FARTHEST = 2**30  # a bound beyond it is none: tokens are numbered in 32 bits
TOGETHER_BYTES = 16 * 2**20  # keys and values of the heads that run side by side: they stay in L2
TOGETHER_BYTES_SKEWED = 64 * 2**20  # measured: late long sequences cost more than keys from HBM


Prepare = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """One call, in elements."""

    q: Heads
    k: Heads
    v: Heads
    batches: int  # sequences, packed or not
    rows: int  # of the longest sequence, or more
    keys: int
    scale: float
    left: int
    right: int
    top_left: bool
    softcap: float
    precision: str
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        """Of all sequences."""
        return self.batches * self.q.heads

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.heads // max(self.k.heads, 1)

    @property
    def bottom_right(self) -> int:
        return 0 if self.top_left else 1

    @property
    def is_packed(self) -> bool:
        """Several sequences share the tokens."""
        return self.batches > self.q.batches

    @property
    def is_empty(self) -> bool:
        return not (self.heads and self.rows)

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Between sequences and between heads."""
        return self.q.heads * self.q.tokens, self.q.tokens

    @property
    def work(self) -> int:
        """Products of rows and keys, at most."""
        return self.heads * self.rows * self.keys

    def is_plain(self, *options: Any) -> bool:
        """Whether a score is a scaled product and nothing else; `options`: slopes and bias."""
        return not self.softcap and all(option is None for option in options)

    @property
    def flags(self) -> dict[str, Any]:
        """The constexprs that all kernels of the op share."""
        return {
            "LEFT": self.left >= 0,
            "RIGHT": self.right >= 0,
            "SOFTCAP": self.softcap > 0,
            "PRECISION": self.precision,
        }


def describe(
    given: Sequence[torch.Tensor], cu_seqlens_q: torch.Tensor | None,
    layout: str, scale: float, left: int, right: int, top_left: bool, softcap: float,
    max_q: int, max_k: int, precision: str,
) -> Call:  # fmt: skip
    """For q, k and v whose last dims are contiguous (`heads.tame`)."""

    def heads(x: torch.Tensor) -> Heads:
        found = heads_of(x.shape, x.stride(), layout)
        assert found is not None
        return found

    q, k, v = map(heads, given)
    batches, rows, keys = q.batches, q.tokens, k.tokens
    if cu_seqlens_q is not None:
        batches, rows, keys = len(cu_seqlens_q) - 1, min(max_q, rows), min(max_k, keys)
    near, far = (bound if bound <= FARTHEST else -1 for bound in (left, right))
    return Call(
        q, k, v, batches, rows, keys, scale, near, far, top_left, softcap, precision,
        given[0].dtype,
    )  # fmt: skip


def refuses(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why no kernel takes heads of these sizes."""
    if not math.prod(q.shape[:-1]):
        return None
    for name, x in (("q", q), ("v", v)):
        dim = x.shape[-1]
        if dim % 8 or not 16 <= dim <= WIDEST:
            wants = f"its tiles hold multiples of 8 from 16 to {WIDEST}"
            return f"{name} has heads of {dim} elements; {wants}"
    return None


def vector_width(tensors: Sequence[torch.Tensor], heads: Sequence[Heads]) -> int:
    """Elements of a 16-byte vector if every row of every tensor is made of whole ones; else 1."""
    size = tensors[0].element_size()
    per_vector = VECTOR_BYTES // size
    whole = all(stride % per_vector == 0 for each in heads for stride in (*each.strides, each.dim))
    aligned = all(t.data_ptr() % VECTOR_BYTES == 0 for t in tensors if not t.is_meta)
    return per_vector if whole and aligned else 1


def width(dim: int, vec: int) -> int:
    """Columns of the tile that holds a head.

    Halves that are not loaded in whole vectors get 64 at least: Triton 3.6 stores tiles of 32 of
    them to the wrong places of shared memory, and the products read other numbers.
    """
    return max(1 << (dim - 1).bit_length(), NARROWEST if vec > 1 else 2 * NARROWEST)


@dataclass(frozen=True)
class Places:
    """How tiles and heads are dealt out to programs: what `triton_attention.place` asks for."""

    blocks: int  # of a line
    heads: int
    lines: int
    together: int
    sequences: int  # packed ones whose heads share a line, or 0

    @property
    def programs(self) -> int:
        return self.blocks * self.lines

    @property
    def arguments(self) -> tuple[int, ...]:
        return self.blocks, self.heads, self.lines, self.together, self.sequences


def places(call: Call, held: Heads, longest: int, tile: int) -> Places:
    """For programs that hold `tile` tokens of a head of `held`, whose longest sequence has so many.

    Packed sequences of unequal lengths share a line: else half the programs or more would be
    started to find that their sequence is too short for them. Their heads run side by side as far
    as L2 goes, so that long sequences of one head do not end up behind short ones of another.
    """
    blocks, lines, room = programs(longest, tile), call.batches * held.heads, TOGETHER_BYTES
    shared = held.tokens // tile + call.batches
    skewed = call.is_packed and 2 * shared <= blocks * call.batches
    if skewed:
        blocks, lines, room = shared, held.heads, TOGETHER_BYTES_SKEWED
    size = torch.empty((), dtype=call.dtype).element_size()
    per_head = max(call.keys * (call.k.dim + call.v.dim) * size // call.group, 1)
    together = room // per_head * held.heads // call.q.heads if blocks > 1 else 1
    sequences = call.batches if skewed else 0
    return Places(blocks, held.heads, lines, max(min(together, lines), 1), sequences)


def described(
    dtype: torch.dtype, heads: Heads, rows: int, columns: int, *, gluon: bool = False
) -> Described:
    """A tensor as (batch, head, token, element), for tiles of rows of one head.

    A dim of one is never stepped along, but TMA wants a whole number of 16 bytes there too.
    """
    shape = (heads.batches, heads.heads, heads.tokens, heads.dim)
    steps = (heads.batch_stride, heads.head_stride, heads.token_stride)
    strides = (*(step or heads.dim for step in steps), 1)
    return Described(dtype, shape, strides, (1, 1, rows, columns), gluon)


def fits_tma(heads: Heads) -> bool:
    """Whether every dim that is walked has a step: an expanded one has none."""
    walked = zip((heads.batches, heads.tokens, heads.heads), heads.strides, strict=True)
    return heads.tokens > 0 and all(size == 1 or step for size, step in walked)


def lse_shape(call: Call, packed: bool) -> tuple[int, ...]:
    sizes = (call.q.heads, call.q.tokens)
    return sizes if packed else (call.batches, *sizes)


def tidy(*places: int) -> Callable[[Prepare], Prepare]:
    """For a `prepare` whose kernels read the small tensors at these places of its arguments one
    element after the other: those that do not lie so are copied, on every call."""

    def decorate(prepare: Prepare) -> Prepare:
        @wraps(prepare)
        def prepare_tidy(gpu: Gpu, *args: Any) -> Callable[..., Any]:
            small = [(i, args[i]) for i in places if args[i] is not None]
            loose = [i for i, x in small if not x.is_contiguous()]
            if not loose:
                return prepare(gpu, *args)

            def tidied(args: tuple[Any, ...]) -> list[Any]:
                return [x.contiguous() if i in loose else x for i, x in enumerate(args)]

            run = prepare(gpu, *tidied(args))
            return lambda *args: run(*tidied(args))

        return prepare_tidy

    return decorate


def alibi_stride(slopes: torch.Tensor | None) -> int:
    """Between sequences."""
    return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0


def bias_strides(bias: torch.Tensor | None) -> tuple[int, ...]:
    """Of batch, head, row and key; along a dim of one the same element serves all."""
    if bias is None:
        return (0, 0, 0, 0)
    return tuple(0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True))


def like(x: torch.Tensor, last: int, layout: str) -> tuple[Callable[[], torch.Tensor], Heads]:
    """An allocator of tensors that lie as x does, with heads of `last` elements; how they lie."""
    shape = (*x.shape[:-1], last)
    strides = result_strides(shape, x.stride())
    heads = heads_of(shape, strides, layout)
    assert heads is not None
    return memory.allocator(shape, strides, x.dtype, x.device), heads
