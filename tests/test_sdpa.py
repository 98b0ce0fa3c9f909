"""torch's scaled_dot_product_attention on ours: every shape, mask and refusal of torch's.

The oracle is torch's function itself on the CPU; with a GPU the kernels are held to it as well.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewright
from tilewright import functional, sdpa
from tilewright.errors import DTypeError, InputError, UnsupportedError

NAME = "scaled_dot_product_attention"
ours, torchs = functional.scaled_dot_product_attention, F.scaled_dot_product_attention

Tensor = torch.Tensor
Shape = tuple[int, ...]
E, EV, L, S = 8, 8, 5, 7  # elements of a head and of a value's, queries, keys
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
KINDS = pytest.mark.parametrize("kind", ["bool", "float"])


def three(query: Shape, key: Shape | None = None, value: Shape | None = None, **made: Any) -> Any:
    """Query, key and value with these dims in front."""
    key = query if key is None else key
    value = key if value is None else value
    shapes = ((*query, L, E), (*key, S, E), (*value, S, EV))
    return tuple(torch.randn(shape, **made) for shape in shapes)


def mask_of(kind: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    if kind == "bool":
        return torch.rand(shape) > 0.4
    numbers = torch.randn(shape, dtype=dtype)
    return numbers.masked_fill(torch.rand(shape) < 0.3, -math.inf)


def grads(function: Any, tensors: tuple[Tensor, ...], weight: Tensor, **given: Any) -> list[Tensor]:
    """The result and the gradients of all tensors, a mask of numbers among them."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
    result = function(*leaves, **given)
    (result * weight.to(result)).sum().backward()
    return [result.detach(), *(x.grad for x in leaves if x.requires_grad)]


def same(tensors: tuple[Tensor, ...], **given: Any) -> None:
    """Result, shape, dtype and gradients are torch's."""
    wanted = torchs(*tensors, **given)
    weight = torch.randn(wanted.shape, dtype=torch.float64)
    for got, theirs in zip(
        grads(ours, tensors, weight, **given), grads(torchs, tensors, weight, **given), strict=True
    ):
        assert got.shape == theirs.shape
        assert got.dtype == theirs.dtype
        torch.testing.assert_close(got, theirs)


# --- shapes --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("lead", [(), (3,), (1,), (2, 3), (1, 1), (2, 1, 3), (2, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_dims(lead: Shape, causal: bool, dtype: torch.dtype) -> None:
    same(three(lead, dtype=dtype), is_causal=causal)


@BOTH
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 3), (1, 3), (1, 3)),
        ((1, 3), (2, 3), (2, 3)),
        ((2, 3), (2, 1), (2, 1)),
        ((2, 1), (2, 3), (2, 3)),
        ((2, 3), (3,), (3,)),
        ((3,), (2, 3), (2, 3)),
        ((2, 3), (1, 3), (2, 3)),
        ((2, 3), (2, 3), (1, 1)),
        ((2, 3), (), ()),
        ((4,), (1,), (1,)),
        ((2, 2, 3), (2, 3), (1, 2, 1)),
        ((2, 2, 3), (2, 1, 3), (3,)),
    ],
    ids=str,
)
def test_dims_in_front_broadcast(
    query: Shape, key: Shape, value: Shape, dtype: torch.dtype
) -> None:
    same(three(query, key, value, dtype=dtype))


@BOTH
@pytest.mark.parametrize(
    ("query", "key"),
    [((2, 6), (2, 2)), ((6,), (3,)), ((2, 4), (1, 1)), ((2, 2, 4), (2, 2, 2)), ((2, 4), (2, 4))],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_query_share_those_of_key(
    query: Shape, key: Shape, causal: bool, dtype: torch.dtype
) -> None:
    same(three(query, key, dtype=dtype), is_causal=causal, enable_gqa=True)


@BOTH
@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (9, 1), (4, 9), (9, 4), (6, 6)], ids=str)
def test_causal_aligns_to_the_top_left(lengths: Shape, dtype: torch.dtype) -> None:
    queries, keys = lengths
    query = torch.randn(2, 3, queries, E, dtype=dtype)
    key, value = torch.randn(2, 2, 3, keys, E, dtype=dtype)
    same((query, key, value), is_causal=True)


@BOTH
@pytest.mark.parametrize("elements", [1, 4, 16, 24])
def test_values_of_another_size(elements: int, dtype: torch.dtype) -> None:
    query, key, _ = three((2, 3), dtype=dtype)
    same((query, key, torch.randn(2, 3, S, elements, dtype=dtype)))


