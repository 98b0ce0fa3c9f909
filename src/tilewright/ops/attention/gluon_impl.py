"""FlashAttention's forward for Hopper (SM 90): the host side of `hopper_kernels`.

A block holds 128 or 192 rows of a head, 64 for each of its consumers; one warp fetches what they
need by TMA. How many consumers, how many keys a step takes, whether consumers take turns and
whether blocks stay for several tiles is data: `tuned/attention-forward-sm90.json`, which
`scripts/tune_attention.py` finds for plain calls. Softcap, lengths, windows and heads that are
multiplied in two parts follow the rules of `launch`; all else follows from the sizes.
Limits: halves, heads up to 256 elements, rows of whole 16 bytes, no ALiBi and no bias.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from typing import Any

import torch

from tilewright.gpu import KIB, Gpu
from tilewright.ops.attention.hopper_kernels import _attend_on_hopper
from tilewright.ops.attention.hopper_math import SHARE
from tilewright.toolkit import attention_call, memory
from tilewright.toolkit.attention_call import (
    Call,
    describe,
    described,
    fits_tma,
    like,
    lse_shape,
    places,
    tidy,
    vector_width,
)  # fmt: skip
from tilewright.toolkit.heads import Heads, is_tame, tame, taming
from tilewright.toolkit.launch import bind, programs

ROWS = SHARE.value  # of a consumer
WIDEST = 256
TABLE = "attention-forward-sm90.json"
SMALLEST = 2.0**-126  # a scale below it is 0 or turns scores round: they are masked after it
MUCH = 2**26  # scores, as for TMA in `triton_impl`: smaller calls were not measured here
RESERVED = 1 * KIB  # bytes for barriers
STEEPEST = 2.0**100  # its reciprocal is a number, too


@dataclass(frozen=True)
class Launch:
    workers: int  # consumers of a block
    keys: int  # of a step
    stages: int  # steps that are in shared memory
    turns: bool  # consumers issue their products one after the other
    lazy: bool  # what was summed is rescaled only if the maximum grew much
    order: str  # of tiles: "pairs", "one" or "queue" (hopper_kernels._tile)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's and the producer's threads: together an SM's 64 Ki, in warps of four."""
        return (240, 32) if self.workers == 2 else (160, 32)


@cache
def table() -> dict[tuple[int, bool], tuple[tuple[float, Launch], ...]]:
    """By columns and whether there are borders: (keys up to which it is the choice, choice)."""
    text = resources.files("tilewright.tuned").joinpath(TABLE).read_text()
    found: dict[tuple[int, bool], tuple[tuple[float, Launch], ...]] = {}
    for entry in json.loads(text)["choices"]:
        key = entry["columns"], entry["borders"]
        up_to = float("inf") if entry["keys_up_to"] is None else entry["keys_up_to"]
        found[key] = (*found.get(key, ()), (up_to, Launch(**entry["launch"])))
    return found


# With softcap a score takes twice the instructions. By columns and borders, as found on an H200.
CAPPED = {
    (64, False): Launch(2, 128, 2, turns=False, lazy=True, order="pairs"),
    (64, True): Launch(2, 128, 2, turns=False, lazy=True, order="pairs"),
    (128, False): Launch(2, 128, 2, turns=False, lazy=True, order="pairs"),
    (128, True): Launch(2, 128, 2, turns=True, lazy=True, order="pairs"),
    (256, False): Launch(2, 64, 2, turns=False, lazy=True, order="pairs"),
    (256, True): Launch(2, 64, 2, turns=False, lazy=True, order="pairs"),
}


def launch(
    columns: int, borders: bool, keys: int, *, window: bool, capped: bool, ragged: bool,
    chained: bool,
) -> Launch:  # fmt: skip
    """For tiles of so many columns, whose rows see up to so many keys. `borders`: a causal mask or
    a window. `ragged`: lengths that the GPU knows. `chained`: two products for one."""
    choice = next(one for up_to, one in table()[columns, borders] if keys <= up_to)
    if capped:
        choice = CAPPED[columns, borders]
    if chained:  # more to issue at once: one consumer at a time
        choice = replace(choice, turns=True, lazy=True)
    spare = replace(choice, workers=2, lazy=True)  # lengths and borders take registers
    if ragged:  # no two tiles are the same work
        return replace(spare, turns=chained or columns == 64, order="queue")
    return replace(spare, turns=True, order="one") if window else choice


def width(dim: int) -> int:
    """Columns of the tile that holds a head; TMA fills up with zeros."""
    return max(1 << (dim - 1).bit_length(), 64)


def rest(dim: int) -> int:
    """Columns that are multiplied beyond half of such a tile, or 0 if all are: heads of 96 are
    multiplied as 64 and 32, not as 128."""
    half = width(dim) // 2
    columns = max(1 << (dim - half - 1).bit_length(), 16)
    return columns if half >= ROWS and columns < half else 0


def refuses(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, alibi_slopes: Any,
    bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, *rest: Any,
) -> str | None:  # fmt: skip
    for name, value in (("alibi_slopes", alibi_slopes), ("bias", bias)):
        if value is not None:
            return f"it has no {name}"
    reason = attention_call.refuses(q, v)
    if reason is not None or not q.numel():
        return reason
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"q or v has heads of more than {WIDEST} elements"
    given = [tame(x) for x in (q, k, v)]
    call = describe(given, cu_seqlens_q, layout, *rest)
    if vector_width(given, (call.q, call.k, call.v)) == 1:
        return "a row of q, k or v does not start at a multiple of 16 bytes, as TMA wants it"
    for name, heads in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not fits_tma(heads):
            return f"{name} has no tokens, or is expanded along a dim: TMA cannot read it so"
    return None


