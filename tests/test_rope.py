"""What verify does not ask of rope: positions, debug, shared memory, torch.compile, gradients.

On a CPU the reference runs; with a GPU the kernels too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import short_way
import tilewright
from rotations import (
    K_HEADS,
    PLACES,
    Q_HEADS,
    STYLES,
    B,
    D,
    Pair,
    T,
    Tensor,
    backends,
    device_of,
    formula,
    full,
    grads_of,
    interpreted,
    layouts,
    projected,
    q_and_k,
    styles,
    tables,
)
from tilewright.errors import InputError
from tilewright.ops.rope import op

# --- tables and positions ------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("size", [(T,), (1, T), (B, T)], ids=str)
def test_positions_name_rows_of_the_tables(
    size: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    q, k = q_and_k(backend)
    cos, sin = tables(11, device=q.device.type)
    ids = torch.randint(0, 11, size).to(dtype).to(q.device)
    rows = ids.long().expand(B, T)
    wanted = tilewright.rope(q, k, cos[rows], sin[rows], backend=backend)
    got = tilewright.rope(q, k, cos, sin, position_ids=ids, backend=backend)
    assert all(map(torch.equal, got, wanted))


@backends
@pytest.mark.parametrize("rows", [T, T + 4], ids=["as many rows", "more rows"])
@styles
def test_tables_of_every_shape_and_width_agree(style: str, rows: int, backend: str) -> None:
    q, k = q_and_k(backend)
    half = tables(rows, device=q.device.type)
    options = {"interleaved": STYLES[style], "backend": backend}
    wanted = tilewright.rope(q, k, *half, **options)
    for width in (half, tuple(full(t, style) for t in half)):
        for size in ((rows,), (1, rows), (B, rows), (B, 1, rows), (1, 1, rows)):
            laid = [t.expand(*size, t.shape[-1]) for t in width]
            got = tilewright.rope(q, k, *laid, **options)
            assert all(map(torch.equal, got, wanted)), (width[0].shape, size)


@backends
def test_pairs_are_a_complex_multiplication(backend: str) -> None:
    q, k = q_and_k(backend)
    cos, sin = tables(T, device=q.device.type)
    turn = torch.complex(cos.double(), sin.double())
    got = tilewright.rope(q, k, cos, sin, interleaved=True, backend=backend)
    for x, y in zip((q, k), got, strict=True):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (D // 2, 2)))
        wanted = torch.view_as_real(pairs * turn).flatten(-2)
        torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-6)


@backends
@styles
def test_packed_sequences_are_turned_as_each_alone(style: str, backend: str) -> None:
    lengths, device = (3, 1, 4), device_of(backend)
    q, k = (torch.randn(sum(lengths), heads, D, device=device) for heads in (Q_HEADS, K_HEADS))
    cos, sin = tables(4, device=device)
    ids = torch.cat([torch.arange(n) for n in lengths]).to(device)
    options = {"interleaved": STYLES[style], "backend": backend}
    got = tilewright.rope(q, k, cos, sin, position_ids=ids, layout="thd", **options)
    start = 0
    for n in lengths:
        alone = [x[None, start : start + n] for x in (q, k)]
        wanted = tilewright.rope(*alone, cos, sin, layout="bshd", **options)
        for whole, part in zip(got, wanted, strict=True):
            assert torch.equal(whole[start : start + n], part[0])
        start += n


@backends
@styles
def test_the_backward_of_a_rotation_is_its_inverse(style: str, backend: str) -> None:
    leaves = [x.requires_grad_() for x in q_and_k(backend)]
    cos, sin = tables(T, device=leaves[0].device.type)
    outputs = tilewright.rope(*leaves, cos, sin, interleaved=STYLES[style], backend=backend)
    grads = grads_of(outputs, leaves, [o.detach() for o in outputs])
    for x, back in zip(leaves, grads, strict=True):
        torch.testing.assert_close(back, x.detach(), rtol=1e-5, atol=1e-5)


@backends
@styles
def test_full_tables_may_give_the_elements_of_a_pair_two_angles(style: str, backend: str) -> None:
    """Entry by entry, as the models' functions take them; then the backward is no inverse."""
    leaves = [x.requires_grad_() for x in q_and_k(backend)]
    cos, sin = (torch.randn(T, D, device=leaves[0].device) for _ in "cs")
    upstream = [torch.randn_like(x) for x in leaves]
    outputs = tilewright.rope(*leaves, cos, sin, interleaved=STYLES[style], backend=backend)
    grads = grads_of(outputs, leaves, upstream)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted = [formula(x, cos.double(), sin.double(), style) for x in wide]
    wanted_grads = grads_of(wanted, wide, [g.double() for g in upstream])
    for got, theirs in zip((*outputs, *grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(got.double(), theirs, rtol=2e-6, atol=2e-6)


@backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_table_is_not_rounded(dtype: torch.dtype, backend: str) -> None:
    q, k = q_and_k(backend, dtype)
    cos, sin = tables(T, device=q.device.type)
    got = tilewright.rope(q, k, cos, sin, backend=backend)
    for x, y in zip((q, k), got, strict=True):
        wanted = formula(x.double(), full(cos).double(), full(sin).double(), "halves")
        assert y.dtype == dtype
        unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(y.double(), wanted, rtol=unit, atol=2e-6)


# --- positions outside the tables ----------------------------------------------------------------


def outside(ids: list[int], rows: int = 6) -> Callable[[], Any]:
    q, k = q_and_k()
    cos, sin = tables(rows)
    return lambda: tilewright.rope(q, k, cos, sin, position_ids=torch.tensor(ids))


def test_the_reference_gives_nan_where_kernels_do() -> None:
    for ids in ([0, 1, 6, 2, 3], [0, 1, -1, 2, 3]):
        for turned in outside(ids)():
            wrong = turned.isnan()
            assert wrong[..., 2, :].all() and int(wrong.sum()) == wrong[..., 2, :].numel()


@pytest.mark.parametrize(
    ("ids", "got"),
    [([0, 1, 6, 2, 3], "0 to 6"), ([0, 1, -1, 2, 3], "-1 to 3"), ([9, -7, 0, 0, 0], "-7 to 9")],
)
def test_debug_names_the_positions(ids: list[int], got: str) -> None:
    with tilewright.debug(), pytest.raises(InputError, match=rf"position_ids.* {got}.*6 rows"):
        outside(ids)()


def test_debug_checks_the_arguments_first() -> None:
    q, k = q_and_k()
    cos, sin = tables(6)
    with tilewright.debug(), pytest.raises(InputError, match=r"position_ids has shape \(3,\)"):
        tilewright.rope(q, k, cos, sin, position_ids=torch.tensor([0, 9, 1]))


def test_debug_lets_right_positions_pass() -> None:
    call = outside([0, 5, 3, 2, 1])
    wanted = call()
    with tilewright.debug():
        assert all(map(torch.equal, call(), wanted))
        none = torch.empty(0, 2, 3, 8), torch.empty(0, 2, 3, 8), *tables(6, width=4)
        ids = torch.empty(0, 3, dtype=torch.int64)
        assert tilewright.rope(*none, position_ids=ids)[0].shape == (0, 2, 3, 8)


def test_nothing_is_read_back_outside_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: seen.append(x) or aminmax(x))
    call, without = outside([0, 1, 2, 3, 4]), (*q_and_k(), *tables(T))
    call()
    assert not seen
    with tilewright.debug():
        tilewright.rope(*without)
        assert not seen
        call()
    assert len(seen) == 1
    call()
    assert len(seen) == 1


def test_debug_nests_ends_with_its_block_and_is_each_threads_own() -> None:
    wrong = outside([-1, 0, 0, 0, 0])
    found: list[Any] = []
    with tilewright.debug():
        with tilewright.debug():
            pass
        with pytest.raises(InputError):
            wrong()
        thread = threading.Thread(target=lambda: found.append(wrong()))
        thread.start()
        thread.join()
    assert len(found) == 1  # served
    with pytest.raises(ZeroDivisionError), tilewright.debug():
        1 / 0  # noqa: B018
    wrong()


def test_debug_holds_in_place_too_and_changes_nothing() -> None:
    q, k = q_and_k()
    before = q.clone(), k.clone()
    with tilewright.debug(), pytest.raises(InputError, match="position_ids"):
        ids = torch.full((T,), 7)
        tilewright.rope(q, k, *tables(6), position_ids=ids, inplace=True)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_the_kernel_gives_nan_for_such_tokens_and_nothing_else_changes(tmp_path: Path) -> None:
    q, k = q_and_k()
    rows, width = 6, 24  # of 32 elements: what is not turned must pass
    right = torch.tensor([[0, 1, 5, 2, 3], [4, 5, 0, 1, 2]])
    wrong = torch.tensor([[0, 6, 5, -1, 3], [2**40, 5, 0, 1, -(2**31)]])
    calls = []
    for style in STYLES.values():
        for table in (tables(rows, width=width), tables(rows, width=width // 2)):
            options = {"interleaved": style, "rotary_dim": width}
            calls += [
                ((q, k, *table), None, {**options, "position_ids": i}) for i in (right, wrong)
            ]
    made = interpreted(calls, tmp_path)
    bad = (right != wrong)[:, None, :, None].expand(B, 1, T, width)
    for clean, dirty in zip(made[0::2], made[1::2], strict=True):
        for before, after in zip(clean, dirty, strict=True):
            assert not before.isnan().any()
            expected = before.clone()
            expected[..., :width].masked_fill_(bad, float("nan"))
            assert torch.equal(after.isnan(), expected.isnan())
            assert torch.equal(after.nan_to_num(0.0), expected.nan_to_num(0.0))


# --- in place ------------------------------------------------------------------------------------


@backends
@layouts
@styles
def test_in_place_returns_its_arguments_with_new_versions(
    style: str, layout: str, backend: str
) -> None:
    x = [t.permute(0, 2, 1, 3) for t in q_and_k(backend)]  # (batch, tokens, heads, dim)
    q, k = (t.permute(PLACES[layout]) for t in x)
    cos, sin = tables(T, width=8, device=q.device.type)
    options = {"interleaved": STYLES[style], "rotary_dim": 16, "layout": layout}
    wanted = tilewright.rope(q, k, cos, sin, backend=backend, **options)
    versions = q._version, k._version
    got = tilewright.rope(q, k, cos, sin, inplace=True, backend=backend, **options)
    assert got[0] is q
    assert got[1] is k
    assert q._version > versions[0]
    assert k._version > versions[1]
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])


def fused(kind: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A projection, and q, k and v as views of it: (batch, tokens, heads, dim)."""
    if kind == "by head":  # as GPT-NeoX has it: q, k and v of a head are neighbours
        whole = torch.randn(B, T, Q_HEADS, 3 * D, device=device)
        return whole, *whole.chunk(3, -1)
    heads = [Q_HEADS, K_HEADS, K_HEADS]
    whole = torch.randn(B, T, sum(heads) * D, device=device)
    return whole, *(p.unflatten(-1, (-1, D)) for p in whole.split([n * D for n in heads], -1))


@backends
@pytest.mark.parametrize("kind", ["side by side", "by head"])
@layouts
@styles
def test_q_and_k_may_be_views_of_one_projection(
    style: str, layout: str, kind: str, backend: str
) -> None:
    whole, q, k, v = fused(kind, device_of(backend))
    q, k = (x.permute(PLACES[layout]) for x in (q, k))
    before = v.clone()
    cos, sin = tables(T, device=q.device.type)
    options = {"interleaved": STYLES[style], "layout": layout, "backend": backend}
    wanted = tilewright.rope(q, k, cos, sin, **options)
    tilewright.rope(q, k, cos, sin, inplace=True, **options)
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])
    assert torch.equal(v, before)
    assert q.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@layouts
def test_projections_of_one_sequence_and_one_token_too(layout: str) -> None:
    """Dims of one: their strides say nothing, and q and k do not repeat."""
    for batch, tokens in ((1, 1), (1, 3), (3, 1)):
        whole = torch.randn(batch, tokens, 3 * D)
        q, k, v = (x[:, :, None].permute(PLACES[layout]) for x in whole.split(D, -1))
        before = v.clone()
        given = tables(tokens)
        wanted = tilewright.rope(q, k, *given, layout=layout)
        assert tilewright.rope(q, k, *given, layout=layout, inplace=True)[0] is q
        assert torch.equal(q, wanted[0])
        assert torch.equal(k, wanted[1])
        assert torch.equal(v, before)


with torch.inference_mode():
    INFERENCE = torch.ones(B, T, Q_HEADS, D).transpose(1, 2)
ROOM = torch.ones(B, Q_HEADS, T, D + 4)

REFUSED: dict[str, tuple[Callable[[], Pair], tuple[str, ...]]] = {
    "q requires grad": (
        lambda: (projected(4).requires_grad_(), projected(2)),
        ("q requires grad", "inplace=False"),
    ),
    "k requires grad": (
        lambda: (projected(4), projected(2).requires_grad_()),
        ("k requires grad", "k.detach()"),
    ),
    "an inference tensor": (
        lambda: (projected(4), INFERENCE),
        ("k is an inference tensor", "k.clone()"),
    ),
    "q expanded": (
        lambda: (torch.ones(B, 1, T, D).expand(B, 3, T, D), projected(2)),
        ("q may overlap itself", "inplace=False"),
    ),
    "k expanded": (
        lambda: (projected(4), torch.ones(1, 2, T, D).expand(B, 2, T, D)),
        ("k may overlap itself", "inplace=False"),
    ),
    "the same tensor": (
        lambda: (INFERENCE.clone(),) * 2,
        ("q may share memory with k", "inplace=False"),
    ),
    "the same memory": (
        lambda: (ROOM[..., :D], ROOM[..., :D]),
        ("q may share memory with k", "inplace=False"),
    ),
    "views that overlap in part": (
        lambda: (ROOM[..., :D], ROOM[..., 4:]),
        ("q may share memory with k", "inplace=False"),
    ),
    "heads in common": (
        lambda: (ROOM[:, :3, :, :D], ROOM[:, 2:, :, :D]),
        ("q may share memory with k", "inplace=False"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_and_left_alone(name: str) -> None:
    make, says = REFUSED[name]
    q, k = make()
    before = q.detach().clone(), k.detach().clone()
    with pytest.raises(InputError) as caught:
        tilewright.rope(q, k, *tables(T), inplace=True)
    assert all(word in str(caught.value) for word in ("rope", *says)), caught.value
    assert torch.equal(q.detach(), before[0])
    assert torch.equal(k.detach(), before[1])


def test_in_place_where_nothing_is_differentiated() -> None:
    leaf, k = torch.randn(B, 2, T, D, requires_grad=True), projected(2)
    cos, sin = tables(T)
    wanted = formula(leaf.detach(), full(cos), full(sin), "halves")
    with torch.no_grad():
        tilewright.rope(leaf, k, cos, sin, inplace=True)
    torch.testing.assert_close(leaf.detach(), wanted)
    with torch.inference_mode():
        made_here = torch.randn(B, 2, T, D)
        wanted = [formula(x, full(cos), full(sin), "halves") for x in (made_here, k)]
        assert tilewright.rope(made_here, k, cos, sin, inplace=True)[0] is made_here
        torch.testing.assert_close(made_here, wanted[0])
        torch.testing.assert_close(k, wanted[1])  # an ordinary tensor


def test_in_place_on_what_another_backward_saved_raises() -> None:
    for place in (0, 1):
        x, w = [projected(2), projected(2)], torch.randn(D, requires_grad=True)
        loss = (w * x[place]).sum()
        tilewright.rope(*x, *tables(T), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- torch.compile -------------------------------------------------------------------------------


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_positions", [False, True], ids=["in order", "positions"])
@styles
def test_compiled_in_one_graph(style: str, with_positions: bool) -> None:
    ids = torch.tensor([3, 1, 0, 6, 2]) if with_positions else None
    cos, sin = tables(7)

    def step(q: Tensor, k: Tensor) -> Any:
        options = {"interleaved": STYLES[style], "rotary_dim": D}
        return tilewright.rope(q * 2, k, cos, sin, position_ids=ids, **options)

    leaves = [x.requires_grad_() for x in q_and_k()]
    upstream = [torch.randn_like(x) for x in leaves]
    wanted, got = step(*leaves), compiled(step)(*leaves)
    for e, g in zip(wanted, got, strict=True):
        assert e.stride() == g.stride()
        assert torch.equal(e, g)
    for e, g in zip(*(grads_of(o, leaves, upstream) for o in (wanted, got)), strict=True):
        assert torch.equal(e, g)


def test_a_graph_reads_nothing_back_in_debug_either() -> None:
    wrong = compiled(outside([-1, 0, 0, 0, 0]))
    with tilewright.debug():
        q, _ = wrong()
    assert q[..., 0, :].isnan().all() and not q[..., 1:, :].isnan().any()


@styles
def test_compiled_in_place_changes_the_callers_tensors(style: str) -> None:
    cos, sin = tables(T)
    options = {"interleaved": STYLES[style]}
    _, q, k, v = fused("side by side", "cpu")
    before = v.clone()
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    wanted = tilewright.rope(q, k, cos, sin, **options)
    got = compiled(lambda q, k: tilewright.rope(q, k, cos, sin, inplace=True, **options))(q, k)
    for x, y, given in zip(wanted, got, (q, k), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, given)
    assert torch.equal(v, before)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_exported_for_any_number_of_tokens(strict: bool) -> None:
    class Turn(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, ids: Tensor) -> Any:
            return tilewright.rope(q, k, cos, sin, position_ids=ids)

    def args(tokens: int) -> tuple[Tensor, ...]:
        q, k = (torch.randn(B, heads, tokens, D) for heads in (Q_HEADS, K_HEADS))
        return q, k, *tables(40), torch.randint(0, 40, (tokens,))

    tokens = torch.export.Dim("tokens", min=2, max=64)
    dims = ({2: tokens}, {2: tokens}, None, None, {0: tokens})
    program = torch.export.export(Turn(), args(5), dynamic_shapes=dims, strict=strict)
    given = args(17)
    assert all(map(torch.equal, program.module()(*given), Turn()(*given)))


@pytest.mark.parametrize("table", ["full", "half"])
@styles
def test_opcheck_of_options(style: str, table: str) -> None:
    cos, sin = tables(9, width=16 if table == "full" else 8)
    options = torch.tensor([8, 0, 3, 3, 1]), style, 16, "bhsd"
    leaves = [x.requires_grad_() for x in q_and_k()]
    torch.library.opcheck(torch.ops.tilewright.rope.default, (*leaves, cos, sin, *options))
    # gradients as they come: of the one in another order, of the other expanded from a sum
    grads = leaves[0].detach().contiguous(), torch.ones(()).expand(leaves[1].shape)
    torch.library.opcheck(torch.ops.tilewright.rope_backward.default, (*grads, cos, sin, *options))


# --- gradients -----------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("asks", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("used", ["q", "k", "both"])
def test_gradients_where_a_result_is_not_used(used: str, asks: Any, backend: str) -> None:
    given = [x.detach().requires_grad_(a) for x, a in zip(q_and_k(backend), asks, strict=True)]
    cos, sin = tables(T, device=given[0].device.type)
    upstream = [torch.randn_like(x) for x in given]
    leaves = [x for x in given if x.requires_grad]
    places = {"q": [0], "k": [1], "both": [0, 1]}[used]

    def grads(outputs: Any) -> tuple[Any, ...]:
        loss = sum((outputs[i] * upstream[i]).sum() for i in places)
        return grads_of(loss, leaves, None)

    def theirs() -> list[Tensor]:
        return [formula(x, full(cos), full(sin), "halves") for x in given]

    if not any(asks[i] for i in places):  # ours is one node, which needs a gradient as a whole
        (got,) = grads(tilewright.rope(*given, cos, sin, backend=backend))
        assert got is None or not got.any()
        return
    wanted = grads(theirs())
    for g, w in zip(grads(tilewright.rope(*given, cos, sin, backend=backend)), wanted, strict=True):
        if w is None:  # torch says "unused"; ours may say zero
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, w)


def test_gradcheck_of_every_style() -> None:
    leaves = [x[:, :1].double().requires_grad_() for x in q_and_k()]
    cos, sin = (torch.randn(T, 24, dtype=torch.float64) for _ in "cs")
    for style in STYLES.values():
        call = lambda q, k, s=style: tilewright.rope(  # noqa: E731
            q, k, cos, sin, interleaved=s, rotary_dim=24
        )
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


# --- where results lie ---------------------------------------------------------------------------


@backends
def test_results_lie_in_memory_as_q_and_k_do(backend: str) -> None:
    q = projected(Q_HEADS, device=device_of(backend))  # tokens before heads in memory
    k = projected(K_HEADS, device=device_of(backend)).contiguous()  # heads before tokens
    cos, sin = tables(T, device=q.device.type)
    new_q, new_k = tilewright.rope(q, k, cos, sin, backend=backend)
    assert new_q.stride() == q.stride()
    assert new_q.transpose(1, 2).is_contiguous()
    assert new_k.is_contiguous()

    part = projected(Q_HEADS + 3, device=device_of(backend))[:, 2 : 2 + Q_HEADS]  # of a projection
    new_q, _ = tilewright.rope(part, k, cos, sin, backend=backend)
    assert new_q.transpose(1, 2).is_contiguous()  # dense, in the same order


@backends
def test_results_are_contiguous_where_heads_are_not(backend: str) -> None:
    q, k = (
        torch.randn(B, T, D, heads, device=device_of(backend)).permute(0, 3, 1, 2)
        for heads in (Q_HEADS, K_HEADS)
    )
    cos, sin = tables(T, device=q.device.type)
    got = tilewright.rope(q, k, cos, sin, backend=backend)
    dense = tilewright.rope(q.contiguous(), k.contiguous(), cos, sin, backend=backend)
    for y, wanted in zip(got, dense, strict=True):
        assert y.is_contiguous()
        assert torch.equal(y, wanted)


# --- what no plan knows ---------------------------------------------------------------------------


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """rope as it is on a GPU once plans exist: around the dispatcher, and around its checks."""
    for holder, name in (("_rope", "rope"), ("_rope_", "rope_")):
        monkeypatch.setattr(op, holder, short_way.short_way(short_way.EVERY_OP[name], False))
    q, k = q_and_k()
    tilewright.rope(q, k, *tables(T))
    tilewright.rope(q.clone(), k.clone(), *tables(T), inplace=True)


def test_memory_that_is_shared_is_refused_on_every_call(warm: None) -> None:
    q, _ = q_and_k()
    cos, sin = tables(T)
    tilewright.rope(q.clone(), q.clone(), cos, sin, inplace=True)
    runs = short_way.PLAN_RUNS["rope_"]
    with pytest.raises(InputError, match="q may share memory with k"):
        tilewright.rope(q, q, cos, sin, inplace=True)
    assert short_way.PLAN_RUNS["rope_"] == runs
    room = torch.randn(B, 2, T, D)
    with pytest.raises(InputError, match="q may share memory with cos"):
        tilewright.rope(room, room.clone(), room[0, 0, :, : cos.shape[-1]], sin, inplace=True)


def test_tables_that_require_grad_are_refused_on_every_call(warm: None) -> None:
    q, k = q_and_k()
    cos, sin = tables(T)
    with pytest.raises(InputError, match="sin requires grad"):
        tilewright.rope(q, k, cos, sin.clone().requires_grad_())
    with torch.no_grad():
        tilewright.rope(q, k, cos, sin.clone().requires_grad_())
