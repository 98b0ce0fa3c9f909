"""What attention's arguments mean, which of them fit together, and what its results look like.

Layouts are named as their dims follow: "bhsd" (batch, heads, tokens, head dim), "bshd", and "thd"
for sequences packed one after another, whose borders are in cu_seqlens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from tilewright import checks
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.multiplying import check_precision
from tilewright.spec import BadInput

RANKS = {"bhsd": 4, "bshd": 4, "thd": 3}
TOKENS = {"bhsd": 2, "bshd": 1, "thd": 0}  # the dim that counts them
HEADS = {"bhsd": 1, "bshd": 2, "thd": 1}
ALIGNMENTS = {"bottom_right": False, "top_left": True}
HELP = "See help(tilewright.attention)."

Tensor = torch.Tensor


# --- what a user's arguments stand for -----------------------------------------------------------


def option(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    """What a word means."""
    if not isinstance(value, str) or value not in known:
        names = ", ".join(repr(each) for each in known)
        raise wrong(name, f"is {value!r}", f"be one of {names}", HELP)
    return known[value]


def borders(window: Any, causal: bool, longest: int) -> tuple[int, int]:
    """How many keys before and behind its own place a query sees; −1: all that there are."""
    left, right = (None, None) if window is None else _sides(window)
    if causal:
        right = 0
    return (
        -1 if left is None or left >= longest else left,
        -1 if right is None or right >= longest else right,
    )


def _sides(window: Any) -> tuple[int | None, int | None]:
    fix = "Pass (left, right), where None is no border, or an int w for (w - 1, 0)."
    if isinstance(window, tuple | list):
        sides = window
    else:
        sides = (checks.index("attention", "window", window, fix) - 1, 0)
        if isinstance(window, bool) or sides[0] < 0:
            raise wrong("window", f"is {window!r}", "be 1 or more, or a pair", fix)
    if len(sides) != 2:
        raise wrong("window", f"is {window!r}", "be a pair or an int", fix)
    left, right = (s if s is None else checks.index("attention", "window", s, fix) for s in sides)
    if (left or 0) < 0 or (right or 0) < 0:
        raise wrong("window", f"is {window!r}", "have no negative side", fix)
    return left, right


def longest(name: str, given: Any, total: int) -> int:
    """The most tokens of a sequence: what the user says, or all there are."""
    if given is None:
        return total
    found = checks.index("attention", name, given, "Pass an int.")
    if found < 0:
        raise wrong(name, f"is {found}", "be 0 or more", "Pass the longest sequence's tokens.")
    return found


def not_packed(name: str) -> InputError:
    fix = "Pack the sequences and pass layout='thd', or leave it out."
    return wrong(name, "is given", "be None for padded layouts ('bhsd', 'bshd')", fix)


def wrong(name: str, got: str, wants: str, fix: str) -> InputError:
    return InputError(sentence("attention", name, got, wants, fix))


def wrong_dtype(name: str, got: str, wants: str, fix: str) -> DTypeError:
    return DTypeError(sentence("attention", name, got, wants, fix))


# --- checks --------------------------------------------------------------------------------------


def check(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None,
    bias: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seq_lens_k: Tensor | None, layout: str, scale: float, left: int, right: int, top_left: bool,
    softcap: float, max_q: int, max_k: int, precision: str,
) -> None:  # fmt: skip
    option("layout", layout, RANKS)
    check_precision("attention", precision)
    checks.number("attention", "scale", scale)
    checks.number("attention", "softcap", softcap, at_least=0.0)
    if softcap == math.inf:
        raise wrong("softcap", "is inf", "be finite", "Pass 0.0 for none.")
    _check_heads(q, k, v, layout)
    sequences = _check_lengths(q, cu_seqlens_q, cu_seqlens_k, seq_lens_k, layout)
    heads = q.shape[HEADS[layout]]
    for name, value in (("sinks", sinks), ("bias", bias)):
        if value is not None:
            checks.floating("attention", name, value)
            checks.same_device("attention", name, value, "q", q)
            if value.dtype not in (q.dtype, torch.float32):
                wants = f"have q's, {_dtype(q)}, or float32"
                fix = f"Convert it: {name}.to(q.dtype)."
                raise wrong_dtype(name, f"has dtype {_dtype(value)}", wants, fix)
    if sinks is not None:
        checks.same_shape("attention", "sinks", sinks, (heads,), "one for each head of q")
    if alibi_slopes is not None:
        _check_slopes(q, alibi_slopes, sequences, heads)
    if bias is not None:
        _check_bias(bias, (sequences, heads, max_q, max_k))


def _check_heads(q: Tensor, k: Tensor, v: Tensor, layout: str) -> None:
    rank, tokens, heads = RANKS[layout], TOKENS[layout], HEADS[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.floating("attention", name, x)
        if x.dim() != rank:
            wants = f"have {rank} dims, as layout={layout!r} says"
            fix = "Reshape it, or name its layout."
            raise wrong(name, f"has shape {tuple(x.shape)}", wants, fix)
        if x is not q:
            checks.same_dtype("attention", name, x, "q", q)
            checks.same_device("attention", name, x, "q", q)
    if k.shape[-1] != q.shape[-1]:
        got = f"has heads of {k.shape[-1]} elements, shape {tuple(k.shape)}"
        wants = f"have q's {q.shape[-1]}, shape {tuple(q.shape)}"
        raise wrong("k", got, wants, "Project both to one head dim.")
    if layout != "thd" and k.shape[0] != q.shape[0]:
        got = f"has a batch of {k.shape[0]}, shape {tuple(k.shape)}"
        wants = f"have q's batch, {q.shape[0]}, shape {tuple(q.shape)}"
        raise wrong("k", got, wants, "Expand or slice it, or name its layout.")
    for dim, what in ((heads, "heads"), (tokens, "tokens"), (0, "batch")):
        if v.shape[dim] != k.shape[dim]:
            got = f"has {v.shape[dim]} in its dim of {what}, shape {tuple(v.shape)}"
            wants = f"have k's {k.shape[dim]}, shape {tuple(k.shape)}"
            raise wrong("v", got, wants, "Slice one of them.")
    of_q, of_k = q.shape[heads], k.shape[heads]
    if of_q % of_k if of_k else of_q:
        got = f"has {of_k} heads, shape {tuple(k.shape)}"
        wants = f"have a number that divides q's {of_q}, shape {tuple(q.shape)}"
        raise wrong("k", got, wants, "Pass heads that q's share evenly, or name the layout.")


def _check_lengths(
    q: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, seq_lens_k: Any, layout: str
) -> int:
    """Returns the number of sequences."""
    borders = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    if layout == "thd":
        if cu_seqlens_q is None or cu_seqlens_k is None:
            wants = "say where the packed sequences of layout='thd' begin and end"
            fix = "Pass int32 sums of lengths: torch.tensor([0, 5, 12], dtype=torch.int32)."
            raise wrong("cu_seqlens_q", "is None", wants, fix)
        if seq_lens_k is not None:
            fix = "Say it in cu_seqlens_k, or pass padded tensors."
            raise wrong("seq_lens_k", "is given", "be None for layout='thd'", fix)
        for name, value in borders:
            _check_indices(name, value, q)
            if value.dim() != 1 or not len(value):
                wants = "have one dim, a border more than there are sequences"
                fix = "Pass cumulative sums of the lengths, from 0."
                raise wrong(name, f"has shape {tuple(value.shape)}", wants, fix)
        if len(cu_seqlens_k) != len(cu_seqlens_q):
            got = f"has shape {tuple(cu_seqlens_k.shape)}"
            wants = f"have cu_seqlens_q's, {tuple(cu_seqlens_q.shape)}"
            fix = "Pass a border for each sequence of q; a length may be 0."
            raise wrong("cu_seqlens_k", got, wants, fix)
        return len(cu_seqlens_q) - 1
    for name, value in borders:
        if value is not None:
            raise not_packed(name)
    if seq_lens_k is not None:
        _check_indices("seq_lens_k", seq_lens_k, q)
        checks.same_shape("attention", "seq_lens_k", seq_lens_k, q.shape[:1], "the batch")
    return q.shape[0]


def _check_indices(name: str, value: Tensor, q: Tensor) -> None:
    checks.dense("attention", name, value)
    if value.dtype != torch.int32:
        fix = f"Convert it: {name}.int()."
        raise wrong_dtype(name, f"has dtype {_dtype(value)}", "be int32", fix)
    checks.same_device("attention", name, value, "q", q)


def _check_slopes(q: Tensor, slopes: Tensor, sequences: int, heads: int) -> None:
    checks.floating("attention", "alibi_slopes", slopes)
    checks.same_device("attention", "alibi_slopes", slopes, "q", q)
    if slopes.dtype != torch.float32:
        fix = "Convert it: alibi_slopes.float()."
        raise wrong_dtype("alibi_slopes", f"has dtype {_dtype(slopes)}", "be float32", fix)
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        wants = f"have shape ({heads},) or ({sequences}, {heads}), a slope for each head of q"
        fix = "Reshape or slice it."
        raise wrong("alibi_slopes", f"has shape {tuple(slopes.shape)}", wants, fix)


def _check_bias(bias: Tensor, scores: tuple[int, ...]) -> None:
    got = f"has shape {tuple(bias.shape)}"
    if bias.dim() != 4:
        wants = f"have 4 dims, each 1 or that of the scores, {scores}"
        raise wrong("bias", got, wants, "Add dims of 1: bias[None].")
    if any(n not in (1, m) for n, m in zip(bias.shape, scores, strict=True)):
        wants = f"broadcast to the scores, {scores}, (batch, heads, queries, keys)"
        raise wrong("bias", got, wants, "Slice it, or pass dims of 1.")


def check_values(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seq_lens_k: Tensor | None, layout: str, max_q: int, max_k: int, *, spare: bool = False,
) -> None:  # fmt: skip
    """What stands in the index tensors; the host waits for it. `spare`: tokens may follow."""
    tokens = TOKENS[layout]
    packed = (("q", cu_seqlens_q, q, max_q), ("k", cu_seqlens_k, k, max_k))
    for letter, values, x, most in packed:
        if not _readable(values):
            continue
        name, found = f"cu_seqlens_{letter}", torch.as_tensor(values).tolist()
        lengths = [end - start for start, end in pairwise(found)]
        all_tokens = x.shape[tokens]
        ends = found[-1] == all_tokens or (spare and found[-1] < all_tokens)
        if found[0] != 0 or not ends:
            wants = f"run from 0 to the {all_tokens} tokens of {letter}"
            fix = "Pass cumulative sums of the lengths."
            raise wrong(name, f"runs from {found[0]} to {found[-1]}", wants, fix)
        if min(lengths, default=0) < 0:
            raise wrong(name, f"is {found}", "never decrease", "Pass sums of lengths.")
        if max(lengths, default=0) > most:
            fix = f"Pass max_seqlen_{letter}={max(lengths)}."
            wants = f"have none above max_seqlen_{letter}, {most}"
            raise wrong(name, f"has a length of {max(lengths)}", wants, fix)
    if _readable(seq_lens_k) and seq_lens_k is not None and len(seq_lens_k):
        least, longest = (int(n) for n in torch.aminmax(seq_lens_k))
        if least < 0 or longest > k.shape[tokens]:
            got, wants = f"runs from {least} to {longest}", f"lie within k's {k.shape[tokens]} keys"
            raise wrong("seq_lens_k", got, wants, "Mend the lengths, or pass longer keys.")


def _readable(values: Tensor | None) -> bool:
    """Whether its numbers can be had: not a fake tensor's, nor those of a graph to come."""
    if values is None or values.__class__ is not torch.Tensor or values.is_meta:
        return False
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def check_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, *rest: Any,
) -> None:  # fmt: skip
    op = "attention_backward"
    checks.same_shape(op, "grad", grad, out.shape, "the output's")
    checks.same_device(op, "grad", grad, "q", q)
    if grad_lse is not None:
        checks.same_shape(op, "grad_lse", grad_lse, lse.shape, "that of lse")
        checks.same_device(op, "grad_lse", grad_lse, "q", q)


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


