"""attention: the declaration and the public function."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewright import attending, checks, debugging, library, multiplying
from tilewright.attending import HEADS, TOKENS
from tilewright.ops.attention import bounds, reference
from tilewright.shapes import LLAMA_3_8B, MODELS
from tilewright.spec import Args, Autograd, Backend, Case, Cost, Features, Op, normal

HERE = "tilewright.ops.attention"
HALVES = (torch.float16, torch.bfloat16)

Tensor = torch.Tensor
Dims = Mapping[str, Any]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seq_lens_k: Tensor | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """softmax(scale q kᵀ) v, without ever holding all scores; with return_lse, (result, lse).

    layout: "bhsd" (batch, heads, tokens, head dim), "bshd", or "thd", sequences packed one after
    another. k and v may have fewer heads, which q's share evenly, and v a head dim of its own. The
    result lies in memory as q does. `scale` is head_dim ** -0.5 unless it is given.

    Query i sees key j if  i + off − left <= j <= i + off + right,  where off is the number of keys
    less that of queries (causal_alignment="bottom_right") or 0 ("top_left"). window=(left, right);
    None on a side, or without a window, is no border; an int w is (w − 1, 0). causal: right is 0.
    A query that sees nothing gets zeros.

    A score is scale q·k, then softcap · tanh(score / softcap) if softcap > 0, less
    slope · |i + off − j| with alibi_slopes, float32, (heads,) or (batch, heads), plus `bias`, which
    broadcasts to (batch, heads, queries, keys), in q's dtype or float32, and may hold -inf.
    `sinks`, (heads,): one more logit, in the denominator alone. lse, float32, (batch, heads,
    queries) or (heads, tokens), is the natural logarithm of the denominator.

    Packed: sequence b is tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1], int32, on q's device; keys
    have cu_seqlens_k, or the same. max_seqlen_q and _k, the longest lengths or more, save work; a
    bias is as large as they say. Padded: of sequence b only the first seq_lens_k[b] keys exist,
    int32. These tensors are not read back to be checked, unless `with tilewright.debug()`.

    precision: "ieee" or "tf32" products of float32; None: as torch.get_float32_matmul_precision()
    says. Gradients: q, k, v, sinks and bias; lse passes its own on. Every bit repeats.

    >>> import torch, tilewright
    >>> q, v = torch.zeros(1, 1, 3, 16), torch.arange(3.0).view(1, 1, 3, 1)
    >>> tilewright.attention(q, q, v, causal=True).flatten()
    tensor([0.0000, 0.5000, 1.0000])
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        checks.tensor("attention", "q", q)
        checks.tensor("attention", "k", k)
    checks.flag("attention", "causal", causal)
    checks.flag("attention", "return_lse", return_lse)
    place = attending.option("layout", layout, TOKENS)
    top_left = attending.option("causal_alignment", causal_alignment, attending.ALIGNMENTS)
    try:
        max_q, max_k, dim = q.size(place), k.size(place), q.size(-1)
    except (IndexError, RuntimeError):  # too few dims, or a nested tensor: `check` will name it
        max_q, max_k, dim = 0, 0, 1
    if layout == "thd":
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
            max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
        max_q = attending.longest("max_seqlen_q", max_seqlen_q, max_q)
        max_k = attending.longest("max_seqlen_k", max_seqlen_k, max_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise attending.not_packed("max_seqlen_k" if max_seqlen_q is None else "max_seqlen_q")
    left, right = -1, 0 if causal else -1
    if window is not None:
        left, right = attending.borders(window, causal, max(max_q, max_k))
    if scale is None:
        scale = (dim or 1) ** -0.5
    if q.dtype != torch.float32 and precision is None:
        precision = "ieee"
    else:
        precision = multiplying.precision_of("attention", precision, q.dtype)
    if getattr(alibi_slopes, "requires_grad", False) and torch.is_grad_enabled():
        wants, fix = "be a constant: there is no gradient for it", "Pass alibi_slopes.detach()."
        raise attending.wrong("alibi_slopes", "requires grad", wants, fix)
    rest = (layout, scale, left, right, top_left, softcap, max_q, max_k, precision, backend)
    tensors = (q, k, v, sinks, alibi_slopes, bias, cu_seqlens_q, cu_seqlens_k, seq_lens_k)
    # Dynamo cannot trace a ContextVar, and a graph reads nothing back
    has_lengths = cu_seqlens_q is not None or seq_lens_k is not None
    if has_lengths and not torch.compiler.is_compiling():
        debug = debugging.active()
        if debug or q.device.type == "cpu":  # where nobody waits for them
            attending.check(*tensors, *rest[:-1])
            attending.check_values(q, k, *tensors[-3:], layout, max_q, max_k, spare=not debug)
    results = _attention(*tensors, rest)
    return results if return_lse else results[0]


# --- inputs --------------------------------------------------------------------------------------

BIASES = {  # which of (batch, heads, queries, keys) a bias has
    "full": (True, True, True, True),
    "heads": (False, True, True, True),
    "batch": (True, False, True, True),
    "rows": (False, False, True, True),
    "keys": (True, False, False, True),
}


def inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """q of dims["shape"]; of two dims, rows and columns, it makes a batch of small heads.

    With dims["head_dim"], heads of q and k are so wide instead.
    """
    shape, layout, kv_heads, lengths, key_lengths = _geometry(dims)
    packed, transposed = layout == "thd", dims.get("from_bshd", False)
    batch, heads = len(lengths) if packed else shape[0], shape[HEADS[layout]]
    max_q, max_k = (max(n, default=0) for n in (lengths, key_lengths))
    keys, value_dim = sum(key_lengths) if packed else max_k, dims.get("value_dim")
    # scores of normal numbers reach about 4; float16 could not hold q alone so enlarged
    logits = dims.get("logits")
    size = 1.0 if logits is None else math.sqrt(logits / 4)

    def of_heads(count: int, tokens: int, dim: int) -> Tensor:
        sizes = {
            "thd": (tokens, count, dim),
            "bhsd": (batch, count, tokens, dim),
            "bshd": (batch, tokens, count, dim),
        }
        x = normal(sizes["bshd" if transposed else layout], rng)
        return x.transpose(1, 2) if transposed else x

    def placed(x: Tensor, of_dtype: torch.dtype = dtype) -> Tensor:
        return x.to(of_dtype).to(device)

    q = placed(size * of_heads(heads, shape[TOKENS[layout]], shape[-1]))
    if dims.get("odd"):  # no row starts at a whole vector
        q = torch.cat((q, q[..., :1]), -1)[..., :-1]
    k = placed(size * of_heads(kv_heads, keys, shape[-1]))
    v = placed(of_heads(kv_heads, keys, shape[-1] if value_dim is None else value_dim))
    sinks = slopes = cu_q = cu_k = seq_lens = None
    kind = dims.get("sinks_dtype") or dtype
    if dims.get("sinks"):
        sinks = placed(normal((heads,), rng), kind)
    if alibi := dims.get("alibi"):
        sizes = (batch, heads)[0 if alibi == "batch" else 1 :]
        slopes = placed(0.3 * normal(sizes, rng).abs(), torch.float32)
    bias, kind = _bias(dims, (batch, heads, max_q, max_k), rng), dims.get("bias_dtype") or dtype
    if packed:
        cu_q, cu_k = (_sums(n).to(device) for n in (lengths, key_lengths))
    elif dims.get("seq_lens"):
        drawn = (normal((batch,), rng).abs() * max_k).clamp(max=max_k)
        drawn[1:2] = 0
        seq_lens = placed(drawn, torch.int32)
    left, right = attending.borders(_window(dims), dims.get("causal", False), max(max_q, max_k))
    scale = dims.get("scale", max(shape[-1], 1) ** -0.5)
    precision = multiplying.precision_of("attention", dims.get("precision") or "ieee", dtype)
    return (
        q, k, v, sinks, slopes, None if bias is None else placed(bias, kind), cu_q, cu_k, seq_lens,
        layout, scale, left, right, dims.get("top_left", False), dims.get("softcap", 0.0),
        max_q, max_k, precision,
    )  # fmt: skip


def _bias(dims: Dims, scores: tuple[int, ...], rng: Any) -> Tensor | None:
    kind, masks = dims.get("bias"), dims.get("bias_masks", False)
    if kind is None:
        return None
    sizes = [n if has else 1 for n, has in zip(scores, BIASES[kind], strict=True)]
    bias = normal(sizes, rng)
    return bias.masked_fill(normal(sizes, rng) > 1, -math.inf) if masks else bias


def _geometry(dims: Dims) -> tuple[Any, str, int, tuple[int, ...], tuple[int, ...]]:
    """q's shape, layout, heads of k, and the lengths of the sequences: queries and keys."""
    shape, kv_heads = tuple(dims["shape"]), dims.get("kv_heads")
    layout = dims.get("layout") or ("thd" if len(shape) == 3 else "bhsd")
    if len(shape) == 2:
        rows, columns = shape
        shape, kv_heads = (rows, 1, max(columns // 16, min(columns, 1)), 16), 1
    shape = (*shape[:-1], dims.get("head_dim", shape[-1]))
    tokens = shape[TOKENS[layout]]
    lengths, key_lengths, keys = dims.get("lengths"), dims.get("key_lengths"), dims.get("keys")
    if layout == "thd":
        lengths = lengths or (tokens // 3, 0, tokens - tokens // 3)
        key_lengths = key_lengths or lengths
    else:
        lengths, key_lengths = (tokens,) * shape[0], (tokens if keys is None else keys,) * shape[0]
    heads = shape[HEADS[layout]]
    return shape, layout, heads if kv_heads is None else kv_heads, lengths, key_lengths


def _window(dims: Dims) -> tuple[int | None, int | None] | None:
    """Both borders, or one: dims are numbers, which None is not."""
    window, ahead, behind = dims.get("window"), dims.get("ahead"), dims.get("behind")
    return (behind, ahead) if window is None else window


def _sums(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def exact_inputs(dims: Dims, dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Each query finds one key with a score of 0; the others' are below −745: exp makes them 0.

    Key j holds the bits of j as ±1, and a 1. A query that looks for key t holds the bits of t, and
    less their count, both times A/2: q·k is −A for each bit in which j and t differ. So the result
    is a row of v, and lse is 0, exactly.
    """
    given = dict(zip(OP.arguments, inputs(dims, dtype, device, rng), strict=True))
    layout, sinks, bias = given["layout"], given["sinks"], given["bias"]
    given |= {"scale": 0.25, "softcap": 2048.0 if given["softcap"] else 0.0}
    far = 4096.0  # A: 1024 after the scale, 946 after the cap
    given["v"] = torch.randint(-2, 3, given["v"].shape, generator=rng).to(given["v"])
    if given["alibi_slopes"] is not None:
        given["alibi_slopes"] = torch.zeros_like(given["alibi_slopes"])
    if bias is not None:
        given["bias"] = torch.zeros_like(bias).masked_fill(bias == -math.inf, -math.inf)
    call = reference.seen(*given.values())
    q, k, bits = torch.zeros_like(call.q), torch.zeros_like(call.k), call.k.shape[2].bit_length()

    def signs(numbers: Tensor) -> Tensor:
        places = torch.arange(bits, device=device)
        return (numbers.unsqueeze(-1) >> places) % 2 * 2.0 - 1

    blind = False  # whether some query sees nothing
    for piece in reference.pieces(call):
        sees = reference.scores(call, piece)[0] > -math.inf
        if not sees.shape[-1]:
            blind = True
            continue
        blind = blind or not bool(sees.any(-1).all())
        chances = torch.rand(sees.shape, generator=rng).to(device)
        targets = chances.masked_fill(~sees, -1.0).argmax(-1).flatten(1, 2)
        q[piece.of_queries][..., :bits] = (signs(targets) * far / 2).to(dtype)
        q[piece.of_queries][..., bits] = -bits * far / 2
        k[piece.of_keys][..., :bits] = signs(torch.arange(sees.shape[-1], device=device)).to(dtype)
        k[piece.of_keys][..., bits] = 1.0
    given["q"], given["k"] = (reference.as_laid_out(x, layout) for x in (q, k))
    # a sink whose power is 0; were it all that a row has, its lse would not be exact
    given["sinks"] = None if sinks is None or blind else torch.full_like(sinks, -far)
    return tuple(given.values())


def sample(rng: random.Random) -> dict[str, Any]:
    dim = rng.choice([*range(16, 136, 8), 16, 32, 64, 128, 64, 160, 256])
    layout = rng.choice(["bhsd", "bshd", "thd"])
    kv_heads, group = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
    heads, batch = kv_heads * group, rng.randint(1, 3)
    longest = 70 if dim <= 128 and heads * batch <= 4 else 35
    dims: dict[str, Any] = {"layout": layout, "kv_heads": kv_heads}
    if rng.random() < 0.2:  # short and plain, as `naive` wants it
        short = (batch, heads, rng.randint(1, 70), min(dim, 128))
        return {**dims, "layout": "bhsd", "shape": short, "keys": rng.randint(1, 64)}
    if layout == "thd":
        lengths, keys = (
            tuple(rng.choice([0, rng.randint(1, longest)]) for _ in range(batch + 1))
            for _ in range(2)
        )
        lengths = (*lengths[:-1], max(lengths[-1], 1))
        dims |= {"shape": (sum(lengths), heads, dim), "lengths": lengths}
        dims["key_lengths"] = rng.choice([lengths, keys])
    else:
        tokens = rng.randint(1, longest)
        sizes = {"bhsd": (batch, heads, tokens, dim), "bshd": (batch, tokens, heads, dim)}
        dims |= {"shape": sizes[layout], "keys": rng.choice([tokens, rng.randint(1, longest)])}
        dims |= {"seq_lens": rng.random() < 0.25, "from_bshd": rng.random() < 0.2}
        dims["from_bshd"] = dims["from_bshd"] and layout == "bhsd"
    kind = rng.choice([None, None, None, *BIASES])
    borders: list[dict[str, Any]] = [
        *({}, {}, {"causal": True}, {"causal": True}),
        {"window": (rng.randint(0, 40), rng.randint(0, 10))},
        {"causal": True, "window": (rng.randint(0, 40), 9)},
        *({"ahead": rng.randint(0, 10)}, {"behind": rng.randint(0, 40)}),
    ]
    return {
        **dims,
        **rng.choice(borders),
        "value_dim": rng.choice([None, None, None, rng.choice([16, 24, 64, 128])]),
        "top_left": rng.random() < 0.4,
        "softcap": rng.choice([0.0, 0.0, 2.0, 30.0]),
        "sinks": rng.random() < 0.3,
        "sinks_dtype": rng.choice([None, torch.float32]),
        "alibi": rng.choice([False, False, True, "batch"]),
        "bias": kind,
        "bias_masks": rng.random() < 0.4,
        "bias_dtype": rng.choice([None, torch.float32]),
        "logits": rng.choice([None, None, None, 100.0]),
        "precision": rng.choice([None, "tf32"]),
    }


def features(large: bool) -> dict[str, dict[str, Dims]]:
    """Every option and its ways: `verify` lets every two of them meet."""
    tokens, keys = (300, 421) if large else (37, 53)
    half = tokens // 2
    # of lengths so unequal that, large, they share their blocks out (attention_call.places)
    lengths = (half, 0, 1, 0, 2, 0, 0, 1, 0, tokens - half - 4)
    key_lengths = (keys // 3, 5, 0, 1, 0, 7, 0, 2, 3, keys)
    packed = {"shape": (tokens, 4, 64), "lengths": lengths, "key_lengths": key_lengths}
    return {
        "sequences": {
            "bhsd": {"shape": (2, 4, tokens, 64), "keys": keys},
            "bshd": {"shape": (2, tokens, 4, 64), "keys": keys, "layout": "bshd"},
            "padded": {"shape": (3, 4, tokens, 64), "keys": keys, "seq_lens": True},
            "packed": {**packed, "layout": "thd"},
        },
        "heads": {f"4 to {n}": {"kv_heads": n} for n in (4, 2, 1)},
        "mask": {
            "none": {},
            "causal": {"causal": True},
            "causal, top left": {"causal": True, "top_left": True},
        },
        "window": {"none": {}, "both sides": {"window": (9, 4)}, "left": {"behind": 9}},
        "softcap": {"no": {}, "yes": {"softcap": 5.0}},
        "sinks": {"no": {}, "yes": {"sinks": True}},
        "ALiBi": {"no": {}, "by head": {"alibi": True}, "by sequence": {"alibi": "batch"}},
        "bias": {"no": {}, **{kind: {"bias": kind} for kind in BIASES}},
        "value dim": {"same": {}, "other": {"value_dim": 40}},
    }


def features_of_few_keys(_: bool) -> Features:
    """What `naive` serves: few keys, and nothing beside a mask that changes a score."""
    served = features(large=False)
    sequences = {name: served["sequences"][name] for name in ("bhsd", "bshd")}
    no: Features = {name: {"no": {}} for name in ("softcap", "sinks", "ALiBi", "bias")}
    return {**served, "sequences": sequences, **no}


def features_on_hopper(large: bool) -> Features:
    """What `gluon` serves; and heads of several widths, for its choices depend on them."""
    widths = {str(dim): {"head_dim": dim} for dim in (64, 80, 96, 128, 192, 256)}
    return {**features(large), "ALiBi": {"no": {}}, "bias": {"no": {}}, "head dim": widths}


# --- cost ----------------------------------------------------------------------------------------


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Two products over the pairs of a query and a key that it sees."""
    shape, layout, _, lengths, key_lengths = _geometry(dims)
    borders = attending.borders(
        _window(dims), dims.get("causal", False), max((*lengths, *key_lengths), default=0)
    )
    top_left = dims.get("top_left", False)
    sequences = Counter(zip(lengths, key_lengths, strict=True))
    pairs = sum(n * _visible_pairs(*sizes, *borders, top_left) for sizes, n in sequences.items())
    value_dim = shape[-1] if (n := dims.get("value_dim")) is None else n
    units = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    unit = "tf32" if dims.get("precision") == "tf32" else "fp32"
    flops = 2.0 * (shape[-1] + value_dim) * shape[HEADS[layout]] * pairs
    return Cost(flops, units.get(dtype, unit))


def _visible_pairs(queries: int, keys: int, left: int, right: int, top_left: bool) -> int:
    if left < 0 and right < 0:
        return queries * keys
    offset = 0 if top_left else keys - queries
    pairs = 0
    for i in range(offset, offset + queries):
        first = max(i - left, 0) if left >= 0 else 0
        end = min(i + right + 1, keys) if right >= 0 else keys
        pairs += max(end - first, 0)
    return pairs


CHAIN = 2048  # keys: seen from about 3,000 on


def beside_torch(q: Tensor, k: Tensor, *rest: Any) -> bool:
    """Halves round every weight and result: many errors. float32 errs by its scores, of which large
    ones leave few weights that are neither 0 nor 1; of a few thousand scores (masked ones counted)
    torch may get all such right by luck. Of many keys its sum is a tree of all of them, that of a
    kernel which never holds all scores a chain of tiles, and errs as one: the tolerance knows."""
    longest_keys = rest[-2]
    few = longest_keys <= CHAIN and q.shape[:-1].numel() * longest_keys >= 8192
    return q.dtype != torch.float32 or few


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    sinks, bias = kept[5], kept[7]
    return (
        *kept,
        *rest,
        bool(needs.get("q")),
        bool(needs.get("k") or needs.get("v")),
        bool(needs.get("sinks")) and sinks is not None,
        bool(needs.get("bias")) and bias is not None,
    )


# --- cases ---------------------------------------------------------------------------------------


def _edges() -> Iterator[Case]:
    for dim in (16, 24, 40, 64, 80, 96, 128, 192, 256):
        yield Case(f"head-{dim}", {"shape": (1, 2, 33, dim), "causal": True})
    yield Case("head-512", {"shape": (1, 1, 17, 512)})
    for tokens in (1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        yield Case(f"tokens-{tokens}", {"shape": (1, 2, tokens, 32), "causal": True})
    for queries, keys in ((1, 65), (3, 64), (16, 17), (17, 3), (64, 16), (65, 1)):
        for top_left in (False, True):
            dims = {"shape": (2, 2, queries, 32), "keys": keys, "causal": True}
            name = f"{queries}-by-{keys}{'-top-left' * top_left}"
            yield Case(name, {**dims, "top_left": top_left})
        yield Case(f"{queries}-by-{keys}-full", {"shape": (1, 2, queries, 64), "keys": keys})
    for value_dim in (16, 40, 128):
        yield Case(f"values-{value_dim}", {"shape": (1, 2, 33, 64), "value_dim": value_dim})
    yield Case("odd", {"shape": (1, 2, 33, 24), "value_dim": 16, "odd": True})
    for kv_heads in (1, 2, 4):
        grouped = {"shape": (2, 4, 35, 64), "kv_heads": kv_heads, "causal": True}
        yield Case(f"kv-heads-{kv_heads}", grouped)
    packed = {"shape": (70, 4, 64), "layout": "thd", "kv_heads": 2}
    yield Case("thd", packed)
    yield Case("thd-causal", {**packed, "lengths": (33, 0, 1, 36), "causal": True})
    skewed = {**packed, "lengths": (0, 3, 2, 1, 0, 5, 150, 0, 2, 0), "causal": True}
    skewed["shape"] = (163, 4, 64)
    yield Case("thd-skewed", skewed)
    yield Case("thd-skewed-everything", {**skewed, **EVERYTHING, "bias": "rows"})
    other = {**packed, "lengths": (33, 0, 1, 36), "key_lengths": (7, 5, 0, 64), "causal": True}
    yield Case("thd-other-keys", other)
    yield Case("thd-top-left", {**other, "top_left": True, "sinks": True})
    yield Case("thd-everything", {**other, **EVERYTHING, "bias": "full"})
    yield Case("bshd", {"shape": (2, 33, 4, 64), "layout": "bshd", "kv_heads": 2, "causal": True})
    yield Case("bshd-everything", {"shape": (2, 33, 4, 64), "layout": "bshd", **EVERYTHING})
    yield Case("from-bshd", {"shape": (2, 4, 33, 64), "from_bshd": True, "kv_heads": 2})
    for kind in BIASES:
        bias = {"shape": (2, 2, 35, 64), "keys": 40, "bias": kind}
        yield Case(f"bias-{kind}", bias)
        yield Case(f"bias-{kind}-masks", {**bias, "bias_masks": True, "causal": True, **FLOAT32})
    for window in ((0, 0), (5, 3), (16, 0), (40, 40)):
        name = f"window-{window[0]}-{window[1]}"
        yield Case(name, {"shape": (1, 2, 67, 32), "window": window})
        yield Case(f"{name}-causal", {"shape": (1, 2, 67, 32), "window": window, "causal": True})
    yield Case("window-unequal", {"shape": (1, 2, 65, 32), "keys": 33, "window": (9, 2)})
    yield Case("ahead", {"shape": (1, 2, 33, 32), "keys": 70, "ahead": 3, "top_left": True})
    yield Case("behind", {"shape": (1, 2, 33, 32), "keys": 70, "behind": 3})
    for alibi in (True, "batch"):
        dims = {"shape": (2, 4, 33, 32), "keys": 48, "alibi": alibi}
        yield Case(f"alibi-{alibi}".lower(), dims)
        yield Case(f"alibi-{alibi}-top-left".lower(), {**dims, "top_left": True, "causal": True})
    yield Case("sinks", {"shape": (2, 4, 33, 64), "sinks": True})
    unseen = {"shape": (2, 4, 65, 64), "keys": 17, "causal": True, "sinks": True}
    yield Case("sinks-unseen", unseen)
    yield Case("sinks-float32", {**unseen, "sinks_dtype": torch.float32, "top_left": True})
    yield Case("seq-lens", {"shape": (3, 2, 33, 64), "keys": 70, "seq_lens": True})
    yield Case("seq-lens-causal", {"shape": (3, 2, 33, 64), "seq_lens": True, "causal": True})
    for scale in (0.0, -0.3):
        yield Case(f"scale-{scale:g}", {"shape": (1, 2, 35, 64), "scale": scale, "causal": True})
    for cap, logits in ((30.0, 1e3), (50.0, 1e4), (2.0, 100.0), (1e6, 100.0)):
        capped = {"shape": (1, 2, 35, 64), "softcap": cap, "logits": logits}
        yield Case(f"softcap-{cap:g}", {**capped, "causal": True})
    for logits in (1e4, 6e4):
        yield Case(f"logits-{logits:g}", {"shape": (1, 2, 35, 64), "logits": logits})
    yield Case("tf32", {"shape": (1, 2, 65, 64), "precision": "tf32", "causal": True})
    yield Case("many-heads", {"shape": (40, 33, 1, 16), "keys": 3, "kv_heads": 11})
    yield Case("too-many-for-y", {"shape": (2049, 33, 1, 16), "keys": 3, "kv_heads": 11})
    for dim in (128, 256, 512):
        yield Case(f"everything-{dim}", {"shape": (1, 4, 35, dim), **EVERYTHING})
    yield from _with_much_work()
    yield from _long()


def _with_much_work() -> Iterator[Case]:
    """Scores enough for TMA in both passes; and few of the same, for binaries that do without it:
    a sanitizer takes minutes for many."""
    yield from _by_work("much", 17, 16, 517, (1021, 0, 1, 2099, 1016), (1379, 1379, 1379))
    yield from _by_work("few", 2, 4, 133, (61, 0, 1, 133, 68), (88, 88, 88))


def _by_work(
    name: str, batch: int, heads: int, tokens: int, lengths: tuple[int, ...], even: tuple[int, ...]
) -> Iterator[Case]:
    """Tokens that fill no tile and no 16 bytes."""
    for dim in (64, 128, 256):
        many = {"shape": (batch, heads, tokens, dim), "kv_heads": heads // 4}
        yield Case(f"{name}-{dim}", many)
        yield Case(f"{name}-{dim}-causal", {**many, "causal": True, "value_dim": 64})
    wide = {"shape": (batch, heads, tokens, 512), "kv_heads": heads // 4}
    yield Case(f"{name}-512", {**wide, "window": (40, 0)})  # its tiles are small: few of many
    many = {"shape": (batch, tokens, heads, 64), "layout": "bshd", "kv_heads": 2}
    yield Case(f"{name}-window", {**many, "window": (100, 20), "sinks": True})
    yield Case(f"{name}-seq-lens", {**many, "seq_lens": True, "causal": True})
    packed = {"shape": (sum(lengths), heads // 2, 64), "layout": "thd", "lengths": lengths}
    yield Case(f"{name}-thd", packed)
    for dim in (128, 256):
        wide = {**packed, "shape": (sum(lengths), heads // 4, dim)}
        yield Case(f"{name}-thd-{dim}", {**wide, "causal": True})
    alike = {**packed, "shape": (sum(even), heads, 64), "lengths": even}
    yield Case(f"{name}-thd-even", {**alike, "causal": True})
    yield Case(f"{name}-thd-causal", {**packed, "causal": True, "kv_heads": 2, "sinks": True})


LONG = dict.fromkeys((64, 128, 256), (700, 1500, 3000, 5000, 9000))


def _long() -> Iterator[Case]:
    """Lengths for every launch choice that depends on them (`gluon_impl.table`)."""
    for dim, lengths in LONG.items():
        for tokens, causal in itertools.product(lengths, (False, True)):
            name = f"long-{dim}-{tokens}{'-causal' * causal}"
            # fewer rows than keys; of the shorter so many heads that blocks take several tiles
            shape = (40 if tokens <= 3000 else 1, 2, 197, dim)
            dims = {"shape": shape, "keys": tokens - 3, "kv_heads": 1}
            yield Case(name, {**dims, "causal": causal})
        window = {"shape": (1, 2, 1030, dim), "window": (200, 3)}
        yield Case(f"long-{dim}-window", window)
        yield Case(f"long-{dim}-softcap", {"shape": (1, 2, 517, dim), "softcap": 50.0})
        capped = {"shape": (1, 2, 1030, dim), "softcap": 50.0, "causal": True}
        yield Case(f"long-{dim}-softcap-causal", capped)
    for scale in (0.0, -0.3, 1e-12):  # turned round by a cap's factor, and too small for its powers
        capped = {"shape": (1, 2, 517, 128), "softcap": 5.0, "scale": scale, "causal": True}
        yield Case(f"long-128-softcap-scale-{scale:g}", capped)
    far = {"shape": (1, 2, 1030, 64), "window": (900, 0)}
    yield Case("long-64-far-window", far)
    packed = {"layout": "thd", "lengths": (301, 0, 216)}
    yield Case("long-256-thd", {"shape": (517, 2, 256), **packed})
    every = {"window": (200, 3), "softcap": 5.0, "sinks": True}
    yield Case("long-256-everything", {"shape": (1, 2, 517, 256), **every})
    yield Case("long-256-thd-everything", {"shape": (517, 2, 256), **packed, **every})
    # widths that are multiplied in two parts
    yield Case("long-96", {"shape": (1, 2, 700, 96), "causal": True, "value_dim": 192})
    yield Case("long-96-full", {"shape": (1, 2, 700, 96)})
    yield Case("long-192", {"shape": (1, 2, 700, 192)})
    yield Case("long-80-softcap", {"shape": (1, 2, 517, 80), "softcap": 5.0})
    yield Case("long-160", {"shape": (1, 2, 700, 160), "value_dim": 128})
    yield Case("long-192-thd", {"shape": (517, 2, 192), **packed, "causal": True})
    yield Case("long-192-window", {"shape": (1, 2, 1030, 192), "window": (200, 3)})


FLOAT32 = {"bias_dtype": torch.float32}
EVERYTHING = {
    "kv_heads": 2, "value_dim": 32, "window": (20, 4), "softcap": 5.0, "sinks": True,
    "alibi": "batch", "bias": "heads", "bias_masks": True,
}  # fmt: skip
TOKENS_IN_ALL = 16_384  # of a bench's batch
SKEWED = (6000, 3500, 2000, 1300, 900, 700, 500, 400, 300, 250, 184, 120, 90, 70, 50, 20)


def _sweep() -> Iterator[Case]:
    """As many tokens everywhere; 2048 columns, or more heads that share keys or have their own; and
    what a cap costs."""
    by_dim = [(128, 16, 16), (64, 32, 32), (256, 8, 8)]
    sizes = [(*heads, t) for heads in by_dim for t in (16_384, 8192, 4096, 2048, 1024, 512)]
    more = itertools.product(((32, 8), (32, 32), (48, 6), (48, 48)), (16_384, 8192, 4096, 2048))
    sizes += [(128, *heads, tokens) for heads, tokens in more]
    for (dim, heads, kv_heads, tokens), causal in itertools.product(sizes, (False, True)):
        name = f"D{dim} T{tokens} {'causal' if causal else 'full'}"
        if heads != kv_heads:
            name += " GQA" if heads == 32 else f" GQA {heads}/{kv_heads}"
        elif heads * dim > 2048:
            name += f" {heads} heads"
        dims = {"shape": (TOKENS_IN_ALL // tokens, heads, tokens, dim), "kv_heads": kv_heads}
        yield Case(name, {**dims, "causal": causal}, "sweep")
    for (dim, heads, _), causal in itertools.product(by_dim, (False, True)):
        capped = {"shape": (2, heads, 8192, dim), "causal": causal, "softcap": 50.0}
        yield Case(f"D{dim} T8192 {'causal' if causal else 'full'} softcap 50", capped, "sweep")


def _sparse() -> Iterator[Case]:
    """Tokens that see few others, and as many that see all: the rate that is to be reached."""
    for causal in (True, False):
        dense = {"shape": (1, 16, TOKENS_IN_ALL, 128), "causal": causal}
        yield Case(f"T16384 {'causal' if causal else 'full'}", dense, "sparse")
    windowed = {"shape": (1, 16, TOKENS_IN_ALL, 128), "causal": True, "window": (4095, 0)}
    yield Case("T16384 window 4096", windowed, "sparse")
    packed = {"shape": (TOKENS_IN_ALL, 16, 128), "layout": "thd", "lengths": SKEWED}
    for causal in (True, False):
        name = f"16 skewed lengths {'causal' if causal else 'full'}"
        yield Case(name, {**packed, "causal": causal}, "sparse")


def _by_model() -> Iterator[Case]:
    """As models call it: heads of a projection (batch, tokens, heads, dim), transposed."""
    for m in MODELS.values():
        dims = {"shape": (1, m.heads, 2048, m.head_dim), "kv_heads": m.kv_heads}
        yield Case(m.name, {**dims, "causal": True, "from_bshd": True}, "model")
    m = LLAMA_3_8B
    for tokens in (512, 2048, 8192):
        dims = {"shape": (1, m.heads, tokens, m.head_dim), "kv_heads": m.kv_heads}
        name = f"{m.name}, {tokens} tokens"
        yield Case(name, {**dims, "causal": True, "from_bshd": True}, "prefill")


# A GPU runs all edge cases; the interpreter on a CPU leaves out those whose neighbours it runs.
PLANS = re.compile(
    r"head-(24|40|96|192)|tokens-(3|15|31|32|63|64|127|128)|.*-full|values-40|bias-.*-masks"
    r"|window-.*-causal|alibi-.*-top-left|sinks-float32|softcap-30|logits-1.*|many-heads"
    r"|too-many-for-y|everything-.*|(much|few|long)-.*|kv-heads-4|.*-by-(16|17|64)(-top-left)?"
)
CASES = (
    *(replace(c, group="plan") if PLANS.fullmatch(c.name) else c for c in _edges()),
    *(*_by_model(), *_sweep(), *_sparse()),
)
# One case of each launch choice and of most kinds of binary: all would be thousands, flags apart.
COMPILED = (
    *("kv-heads-2", "tokens-16", "head-128", "head-256", "head-512"),
    *("bshd-everything", "everything-128", "everything-256", "everything-512"),
    *("D64 T512 causal", "D64 T8192 causal", "D128 T8192 causal", "D256 T8192 causal", "much-512"),
    *("much-thd", "16 skewed lengths causal", "much-thd-256"),
)
COMPILED_FOR_HOPPER = (  # whichever case is the first to reach a choice of the table
    *(f"long-64-{n}" for n in ("700", "700-causal", "1500", "3000-causal", "5000", "9000-causal")),
    *(f"long-128-{n}" for n in ("700", "1500-causal", "5000", "9000-causal")),
    *(f"long-256-{n}" for n in ("700", "700-causal", "1500", "5000-causal")),
    *(f"long-{dim}-{what}" for dim in LONG for what in ("window", "softcap")),
    *("long-128-softcap-causal", "long-256-softcap-causal", "long-128-softcap-scale--0.3"),
    *(f"D{dim} T{n} full" for dim in LONG for n in (512, 16_384)),
    *("D128 T512 causal", "D256 T512 causal", "D64 T16384 causal", "D128 T16384 causal"),
    *("much-window", "much-seq-lens", "much-thd-causal", "much-128-causal", "softcap-50"),
    *("scale--0.3", "sinks", "thd-causal", "16 skewed lengths full", "long-64-far-window"),
    *("long-256-thd", "long-256-everything", "long-256-thd-everything", "long-96"),
    *("long-96-full", "long-192", "long-80-softcap", "long-160", "long-192-thd"),
    *("long-192-window",),
)


def _called(backend: Any, *args: Any) -> Any:
    q, k, v, sinks, slopes, bias, cu_q, cu_k, seq_lens, layout, scale, *rest = args
    left, right, top_left, softcap, max_q, max_k, precision = rest
    sides = (None if left < 0 else left, None if right < 0 else right)
    packed: dict[str, Any] = {}
    if layout == "thd":
        packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        packed |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return attention(
        q, k, v, causal=right == 0, causal_alignment="top_left" if top_left else "bottom_right",
        window=None if sides in ((None, None), (None, 0)) else sides, softcap=softcap,
        scale=scale, sinks=sinks, alibi_slopes=slopes, bias=bias, seq_lens_k=seq_lens,
        layout=layout, precision=precision, backend=backend, **packed,
    )  # fmt: skip


FEATURES = (
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seq_lens_k, str layout, float scale, int left, int right, "
    "bool top_left, float softcap, SymInt max_q, SymInt max_k, str precision"
)
KEPT = ("q", "k", "v", "output", "output 1", "sinks", "alibi_slopes", "bias")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seq_lens_k")


def _triton(name: str, module: str, may_spill: int = 1024, **facts: Any) -> Backend:
    place = f"{HERE}.{module}"
    return Backend(
        name,
        "triton",
        f"{place}:prepare",
        limits=f"{place}:refuses",
        min_sm=80,
        may_spill=may_spill,
        **facts,
    )


BACKWARD = Op(
    name="attention_backward",
    summary="gradients of attention",
    schema="(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{FEATURES}, bool need_q, bool need_kv, bool need_sinks, bool need_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.attention_backward,
    outputs=attending.outputs_backward,
    check=attending.check_backward,
    backends=(
        _triton(
            *("triton", "triton_backward_impl"),
            tensor_cores=("_grad_keys", "_grad_queries", "_grad_bias"),
        ),
        Backend("torch", "torch", f"{HERE}.reference:attention_backward", dtypes=None),
    ),
    tolerance=bounds.tolerance_backward,
    layout_argument="grad",
)

OP = Op(
    name="attention",
    summary="softmax(scale q kᵀ) v, masked, biased, packed or padded",
    schema=f"(Tensor q, Tensor k, Tensor v, {FEATURES}) -> (Tensor, Tensor)",
    reference=reference.attention,
    outputs=attending.outputs,
    check=attending.check,
    backends=(
        _triton(
            *("naive", "naive_impl"),
            dtypes=HALVES,
            tensor_cores=("_attend_at_once",),
            features=features_of_few_keys,
        ),
        Backend(
            "gluon",
            "gluon",
            f"{HERE}.gluon_impl:prepare",
            dtypes=HALVES,
            min_sm=90,
            max_sm=90,
            limits=f"{HERE}.gluon_impl:refuses",
            yields=f"{HERE}.gluon_impl:yields",
            tensor_cores=("_attend_on_hopper",),
            may_spill=80,  # bytes, most read once in a tile; what the matrix finds is in notes.md
            compiled=COMPILED_FOR_HOPPER,
            features=features_on_hopper,
        ),
        # 2048 lets misaligned heads of 256 elements pass, and has no other reason (notes.md)
        _triton("triton", "triton_impl", may_spill=2048, tensor_cores=("_attend",)),
        Backend("torch", "torch", f"{HERE}.reference:attention", dtypes=None),
    ),
    public=attention,
    returned=1,
    inputs=inputs,
    features=features,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=bounds.tolerance,
    beside_torch=beside_torch,
    backward_times_torch=3.0,
    cases=CASES,
    compiled=COMPILED,
    cost=cost,
    backward_flops=2.5,
    as_called=_called,
    vendor_is_eager=True,
    autograd=Autograd(
        BACKWARD, (*KEPT, *LENGTHS), saved, (("q",), ("k",), ("v",), ("sinks",), ("bias",))
    ),
    layout_argument="q",
    ranks=(3, 4),
    variants=({}, {"causal": True, "kv_heads": 1}),
    errors=attending.ERRORS,
)

OPS = (OP,)
_attention = library.register_with_backward(OP)
