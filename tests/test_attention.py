"""What verify does not ask of attention: the reference against others, defaults, debug, compile.

The kernels are held to the reference elsewhere; here it runs itself, on the CPU.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import tilewright
from tilewright import attending
from tilewright.dims import meta_inputs
from tilewright.errors import InputError
from tilewright.ops.attention import op, reference
from tilewright.spec import FLOATS
from tilewright.verify import CHECKS, Context, compare

F_OURS = tilewright.functional.scaled_dot_product_attention
Tensor = torch.Tensor
SEEDS = range(48)
NAMES = op.OP.arguments


def drawn(seed: int, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Any, ...]:
    dims = {**op.sample(random.Random(seed)), **more}
    return op.inputs(dims, dtype, "cpu", torch.Generator().manual_seed(seed))


def q_k_v(*, heads: int = 4, kv_heads: int = 2, tokens: int = 7, keys: int = 9) -> list[Tensor]:
    sizes = ((heads, tokens), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, h, t, 16, dtype=torch.float64) for h, t in sizes]


def attention(*args: Any, **options: Any) -> Any:
    return tilewright.attention(*args, backend="torch", **options)


# --- the reference -------------------------------------------------------------------------------


def by_hand(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Query by query, from the definition; no helper of the reference."""
    given = dict(zip(NAMES, args, strict=True))
    q, k, v, layout = (given[name] for name in ("q", "k", "v", "layout"))
    packed, heads_dim = layout == "thd", 2 if layout == "bshd" else 1
    heads = q.shape[heads_dim]
    group = heads // k.shape[heads_dim]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    tokens = q.shape[0] if packed else q.shape[3 - heads_dim]
    lse = q.new_zeros((heads, tokens) if packed else (q.shape[0], heads, tokens))
    count = len(given["cu_seqlens_q"]) - 1 if packed else q.shape[0]
    for b in range(count):
        starts = (0, 0)
        if packed:
            starts = given["cu_seqlens_q"][b], given["cu_seqlens_k"][b]
            sizes = [int(given[f"cu_seqlens_{x}"][b + 1]) - int(s) for x, s in zip("qk", starts)]
        else:
            sizes = [tokens, k.shape[3 - heads_dim]]
            if given["seq_lens_k"] is not None:
                sizes[1] = int(given["seq_lens_k"][b])
        off = 0 if given["top_left"] else sizes[1] - sizes[0]

        def vector(x: Tensor, head: int, token: int, b: int = b) -> Tensor:
            if packed:
                return x[token, head]
            return x[b, head, token] if layout == "bhsd" else x[b, token, head]

        for h in range(heads):
            slopes = given["alibi_slopes"]
            slope = 0.0 if slopes is None else float(slopes.expand(count, heads)[b, h])
            for i in range(sizes[0]):
                row, scores, seen = vector(q, h, starts[0] + i), [], []
                for j in range(sizes[1]):
                    d = i + off - j
                    if 0 <= given["left"] < d or 0 <= given["right"] < -d:
                        continue
                    s = given["scale"] * float(row @ vector(k, h // group, starts[1] + j))
                    if given["softcap"]:
                        s = given["softcap"] * math.tanh(s / given["softcap"])
                    s -= slope * abs(d)
                    if given["bias"] is not None:
                        shape = given["bias"].shape
                        place = [0 if n == 1 else p for n, p in zip(shape, (b, h, i, j))]
                        s += float(given["bias"][tuple(place)])
                    scores.append(s)
                    seen.append(j)
                if given["sinks"] is not None:
                    scores.append(float(given["sinks"][h]))
                total = torch.tensor(scores, dtype=torch.float64).logsumexp(0)
                vector(lse.unsqueeze(-1).transpose(0, 1) if packed else _tall(lse, layout), h,
                       starts[0] + i).fill_(total)  # fmt: skip
                for s, j in zip(scores, seen):
                    weight = math.exp(s - float(total)) if s > -math.inf else 0.0
                    vector(out, h, starts[0] + i).add_(
                        weight * vector(v, h // group, starts[1] + j)
                    )
    return out, lse


def _tall(lse: Tensor, layout: str) -> Tensor:
    return lse.unsqueeze(-1) if layout == "bhsd" else lse.unsqueeze(-1).transpose(1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_is_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    dims = op.sample(rng)
    small = {"lengths": (3, 0, 5), "shape": (8, *dims["shape"][1:])}
    if dims["layout"] != "thd":
        shape = list(dims["shape"])
        shape[attending.TOKENS[dims["layout"]]] = 5
        small = {"shape": tuple(shape), "keys": rng.choice([3, 5, 9])}
    else:
        small["key_lengths"] = rng.choice([(3, 0, 5), (0, 2, 7)])
    args = drawn(seed, **small)
    for ours, wanted in zip(reference.attention(*args), by_hand(args), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("aligned", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("tokens", "keys"), [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_is_torchs(layout: str, aligned: str, tokens: int, keys: int, kv_heads: int) -> None:
    q, k, v = q_k_v(kv_heads=kv_heads, tokens=tokens, keys=keys)
    ones = torch.ones(tokens, keys, dtype=torch.bool)
    sees = ones.tril(keys - tokens if aligned == "bottom_right" else 0)
    turned = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
    options = {"layout": layout, "causal_alignment": aligned}
    for causal, mask in ((False, ones), (True, sees)):
        wanted = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        wanted = torch.where(mask.any(-1)[:, None], wanted, 0.0)  # torch's rows of nothing
        got = attention(*turned, causal=causal, **options)
        got = got.transpose(1, 2) if layout == "bshd" else got
        torch.testing.assert_close(got, wanted)
    if aligned == "top_left":
        got = attention(*turned, causal=True, **options)
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got.transpose(1, 2) if layout == "bshd" else got, wanted)


@pytest.mark.parametrize("kind", op.BIASES)
def test_a_bias_and_a_scale_are_torchs(kind: str) -> None:
    q, k, v = q_k_v()
    bias = op._bias({"bias": kind}, (2, 4, 7, 9), torch.Generator().manual_seed(0)).double()
    wanted = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, bias=bias, scale=0.3), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_backward_is_autograds(seed: int) -> None:
    args = drawn(seed, sinks_dtype=None, bias_dtype=None)
    given, leaves = compare.with_leaves(op.OP, args)
    outputs = reference.attention(*given)
    grads = tuple(torch.randn_like(o) for o in outputs)
    wanted = torch.autograd.grad(outputs, leaves, grads)
    places = compare.gradient_places(op.OP, args)
    needs = {NAMES[i]: True for i in places}
    call = op.OP.backward_call(args, tuple(o.detach() for o in outputs), grads, needs)
    got = dict(zip(("q", "k", "v", "sinks", "bias"), reference.attention_backward(*call)))
    for i, gradient in zip(places, wanted, strict=True):
        assert gradient.isfinite().all()
        torch.testing.assert_close(got.pop(NAMES[i]), gradient, rtol=1e-9, atol=1e-9)
    assert all(not nothing.numel() for nothing in got.values())


@pytest.mark.parametrize("most", [1, 60, 300])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_the_whole(most: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = drawn(seed, sinks_dtype=None, bias_dtype=None)
    given, leaves = compare.with_leaves(op.OP, args)

    def results() -> list[Tensor]:
        outputs = reference.attention(*given)
        grads = compare.random_like(outputs, 0)
        plain = tuple(o.detach() for o in outputs)
        call = op.OP.backward_call(args, plain, tuple(grads))
        return [*plain, *torch.autograd.grad(outputs, leaves, grads),
                *reference.attention_backward(*call)]  # fmt: skip

    wanted = results()
    monkeypatch.setattr(reference, "MOST_SCORES", most)
    assert len(list(reference.pieces(reference.seen(*args)))) > 1
    for ours, whole in zip(results(), wanted, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-10)


def test_a_query_that_sees_nothing() -> None:
    q, k, v = (x.requires_grad_() for x in q_k_v(tokens=9, keys=5))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :, :4].any()
    assert (lse[:, :, :4] == -math.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert not q.grad[:, :, :4].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))

    out, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :, :4].any()
    assert torch.equal(lse[:, :, :4], sinks.view(1, 4, 1).expand(2, 4, 4))
    (gradient,) = torch.autograd.grad(lse[:, :, :4].sum(), sinks)
    assert torch.equal(gradient, torch.full_like(sinks, 8.0))


def test_a_sequence_without_keys() -> None:
    q, k, v = q_k_v()
    out, lse = attention(q, k, v, seq_lens_k=torch.tensor([0, 4]).int(), return_lse=True)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    wanted = F.scaled_dot_product_attention(q[1:], k[1:, :, :4], v[1:, :, :4], enable_gqa=True)
    torch.testing.assert_close(out[1:], wanted)


def test_lse_by_hand() -> None:
    q, v = torch.zeros(1, 1, 3, 16), torch.ones(1, 1, 3, 8)
    _, lse = attention(q, q, v, causal=True, return_lse=True)
    torch.testing.assert_close(lse.flatten().exp(), torch.tensor([1.0, 2.0, 3.0]))
    sinks = torch.tensor([math.log(2.0)])
    out, lse = attention(q, q, v, causal=True, sinks=sinks, return_lse=True)
    torch.testing.assert_close(lse.flatten().exp(), torch.tensor([3.0, 4.0, 5.0]))
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1 / 3, 2 / 4, 3 / 5]))


