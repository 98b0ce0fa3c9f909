"""The bench without a GPU: order, statistics, bytes, roofs, rivals, suites, tables."""

from __future__ import annotations

import io
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from fake_bench import H200, bench, subject
from tilewright.bench import host, predict, rivals, roofs, suites, tables, timing, witness
from tilewright.bench.contest import contests
from tilewright.bench.measure import measure
from tilewright.bench.record import Row, Stats
from tilewright.bench.roofs import MIXES, STREAMS, mix_of, sets_for
from tilewright.bench.subject import Wish, of_op
from tilewright.bench.timing import Within
from tilewright.dims import meta_inputs
from tilewright.errors import InputError, UnsupportedError
from tilewright.ops import registry
from tilewright.spec import Case, Traffic, as_tuple

ROOT = Path(__file__).parents[1]


# --- order and statistics ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 6, 11, 12])
def test_everybody_stands_everywhere_and_follows_everybody(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = count if count % 2 == 0 else 2 * count
    order = list(timing.rotating(names, rounds))
    turns = [order[i : i + count] for i in range(0, len(order), count)]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    places = Counter((name, place) for turn in turns for place, name in enumerate(turn))
    follows = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert len(set(places.values())) == 1
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1
    assert list(timing.rotating([], 3)) == []


def test_samples_are_taken_in_that_order() -> None:
    taken: list[str] = []

    def take(name: str) -> Any:
        taken.append(name)
        return lambda: 1.0

    timing.interleaved(["a", "b", "c", "d"], 4, take)
    assert taken == list(timing.rotating(["a", "b", "c", "d"], 4))
    assert len({tuple(taken[i : i + 4]) for i in range(0, 16, 4)}) == 4


def test_who_breaks_is_named() -> None:
    with pytest.raises(timing.Broken, match="ZeroDivisionError") as told:
        timing.interleaved(["a", "b"], 1, lambda name: (lambda: 1.0) if name == "a" else 1 / 0)
    assert told.value.name == "b"


def test_readings_are_read_after_the_last_sample_was_taken() -> None:
    taken: list[str] = []

    def take(name: str) -> Any:
        taken.append(name)
        return lambda: float(len(taken))

    assert timing.interleaved(["a", "b"], 2, take) == {"a": [4.0, 4.0], "b": [4.0, 4.0]}


def test_statistics_of_two_passes() -> None:
    found = timing.stats([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert (found.median, found.n, found.passes) == (3.5, 6, (2.0, 5.0))
    assert found.p20 < found.median < found.p80
    assert found.spread == pytest.approx(1.5)
    assert timing.is_noisy(found)
    assert not timing.is_noisy(timing.stats([100.0], [102.9]))
    assert timing.is_noisy(timing.stats([100.0], [103.1]))
    assert timing.stats([7.0]).median == 7.0


# --- bytes and roofs -----------------------------------------------------------------------------

N, C = 64, 512
BIG, ROW = N * C, C  # elements of the input, of a weight
HAND_COUNTS = {  # op, phase: elements read, elements written, by reading the mathematics
    ("layer_norm", "forward"): (BIG + 2 * ROW, BIG),  # x, weight, bias; y
    # gradient, x, weight, and a bias that only says its dtype; dx, dweight, dbias
    ("layer_norm", "backward"): (2 * BIG + 2 * ROW, BIG + 2 * ROW),
    ("layer_norm_fp8", "forward"): (BIG + 2 * ROW, 0),  # x, weight, bias; BYTES_WRITTEN
    ("rms_norm_fp8", "forward"): (BIG + ROW, 0),
    ("matmul", "forward"): (BIG + 48 * ROW, 48 * N),  # a; b has 48 columns
    ("matmul", "backward"): (48 * N + BIG + 48 * ROW, BIG + 48 * ROW),
    ("relu", "forward"): (BIG, BIG),
    ("relu", "backward"): (2 * BIG, BIG),  # gradient and output; gradient
    ("rms_norm", "forward"): (BIG + ROW, BIG),
    ("rms_norm", "backward"): (2 * BIG + ROW, BIG + ROW),  # gradient, x, weight; dx, dweight
    ("add_rms_norm", "forward"): (2 * BIG + ROW, 2 * BIG),  # x, residual, weight; y, sum
    ("add_rms_norm", "backward"): (3 * BIG + ROW, BIG + ROW),  # two gradients, sum, weight
    ("rms_norm_swiglu", "forward"): (2 * BIG + ROW, BIG),  # x, gate, weight; y
    # gradient, x, gate, weight; dx, dgate, dweight
    ("rms_norm_swiglu", "backward"): (3 * BIG + ROW, 2 * BIG + ROW),
    # q; k has a quarter of its heads, of 128 columns; cos and sin have one row for all heads
    ("rope", "forward"): (BIG + BIG // 4 + 2 * N * 128, BIG + BIG // 4),
    ("rope", "backward"): (BIG + BIG // 4 + 2 * N * 128, BIG + BIG // 4),  # gradients for q and k
    ("softmax", "forward"): (BIG, BIG),
    ("softmax", "backward"): (2 * BIG, BIG),  # gradient and output; gradient
    ("swiglu", "forward"): (2 * BIG, BIG),  # gate, up; their product
    ("swiglu", "backward"): (3 * BIG, 2 * BIG),  # gradient, gate, up; dgate, dup
    ("swiglu_packed", "forward"): (BIG, BIG // 2),  # gate and up in one
    ("swiglu_packed", "backward"): (BIG // 2 + BIG, BIG),
    ("geglu", "forward"): (2 * BIG, BIG),
    ("geglu", "backward"): (3 * BIG, 2 * BIG),
    ("geglu_packed", "forward"): (BIG, BIG // 2),
    ("geglu_packed", "backward"): (BIG // 2 + BIG, BIG),
    ("attention", "forward"): (3 * BIG, BIG),  # one head of 16 columns: q, k, v; out
    # gradient, q, k, v, out; dq, dk, dv. The lse's own gradient is not there
    ("attention", "backward"): (5 * BIG, 3 * BIG),
}
LSE = 4 * N * C // 16
# whatever the input's dtype: q, and a float32 scale for each row
BYTES_WRITTEN = {(op, "forward"): BIG + 4 * N for op in ("layer_norm_fp8", "rms_norm_fp8")}
BYTES_WRITTEN["attention", "forward"] = LSE
BYTES_READ = {("attention", "backward"): LSE}


def test_every_op_has_a_hand_count() -> None:
    phases = {(o.name, p) for o in registry().values() for p in ("forward", "backward")
              if p == "forward" or o.autograd}  # fmt: skip
    assert phases == set(HAND_COUNTS)


@pytest.mark.parametrize(("op", "phase"), HAND_COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_a_hand_count(op: str, phase: str, dtype: torch.dtype) -> None:
    case = Case("", {"shape": (N, C)})
    found = of_op(registry()[op], case, dtype, phase, "cpu", H200, Wish((), ())).traffic
    size = torch.empty((), dtype=dtype).element_size()
    read, written = (count * size for count in HAND_COUNTS[op, phase])
    place = (op, phase)
    assert found == (read + BYTES_READ.get(place, 0), written + BYTES_WRITTEN.get(place, 0))


def test_bytes_are_counted_from_the_tensors() -> None:
    softmax = registry()["softmax"]
    x = torch.empty(8, 16, dtype=torch.bfloat16)
    assert softmax.traffic((x, -1, torch.float32)) == (8 * 16 * 2, 8 * 16 * 4)
    expanded = torch.empty(1, 16).expand(8, 16)
    assert softmax.traffic((expanded, -1, None)).read == 16 * 4
    assert softmax.traffic((torch.empty(0, 16), -1, None)).total == 0


def test_what_anybody_must_move_in_a_backward() -> None:
    made = subject("relu", (N, C), phase="backward")
    assert made.least == (BIG * 4, BIG * 4)  # gradients in and out, whatever was saved
    assert made.traffic == (2 * BIG * 4, BIG * 4)


def test_a_backward_is_counted_as_two_products_for_each() -> None:
    forward, backward = (subject("softmax", (N, C), phase=p).cost for p in ("forward", "backward"))
    assert forward.flops == 5.0 * BIG  # by the declaration
    assert (backward.flops, backward.unit) == (10.0 * BIG, forward.unit)


def test_the_op_that_runs_in_a_phase() -> None:
    softmax = registry()["softmax"]
    args = meta_inputs(softmax, {"shape": (N, C)}, torch.float16)
    assert softmax.in_phase(args, "forward") == (softmax, args)
    running, its_args = softmax.in_phase(args, "backward")
    assert running.name == "softmax_backward"
    assert [tuple(t.shape) for t in its_args[:2]] == [(N, C), (N, C)]


def test_a_gradient_of_what_a_user_does_not_get_is_not_there() -> None:
    attention = registry()["attention"]
    args = meta_inputs(attention, {"shape": (N, C)}, torch.float16)
    grad, grad_lse, *_ = attention.in_phase(args, "backward")[1]
    assert (tuple(grad.shape), grad_lse) == ((64, 1, 32, 16), None)
    asked = replace(attention, returned=None).in_phase(args, "backward")[1]
    assert tuple(asked[1].shape) == (64, 1, 32)


def test_the_mix_of_a_call() -> None:
    assert mix_of(Traffic(100, 0)) == "read"
    assert mix_of(Traffic(2000, 1000)) == "2:1"
    assert mix_of(Traffic(3000, 2000)) == "3:2"
    assert mix_of(Traffic(1000, 1000)) == "1:1"
    assert mix_of(Traffic(1000, 2000)) == "1:2"
    assert mix_of(Traffic(32 * 2**20, 2**20)) == "read"


def test_a_graph_walks_past_l2() -> None:
    l2 = 60 * 2**20
    for size in (2**14, 2**20, 2**23, 2**26 - 1):
        traffic = Traffic(size // 2, size // 2)
        sets = sets_for(traffic, l2)
        assert 16 <= sets <= 128
        assert sets * traffic.total >= 2 * l2 or sets == 128


def test_a_roof_beside_the_case_is_named_in_the_row() -> None:
    of = subject("relu", (256, 4096))
    row = measure(of, bench(of, {}))[0]
    assert row.roof == "bandwidth 1:1 at this size"
    assert (row.method, row.bound) == ("graph", "bandwidth")
    assert row.roof_us == pytest.approx(of.traffic.total / 4e6 + 1.0, rel=0.002)


@pytest.mark.drawn(seconds=5, family="slow")
def test_large_cases_are_timed_cold() -> None:
    of = subject("relu", (2048, 4096))  # 64 MiB
    row = measure(of, bench(of, {"eager": 40.0, "vendor": 40.0}))[0]
    assert (row.method, row.graph) == ("cold", None)
    assert row.cold is not None
    assert row.us == row.cold.median
    assert len(row.samples) == row.cold.n == 20


KERNELS = """
from functools import reduce
from operator import xor
import torch, triton, triton.language as tl
from tilewright.bench.roof_kernels import _stream, _mma, _fma
for reads, writes in [(1, 0), (2, 1), (3, 2), (1, 1), (1, 2)]:
    tiles, words = 3, 64
    inp = torch.randint(-9, 9, (reads * tiles * words,), dtype=torch.int32)
    size = max(writes * words, 1) * tiles
    room = torch.full((size + 256,), 77, dtype=torch.int32)
    out = room[128:-128]
    _stream[(tiles,)](out, inp, tiles, READS=reads, WRITES=writes, BLOCK=words)
    mixed = reduce(xor, inp.view(reads, tiles, words))
    for i in range(writes):
        assert torch.equal(out.view(writes, tiles, words)[i], mixed)
    if not writes:
        assert out.tolist() == [reduce(xor, tile) for tile in mixed.tolist()]
    assert (room[:128] == 77).all() and (room[-128:] == 77).all()  # no word beside its own
a, b = torch.randn(16, 16), torch.randn(16, 16)
out = torch.empty(2, 16)
_mma[(2,)](out, a, b, 3, ACC=tl.float32, M=16, N=16, K=16)
assert torch.allclose(out[0], 3 * (a @ b.T).sum(0), atol=1e-3) and torch.equal(out[0], out[1])
x, y = torch.rand(64), torch.empty(64)
_fma[(1,)](y, x, 1, BLOCK=64)
want = x.clone()
for _ in range(16):
    want = want * x + x
assert torch.allclose(y, want)
"""


@pytest.mark.drawn(seconds=2.8, family="slow")
def test_roof_kernels_do_the_work_they_are_paid_for() -> None:
    """In the interpreter: a roof that skips bytes or flops would make everybody look slow."""
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sm", [80, 90])
def test_the_tensor_core_roof_is_made_of_tensor_core_instructions(sm: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tilewright.bench.roof_kernels import _mma

    names = {"out": "*fp32", "a": "*bf16", "b": "*bf16", "steps": "i32"}
    constants = {"ACC": tl.float32, "M": 128, "N": 256 if sm >= 90 else 128, "K": 64}
    source = ASTSource(_mma, {**names, **dict.fromkeys(constants, "constexpr")}, constants)
    options = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    text = built.asm["ptx"]
    loop = text[text.index("$L__BB0_") :]
    assert ("wgmma.mma_async" if sm >= 90 else "mma.sync") in loop


class OneTime:
    """A clock for which every call takes as long as its name says."""

    def cold(self, calls: Any, rounds: int) -> Any:
        return {name: [float(name.split()[-1])] * rounds for name in calls}

    def graph(self, calls: Any, rounds: int, check: Any) -> Any:
        return dict.fromkeys(calls, [0.5] * rounds)


def test_the_survey_takes_the_fastest_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(arena: Any, mix: str, size: int, sets: int, words: int, warps: int) -> Any:
        return roofs.RoofCall(f"{mix} {words}", "bandwidth", lambda i: lambda: None, scale=2.0)

    monkeypatch.setattr(roofs, "EMPTY", "empty 3")
    monkeypatch.setattr(roofs, "stream", stream)
    monkeypatch.setattr(roofs, "_empty_call", lambda: lambda: None)
    monkeypatch.setattr(roofs.DeviceRoofs, "_compute_rate", lambda self, clock, unit: None)
    made = roofs.DeviceRoofs(H200)
    found = {roof.name: roof.value for roof in made.survey(OneTime())}
    least = 2.0 * min(words for words, _ in STREAMS)
    for mix in MIXES:
        assert found[f"bandwidth {mix}"] == pytest.approx(roofs.SURVEY_BYTES / least / 1e3)
        assert made.bandwidths[mix] == pytest.approx(roofs.SURVEY_BYTES / least * 1e6)


def test_streams_cover_every_mix() -> None:
    assert all(reads >= 1 and writes >= 0 for reads, writes in MIXES.values())
    assert len({words for words, _ in STREAMS}) == len(STREAMS)


# --- witness -------------------------------------------------------------------------------------


def test_symbols_are_shortened() -> None:
    assert witness.short("_softmax_rows") == "_softmax_rows"
    assert witness.short("_Z3fooIfEvT_i") in ("foo", "_Z3fooIfEvT_i")
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::F<float>>(int, T)"
    assert witness.short(long) == "at::native::vectorized_elementwise_kernel"
    assert witness.short("tilewright::rows<__half, 8>") == "tilewright::rows"


def test_a_witness_wants_all_kernels_of_a_backend() -> None:
    names = ("fill", "tilewright::rows", "_partials")
    assert witness.saw(("rows<float, 4>",), names)
    assert witness.saw(("_partials", "rows"), names)
    assert not witness.saw(("_partials", "columns"), names)
    assert witness.strangers(("rows<float, 4>",), names) == ("fill", "_partials")
    assert witness.strangers(("rows<float, 4>", "_partials", "fill"), names) == ()


# --- rivals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", registry())
def test_eager_compile_and_vendor_stand_beside_every_op(op: str) -> None:
    found = rivals.of(registry()[op])
    assert list(found)[:3] == list(rivals.ALWAYS)
    args = tuple(
        torch.randn(a.shape, dtype=a.dtype) if isinstance(a, torch.Tensor) else a
        for a in meta_inputs(registry()[op], {"shape": (8, 64)}, torch.float32)
    )
    wanted = as_tuple(registry()[op].reference(*args))[: registry()[op].returned]
    for got, want in zip(as_tuple(found["vendor"](*args)), wanted, strict=True):
        assert torch.allclose(got.double(), want.double(), atol=1e-5)  # fp8 knows no allclose


def test_peers_that_are_not_installed_say_so() -> None:
    for name in rivals.PEERS:
        package = name.partition("-")[0]
        adapter = __import__(f"tilewright.bench.rivals.{package}", fromlist=["CALLS"])
        for op in adapter.CALLS:
            rival = rivals.peer(name, op)
            assert rival is not None
            assert "not installed" in rival.missing or rival.missing == ""
    assert rivals.peer("liger", "no such op") is None


def test_peers_refuse_what_they_cannot_do() -> None:
    x, w = torch.empty(4, 8), torch.empty(8)
    liger, quack = (rivals.peer(n, "softmax") for n in ("liger", "quack"))
    assert liger is not None
    assert quack is not None
    for rival in (liger, quack):
        assert rival.refuses(x, 1, None) == ""
        assert "last dim" in rival.refuses(x, 0, None)
        assert "dtype" in rival.refuses(x, 1, torch.float64)
    norm = rivals.peer("liger", "rms_norm")
    assert norm is not None
    assert "weight" in norm.refuses(x, None, 1e-6, 0.0, "torch")
    assert norm.refuses(x, w, 1e-6, 0.0, "torch") == ""
    layer = rivals.peer("liger", "layer_norm")
    assert layer is not None
    assert "bias" in layer.refuses(x, w, None, 1e-5)
    assert "weight" in layer.refuses(x, None, w, 1e-5)
    assert layer.refuses(x, w, w, 1e-5) == ""
    layer = rivals.peer("quack", "layer_norm")
    assert layer is not None
    assert layer.refuses(x.bfloat16(), w, None, 1e-5) == ""
    assert "float32" in layer.refuses(x.bfloat16(), w.bfloat16(), None, 1e-5)


# --- torch's attention and FlashAttention-4, with the arguments of our op ------------------------


def attending(
    q: Sequence[int] = (2, 4, 16, 32), k: Sequence[int] = (2, 4, 16, 32), **given: Any
) -> tuple[Any, ...]:
    """A call's arguments in the op's order; those that a test does not name are off."""
    dtype, device = given.pop("dtype", torch.float32), given.pop("device", "cpu")
    tensors = [torch.randn(q), torch.randn(k), torch.randn(given.pop("v", k))]
    how: dict[str, Any] = {
        **dict.fromkeys(("sinks", "slopes", "bias", "cu_q", "cu_k", "lengths")),
        **{"layout": "bhsd", "scale": 0.25, "left": -1, "right": -1, "top_left": False},
        **{"softcap": 0.0, "max_q": 0, "max_k": 0, "precision": "ieee"},
    }
    assert set(given) <= set(how)
    return (*(t.to(device, dtype) for t in tensors), *{**how, **given}.values())


def in_doubles(args: Sequence[Any]) -> torch.Tensor:
    """Plain attention, its heads repeated; (batch, heads, tokens, dim)."""
    q, k, v = (x.double() if args[9] == "bhsd" else x.double().transpose(1, 2) for x in args[:3])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * args[10]
    if args[12] == 0:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ v
    return out if args[9] == "bhsd" else out.transpose(1, 2)


def peer(name: str) -> rivals.Rival:
    found = rivals.peer(name, "attention")
    assert found is not None
    return found


def test_ways_of_torchs_attention_follow_the_vendor() -> None:
    assert rivals.NAMES[:5] == (*rivals.ALWAYS, "sdpa-flash", "sdpa-cudnn")
    found = rivals.of(registry()["attention"])
    assert list(found) == [*rivals.NAMES[:5], "fa4"]
    assert not any(found[name].missing for name in rivals.NAMES[:5])
    assert found["vendor"].setting is None  # torch's own choice
    assert not any(name.startswith("sdpa") for name in rivals.of(registry()["softmax"]))


@pytest.mark.parametrize(
    "args",
    [
        attending(),
        attending(right=0),
        attending(q=(2, 8, 16, 32), right=0),  # two query heads to a key head
        attending(q=(2, 16, 8, 32), k=(2, 16, 2, 32), layout="bshd"),
        attending(q=(2, 4, 5, 32)),
    ],
    ids=["full", "causal", "grouped", "bshd", "fewer queries"],
)
def test_torchs_attention(args: Any) -> None:
    """By its choice, and held to FlashAttention, of which it has one for CPUs."""
    for rival in (rivals.of(registry()["attention"])["vendor"], peer("sdpa-flash")):
        assert rival.refuses(*args) == ""
        out = rival.bind(args)()
        assert out.shape == args[0].shape
        assert torch.allclose(out.double(), in_doubles(args), atol=1e-5)


NO_LENGTHS, NOTHING_ELSE = "sequences of one length", "no sinks, no ALiBi and no softcap"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (attending((16, 4, 32), (16, 4, 32), layout="thd"), NO_LENGTHS),
        (attending(lengths=torch.tensor([3, 16])), NO_LENGTHS),
        (attending(sinks=torch.zeros(4)), NOTHING_ELSE),
        (attending(slopes=torch.zeros(4)), NOTHING_ELSE),
        (attending(softcap=30.0), NOTHING_ELSE),
        (attending(left=4, right=0), "window"),
        (attending(right=4), "window"),
        (attending(right=0, bias=torch.zeros(16, 16)), "not both"),
        (attending((2, 4, 8, 32), right=0), "as many queries as keys"),
        (attending((2, 8, 4, 32), (2, 16, 4, 32), right=0, layout="bshd"), "as many queries"),
    ],
)
def test_torchs_attention_refuses_what_it_does_not_have(args: Any, says: str) -> None:
    for name in ("sdpa-flash", "sdpa-cudnn"):
        assert says in peer(name).refuses(*args)


def test_a_kernel_that_torch_does_not_have_here_is_unavailable() -> None:
    """And torch's own words say why."""
    with pytest.raises(UnsupportedError, match="same last dimension"):
        peer("sdpa-flash").bind(attending(v=(2, 4, 16, 8)))()
    with pytest.raises(UnsupportedError, match="No viable backend"):
        peer("sdpa-cudnn").bind(attending())()
    mixed = list(attending())
    mixed[1] = mixed[1].double()
    with pytest.raises(RuntimeError, match="same dtype") as told:  # a mistake stays one
        peer("sdpa-flash").bind(mixed)()
    assert not isinstance(told.value, UnsupportedError)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_attention_is_judged_beside_torchs_own(phase: str) -> None:
    dims = {"shape": (1, 2, 8, 16), "kv_heads": 1, "causal": True}
    wish = Wish((), ("eager", "vendor", "sdpa-flash", "sdpa-cudnn"))
    op, case = registry()["attention"], Case("a case", dims)
    of = of_op(op, case, torch.float32, phase, "cpu", H200, wish)
    rows = measure(of, bench(of, {}, warmup=1, iters=4))
    found = {row.contender: row.state for row in rows}
    assert found == {"eager": "ok", "vendor": "ok", "sdpa-flash": "ok", "sdpa-cudnn": "unavailable"}
    window = of_op(
        op, Case("", {**dims, "window": (3, 0)}), torch.float32, phase, "cpu", H200, wish
    )
    assert {c.missing for c in window.contenders[1:]} == {"it has no window"}


def test_the_cpu_time_of_a_call_is_taken_inside_its_setting() -> None:
    calls = host._served(host.contenders("cpu", torch.float32, False)["attention"])
    assert list(calls) == ["torch", "sdpa-flash", "automatic"]  # cuDNN is for GPUs
    entries: list[int] = []

    @contextmanager
    def setting() -> Iterator[None]:
        entries.append(1)
        yield

    counted: Any = {name: Within(setting, lambda: None) for name in ("torch", "sdpa-flash")}
    found = host.measure(counted, 2 * host.BURST, lambda: None)
    assert found["sdpa-flash"]["calls"] == 2 * host.BURST
    assert len(entries) == 2 * (20 + 2)  # once a burst, and for each call before


def test_torchs_choice_is_its_own_again_after_a_rivals_call() -> None:
    flags = [f"{name}_sdp_enabled" for name in ("flash", "cudnn", "mem_efficient", "math")]
    before = [getattr(torch.backends.cuda, flag)() for flag in flags]
    peer("sdpa-flash").bind(attending())()
    assert [getattr(torch.backends.cuda, flag)() for flag in flags] == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (attending(), "float16 and bfloat16"),
        (attending((1, 1, 4, 512), (1, 1, 4, 512), dtype=torch.float16), "at most 256"),
        (attending(slopes=torch.zeros(4), dtype=torch.float16), "no ALiBi"),
        (attending(bias=torch.zeros(16, 16), dtype=torch.float16), "no bias"),
        (attending(lengths=torch.tensor([3, 16]), dtype=torch.float16), "padded"),
        (attending((2, 4, 8, 32), right=0, top_left=True, dtype=torch.float16), "bottom right"),
        (attending((2, 4, 8, 32), right=0, dtype=torch.float16), ""),
        (attending(right=0, top_left=True, dtype=torch.float16), ""),
        (attending(left=4, right=0, softcap=30.0, dtype=torch.float16), ""),
        (attending((16, 4, 32), (16, 4, 32), layout="thd", dtype=torch.bfloat16), ""),
    ],
)
def test_flash_attention_4_refuses_what_it_does_not_have(args: Any, says: str) -> None:
    found = peer("fa4").refuses(*args)
    assert says in found
    assert bool(says) == bool(found)


def test_flash_attention_4_is_called_in_its_own_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before heads, None for a bound that is none, and the output alone."""
    seen: list[tuple[str, Any, dict[str, Any]]] = []

    def named(name: str) -> Any:
        return lambda *qkv, **how: (seen.append((name, qkv[0].shape, how)), (qkv[0] + 1, None))[1]

    module = SimpleNamespace(flash_attn_func=named("dense"), flash_attn_varlen_func=named("packed"))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    rival = peer("fa4")
    dense = attending((2, 4, 16, 32), right=0, softcap=2.0)
    assert torch.equal(rival.bind(dense)(), dense[0] + 1)
    swapped = attending((2, 16, 4, 32), (2, 16, 4, 32), layout="bshd", left=3, right=0)
    assert torch.equal(rival.bind(swapped)(), swapped[0] + 1)
    ends = torch.tensor([0, 7, 16], dtype=torch.int32)
    packed = attending((16, 4, 32), (16, 4, 32), layout="thd", cu_q=ends, cu_k=ends, max_q=9,
                       max_k=9)  # fmt: skip
    assert torch.equal(rival.bind(packed)(), packed[0] + 1)
    plain = {"softmax_scale": 0.25, "learnable_sink": None, "softcap": 0.0}
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 9, "max_seqlen_k": 9}
    assert seen == [
        ("dense", (2, 16, 4, 32), {**plain, "window_size": (None, 0), "softcap": 2.0}),
        ("dense", (2, 16, 4, 32), {**plain, "window_size": (3, 0)}),
        ("packed", (16, 4, 32), {**plain, "window_size": (None, None), **lengths}),
    ]


def test_the_vendor_refuses_castings_it_does_not_have() -> None:
    made = registry()["rms_norm"]
    with pytest.raises(InputError, match="Llama"):
        made.baselines["vendor"](torch.ones(2, 8), None, 1e-6, 0.0, "llama")


def test_compiled_compiles_once_and_for_its_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def compile_(function: Any, **options: Any) -> Any:
        made.append(options)
        return lambda x: function(x) * 10

    resets: list[int] = []
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(len(made)))
    compiled = rivals.Compiled(lambda x: x + 1)
    assert [compiled(i) for i in range(3)] == [10, 20, 30]
    assert made == [{"dynamic": False, "fullgraph": True}]
    assert resets == [0]  # before: dynamo stops compiling a function after a few shapes


def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the installed distribution, or by the module of a checkout on the path."""

    def absent(name: str) -> str:
        if name == "liger-kernel":
            return "1.2"
        raise rivals.importlib.metadata.PackageNotFoundError(name)

    modules = {"gemlite": SimpleNamespace(__version__="0.6"), "quack": SimpleNamespace()}
    monkeypatch.setattr(rivals.importlib.metadata, "version", absent)
    monkeypatch.setattr(rivals, "_not_importable", lambda name: "" if name in modules else "no")
    monkeypatch.setattr(rivals.importlib, "import_module", modules.__getitem__)
    wanted = {"liger": "1.2", "quack": "of unknown version", "gemlite": "0.6"}
    assert rivals.versions() == wanted


# --- suites --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", [name for name in suites.SUITES if name != "sparse"])
def test_every_op_has_cases_in_every_suite(suite: str) -> None:
    for op in registry().values():
        cases = suites.suite_cases(op, suite)
        if (op.name, suite) == ("attention", "decode"):  # work of another kind: one query
            continue
        assert cases, op.name
        if suite == "quick":
            assert len(cases) == 2


def test_ops_without_sparse_cases_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    relu, softmax = registry()["relu"], registry()["softmax"]
    window = Case("window", {"shape": (8, 8)}, "sparse")
    ops = {"relu": relu, "softmax": replace(softmax, cases=(*softmax.cases, window))}
    monkeypatch.setattr(suites, "registry", lambda: ops)
    found = suites.plan([], "sparse", [], ["bf16"], ["fwd", "bwd"])
    assert [(w.op.name, w.case.name, w.phase) for w in found] == [
        ("softmax", "window", "forward"),
        ("softmax", "window", "backward"),
    ]
    assert suites.plan(["relu"], "sparse", [], ["bf16"], ["fwd"]) == []


def test_suites_are_of_real_layers() -> None:
    shapes = {c.dims["shape"][-1] for c in suites.suite_cases(registry()["rms_norm"], "decode")}
    assert shapes == {4096, 8192, 3584}  # Llama-3-8B and Mistral-7B, Llama-3-70B, Qwen and Gemma
    tokens = {c.dims["shape"][0] for c in suites.suite_cases(registry()["rms_norm"], "prefill")}
    assert tokens == {512, 2048, 8192}


def test_a_plan_is_ops_by_phases_by_cases_by_dtypes() -> None:
    found = suites.plan(["relu", "softmax"], "quick", [], ["bf16", "float32"], ["fwd", "bwd"])
    assert len(found) == 2 * 2 * 2 * 2
    assert len({work.key for work in found}) == len(found)
    given = suites.plan(["relu"], "quick", ["8x16", "shape=4x4"], ["fp16", "float16"], ["fwd"])
    assert [work.case.dims["shape"] for work in given] == [(8, 16), (4, 4)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((["rellu"], "quick", [], ["bf16"], ["fwd"]), "op is 'rellu'"),
        (([], "fast", [], ["bf16"], ["fwd"]), "--suite is 'fast'"),
        (([], "quick", [], ["int4"], ["fwd"]), "--dtype is 'int4'"),
        (([], "quick", [], ["bf16"], ["sideways"]), "--mode is 'sideways'"),
        (([], "quick", ["x"], ["bf16"], ["fwd"]), "--shape is 'x'"),
    ],
)
def test_bad_plans(arguments: Any, says: str) -> None:
    with pytest.raises(InputError, match="bench: ") as told:
        suites.plan(*arguments)
    assert says in str(told.value)


# --- predictions ---------------------------------------------------------------------------------


def test_predictions_are_bytes_over_bandwidth() -> None:
    (work,) = suites.plan(["relu"], "quick", ["16384x8192"], ["bf16"], ["fwd"])
    found = predict.predict(work, H200)
    assert found.bytes == 2 * 2 * 16384 * 8192
    assert found.us == pytest.approx(found.bytes / 4.8e12 * 1e6)
    assert (found.bound, found.backend, found.kernels) == ("bandwidth", "triton", ("_relu",))
    (small,) = suites.plan(["relu"], "quick", ["8x8"], ["bf16"], ["bwd"])
    assert predict.predict(small, H200).bound == "launch"


# --- tables --------------------------------------------------------------------------------------


def timed_row(contender: str, us: float, ours: bool = True, op: str = "softmax") -> Row:
    return Row(op, "c", {}, "bfloat16", "forward", contender, ours, "ok", us=us)


def test_head_to_head_takes_the_best_version_of_a_backend() -> None:
    rows = [timed_row("triton", 10.0), timed_row("cuda_v1", 30.0), timed_row("cuda_v2", 12.0)]
    rows += [timed_row("triton", 5.0, op="relu")]  # has no CUDA kernel
    (pair,) = tables.versus(rows, "triton", "cuda")
    assert (pair["second"].contender, pair["ratio"]) == ("cuda_v2", 1.2)
    assert tables.head_to_head(rows, "triton", "cuda").row_count == 2
    assert tables.head_to_head(rows[-1:], "triton", "cuda").row_count == 1


def test_no_speedup_without_the_whole_field() -> None:
    rows = [timed_row("triton", 10.0), timed_row("eager", 20.0, False)]
    (contest,) = contests(rows)
    assert contest.speedup("eager") is None
    assert "compile was not measured" in contest.barred
    rows += [timed_row(name, 15.0, False) for name in ("compile", "vendor")]
    (contest,) = contests(rows)
    assert contest.speedup("eager") == 2.0
    for state in ("refused", "unavailable"):  # whoever fails must not make us look good
        broken = replace(rows[2], state=state, us=None, reason="it raised")
        (contest,) = contests([*rows[:2], broken, rows[3]])
        assert "compile has no number: it raised" in contest.barred
    nobody = replace(rows[3], state="unavailable", us=None, reason="no such kernel")
    assert contests([*rows[:3], nobody])[0].speedup("eager") == 2.0


def test_torchs_own_attention_is_the_whole_field() -> None:
    rows = [timed_row("triton", 10.0, op="attention"), timed_row("vendor", 9.0, False, "attention")]
    (contest,) = contests(rows)
    assert (contest.barred, contest.speedup("vendor")) == ("", 0.9)
    slow = timed_row("sdpa-flash", 15.0, False, "attention")
    absent = replace(rows[1], state="unavailable", us=None, reason="no window")
    for field in ([slow], [slow, absent]):  # without it, the others are a weak one
        (contest,) = contests([rows[0], *field])
        assert "eager was not measured" in contest.barred
        assert contest.speedup("sdpa-flash") is None


def test_a_speedup_is_of_what_a_plain_call_takes() -> None:
    rows = [replace(timed_row("triton", 12.0), automatic=True), timed_row("cuda", 10.0)]
    rows += [timed_row(name, 11.0, False) for name in rivals.ALWAYS]
    (contest,) = contests(rows)
    assert contest.best is not None
    assert contest.best.contender == "triton"
    assert contest.outcome == "slower"
    broken = replace(rows[0], state="refused", us=None, reason="is wrong before timing")
    (contest,) = contests([broken, *rows[1:]])  # another backend does not stand in for it
    assert (contest.best, contest.outcome, contest.speedup("eager")) == (None, "", None)
    assert "triton, which a call takes, is wrong before timing" in contest.barred
    assert of_op(registry()["softmax"], Case("", {"shape": (8, 8)}), torch.float16, "forward",
                 "cpu", H200, Wish(None, ())).contenders[0].automatic  # fmt: skip


def test_the_summary_counts_losses() -> None:
    rivals_ = [timed_row(name, us, False) for name, us in zip(rivals.ALWAYS, (20.0, 9.0, 30.0),
                                                               strict=True)]  # fmt: skip
    text = tables.summary([timed_row("triton", 10.0), *rivals_])
    assert "slower in 1" in text
    assert "faster than every rival in 0" in text


def test_tables_are_made_of_any_rows() -> None:
    bad = Row("relu", "c", {}, "float16", "forward", "triton", True, "refused", "wrong [bold]")
    console = Console(width=80, record=True, file=io.StringIO())
    plain = replace(timed_row("triton", 2.0), cold=Stats(2.0, 1.0, 3.0, 2), method="cold")
    console.print(tables.case_tables([plain, bad, timed_row("triton", 1.0)]))
    text = console.export_text()
    assert "wrong [bold]" in text
    assert "no speed-up is shown" in text
