"""What verify does not ask of attention's kernels: TMA, loose small tensors, spare tokens, grids,
and that each launch choice is compiled.

Kernels run in Triton's interpreter, which is chosen before Triton is imported: in a process of its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright import attending, gpu, matrix
from tilewright.dims import meta_inputs
from tilewright.ops.attention import op, triton_backward_impl, triton_impl
from tilewright.toolkit import attention_call

SOURCE = Path(__file__).parents[1] / "src"
SLOTS = Path(__file__).parent / "slots.py"


def interpret(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]


LOOSE = """
import torch, tilewright

def spread(x):  # every second element of a room that holds wrong ones
    return torch.full((*x.shape[:-1], 2 * x.shape[-1]), 5, dtype=x.dtype)[..., ::2].copy_(x)

def bits(x):
    q, k, v = (torch.randn(9, 2, 16, generator=rng).requires_grad_() for _ in range(3))
    args = {name: value.detach() for name, value in x.items()}
    args["sinks"].requires_grad_()
    out = tilewright.attention(
        q, k, v, layout="thd", max_seqlen_q=5, backend="triton", **args
    )
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, args["sinks"]))
    return [out, *grads]

sums = torch.tensor([0, 4, 9], dtype=torch.int32)
slopes = torch.tensor([[0.1, 0.2], [0.5, 0.6]])
tidy = {"alibi_slopes": slopes, "sinks": torch.tensor([0.5, -1.0])}
tidy |= {"cu_seqlens_q": sums, "cu_seqlens_k": sums}
rng = torch.Generator().manual_seed(0)
wanted = bits(tidy)
assert not any(x.isnan().any() for x in wanted)
for name, value in tidy.items():
    rng = torch.Generator().manual_seed(0)
    got = bits({**tidy, name: spread(value)})
    assert all(map(torch.equal, got, wanted)), name
"""


@pytest.mark.drawn(seconds=3.7, family="slow")
def test_small_tensors_may_lie_loosely() -> None:
    """Slopes, sinks and lengths are read one after the other; random layouts seldom reach them."""
    interpret("-c", LOOSE)


@pytest.mark.parametrize(("on", "serves"), [("h100", "triton"), ("rtx4090", "torch")])
def test_the_gradient_of_the_widest_heads_needs_large_blocks(on: str, serves: str) -> None:
    q = torch.empty(1, 2, 8, 512, device="meta", requires_grad=True)
    told = str(tilewright.explain("attention", q, q, q, gpu=on))
    assert told.startswith("attention on") and "triton (automatic)" in told
    assert f"backward: {serves}" in told
    assert ("need 129 KB of shared memory" in told) == (serves == "torch")


BY_TMA = """
import torch, tilewright
from tilewright import attending
from tilewright.ops.attention import op, triton_backward_impl, triton_impl
from tilewright.verify.context import Context, both_phases
from tilewright.verify.interpreter import without_repetition

taken = []
for module in (triton_impl, triton_backward_impl):
    module.MUCH = 0
    plain = module.described
    module.described = lambda *args, plain=plain: taken.append(1) or plain(*args)