def test_tf32_drops_thirteen_bits() -> None:
    x = torch.tensor([1 + 2.0**-10 + 2.0**-11, math.inf, -math.inf, math.nan, -3.0])
    cut = reference._truncated(x)
    assert torch.equal(cut[:3], torch.tensor([1 + 2.0**-10, math.inf, -math.inf]))
    assert cut[3].isnan() and cut[4] == -3
    assert torch.equal(reference._truncated(x.requires_grad_()).detach()[4], cut[4])


# --- the public function -------------------------------------------------------------------------


def captured(*args: Any, **options: Any) -> dict[str, Any]:
    """The registered call that a user's call makes."""
    found: list[Any] = []
    keep = op._attention
    try:
        op._attention = lambda *given: found.append(given) or (None, None)  # type: ignore[assignment]
        tilewright.attention(*args, **options)
    finally:
        op._attention = keep
    (*tensors, rest) = found[0]
    return dict(zip((*NAMES, "backend"), (*tensors, *rest), strict=True))


def test_defaults() -> None:
    q = torch.zeros(2, 4, 7, 64)
    found = captured(q, q[:, :, :5], q[:, :, :5])
    numbers = {n: x for n, x in found.items() if not isinstance(x, Tensor)}
    assert numbers == {
        **dict.fromkeys(("sinks", "alibi_slopes", "bias", "seq_lens_k", "backend")),
        **{"cu_seqlens_q": None, "cu_seqlens_k": None, "layout": "bhsd", "scale": 0.125},
        **{"left": -1, "right": -1, "top_left": False, "softcap": 0.0},
        **{"max_q": 7, "max_k": 5, "precision": "ieee"},
    }
    other = captured(q, q, q, layout="bshd", causal=True, causal_alignment="top_left")
    assert (other["max_q"], other["right"], other["top_left"]) == (4, 0, True)


