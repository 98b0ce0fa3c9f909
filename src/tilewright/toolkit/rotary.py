"""What a rotary kernel is told about its tensors, whichever technology it is written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.toolkit import memory
from tilewright.toolkit.heads import Heads, heads_of, result_strides, tame
from tilewright.toolkit.rows import VECTOR_BYTES

# by style: whether the elements of a pair are neighbours where they are read, and where written
STYLES = {"halves": (False, False), "pairs": (True, True), "to_halves": (True, False)}


@dataclass(frozen=True)
class Call:
    """One call, q before k, in elements."""

    given: tuple[Heads, Heads]
    made: tuple[Heads, Heads]
    made_strides: tuple[tuple[int, ...], tuple[int, ...]]
    rotary_dim: int
    full_table: bool  # an entry for each element of the result, not for each pair
    table_rows: int  # that a position may name
    table_strides: tuple[int, int]  # between sequences, between rows
    position_strides: tuple[int, int]  # between sequences, between tokens

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.given[0].batches * self.given[0].tokens

    @property
    def rest(self) -> int:
        """Elements of a head that are not rotated."""
        return self.given[0].dim - self.rotary_dim


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    rotary_dim: int,
    layout: str,
    *,
    in_place: bool = False,
) -> Call:
    """For tensors whose last dims are contiguous (`heads.tame`); `sin` lies as `cos` does."""

    def heads(x: torch.Tensor, strides: tuple[int, ...]) -> Heads:
        found = heads_of(x.shape, strides, layout)
        assert found is not None
        return found

    def made(x: torch.Tensor) -> tuple[int, ...]:
        return tuple(x.stride()) if in_place else result_strides(x.shape, x.stride())

    of_positions = (0, 0)
    if position_ids is not None:
        of_positions = _steps(position_ids.shape, position_ids.stride())
    table = cos[:, 0] if cos.dim() == 4 else cos
    of_table = (0, table.stride(0)) if table.dim() == 2 else _steps(table.shape, table.stride())
    return Call(
        given=(heads(q, q.stride()), heads(k, k.stride())),
        made=(heads(q, made(q)), heads(k, made(k))),
        made_strides=(made(q), made(k)),
        rotary_dim=rotary_dim,
        full_table=cos.shape[-1] == rotary_dim,
        table_rows=table.shape[-2],
        table_strides=of_table,
        position_strides=of_positions,
    )


def _steps(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int]:
    """Between sequences and between tokens, of (tokens, ...) or (batch or 1, tokens, ...)."""
    if len(shape) == 1:
        return 0, strides[0]
    return (strides[0] if shape[0] > 1 else 0), strides[1]


def vector_width(call: Call, *tensors: torch.Tensor) -> int:
    """Elements per 16-byte load, if pairs, rests and strides come in whole vectors, else 1."""
    heads, *_ = tensors
    vec = VECTOR_BYTES // heads.element_size()
    sizes = [call.rotary_dim // 2, call.given[0].dim, *call.table_strides]
    for part in (*call.given, *call.made):
        sizes += part.strides
    whole = all(size % vec == 0 for size in sizes)
    aligned = all(t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)
    return vec if whole and aligned else 1


def new_results(
    call: Call, q: torch.Tensor, k: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Allocators of the results for q and for k."""
    of_q, of_k = call.made_strides
    return (
        memory.allocator(q.shape, of_q, q.dtype, q.device),
        memory.allocator(k.shape, of_k, k.dtype, k.device),
    )


def on_heads(prepare: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """A `prepare` whose heads are contiguous, and whose tables lie alike: others are copied."""

    def prepared(gpu: Any, *args: Any) -> Callable[..., Any]:
        if _are_tame(*args[:4]):
            return prepare(gpu, *args)

        def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, cos, sin, *rest = args
            return tame(q), tame(k), cos.contiguous(), sin.contiguous(), *rest

        run = prepare(gpu, *copied(args))
        return lambda *args: run(*copied(args))

    return prepared


def on_heads_in_place(
    prepare: Callable[..., Callable[..., Any]],
) -> Callable[..., Callable[..., None]]:
    """The same for heads that are written where they lie: copies are written back."""

    def prepared(gpu: Any, *args: Any) -> Callable[..., None]:
        if _are_tame(*args[:4]):
            return prepare(gpu, *args)

        def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, cos, sin, *rest = args
            return q.contiguous(), k.contiguous(), cos.contiguous(), sin.contiguous(), *rest

        run = prepare(gpu, *copied(args))

        def on_copies(*args: Any) -> tuple[Any, ...]:
            copies = copied(args)
            run(*copies)
            return copies[:2]

        return written_back(on_copies)

    return prepared


def written_back(run: Callable[..., Any]) -> Callable[..., None]:
    """In place, by way of results apart."""

    def run_and_write_back(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> None:
        for given, result in zip((q, k), run(q, k, *rest), strict=True):
            given.copy_(result)

    return run_and_write_back


def _are_tame(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return all(tame(t) is t for t in (q, k, cos)) and cos.stride() == sin.stride()
