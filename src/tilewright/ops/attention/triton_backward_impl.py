"""The backward on the host: tiles, workspaces, and which of the kernels a call needs.

Limits: those of the forward; and float32 heads of more than 256 elements need blocks of 129 KB of
shared memory, which SM 86, 89 and 120 do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.ops.attention.backward_kernels import (
    _grad_bias,
    _grad_keys,
    _grad_queries,
    _summaries,
)  # fmt: skip
from tilewright.toolkit import attention_call, memory
from tilewright.toolkit.attention_call import (
    Call,
    alibi_stride,
    bias_strides,
    describe,
    described,
    fits_tma,
    like,
    places,
    tidy,
    vector_width,
    width,
)  # fmt: skip
from tilewright.toolkit.heads import Heads, heads_of, tame
from tilewright.toolkit.launch import Described, bind, is_interpreted, programs


@dataclass(frozen=True)
class Launch:
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most


@dataclass(frozen=True)
class Plan:
    keys: Launch  # of _grad_keys, which holds keys
    queries: Launch  # of _grad_queries, which holds rows
    bias: Launch | None = None  # of _grad_bias, which takes no TMA


# By the width of a tile, the wider of q's and v's. Measured on an H200, 2026-11.
TINY = Launch(16, 16, 8, 1)
BY_TMA = {
    64: Plan(Launch(64, 64, 4, 3, registers=168), Launch(64, 64, 4, 3)),  # 3 blocks on an SM 90
    128: Plan(Launch(64, 64, 4, 2), Launch(128, 64, 8, 3)),
    256: Plan(Launch(64, 64, 8, 2), Launch(128, 32, 8, 2)),
    512: Plan(TINY, Launch(32, 16, 8, 1)),
}
# On SM 100 a third block would find no shared memory, and two stages of 256 columns are more than
# one has. Compiled for, not tuned.
BY_TMA_ON_100 = BY_TMA | {
    64: Plan(Launch(64, 64, 4, 3), BY_TMA[64].queries),
    256: Plan(Launch(64, 64, 8, 1), BY_TMA[256].queries),
}
# Without TMA addresses take registers, as softcap, ALiBi and a bias do; and blocks of SM 80 have
# 163 KB, those of SM 86, 89 and 120 99. Compiled for, not tuned.
BIAS = Launch(32, 32, 4, 1)
SMALL = {
    64: Plan(Launch(32, 64, 4, 2), Launch(64, 32, 4, 2), BIAS),
    128: Plan(Launch(32, 32, 4, 1), Launch(64, 32, 4, 1), BIAS),
    256: Plan(Launch(16, 32, 8, 1), Launch(32, 16, 4, 1), Launch(16, 16, 4, 1)),
    512: Plan(TINY, TINY, TINY),
}
FLOATS = {
    64: Plan(Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), BIAS),
    128: Plan(Launch(16, 32, 4, 1), Launch(32, 16, 4, 1), Launch(16, 16, 4, 1)),
    256: Plan(Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1)),
    512: Plan(TINY, TINY, TINY),
}
ROOM = 200 * 1024  # bytes of shared memory that the large tiles need
ROOM_OF_FLOATS = 129 * 1024  # that FLOATS[512] needs
SUMMARY_ELEMENTS = 4096  # of a tile of O
MUCH = 2**24  # scores: below, encoding descriptors on the host takes longer than they save


def launch(columns: int, dtype: torch.dtype, tma: bool, gpu: Gpu) -> Plan:
    """For tiles of so many columns."""
    narrow = max(columns, 64)
    if dtype == torch.float32:
        return FLOATS[narrow]
    if not tma:
        return SMALL[narrow]
    return (BY_TMA if gpu.sm < 100 else BY_TMA_ON_100)[narrow]


def refuses(
    gpu: Gpu, grad: Any, grad_lse: Any, q: torch.Tensor, k: Any, v: torch.Tensor, *_: Any
) -> str | None:
    dim = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32 and dim > 256 and gpu.shared_per_block < ROOM_OF_FLOATS:
        needs = f"need {ROOM_OF_FLOATS >> 10} KB of shared memory"
        has = f"a block of SM {gpu.sm} has {gpu.shared_per_block >> 10}"
        return f"float32 heads of {dim} elements {needs}; {has}"
    return attention_call.refuses(q, v)


@dataclass(frozen=True)
class _Given:
    """What the kernels of one backward have in common."""

    call: Call
    plan: Plan
    vec: int
    tma: bool
    grad: Heads
    tensors: dict[str, Any]

    @property
    def columns(self) -> tuple[int, int]:
        return width(self.call.q.dim, self.vec), width(self.call.v.dim, self.vec)

    def strides(self, *heads: Heads) -> list[int]:
        return [stride // self.vec for each in heads for stride in each.strides]

    @property
    def summary_rows(self) -> int:
        return SUMMARY_ELEMENTS // self.columns[1]

    @property
    def line(self) -> int:
        """Elements of a head's line of summaries: whole 16 bytes, of each packed sequence too."""
        gaps = 0 if self.tensors["cu_seqlens_q"] is None else self.call.batches
        return (programs(self.call.q.tokens, 4) + gaps) * 4

    @property
    def lines(self) -> int:
        """Of all heads, once for the LSE; the deltas follow."""
        return self.call.q.batches * self.call.q.heads

    def summary_strides(self) -> tuple[int, int]:
        """Between sequences and between heads."""
        return self.call.q.heads * self.line, self.line

    def tail(self, half: int) -> tuple[Any, ...]:
        """The scalars that end every list; `half`: from an LSE to its delta."""
        call, t = self.call, self.tensors
        alibi, bias = alibi_stride(t["alibi_slopes"]), bias_strides(t["bias"])
        return (*self.summary_strides(), half, alibi, *bias, call.scale, call.softcap or 1.0)

    def constants(self, choice: Launch, **more: Any) -> dict[str, Any]:
        columns, value_columns = self.columns
        padded = columns != self.call.q.dim or value_columns != self.call.v.dim
        interpreted = is_interpreted(_grad_keys) and self.call.dtype == torch.bfloat16
        sizes = {"VEC": self.vec, "ROWS": choice.rows, "KEYS": choice.keys, "COLUMNS": columns}
        sizes |= {"VALUE_COLUMNS": value_columns, "PADDED": padded, "WIDE": interpreted}
        return {**sizes, **self.call.flags, **more}

    def pick(self, *names: str) -> list[Any]:
        return [self.tensors[name] for name in names]