@pytest.mark.parametrize(
    ("window", "causal", "sides"),
    [
        (None, False, (-1, -1)),
        (None, True, (-1, 0)),
        (4, False, (3, 0)),
        (4, True, (3, 0)),
        (1, False, (0, 0)),
        ((2, 3), False, (2, 3)),
        ([2, 3], True, (2, 0)),
        ((None, 3), False, (-1, 3)),
        ((2, None), False, (2, -1)),
        ((2, None), True, (2, 0)),
        ((100, 100), False, (-1, -1)),  # farther than there are tokens
        (100, True, (-1, 0)),
    ],
)
def test_windows(window: Any, causal: bool, sides: tuple[int, int]) -> None:
    q = torch.zeros(1, 1, 30, 16)
    found = captured(q, q, q, window=window, causal=causal)
    assert (found["left"], found["right"]) == sides


def test_a_window_masks_what_it_says() -> None:
    q, k, v = q_k_v(tokens=7, keys=9)
    distance = torch.arange(7)[:, None] + 2 - torch.arange(9)
    for window, sees in (((2, 1), (distance <= 2) & (distance >= -1)), (3, (distance // 3 == 0))):
        wanted = F.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)
        torch.testing.assert_close(attention(q, k, v, window=window), wanted)


def test_packed_defaults() -> None:
    q, k = torch.zeros(12, 4, 16), torch.zeros(20, 4, 16)
    of_q, of_k = (torch.tensor(ends).int() for ends in ([0, 5, 12], [0, 10, 20]))
    alone = captured(q, q, q, layout="thd", cu_seqlens_q=of_q)
    assert alone["cu_seqlens_k"] is of_q
    assert (alone["max_q"], alone["max_k"]) == (12, 12)
    alone = captured(q, q, q, layout="thd", cu_seqlens_q=of_q, max_seqlen_q=7)
    assert (alone["max_q"], alone["max_k"]) == (7, 7)
    both = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": 7}
    found = captured(q, k, k, layout="thd", **both)
    assert found["cu_seqlens_k"] is of_k
    assert (found["max_q"], found["max_k"]) == (7, 20)


def test_packed_sequences_are_as_each_alone() -> None:
    lengths, ends = (3, 0, 5), torch.tensor([0, 3, 3, 8]).int()
    q, k, v = (torch.randn(8, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    slopes, sinks = torch.rand(3, 4), torch.randn(4, dtype=torch.float64)
    options = {"causal": True, "softcap": 3.0, "sinks": sinks, "return_lse": True}
    out, lse = attention(q, k, v, layout="thd", cu_seqlens_q=ends, alibi_slopes=slopes, **options)
    start = 0
    for i, n in enumerate(lengths):
        one = [x[None, start : start + n] for x in (q, k, v)]
        wanted = attention(*one, layout="bshd", alibi_slopes=slopes[i], **options)
        torch.testing.assert_close(out[start : start + n], wanted[0][0])
        torch.testing.assert_close(lse[:, start : start + n], wanted[1][0])
        start += n


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_precision_follows_torch_for_float32_alone(dtype: torch.dtype) -> None:
    q, before = torch.zeros(1, 1, 2, 16, dtype=dtype), torch.get_float32_matmul_precision()
    try:
        for setting in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(setting)
            exact = setting == "highest" or dtype != torch.float32
            assert captured(q, q, q)["precision"] == ("ieee" if exact else "tf32")
            assert captured(q, q, q, precision="ieee")["precision"] == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    wanted = "tf32" if dtype == torch.float32 else "ieee"
    assert captured(q, q, q, precision="tf32")["precision"] == wanted


def test_results_lie_as_q_does() -> None:
    q = torch.randn(2, 7, 4, 16).transpose(1, 2)
    v = torch.randn(2, 4, 7, 8)
    out, lse = attention(q, q, v, return_lse=True)
    assert out.transpose(1, 2).is_contiguous() and out.shape == (2, 4, 7, 8)
    assert lse.is_contiguous() and lse.dtype == torch.float32
    assert attention(q.contiguous(), q, v).is_contiguous()
    assert attention(q.transpose(2, 3).contiguous().transpose(2, 3), q, v).is_contiguous()
    for x in (leaves := [t.clone().requires_grad_() for t in (q, q, v)]):
        assert x.stride() == (q if x.shape == q.shape else v).stride()
    gradients = torch.autograd.grad(attention(*leaves).sum(), leaves)
    assert [g.stride() for g in gradients] == [x.stride() for x in leaves]
    half = attention(q.half(), q.half(), v.half(), return_lse=True)
    assert (half[0].dtype, half[1].dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("needed", ["q", "k", "v", "sinks", "bias"])
@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_a_gradient_alone(needed: str, used: str) -> None:
    args = dict(zip(NAMES, drawn(3, layout="bhsd", shape=(2, 4, 5, 16), kv_heads=2, keys=6,
                                 sinks=True, bias="heads", sinks_dtype=None, bias_dtype=None,
                                 value_dim=24, seq_lens=False), strict=True))  # fmt: skip
    leaf = args[needed] = args[needed].requires_grad_()

    def total(results: Any) -> Tensor:
        out, lse = (x.sin().sum() for x in results)
        return {"out": out, "lse": lse, "both": out + lse}[used]

    wanted = torch.zeros_like(leaf)
    if (needed, used) != ("v", "lse"):
        (wanted,) = torch.autograd.grad(total(reference.attention(*args.values())), leaf)
    names = ("q", "k", "v")
    options = {n: args[n] for n in ("sinks", "alibi_slopes", "bias", "softcap", "scale")}
    window = [None if args[side] < 0 else args[side] for side in ("left", "right")]
    alignment = "top_left" if args["top_left"] else "bottom_right"
    results = attention(*(args[n] for n in names), **options, window=window,
                        causal_alignment=alignment, return_lse=True)  # fmt: skip
    (got,) = torch.autograd.grad(total(results), leaf)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("seed", range(8))
def test_as_called_is_the_call(seed: int) -> None:
    args = drawn(seed, torch.float32)
    got, wanted = op._called("torch", *args), reference.attention(*args)[0]
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("bad", op.OP.errors, ids=lambda bad: bad.name)
def test_mistakes_are_named_in_one_sentence(bad: Any) -> None:
    with pytest.raises(bad.raises) as told:
        bad.call(tilewright.attention, "cpu")
    assert "\n" not in str(told.value)


def test_verify_finds_every_mistake() -> None:
    results = list(CHECKS["errors"](Context(op.OP, "torch", "cpu", False, 0, 0)))
    assert len(results) >= 30
    assert [r.message for r in results if not r.passed] == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cu_seqlens_q": [1, 5, 12]}, ("cu_seqlens_q", "from 1 to 12", "from 0 to the 12")),
        ({"cu_seqlens_q": [0, 5, 11]}, ("cu_seqlens_q", "from 0 to 11")),
        ({"cu_seqlens_q": [0, 13, 12]}, ("cu_seqlens_q", "[0, 13, 12]", "never decrease")),
        ({"cu_seqlens_k": [0, 5, 9]}, ("cu_seqlens_k", "12 tokens of k")),
        ({"max_seqlen_q": 6}, ("cu_seqlens_q", "length of 7", "max_seqlen_q=7")),
        ({"seq_lens_k": [3, 8], "layout": "bhsd"}, ("seq_lens_k", "from 3 to 8", "k's 7 keys")),
        ({"seq_lens_k": [-1, 8], "layout": "bhsd"}, ("seq_lens_k", "from -1")),
    ],
)
def test_debug_reads_the_lengths(changes: dict[str, Any], says: tuple[str, ...]) -> None:
    values = {n: torch.tensor(x).int() if isinstance(x, list) else x for n, x in changes.items()}
    q, options = torch.zeros(12, 2, 16), {"cu_seqlens_q": torch.tensor([0, 5, 12]).int()}
    if "layout" in values:
        q, options = torch.zeros(2, 2, 7, 16), {}
    options = {"layout": "thd", **options, **values}
    with tilewright.debug(), pytest.raises(InputError) as told:
        attention(q, q, q, **options)
    assert all(word in str(told.value) for word in says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"causal": "no"}, ("causal", "'no'", "True or False")),
        ({"causal": torch.ones(7, 7)}, ("causal", "True or False")),
        ({"return_lse": torch.ones(2)}, ("return_lse", "True or False")),
        ({"softcap": math.inf}, ("softcap", "inf", "finite")),
    ],
)
def test_options_of_other_kinds(options: dict[str, Any], says: tuple[str, ...]) -> None:
    q = torch.zeros(1, 2, 7, 16)
    with pytest.raises(tilewright.TilewrightError) as told:
        attention(q, q, q, **options)
    assert all(word in str(told.value) for word in says)