def yields(gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> str | None:
    """Why another kernel is quicker, or may be: short walks and few rows were not measured."""
    _, _, _, cu_seqlens_q, _, _, layout, *options = rest
    call = describe([tame(x) for x in (q, k, v)], cu_seqlens_q, layout, *options)
    if call.rows < 2 * ROWS:
        return f"q has {call.rows} tokens in a sequence; a block holds {2 * ROWS} or more"
    scores = call.heads * call.rows * _reach(call)
    if scores < MUCH:
        return f"it pays from {MUCH:,} scores on; there are {scores:,} at most"
    return None


def _reach(call: Call) -> int:
    """Keys that a row sees, at most."""
    if call.left < 0 or call.right < 0:
        return call.keys
    return min(call.keys, call.left + call.right + 1)


def bend(call: Call) -> float:
    """What scores are multiplied by before tanh. Beyond the largest, it is a step either way."""
    k = call.scale / call.softcap if call.softcap else 0.0
    return min(max(k, -STEEPEST), STEEPEST)


def _bind(call: Call, gpu: Gpu, options: Sequence[Any], out: Heads) -> Callable[..., None]:
    """`run(out, out, lse, q, k, v, sinks, cu_q, cu_k, key_counts, counter)`; the second if packed,
    the last, a 0, if lengths are known to the GPU alone."""
    _, cu_q, _, key_counts = options
    ragged = cu_q is not None or key_counts is not None
    columns, value_columns = width(call.q.dim), width(call.v.dim)
    borders = call.left >= 0 or call.right >= 0
    choice = launch(
        max(columns, value_columns), borders, _reach(call),
        window=call.left >= 0, capped=call.softcap > 0, ragged=ragged,
        chained=bool(rest(call.q.dim) or rest(call.v.dim)),
    )  # fmt: skip
    rows = choice.workers * ROWS
    tiles = places(call, call.q, call.rows, rows)
    in_pairs = choice.order == "pairs"
    units = programs(tiles.blocks, 2) * tiles.lines if in_pairs else tiles.programs
    grid = units if choice.order == "one" else min(units, gpu.sm_count)
    rounds = programs(units, grid) * (2 if in_pairs else 1)

    of_queries, of_results = 2 * rows * columns, 2 * rows * value_columns
    room = gpu.shared_per_block - RESERVED
    room -= 2 * choice.stages * choice.keys * (columns + value_columns)
    own = of_queries + of_results <= room
    queue = 2 if choice.order != "one" and 2 * of_queries + of_results <= room else 1
    registers, few_registers = choice.registers

    def tile(heads: Heads, tokens: int, columns: int) -> Any:
        return described(call.dtype, heads, tokens, columns, gluon=True)

    off = call.keys - call.rows if call.bottom_right else 0
    return bind(
        _attend_on_hopper,
        (grid,),
        [
            tile(out, ROWS, value_columns), None if cu_q is None else call.dtype, torch.float32,
            tile(call.q, ROWS, columns), tile(call.k, choice.keys, columns),
            tile(call.v, choice.keys, value_columns), *options,
            torch.int32 if choice.order == "queue" else None,
        ],
        (
            rounds, *tiles.arguments, call.group, call.rows, call.keys, call.left, call.right, off,
            call.bottom_right, out.token_stride, out.head_stride, call.q.tokens, call.scale,
            bend(call),
        ),
        {
            "WORKERS": choice.workers, "KEYS": choice.keys, "STAGES": choice.stages,
            "REGISTERS": registers, "FEW_REGISTERS": few_registers,
            "LEFT": call.left >= 0, "RIGHT": call.right >= 0,
            "TAIL": ragged or call.keys % choice.keys > 0, "RAGGED": ragged,
            "SOFTCAP": call.softcap > 0, "SCALED": call.scale < SMALLEST, "TURNS": choice.turns,
            "LAZY": choice.lazy, "OWN": own, "QUEUE": queue, "ORDER": choice.order,
            "REST": rest(call.q.dim), "REST_OF_VALUES": rest(call.v.dim),
        },
        aligned=True,
        num_warps=4,
    )  # fmt: skip


@tidy(3, 6, 7, 8)
def prepare(
    gpu: Gpu, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, alibi_slopes: Any,
    bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str, *rest: Any,
) -> Callable[..., Any]:  # fmt: skip
    given = [tame(x) for x in (q, k, v)]
    call = describe(given, cu_seqlens_q, layout, *rest)
    new_out, out = like(q, v.shape[-1], layout)
    packed = cu_seqlens_q is not None
    new_lse = memory.contiguous(lse_shape(call, packed), torch.float32, q.device)
    if call.is_empty:
        return lambda *_: (new_out(), new_lse())
    kernel = _bind(call, gpu, [sinks, cu_seqlens_q, cu_seqlens_k, seq_lens_k], out)
    # a new counter for each call: calls on two streams must not share one
    queued = packed or seq_lens_k is not None
    new_counter = partial(torch.zeros, 1, dtype=torch.int32, device=q.device)

    def run(
        q: Any, k: Any, v: Any, sinks: Any, _: Any, __: Any, cu_q: Any, cu_k: Any, counts: Any,
        *___: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse = new_out(), new_lse()
        counter = new_counter() if queued else None
        kernel(out, out if packed else None, lse, q, k, v, sinks, cu_q, cu_k, counts, counter)
        return out, lse

    return run if all(map(is_tame, (q, k, v))) else taming(run, 3)