SUMMARISED = ("grad_lse", "sinks", "cu_seqlens_q")
OPTIONS = ("alibi_slopes", "bias", "cu_seqlens_q", "cu_seqlens_k", "seq_lens_k")


def _bind_summaries(g: _Given, out: Heads, blocks: int) -> Callable[..., None]:
    call, grad_lse = g.call, g.tensors["grad_lse"]
    dlse = (0, 0, 0)
    if grad_lse is not None:
        dlse = (0, *grad_lse.stride()) if grad_lse.dim() == 2 else grad_lse.stride()
    return bind(
        _summaries,
        (blocks * call.heads,),
        [torch.float32, torch.float32, *g.pick("out", "grad", "lse", *SUMMARISED)],
        (
            blocks, call.q.heads, call.heads, call.rows, call.v.dim // g.vec, g.lines * g.line,
            *g.strides(out, g.grad), *call.lse_strides, *g.summary_strides(), *dlse,
        ),
        {"VEC": g.vec, "ROWS": g.summary_rows, "COLUMNS": g.columns[1],
         "PADDED": g.columns[1] != call.v.dim},
        aligned=g.vec > 1,
        num_warps=4,
    )  # fmt: skip


def _bind_keys(g: _Given, dk: Heads, dv: Heads) -> Callable[..., None]:
    call, choice = g.call, g.plan.keys
    tiles = places(call, call.k, call.keys, choice.keys)
    q, grad, k, v = g.pick("q", "grad", "k", "v")
    summary: Any = torch.float32
    if g.tma:
        q = described(call.dtype, call.q, choice.rows, g.columns[0])
        grad = described(call.dtype, g.grad, choice.rows, g.columns[1])
        size = (2 * g.lines, g.line)
        summary = Described(torch.float32, size, (g.line, 1), (1, choice.rows))
    return bind(
        _grad_keys,
        (tiles.programs,),
        [call.dtype, call.dtype, q, grad, k, v, summary, *g.pick(*OPTIONS)],
        (
            *tiles.arguments, call.group, call.rows, call.keys, call.q.dim // g.vec,
            call.v.dim // g.vec, call.left, call.right, call.bottom_right,
            *g.strides(dk, dv, call.q, g.grad, call.k, call.v),
            *g.tail(g.lines if g.tma else g.lines * g.line),
        ),
        g.constants(choice, TMA=g.tma),
        aligned=g.vec > 1,
        num_warps=choice.warps,
        num_stages=choice.stages,
        registers=choice.registers,
    )  # fmt: skip


def _bind_queries(g: _Given, dq: Heads) -> Callable[..., None]:
    call, choice = g.call, g.plan.queries
    tiles = places(call, call.q, call.rows, choice.rows)
    q, grad, k, v = g.pick("q", "grad", "k", "v")
    if g.tma:
        k = described(call.dtype, call.k, choice.keys, g.columns[0])
        v = described(call.dtype, call.v, choice.keys, g.columns[1])
    return bind(
        _grad_queries,
        (tiles.programs,),
        [call.dtype, q, grad, k, v, torch.float32, *g.pick(*OPTIONS)],
        (
            *tiles.arguments, call.group, call.rows, call.keys, call.q.dim // g.vec,
            call.v.dim // g.vec, call.left, call.right, call.bottom_right,
            *g.strides(dq, call.q, g.grad, call.k, call.v), *g.tail(g.lines * g.line),
        ),
        g.constants(choice, TMA=g.tma),
        aligned=g.vec > 1,
        num_warps=choice.warps,
        num_stages=choice.stages,
        registers=choice.registers,
    )  # fmt: skip