def test_a_nested_tensor_is_refused() -> None:
    q = torch.nested.nested_tensor([torch.zeros(2, n, 16) for n in (3, 5)])
    with pytest.raises(InputError, match="attention: q is nested"):
        attention(q, q, q)


def test_on_a_cpu_lengths_are_read_anyway() -> None:
    q, ends = torch.zeros(12, 2, 16), torch.tensor([0, 5, 13]).int()
    with pytest.raises(InputError, match="runs from 0 to 13"):
        attention(q, q, q, layout="thd", cu_seqlens_q=ends)
    with pytest.raises(InputError, match="has a length of 5"):
        attention(q, q, q, layout="thd", cu_seqlens_q=ends[:2], max_seqlen_q=4)
    out = attention(q, q, q, layout="thd", cu_seqlens_q=ends[:2])  # tokens may be left over
    assert out.shape == q.shape


def test_debug_lets_what_is_right_pass() -> None:
    q, ends = torch.zeros(12, 2, 16), torch.tensor([0, 5, 5, 12]).int()
    with tilewright.debug():
        attention(q, q, q, layout="thd", cu_seqlens_q=ends, max_seqlen_q=7)
        attention(q[None], q[None], q[None], layout="bshd", seq_lens_k=torch.tensor([12]).int())


# --- torch's machinery ---------------------------------------------------------------------------