@pytest.mark.parametrize("scale", [None, 1.0, 0.25, 2, -0.5])
@BOTH
def test_scale(scale: float | None, dtype: torch.dtype) -> None:
    same(three((2, 3), dtype=dtype), scale=scale)


@pytest.mark.parametrize("shapes", [(0, L, S), (2, 0, S), (2, L, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_at_all(shapes: Shape, causal: bool) -> None:
    """torch gives zeros where there are no keys."""
    batch, queries, keys = shapes
    query = torch.randn(batch, 3, queries, E)
    key, value = torch.randn(2, batch, 3, keys, E)
    got = ours(query, key, value, is_causal=causal)
    assert torch.equal(got, torchs(query, key, value, is_causal=causal))
    assert got.shape == (batch, 3, queries, E)


@BOTH
def test_strides(dtype: torch.dtype) -> None:
    """(batch, tokens, heads, elements) transposed, and last dims that are not contiguous."""
    q, k, v = three((2, 3), dtype=dtype)
    turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    slanted = tuple(x.mT.contiguous().mT for x in (q, k, v))
    same(turned)
    same(slanted)
    same((q, turned[1], slanted[2]), is_causal=True)


# --- masks ---------------------------------------------------------------------------------------

MASKS = [
    ((2, 3), (L, S)),
    ((2, 3), (1, S)),
    ((2, 3), (L, 1)),
    ((2, 3), (3, L, S)),
    ((2, 3), (1, 1, S)),
    ((2, 3), (2, 3, L, S)),
    ((2, 3), (2, 1, L, S)),
    ((2, 3), (1, 3, 1, S)),
    ((2, 3), (2, 1, 1, S)),
    ((), (L, S)),
    ((3,), (L, S)),
    ((3,), (3, L, S)),
    ((2, 2, 3), (L, S)),
    ((2, 2, 3), (3, L, S)),
    ((2, 2, 3), (2, 1, L, S)),
    ((2, 2, 3), (2, 1, 3, L, S)),
    ((2, 2, 3), (1, 2, 1, 1, S)),
    ((2, 2, 3), (1, 1, 1, L, S)),
    ((2, 2, 3), (2, 2, 3, L, S)),
]


@BOTH
@KINDS
@pytest.mark.parametrize(("lead", "shape"), MASKS, ids=str)
def test_masks_broadcast_to_the_scores(
    lead: Shape, shape: Shape, kind: str, dtype: torch.dtype
) -> None:
    same((*three(lead, dtype=dtype), mask_of(kind, shape, dtype)))


@pytest.mark.parametrize("shape", [(S,), ()], ids=str)
@KINDS
def test_masks_of_fewer_than_two_dims(shape: Shape, kind: str) -> None:
    """torch's documentation takes them, its kernel for CPUs trips over them."""
    q, k, v = three((2, 3))
    mask = mask_of(kind, shape, torch.float32)
    assert torch.equal(ours(q, k, v, mask), ours(q, k, v, mask.expand(L, S).clone()))


@KINDS
def test_masks_with_broadcast_batches_and_shared_heads(kind: str) -> None:
    q, k, v = three((2, 4), (1, 2), dtype=torch.float64)
    for shape in [(2, 4, L, S), (4, 1, S), (2, 1, L, S), (1, 1, L, S)]:
        same((q, k, v, mask_of(kind, shape, torch.float64)), enable_gqa=True)
    q, k, v = three((1, 3), (2, 3), dtype=torch.float64)
    same((q, k, v, mask_of(kind, (2, 1, L, S), torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_float32_masks_for_every_dtype(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in three((2, 3)))
    mask = mask_of("float", (L, S), torch.float32)
    got, wanted = ours(q, k, v, mask), torchs(q.double(), k.double(), v.double(), mask.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_rows_masked_whole_are_zero(kind: str, dtype: torch.dtype) -> None:
    """As torch has them since 2.5: neither a result nor a gradient is NaN."""
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[1] = False
    if kind == "float":
        mask = torch.zeros(L, S, dtype=dtype).masked_fill(~mask, -math.inf)
    tensors = (*(x.to(dtype) for x in three((2, 3))), mask)
    found = grads(ours, tensors, torch.ones(2, 3, L, EV))
    assert not any(x.isnan().any() for x in found)
    assert not found[0][:, :, 1].any()
    assert not found[1][:, :, 1].any()
    assert not torchs(*tensors)[:, :, 1].any()


def bias_of(query: Tensor, key: Tensor, mask: Tensor, gqa: bool = False) -> Tensor:
    bias = sdpa.arrange(NAME, query, key, key, mask, gqa).bias
    assert bias is not None
    return bias


def test_a_mask_of_booleans_is_never_blown_up() -> None:
    q, k, _ = three((2, 3), dtype=torch.bfloat16)
    for shape, wanted in {
        (L, S): (1, 1, L, S),
        (2, 1, 1, S): (2, 1, 1, S),
        (1, S): (1, 1, 1, S),
    }.items():
        bias = bias_of(q, k, torch.ones(shape, dtype=torch.bool))
        assert bias.shape == wanted
        assert bias.dtype == q.dtype
    expanded = torch.ones(2, 1, 1, S, dtype=torch.bool).expand(2, 3, L, S)
    assert bias_of(q, k, expanded).shape == (2, 1, 1, S)


def test_four_dims_are_views() -> None:
    """Whatever strides allow; and a mask of numbers is taken as it is."""
    for query, key in [
        ((2, 3), (2, 3)),
        ((), ()),
        ((3,), (3,)),
        ((2, 3), (1, 3)),
        ((2, 2, 3),) * 2,
    ]:
        q, k, v = three(query, key)
        mask = torch.randn(L, S)
        found = sdpa.arrange(NAME, q, k, v, mask, False)
        for given, got in zip((q, k, v, mask), found, strict=False):
            assert got.dim() == 4
            assert got.data_ptr() == given.data_ptr()
    q, k, v = three((2, 3))
    assert sdpa.arrange(NAME, q, k, v, None, False)[:3] == (q, k, v)


def test_random_shapes_against_torch() -> None:
    rng = random.Random(0)
    for _ in range(60):
        lead = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 4)))

        def some(lead: Shape = lead) -> Shape:
            kept = lead[rng.randint(0, len(lead)) :] if rng.random() < 0.3 else lead
            return tuple(1 if rng.random() < 0.2 else n for n in kept)

        q, k, v = three(some(), some(), some(), dtype=torch.float64)
        scores = (q @ k.mT).shape
        tensors = (q, k, v)
        if rng.random() < 0.7:
            shape = tuple(1 if rng.random() < 0.3 else n for n in scores)
            shape = shape[rng.randint(0, len(shape) - 2) :]
            tensors += (mask_of(rng.choice(["bool", "float"]), shape, torch.float64),)
        same(tensors, is_causal=len(tensors) == 3 and rng.random() < 0.5)


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torchs(dtype: torch.dtype) -> None:
    q, k, v = three((2, 3))
    mask = mask_of("float", (L, S), torch.float32)
    calls = [
        (q, k, v),
        (q, k.half(), v.bfloat16()),
        (q, k, v, mask),
        (q, k, v, mask.half()),
        (q, k, v, mask > 0),
        (q.double(), k.double(), v.double()),
    ]
    for tensors in calls:
        with torch.autocast("cpu", dtype=dtype):
            got, wanted = ours(*tensors), torchs(*tensors)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


def test_gradients_under_autocast_come_back_in_the_dtype_that_went_in() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grads(ours, three((2, 3)), torch.ones(2, 3, L, EV))
    assert [x.dtype for x in found] == [torch.bfloat16, *[torch.float32] * 3]


# --- dropout -------------------------------------------------------------------------------------


def test_dropout_is_torchs_own() -> None:
    tensors = three((2, 3))
    for given in ({"is_causal": True}, {"scale": 0.5}, {"attn_mask": torch.ones(L, S).bool()}):
        torch.manual_seed(1)
        wanted = torchs(*tensors, dropout_p=0.5, **given)
        torch.manual_seed(1)
        assert torch.equal(ours(*tensors, dropout_p=0.5, **given), wanted)
    assert torch.equal(ours(*tensors, dropout_p=1.0), torch.zeros(2, 3, L, EV))
    torch.manual_seed(1)
    shared = ours(*three((2, 4), (2, 2)), dropout_p=0.5, enable_gqa=True, backend="torch")
    assert shared.shape == (2, 4, L, EV)


def test_dropout_refuses_a_kernel_that_was_asked_for() -> None:
    tensors = three((2, 3))
    with pytest.raises(UnsupportedError, match=r"triton.*backend=.*dropout_p is 0\.1.*torch"):
        ours(*tensors, dropout_p=0.1, backend="triton")
    with (
        tilewright.use_backend("triton"),
        pytest.raises(UnsupportedError, match="use_backend.*no dropout"),
    ):
        ours(*tensors, dropout_p=0.1)
    with pytest.raises(InputError, match="backend is 'tritn'"):
        ours(*tensors, dropout_p=0.1, backend="tritn")


def test_explain_says_why_dropout_is_torchs() -> None:
    """Without running it, and without drawing a random number."""
    tensors = three((2, 3), device="meta", dtype=torch.float16)
    state = torch.get_rng_state()
    found = tilewright.explain(NAME, *tensors, dropout_p=0.1, gpu="h200")
    assert found.backend == "torch"
    assert found.asked_by == "automatic"
    assert "H200" in (found.gpu or "")
    assert "dropout_p is 0.1" in found.refused["triton"]
    assert torch.equal(torch.get_rng_state(), state)
    found = tilewright.explain(NAME, *three((2, 3)), dropout_p=0.1, backend="torch")
    assert (found.asked_by, found.gpu) == ("backend=", None)


def test_explain_follows_it_to_attention() -> None:
    tensors = torch.empty(3, 2, 3, L, 64, device="meta", dtype=torch.float16).unbind()
    found = tilewright.explain(NAME, *tensors, gpu="h200")
    assert found.op == "attention"
    assert found.backend != "torch"
    with pytest.raises(InputError, match="attention.*scaled_dot_product_attention"):
        tilewright.explain("scaled_dot_product", *tensors)


# --- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, (L, S), (2, 1, 1, S)], ids=str)
def test_compiles_without_a_break(mask: Shape | None) -> None:
    tensors = three((2, 3))
    if mask is not None:
        tensors += (torch.rand(mask) > 0.4,)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    weight = torch.randn(2, 3, L, EV)
    pairs = zip(grads(compiled, tensors, weight), grads(ours, tensors, weight), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


def test_a_mask_of_known_size_fits_tokens_of_any_number() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, mask: ours(x, x, x, mask), fullgraph=True, backend="aot_eager"
    )
    for tokens in (9, 10):  # the second makes their number a symbol
        compiled(torch.randn(2, 4, tokens, 16), None)
    x, mask = torch.randn(2, 4, 12, 16), torch.ones(12, 12).tril().bool()
    torch.testing.assert_close(compiled(x, mask), torchs(x, x, x, mask))
    with pytest.raises(Exception, match="attn_mask.*has shape"):
        compiled(x, mask[:, :11])


def test_compiles_with_dropout_and_autocast() -> None:
    torch.compiler.reset()
    tensors = three((3,))
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors, dropout_p=1.0), torch.zeros(3, L, EV))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(*tensors).dtype == torch.bfloat16


# --- mistakes ------------------------------------------------------------------------------------

Q, K, V = (torch.randn(2, 4, n, E) for n in (L, S, S))
MISTAKES: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "no tensor": (lambda: ours([1.0], K, V), DTypeError, ("query", "list", "torch.Tensor")),
    "no tensor with dropout": (lambda: ours([1.0], K, V, None, 0.5), DTypeError, ("query", "list")),
    "key no tensor under autocast": (
        lambda: torch.autocast("cpu")(ours)(Q, None, V),
        DTypeError,
        ("key", "NoneType"),
    ),
    "key no tensor": (lambda: ours(Q, None, V), DTypeError, ("key", "NoneType")),
    "integers": (lambda: ours(Q.int(), K.int(), V.int()), DTypeError, ("query", "int32")),
    "dtypes": (lambda: ours(Q, K.half(), V), DTypeError, ("key", "float16", "float32")),
    "devices": (lambda: ours(Q, K, V.to("meta")), InputError, ("value", "meta", "cpu")),
    "one dim": (lambda: ours(Q[0, 0, 0], K, V), InputError, ("query", "(8,)", "two dims")),
    "heads' sizes": (
        lambda: ours(Q, K[..., :7], V),
        InputError,
        ("key", "(2, 4, 7, 7)", "8 elements", "(2, 4, 5, 8)"),
    ),
    "lengths": (
        lambda: ours(Q, K, V[:, :, :6]),
        InputError,
        ("value", "(2, 4, 6, 8)", "7 tokens", "(2, 4, 7, 8)"),
    ),
    "heads": (
        lambda: ours(Q, K[:, :2], V[:, :2]),
        InputError,
        ("key", "(2, 2, 7, 8)", "4 heads", "enable_gqa=True", "2 of query's"),
    ),
    "heads that do not divide": (
        lambda: ours(Q, K[:, :3], V[:, :3], enable_gqa=True),
        InputError,
        ("key", "(2, 3, 7, 8)", "divide query's 4"),
    ),
    "heads of value": (
        lambda: ours(Q, K[:, :2], V, enable_gqa=True),
        InputError,
        ("value", "(2, 4, 7, 8)", "key's 2 heads"),
    ),
    "no heads": (lambda: ours(Q, K[:, :0], V[:, :0], enable_gqa=True), InputError, ("key", "4")),
    "batches": (
        lambda: ours(Q, K.repeat(2, 1, 1, 1), V),
        InputError,
        ("query", "(2, 4, 5, 8)", "(4, 4, 7, 8)", "agree"),
    ),
    "mask and causal": (
        lambda: ours(Q, K, V, torch.ones(L, S).bool(), is_causal=True),
        InputError,
        ("attn_mask", "is_causal=True", "None"),
    ),
    "mask and causal with dropout": (
        lambda: ours(Q, K, V, torch.ones(L, S).bool(), 0.5, True),
        InputError,
        ("attn_mask", "is_causal=True"),
    ),
    "mask no tensor": (lambda: ours(Q, K, V, [True]), DTypeError, ("attn_mask", "list")),
    "mask of integers": (
        lambda: ours(Q, K, V, torch.ones(L, S).long()),
        DTypeError,
        ("attn_mask", "int64", "bool", "float32"),
    ),
    "mask of another dtype": (
        lambda: ours(Q, K, V, torch.ones(L, S).half()),
        DTypeError,
        ("attn_mask", "float16"),
    ),
    "mask elsewhere": (
        lambda: ours(Q, K, V, torch.ones(L, S, device="meta")),
        InputError,
        ("attn_mask", "meta", "cpu"),
    ),
    "mask too long": (
        lambda: ours(Q, K, V, torch.ones(L, S + 1).bool()),
        InputError,
        ("attn_mask", "(5, 8)", "(2, 4, 5, 7)"),
    ),
    "mask of more batches": (
        lambda: ours(Q[:1], K[:1], V[:1], torch.ones(2, 1, L, S).bool()),
        InputError,
        ("attn_mask", "(2, 1, 5, 7)", "(1, 4, 5, 7)"),
    ),
    "mask of more dims": (
        lambda: ours(Q[0], K[0], V[0], torch.ones(1, 4, L, S).bool()),
        InputError,
        ("attn_mask", "(1, 4, 5, 7)", "(4, 5, 7)"),
    ),
    "dropout below": (lambda: ours(Q, K, V, None, -0.1), InputError, ("dropout_p", "-0.1", "0 or")),
    "dropout above": (lambda: ours(Q, K, V, None, 1.5), InputError, ("dropout_p", "1.5", "1 or")),
    "dropout text": (lambda: ours(Q, K, V, None, "0"), DTypeError, ("dropout_p", "str", "number")),
    "sparse": (lambda: ours(Q, K.to_sparse(), V), InputError, ("key", "sparse", "dense")),
    "backend": (lambda: ours(Q, K, V, backend="tritn"), InputError, ("backend", "tritn", "triton")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named(name: str) -> None:
    call, raises, says = MISTAKES[name]
    with pytest.raises(raises) as caught:
        call()
    for word in says:
        assert word in str(caught.value)
    if name != "backend":
        assert str(caught.value).startswith(f"{NAME}: ")


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@KINDS
@pytest.mark.parametrize(("lead", "shape"), MASKS, ids=str)
def test_kernels_give_torchs_results(lead: Shape, shape: Shape, kind: str) -> None:
    made = {"device": "cuda", "dtype": torch.float16}
    query, key = torch.randn(*lead, L, 64, **made), torch.randn(*lead, S, 64, **made)
    mask = mask_of(kind, shape, torch.float16).cuda()
    assert tilewright.explain(NAME, query, key, key, mask).backend != "torch"
    wide = (x.double().cpu() if x.is_floating_point() else x.cpu() for x in (query, key, key, mask))
    got, wanted = ours(query, key, key, mask), torchs(*wide)
    torch.testing.assert_close(got.double().cpu(), wanted, atol=5e-3, rtol=5e-3)