# --- results -------------------------------------------------------------------------------------


def outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layout = next(word for word in rest if isinstance(word, str))
    heads_and_tokens = (q.shape[HEADS[layout]], q.shape[TOKENS[layout]])
    shape = heads_and_tokens if layout == "thd" else (q.shape[0], *heads_and_tokens)
    wide = torch.promote_types(q.dtype, torch.float32)
    return like(q, v.shape[-1]), q.new_empty(shape, dtype=wide)


def outputs_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None, bias: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    need_q, need_kv, need_sinks, need_bias = rest[-4:]
    return (
        like(q, q.shape[-1]) if need_q else q.new_empty(0),
        like(k, k.shape[-1]) if need_kv else q.new_empty(0),
        like(v, v.shape[-1]) if need_kv else q.new_empty(0),
        q.new_empty(0) if sinks is None or not need_sinks else sinks.new_empty(sinks.shape),
        q.new_empty(0) if bias is None or not need_bias else bias.new_empty(bias.shape),
    )


def like(x: Tensor, dim: int) -> Tensor:
    """Dense, with heads of `dim` elements side by side, its other dims in the order of x."""
    last = x.dim() - 1
    order = sorted(range(last), key=x.stride, reverse=True)
    shape = (*x.shape[:-1], dim)
    return torch.empty_permuted(shape, (*order, last), dtype=x.dtype, device=x.device)