def test_lengths_are_not_read() -> None:
    """Fake tensors have no values: whoever read one would fail."""
    with FakeTensorMode():
        q, ends = torch.empty(20, 4, 16), torch.empty(4, dtype=torch.int32)
        for context in (tilewright.debug, torch.no_grad):
            with context():
                options = {"cu_seqlens_q": ends, "layout": "thd", "return_lse": True}
                out, lse = tilewright.attention(q, q[:, :2], q[:, :2, :8], **options)
                assert (out.shape, lse.shape) == ((20, 4, 8), (4, 20))


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
@pytest.mark.parametrize("face", ["attention", "sdpa", "bhsd"])
def test_two_graphs_serve_all_lengths(face: str, dynamic: bool | None) -> None:
    faces = {
        "attention": lambda q, k: attention(q, k, k, causal=True),
        "sdpa": lambda q, k: F_OURS(q, k, k, is_causal=True, enable_gqa=True),
        "bhsd": lambda q, k: tilewright.flash_attention_bhsd(q, k, k, is_causal=True),
    }
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(faces[face], fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in range(5, 15):
        q, k = (torch.randn(2, heads, tokens, 16) for heads in (4, 2))
        torch.testing.assert_close(compiled(q, k), faces[face](q, k))
    assert counter.frame_count <= 2


def test_compiled_in_one_graph() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        options = {"layout": "thd", "cu_seqlens_q": ends, "causal": True, "window": (3, None)}
        return attention(q, k, v, **options).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ends = torch.tensor([0, 5, 12]).int()
    leaves = [torch.randn(12, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    got, wanted = compiled(*leaves, ends), step(*leaves, ends)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (got, wanted))):
        torch.testing.assert_close(ours, theirs)


def test_the_reference_compiles_in_one_graph() -> None:
    dims = {"shape": (2, 4, 9, 32), "kv_heads": 2, **op.EVERYTHING, "causal": True}
    args = op.inputs(dims, torch.float32, "cpu", torch.Generator().manual_seed(0))
    given, leaves = compare.with_leaves(op.OP, args)
    compiled = torch.compile(reference.attention, fullgraph=True, backend="aot_eager")
    both = compiled(*given), reference.attention(*given)
    for ours, theirs in zip(*both):
        torch.testing.assert_close(ours, theirs)
    found = [torch.autograd.grad(out.sum(), leaves) for out, _ in both]
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(4))
def test_opcheck(seed: int) -> None:
    args, leaves = compare.with_leaves(op.OP, drawn(seed, torch.float32))
    assert leaves
    torch.library.opcheck(torch.ops.tilewright.attention.default, (*args, "torch"))