def _bind_bias(g: _Given, bias: torch.Tensor) -> Callable[..., None]:
    call, choice = g.call, g.plan.bias
    assert choice is not None
    batches, heads, height, width = bias.shape
    shared = [height == 1 and call.rows > 1, width == 1 and call.keys > 1]
    held = programs(height, choice.rows), programs(width, choice.keys)
    tiles = programs(call.rows, choice.rows), programs(call.keys, choice.keys)
    walked = [count if one else 1 for one, count in zip(shared, tiles, strict=True)]
    return bind(
        _grad_bias,
        (batches * heads * held[0] * held[1],),
        [bias.dtype, *g.pick("q", "grad", "k", "v"), torch.float32, *g.pick(*OPTIONS)],
        (
            *held, height, width, call.q.heads, call.group, call.rows, call.keys,
            call.q.dim // g.vec, call.v.dim // g.vec, call.left, call.right, call.bottom_right,
            call.batches // batches, call.q.heads // heads,
            *walked, *g.strides(call.q, g.grad, call.k, call.v), *g.tail(g.lines * g.line),
        ),
        g.constants(choice, ONE_ROW=shared[0], ONE_KEY=shared[1]),
        aligned=g.vec > 1,
        num_warps=choice.warps,
        num_stages=choice.stages,
        registers=choice.registers,
    )  # fmt: skip


def _no_kernel(*tensors: Any) -> None:
    """There is nothing to compute."""


@tidy(6, 7, 8, 10, 11, 12)
def prepare(
    gpu: Gpu, grad: torch.Tensor, grad_lse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sinks: Any, alibi_slopes: Any, bias: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, *rest: Any,
) -> Callable[..., Any]:  # fmt: skip
    *numbers, need_q, need_kv, need_sinks, need_bias = rest
    given = {"grad": tame(grad), "q": tame(q), "k": tame(k), "v": tame(v), "out": tame(out)}
    call = describe([given[x] for x in "qkv"], cu_seqlens_q, layout, *numbers)
    given |= {"grad_lse": grad_lse, "lse": lse, "bias": bias, "sinks": sinks}
    given |= {"alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q}
    given |= {"cu_seqlens_k": cu_seqlens_k, "seq_lens_k": seq_lens_k}
    (new_q, dq), (new_k, dk), (new_v, dv) = (like(x, x.shape[-1], layout) for x in (q, k, v))
    grads, outs = (heads_of(given[x].shape, given[x].stride(), layout) for x in ("grad", "out"))
    assert grads is not None
    assert outs is not None
    nothing = memory.contiguous((0,), q.dtype, q.device)
    new_bias = memory.contiguous(bias.shape, bias.dtype, q.device) if need_bias else nothing
    vec = vector_width(
        [given[x] for x in ("grad", "q", "k", "v", "out")],
        (grads, outs, call.q, call.k, call.v, dq, dk, dv),
    )
    tma = gpu.sm >= 90 and gpu.shared_per_block >= ROOM and call.work >= MUCH
    tma = tma and vec > 1 and call.dtype != torch.float32 and call.is_plain(alibi_slopes, bias)
    tma = tma and all(map(fits_tma, (grads, call.q, call.k, call.v)))
    columns = max(width(call.q.dim, vec), width(call.v.dim, vec))
    g = _Given(call, launch(columns, call.dtype, tma, gpu), vec, tma, grads, given)
    blocks = programs(call.rows, g.summary_rows)
    new_summary = memory.contiguous((2 * g.lines, g.line), torch.float32, q.device)
    parts = 0 if sinks is None else call.batches * blocks  # of the sinks' gradient
    new_parts = memory.contiguous((parts, call.q.heads), torch.float32, q.device)
    rows, keys = call.heads * call.rows, call.heads * call.keys  # none of them: nothing to launch
    summaries = _bind_summaries(g, outs, blocks) if rows else _no_kernel
    key_kernel = _bind_keys(g, dk, dv) if need_kv and keys else _no_kernel
    query_kernel = _bind_queries(g, dq) if need_q and rows else _no_kernel
    bias_kernel = _bind_bias(g, bias) if need_bias and bias.numel() and call.heads else _no_kernel

    def run(
        grad: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any,
        alibi: Any, bias: Any, cu_q: Any, cu_k: Any, seq_k: Any, *_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        grad, q, k, v = tame(grad), tame(q), tame(k), tame(v)
        summary, parts = new_summary(), new_parts()
        summaries(summary, parts, tame(out), grad, lse, grad_lse, sinks, cu_q)
        more = (summary, alibi, bias, cu_q, cu_k, seq_k)
        dq = dk = dv = dsinks = dbias = None
        if need_kv:
            dk, dv = new_k(), new_v()
            key_kernel(dk, dv, q, grad, k, v, *more)
        if need_q:
            dq = new_q()
            query_kernel(dq, q, grad, k, v, *more)
        if need_bias:
            dbias = new_bias() if call.heads else new_bias().zero_()
            bias_kernel(dbias, q, grad, k, v, *more)
        if need_sinks:
            dsinks = parts.sum(0).to(sinks.dtype)
        return tuple(nothing() if x is None else x for x in (dq, dk, dv, dsinks, dbias))

    return run