heads = {"shape": (1, 4, 37, 32), "kv_heads": 2}
packed = {"shape": (47, 2, 32), "layout": "thd", "lengths": (5, 0, 30, 12)}
CALLS = [
    heads, {**heads, "causal": True}, {**heads, "window": (9, 3), "sinks": True},
    {**heads, "shape": (2, 4, 37, 64), "seq_lens": True}, {**heads, "keys": 70, "value_dim": 64},
    packed, {**packed, "causal": True, "key_lengths": (7, 5, 33, 2), "kv_heads": 1},
]
context = Context(op.OP, "triton", "cpu", False, 1, 0)
with without_repetition():
    for number, dims in enumerate(CALLS):
        taken.clear()
        args = context.inputs(dims, torch.float16, number)
        for result in both_phases(context, "cases", str(dims), torch.float16, args, number):
            assert result.passed, (dims, result.phase, result.message, result.ratio)
        assert len(taken) >= 6, dims  # k and v; q and the gradient; k and v again

    # what another sequence holds reaches no other, nor do lengths the host
    q, k, v = (torch.randn(40, 2, 32).half() for _ in range(3))
    q[21:] = k[21:] = v[21:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 21, 40], dtype=torch.int32)
    attending.check_values = lambda *_, **__: None
    kept = torch.Tensor.tolist, torch.Tensor.item

    def read(self):
        raise AssertionError("a length was read")

    torch.Tensor.tolist = torch.Tensor.item = read
    options = {"layout": "thd", "cu_seqlens_q": ends, "max_seqlen_q": 21, "backend": "triton"}
    out = tilewright.attention(q, k, v, **options)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.Tensor.tolist, torch.Tensor.item = kept
    for x in (out, *grads):
        assert not x[:21].isnan().any() and x[21:].isnan().any()

    # the gradient of a sum is one number, expanded; that of no number too
    for shape in ((0, 2, 5, 16), (2, 2, 0, 16), (1, 0, 5, 16)):
        x = torch.randn(shape).half().requires_grad_()
        bias = torch.zeros(1, 1, 1, 1).half().requires_grad_()
        tilewright.attention(x, x, x, bias=bias, backend="triton").sum().backward()
        assert x.grad.shape == x.shape and bias.grad.item() == 0
    x, q = (torch.randn(1, 2, n, 16).half().requires_grad_() for n in (5, 0))
    tilewright.attention(q, x, x, backend="triton").sum().backward()
    assert not x.grad.any()