# --- the declaration -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_flops_count_what_is_seen(seed: int) -> None:
    dims = {**op.sample(random.Random(seed)), "seq_lens": False, "bias": None}
    args = op.inputs(dims, torch.float32, "cpu", torch.Generator().manual_seed(0))
    call, pairs = reference.seen(*args), 0
    for piece in reference.pieces(call):
        sees = reference.visible(call, piece.distance(torch.device("cpu")))
        pairs += int(sees.sum()) * piece.scores // max(math.prod(piece.sizes), 1)
    dim, value_dim = args[0].shape[-1], args[2].shape[-1]
    assert op.cost(dims, torch.bfloat16).flops == 2 * (dim + value_dim) * pairs
    assert op.OP.cost_in(dims, torch.bfloat16, "backward").flops == 5 * (dim + value_dim) * pairs


def test_units_of_work() -> None:
    dims = {"shape": (1, 2, 8, 16)}
    units = {dtype: op.cost(dims, dtype).unit for dtype in FLOATS}
    assert list(units.values()) == ["fp32", "fp16", "bf16"]
    assert op.cost({**dims, "precision": "tf32"}, torch.float32).unit == "tf32"


def test_the_bench_cases_are_those_of_the_papers() -> None:
    groups: dict[str, list[Any]] = {}
    for case in op.CASES:
        groups.setdefault(case.group, []).append(case)
    assert [case.name for case in groups["sweep"][:2]] == ["D128 T16384 full", "D128 T16384 causal"]
    assert len(groups["sweep"]) == 3 * 6 * 2 + 4 * 4 * 2 + 3 * 2  # more heads, softcap
    for case in groups["sweep"]:
        batch, heads, tokens, dim = case.dims["shape"]
        assert batch * tokens == 16_384
        more = (heads, case.dims.get("kv_heads")) in ((32, 8), (48, 6), (32, 32), (48, 48))
        assert heads * dim == 2048 or (dim == 128 and more)
    assert sum(op.SKEWED) == 16_384 and len(op.SKEWED) == 16
    for case in op.CASES:
        op.OP.check(*meta_inputs(op.OP, case.dims, torch.bfloat16))
        assert len({c.name for c in op.CASES if c.group == case.group}) == len(groups[case.group])