# --- mistakes ------------------------------------------------------------------------------------


def _bad(name: str, change: Any, raises: type[Exception], *says: str) -> BadInput:
    """A call that is wrong in one way: `change(q)` gives (arguments, options)."""

    def call(attention: Any, device: str) -> Any:
        arguments, options = change(torch.ones(2, 4, 6, 16, device=device))
        return attention(*arguments, **options)

    return BadInput(name, call, raises, ("attention", *says))


def _all(q: Tensor, **options: Any) -> tuple[Any, Any]:
    return (q, q, q), options


def _packed(q: Tensor, *ends: int, **options: Any) -> tuple[Any, Any]:
    """The first sequence's tokens, packed, with these borders."""
    x = q[0].transpose(0, 1)
    found = torch.tensor(ends, dtype=torch.int32, device=q.device)
    return (x, x, x), {"layout": "thd", "cu_seqlens_q": found, **options}


ERRORS = (
    _bad(
        "k of another head dim",
        lambda q: ((q, q[..., :8], q), {}),
        *(InputError, "k has heads of 8", "q's 16", "(2, 4, 6, 16)", "(2, 4, 6, 8)"),
    ),
    _bad(
        "kv heads that do not divide q's",
        lambda q: ((q, q[:, :3], q[:, :3]), {}),
        *(InputError, "k has 3 heads", "divides q's 4", "(2, 3, 6, 16)"),
    ),
    _bad(
        "v of other heads than k",
        lambda q: ((q, q, q[:, :2]), {}),
        *(InputError, "v", "heads", "(2, 2, 6, 16)", "(2, 4, 6, 16)"),
    ),
    _bad(
        "v of other tokens than k",
        lambda q: ((q, q, q[:, :, :5]), {}),
        *(InputError, "v", "tokens", "(2, 4, 5, 16)", "(2, 4, 6, 16)"),
    ),
    _bad(
        "k of another batch",
        lambda q: ((q, q[:1], q[:1]), {}),
        *(InputError, "k has a batch of 1", "(1, 4, 6, 16)", "(2, 4, 6, 16)"),
    ),
    _bad(
        "dtypes that differ",
        lambda q: ((q, q.half(), q.half()), {}),
        *(DTypeError, "k", "float16", "q's, float32", "k.to(q.dtype)"),
    ),
    _bad("integer tensor", lambda q: _all(q.int()), DTypeError, "q", "int32", "q.float()"),
    _bad("not a tensor", lambda q: (([1.0], q, q), {}), DTypeError, "q", "list"),
    _bad(
        "k on another device",
        lambda q: ((q, q.to("meta"), q), {}),
        *(InputError, "k", "meta", "k.to(q.device)"),
    ),
    _bad("q of too few dims", lambda q: _all(q[0]), InputError, "q", "(4, 6, 16)", "4 dims"),
    _bad("unknown layout", lambda q: _all(q, layout="sbhd"), InputError, "'sbhd'", "'bhsd'"),
    _bad(
        "unknown alignment",
        lambda q: _all(q, causal=True, causal_alignment="left"),
        *(InputError, "causal_alignment", "'left'", "'top_left'"),
    ),
    _bad(
        "unknown precision",
        lambda q: _all(q, precision="fp8"),
        *(InputError, "precision", "'fp8'", "'tf32'"),
    ),
    _bad("negative window", lambda q: _all(q, window=(3, -1)), InputError, "window", "(3, -1)"),
    _bad("window of nothing", lambda q: _all(q, window=0), InputError, "window is 0", "1 or more"),
    _bad(
        "window of another type",
        lambda q: _all(q, window=2.5),
        *(DTypeError, "window is 2.5", "(left, right)"),
    ),
    _bad(
        "window of three",
        lambda q: _all(q, window=(1, 2, 3)),
        *(InputError, "window is (1, 2, 3)", "pair"),
    ),
    _bad("negative softcap", lambda q: _all(q, softcap=-30.0), InputError, "softcap is -30", "0"),
    _bad("scale that is no number", lambda q: _all(q, scale="1"), DTypeError, "scale", "number"),
    _bad(
        "sinks of another shape",
        lambda q: _all(q, sinks=q[0, 0, 0]),
        *(InputError, "sinks", "(16,)", "(4,)", "head of q"),
    ),
    _bad(
        "slopes of another shape",
        lambda q: _all(q, alibi_slopes=q[0, 0, 0]),
        *(InputError, "alibi_slopes", "(16,)", "(4,) or (2, 4)"),
    ),
    _bad(
        "slopes of another dtype",
        lambda q: _all(q.half(), alibi_slopes=q[0, :, 0, 0].half()),
        *(DTypeError, "alibi_slopes", "float16", "alibi_slopes.float()"),
    ),
    _bad(
        "slopes that require grad",
        lambda q: _all(q, alibi_slopes=q[0, :, 0, 0].clone().requires_grad_()),
        *(InputError, "alibi_slopes", "requires grad", "detach"),
    ),
    _bad(
        "bias that does not broadcast",
        lambda q: _all(q, bias=q[:, :, :, :5]),
        *(InputError, "bias", "(2, 4, 6, 5)", "(2, 4, 6, 6)", "broadcast"),
    ),
    _bad(
        "bias of too few dims",
        lambda q: _all(q, bias=q[0, 0, :, :6]),
        *(InputError, "bias", "(6, 6)", "4 dims", "(2, 4, 6, 6)"),
    ),
    _bad(
        "bias of another dtype",
        lambda q: _all(q.half(), bias=q[..., :6].bfloat16()),
        *(DTypeError, "bias", "bfloat16", "float16", "float32"),
    ),
    _bad(
        "packed without borders",
        lambda q: _all(q[0].transpose(0, 1), layout="thd"),
        *(InputError, "cu_seqlens_q is None", "thd", "int32"),
    ),
    _bad(
        "borders of a padded batch",
        lambda q: _all(q, cu_seqlens_q=torch.zeros(3, dtype=torch.int32, device=q.device)),
        *(InputError, "cu_seqlens_q", "bhsd", "thd"),
    ),
    _bad(
        "borders in int64",
        lambda q: _all(
            q[0].transpose(0, 1),
            **{"layout": "thd", "cu_seqlens_q": torch.tensor([0, 6], device=q.device)},
        ),
        *(DTypeError, "cu_seqlens_q", "int64", "cu_seqlens_q.int()"),
    ),
    _bad(
        "borders of two dims",
        lambda q: _packed(q, cu_seqlens_q=torch.zeros(2, 2, dtype=torch.int32, device=q.device)),
        *(InputError, "cu_seqlens_q", "(2, 2)", "one dim"),
    ),
    _bad(
        "other sequences of k than of q",
        lambda q: _packed(q, 0, 2, 6, cu_seqlens_k=_packed(q, 0, 6)[1]["cu_seqlens_q"]),
        *(InputError, "cu_seqlens_k", "(2,)", "(3,)"),
    ),
    _bad(
        "lengths of packed sequences",
        lambda q: _packed(q, 0, 6, seq_lens_k=_packed(q, 6)[1]["cu_seqlens_q"]),
        *(InputError, "seq_lens_k", "thd", "cu_seqlens_k"),
    ),
    _bad(
        "longest sequence of a padded batch",
        lambda q: _all(q, max_seqlen_q=6),
        *(InputError, "max_seqlen_q", "bhsd", "thd"),
    ),
    _bad("unknown backend", lambda q: _all(q, backend="tritn"), InputError, "tritn", "triton"),
)