"""


@pytest.mark.drawn(seconds=3.7, family="slow")
def test_large_calls_take_tma() -> None:
    """With their threshold at 0: what else verify calls here is too small."""
    interpret("-c", BY_TMA)


def test_the_cases_with_much_work_reach_tma() -> None:
    named = {case.name: case for case in op.CASES if case.name.startswith("much-")}
    assert len(named) == 14
    for case in named.values():
        q, k, *_, max_q, max_k, _ = meta_inputs(op.OP, case.dims, torch.bfloat16)
        ends = meta_inputs(op.OP, case.dims, torch.bfloat16)[6]
        batch = len(q) if ends is None else len(ends) - 1
        heads = q.shape[attending.HEADS[case.dims.get("layout", "bhsd")]]
        assert batch * heads * max_q * max_k >= triton_impl.MUCH > triton_backward_impl.MUCH
        assert max_q % 4


Choice = tuple[int, int, Any, bool, bool]  # SM, columns, Launch, by TMA, of float32
SMS = (80, 86, 89, 90, 100, 120)


def compiled(kernel: str, launch: Any) -> set[Choice]:
    """What the compile matrix takes of a kernel."""
    found = set()
    for wanted in matrix.reachable(["attention"]):
        if wanted.kernel == kernel:
            c, o = dict(wanted.request.constants), dict(wanted.request.options)
            sizes = c["ROWS"], c["KEYS"], o["num_warps"], o["num_stages"]
            limits = (o["maxnreg"],) if "maxnreg" in o else ()
            columns = max(64, c["COLUMNS"], c["VALUE_COLUMNS"])
            tma, floats = c.get("TMA", False), wanted.dtype == "float32"
            found.add((wanted.sm, columns, launch(*sizes, *limits), tma, floats))
    return found


def test_every_choice_of_the_forward_is_compiled() -> None:
    of = triton_impl
    listed = set()
    for sm in SMS:
        tables = [(of.SMALL, False, False), (of.FLOATS, False, True)]
        if sm in (90, 100):  # large blocks
            tables += [(of.BY_TMA, True, False), (of.FEW, True, False)]
            tables += [(of.BY_POINTERS, False, False)]
        listed |= {(sm, n, one, *how) for table, *how in tables for n, one in table.items()}
    assert listed == compiled("_attend", of.Launch)


@pytest.mark.parametrize("kernel", ["keys", "queries", "bias"])
def test_every_choice_of_the_backward_is_compiled(kernel: str) -> None:
    of = triton_backward_impl
    listed = set()
    for sm in SMS:
        by_tma = {90: of.BY_TMA, 100: of.BY_TMA_ON_100}.get(sm, {})
        floats = {n: plan for n, plan in of.FLOATS.items() if n < 512 or sm in (80, 90, 100)}
        tables = [(by_tma, True, False), (of.SMALL, False, False), (floats, False, True)]
        plans = [(n, plan, how) for table, *how in tables for n, plan in table.items()]
        choices = [(sm, n, getattr(plan, kernel), *how) for n, plan, how in plans]
        listed |= {choice for choice in choices if choice[2] is not None}
    assert listed == compiled(f"_grad_{kernel}", of.Launch)


def test_three_blocks_with_a_limit_of_registers_share_an_sm() -> None:
    every = matrix.reachable(["attention"], [90, 100])
    limited = [w for w in every if "maxnreg" in dict(w.request.options)]
    assert {(w.sm, w.kernel) for w in limited} == {(90, "_grad_keys")}
    for wanted in limited:
        built, threads = matrix.build(wanted), 32 * dict(wanted.request.options)["num_warps"]
        assert 3 * threads * built.registers <= 65536, built
        assert 3 * (built.shared + 1024) <= gpu.arch_of(90).shared_per_sm, built


@pytest.mark.parametrize(
    ("lengths", "longest", "blocks", "programs"),
    [
        ((6000, 3000, 900, 100), 6000, 156 + 4, (156 + 4) * 8),  # 156 whole tiles of 64 in all
        ((2500, 2500, 2500, 2500), 2500, 40, 40 * 4 * 8),
        ((10_000,), 10_000, 157, 157 * 8),
        ((1,) * 1025 + (8975,), 8975, 156 + 1026, (156 + 1026) * 8),
    ],
)
def test_only_packed_sequences_of_unequal_lengths_share_their_blocks(
    lengths: tuple[int, ...], longest: int, blocks: int, programs: int
) -> None:
    tensors = [torch.empty(sum(lengths), 8, 64, dtype=torch.half, device="meta")] * 3
    ends = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    numbers = (0.125, -1, 0, False, 0.0, longest, longest, "ieee")
    call = attention_call.describe(tensors, ends, "thd", *numbers)
    found = attention_call.places(call, call.q, call.rows, 64)
    assert (found.blocks, found.programs) == (blocks, programs)
    assert found.sequences == (len(lengths) if blocks > 157 else 0)


@pytest.mark.drawn(seconds=5.4, family="slow")
@pytest.mark.parametrize("last_first", [True, False])
def test_each_tile_of_packed_sequences_has_one_slot(last_first: bool) -> None:
    """In the interpreter, of lengths around a tile's, with spare tokens on either side."""
    interpret(str(SLOTS), str(last_first))


SPARE = """
import torch, tilewright
from tilewright.toolkit import memory

torch.manual_seed(0)
ends = torch.arange(0, 130, 10, dtype=torch.int32)  # twelve sequences of ten

def results(backend, inputs):
    packed = {"layout": "thd", "cu_seqlens_q": ends, "causal": True}
    out = tilewright.attention(*inputs, **packed, backend=backend)
    return [x[:120].float() for x in (out, *torch.autograd.grad(out[:120].sum(), inputs))]

for tokens in (120, 160, 250):
    inputs = [torch.randn(tokens, 2, 64).half().requires_grad_() for _ in "qkv"]
    with memory.guarded() as guard:
        found = results("triton", inputs)
    assert not guard.faults(), (tokens, guard.faults())
    for ours, wanted in zip(found, results("torch", inputs), strict=True):
        torch.testing.assert_close(ours, wanted, atol=0.02, rtol=0.0)
"""


@pytest.mark.drawn(seconds=14, family="slow")
def test_spare_tokens_change_nothing() -> None:
    """Behind the last border there may be more; no program takes them for a sequence's."""
    interpret("-c", SPARE)