@pytest.mark.parametrize("shape", [(5, 33), (5, 1024), (3, 1), (2, 0), (0, 64)], ids=str)
def test_rows_and_columns_become_a_batch_of_heads(shape: tuple[int, int]) -> None:
    q = op.inputs({"shape": shape}, torch.float16, "cpu", torch.Generator())[0]
    assert q.dim() == 4 and len(q) == shape[0]
    assert q.numel() <= max(math.prod(shape), 16 * shape[0])


def flash(args: tuple[Any, ...], *, right: int | None = None) -> tuple[Tensor, Tensor]:
    """Scores in float32, weights rounded to the dtype: what a kernel does."""
    wide = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    if right is not None:
        wide[NAMES.index("right")] = right
    out, lse = reference.attention(*wide)
    return out.to(args[0].dtype), lse


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_bounds_let_a_kernel_pass_and_no_shifted_mask(dtype: torch.dtype, seed: int) -> None:
    dims = {"shape": (1, 2, 40, 32), "causal": True, "sinks": seed % 2 == 0}
    dims |= {"softcap": (0.0, 5.0, 30.0)[seed % 3], "bias": "rows" if seed % 3 == 1 else None}
    args = op.inputs(dims, dtype, "cpu", torch.Generator().manual_seed(seed))
    truths = compare.forward_truth(op.OP, args)

    def worst(results: tuple[Tensor, Tensor]) -> float:
        pairs = zip(results, truths, strict=True)
        return max(compare.within(x, t.wanted, t.bound, t.what).ratio for x, t in pairs)

    assert worst(flash(args)) <= 1
    assert worst(flash(args, right=1)) > 10


def test_three_times_torchs_error_above_what_float32_may_err() -> None:
    ones, torchs = torch.ones(2).double(), torch.tensor([1.0, 1.01])
    near, far = torch.tensor([1.0, 1.025]), torch.tensor([1.0, 1.04])
    assert not compare.like_torch(near, ones, torchs, 0.0).passed
    assert compare.like_torch(near, ones, torchs, 0.0, times=3).passed
    assert not compare.like_torch(far, ones, torchs, 0.0, times=3).passed
    assert compare.like_torch(far, ones, torchs, 0.0, torch.tensor([0.02, 0.0]), times=3).passed
    assert compare.like_torch(far, ones, torchs, 0.0, times=3, truncates=True).passed


@pytest.mark.parametrize(
    ("tokens", "dtype", "compared"),
    [(64, torch.float32, True), (63, torch.float32, False), (3, torch.float16, True)],
)
def test_verify_holds_results_to_twice_torchs_error(
    tokens: int, dtype: torch.dtype, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are errors enough: of few, torch's largest may be none at all."""
    args = op.inputs({"shape": (1, 2, tokens, 32)}, dtype, "cpu", torch.Generator().manual_seed(0))
    off = [1 + 64 * torch.finfo(dtype).eps, 1.0]

    def call(op: Any, args: Any, backend: str) -> Any:
        return tuple(x * by for x, by in zip(reference.attention(*args), off, strict=True))

    monkeypatch.setattr(compare, "call", call)
    monkeypatch.setattr(compare, "within", lambda *_, **__: compare.Verdict())
    verdict, _ = compare.forward(op.OP, args, "torch", interpreted=False)
    assert not verdict.message
    assert verdict.passed != compared


@pytest.mark.parametrize("wrong", [1.0, 1.02], ids=["right", "wrong"])
def test_verify_holds_gradients_to_it(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of q that is 2 % off: far within what a tolerance of bfloat16 allows."""
    dims = {"shape": (1, 2, 64, 32), "kv_heads": 1}
    args = op.inputs(dims, torch.bfloat16, "cpu", torch.Generator().manual_seed(0))
    monkeypatch.setattr(compare, "call", lambda op, args, backend: reference.attention(*args))
    grad = torch.autograd.grad
    calls: list[int] = []

    def off(*given: Any) -> Any:
        """The first is the kernel's."""
        calls.append(1)
        first, *others = grad(*given)
        return (first * wrong if len(calls) == 1 else first, *others)

    monkeypatch.setattr(torch.autograd, "grad", off)
    monkeypatch.setattr(compare, "within", lambda *_, **__: compare.Verdict())
    verdict, _ = compare.backward(op.OP, args, "torch", 0, interpreted=False)
    assert not verdict.message
    assert verdict.passed == (wrong == 1)
