"""The registered operators: schema, fake, autograd, autocast, compile, export, transforms.

CPU tensors run the reference through the same registration, so all of it is tested without a GPU.
`path` runs a test three times: through the dispatcher, on the short way around it that a warm CUDA
call takes when nothing needs the dispatcher, and by the launch that such a call leaves ready; here
CPU tensors are lent plans for it (short_way.py).
"""

from __future__ import annotations

import copy
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright
from short_way import (
    EVERY_OP,
    HOLDERS,
    HOOKS,
    IN_PLACE,
    PLAN_RUNS,
    READY_LAUNCHES,
    short_way,
    silently,
)
from tilewright import dispatch, library, ops
from tilewright.spec import Op
from tilewright.toolkit import memory

OPERATORS = torch.ops.tilewright
N = 8

Public = Callable[[torch.Tensor], torch.Tensor]

COS, SIN = torch.full((16, N), 0.6), torch.full((16, N), 0.8)  # every token turns alike


def _rope_of(x: torch.Tensor) -> torch.Tensor:
    """Of (tokens, columns) or (batch, tokens, columns): one head for each token."""
    layout = "thd" if x.dim() == 2 else "bshd"
    q = x.unsqueeze(-2)
    return tilewright.rope(q, q * 2, COS, SIN, layout=layout)[0].squeeze(-2)


# One tensor in, one tensor out: enough for whatever does not depend on the op.
PUBLIC: dict[str, Public] = {
    "relu": tilewright.relu,
    "softmax": tilewright.softmax,
    "rms_norm": lambda x: tilewright.rms_norm(x, N),
    "add_rms_norm": lambda x: tilewright.rms_norm(x, N, residual=x * 2)[0],
    "layer_norm": lambda x: tilewright.layer_norm(x, N),
    "rope": _rope_of,
    "swiglu": lambda x: tilewright.swiglu(x, x * 2),
    "geglu_packed": tilewright.geglu_packed,
}
public = pytest.mark.parametrize("name", PUBLIC)


@pytest.fixture(params=["dispatcher", "shortcut", "ready"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "dispatcher":
        ready = request.param == "ready"
        callers = {name: short_way(op, ready) for name, op in EVERY_OP.items()}
        monkeypatch.setattr(library, "_stream", lambda _: 0)
        monkeypatch.setattr(library, "_current_device", lambda: -1)
        for name, caller in callers.items():
            monkeypatch.setitem(library.calls, name, caller)
        for module, name in HOLDERS:
            monkeypatch.setattr(importlib.import_module(module), f"_{name}", callers[name])
    else:
        monkeypatch.setattr(library, "_function_modes", lambda: 1)  # "a mode must see this call"
    return str(request.param)


@pytest.fixture
def plain_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each public function reaches the dispatcher."""
    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        yield seen


@pytest.fixture
def silent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = dispatch.prepare

    def prepare_silently(op: Op, *rest: Any) -> Any:
        return silently(op) if op.name in IN_PLACE else prepare(op, *rest)

    monkeypatch.setattr(dispatch, "prepare", prepare_silently)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def warm(f: Callable[[], Any]) -> Any:
    """The result of the third call: the first makes a plan, the second leaves a launch ready."""
    f()
    f()
    return f()


# --- opcheck -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: torch.randn(6, N).to(dtype),
    "transposed": lambda dtype: torch.randn(N, 6).to(dtype).t(),
    "column slice": lambda dtype: torch.randn(6, 20).to(dtype)[:, 3 : 3 + N],
    "expanded": lambda dtype: torch.randn(1, N).to(dtype).expand(6, N),
    "5-d permuted": lambda dtype: torch.randn(2, 3, 2, 1, N).to(dtype).permute(3, 2, 1, 0, 4),
}


def _laid_out(layout: str, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return LAYOUTS[layout](dtype).detach().requires_grad_(requires_grad)


def _call(op: str, layout: str, dtype: torch.dtype) -> tuple[Any, ...]:
    def x(grad: bool = False) -> torch.Tensor:
        return _laid_out(layout, dtype, grad)

    def heads(grad: bool = False) -> torch.Tensor:
        """Of rope's ranks: packed (tokens, heads, dim), or (batch, heads, tokens, dim)."""
        laid = LAYOUTS[layout](dtype)
        laid = laid[:, None] if laid.dim() == 2 else laid[0]
        return laid.detach().requires_grad_(grad)

    if op in ("attention", "attention_backward"):
        return _attention(heads, backward=op != "attention")
    weight = torch.randn(N).to(dtype)
    last = x().dim() - 1
    cos, sin = torch.randn(2, 6, N).to(dtype)
    laid_b = torch.randn(5, N).to(dtype).t()
    product = torch.randn(*x().shape[:-1], 5).to(dtype)
    turned = cos, sin, None, "halves", N, "thd" if heads().dim() == 3 else "bhsd"
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (x(True), laid_b.requires_grad_(), None, "ieee", (16, 16, 16), False),
        "matmul_backward": (product, x(), laid_b.detach(), None, "ieee", False, True, True),
        "relu": (x(True),),
        "relu_": (x(),),
        "relu_backward": (x(), x()),
        "softmax": (x(True), last, None),
        "softmax_backward": (x(), x(), last, dtype),
        "rms_norm": (x(True), weight.requires_grad_(), 1e-6, 0.0, "torch"),
        "add_rms_norm": (x(True), x(True), weight.requires_grad_(), 1e-6, 0.0, "torch"),
        "rms_norm_backward": (x(), x(), x(), weight.detach(), 1e-6, 0.0, True),
        "rms_norm_swiglu": (x(True), x(True), weight.requires_grad_(), 1e-6),
        "rms_norm_swiglu_backward": (x(), x(), x(), weight.detach(), 1e-6, True),
        "layer_norm": (x(True), weight.requires_grad_(), weight.requires_grad_(), 1e-5),
        "layer_norm_backward": (x(), x(), weight.detach(), weight.detach(), 1e-5, True, True),
        "layer_norm_fp8": (x(), weight.detach(), weight.detach(), 1e-5, "e4m3", "group"),
        "rms_norm_fp8": (x(), weight.detach(), 1e-6, 0.0, "e4m3", "row"),
        "rope": (heads(True), heads(True), *turned),
        "rope_": (heads(), heads(), *turned),
        "rope_backward": (heads(), heads(), *turned),
        "swiglu": (x(True), x(True)),
        "swiglu_backward": (x(), x(), x()),
        "swiglu_packed": (x(True), "gate_up"),
        "swiglu_packed_backward": (x()[..., ::2], x(), "up_gate"),
        "geglu": (x(True), x(True), "tanh"),
        "geglu_backward": (x(), x(), x(), "none"),
        "geglu_packed": (x(True), "up_gate", "none"),
        "geglu_packed_backward": (x()[..., ::2], x(), "gate_up", "tanh"),
    }
    return calls[op]


def _attention(heads: Callable[..., torch.Tensor], backward: bool) -> tuple[Any, ...]:
    """Packed as two sequences, or causal with sinks: test_attention has the other options."""
    grad = not backward
    q, k, v = (heads(grad) for _ in range(3))
    packed = q.dim() == 3
    tokens, count = (len(q), q.shape[1]) if packed else (q.shape[2], q.shape[1])
    sums = torch.tensor([0, 2, tokens], dtype=torch.int32) if packed else None
    sinks = None if packed else torch.randn(count).to(q.dtype).requires_grad_(grad)
    options = ("thd" if packed else "bhsd", 0.5, -1, 0, False, 0.0, tokens, tokens, "ieee")
    args = (q, k, v, sinks, None, None, sums, sums, None, *options)
    if not backward:
        return args
    attention = EVERY_OP["attention"]
    outputs = tuple(attention.reference(*args))
    return attention.backward_call(args, outputs, (heads(), outputs[1]))


def test_opcheck_covers_every_registered_op() -> None:
    for op in library.calls:
        _call(op, "contiguous", torch.float32)
    assert set(library.calls) == set(EVERY_OP)


@pytest.mark.drawn(seconds=0.16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", library.calls)
def test_opcheck(op: str, layout: str, dtype: torch.dtype) -> None:
    args = _call(op, layout, dtype)
    if op in IN_PLACE and layout == "expanded":
        with pytest.raises(tilewright.InputError, match="overlap"):
            library.call(EVERY_OP[op], args, None)
        return
    torch.library.opcheck(getattr(OPERATORS, op).default, args)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("softmax", (0, None)),
        ("softmax", (1, torch.float64)),
        ("rms_norm", (None, 1e-6, 0.0, "torch")),
        ("rms_norm", (torch.randn(N, dtype=torch.float64), 1e-6, 0.0, "llama")),
        ("rms_norm", (torch.randn(N), 1e-6, 1.0, "gemma")),
        ("layer_norm", (None, None, 1e-5)),
        ("layer_norm", (torch.randn(N, requires_grad=True), None, 1e-5)),
        ("layer_norm", (None, torch.randn(N, requires_grad=True), 0.0)),
    ],
)
def test_opcheck_of_options(op: str, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(getattr(OPERATORS, op).default, (leaf(6, N, dtype=torch.float32), *args))


@pytest.mark.parametrize(
    "op",
    [
        *("relu_backward", "softmax_backward", "rms_norm_backward", "layer_norm_backward"),
        *("swiglu_backward", "geglu_backward"),
    ],
)
@pytest.mark.parametrize("grad_layout", ["transposed", "column slice", "expanded"])
def test_backward_outputs_are_laid_out_as_declared_whatever_the_gradient_is(
    op: str, grad_layout: str
) -> None:
    _, *rest = _call(op, "contiguous", torch.float32)
    args = (_laid_out(grad_layout, torch.float32, False), *rest)
    torch.library.opcheck(getattr(OPERATORS, op).default, args)


def test_raw_in_place_operator_bumps_the_version(silent_kernel: None) -> None:
    x = torch.randn(3, N)
    before = x._version
    OPERATORS.relu_(x)
    assert x._version > before


def test_raw_in_place_operator_refuses_what_it_cannot_differentiate() -> None:
    """Autograd records nothing for relu_; a gradient of all ones would be silently wrong."""
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    y = x * 1
    with pytest.raises(RuntimeError, match="relu"):
        OPERATORS.relu_(y)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.tensor([0.0, 1.0])), f"silently wrong: {grad}"
        raise RuntimeError("relu_ is differentiable, and right")


# --- torch.compile and torch.export --------------------------------------------------------------

WEIGHT = torch.randn(N, requires_grad=True)
BIAS = torch.randn(N, requires_grad=True)

COMPILED: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": tilewright.relu,
    "relu in place": lambda x: tilewright.relu(x * 2, inplace=True),
    "relu on torch": lambda x: tilewright.relu(x, backend="torch"),
    "softmax": tilewright.softmax,
    "softmax dim=0": lambda x: tilewright.softmax(x, dim=0),
    "softmax to float32": lambda x: tilewright.softmax(x.bfloat16(), -1, torch.float32),
    "softmax to float64": lambda x: tilewright.softmax(x, -1, torch.float64),
    "rms_norm tuple": lambda x: tilewright.rms_norm(x, (N,), WEIGHT),
    "rms_norm int": lambda x: tilewright.rms_norm(x, N, WEIGHT),
    "rms_norm list": lambda x: tilewright.rms_norm(x, [N], WEIGHT, 1e-5),
    "rms_norm no weight": lambda x: tilewright.rms_norm(x, x.shape[-1]),
    "rms_norm two dims": lambda x: tilewright.rms_norm(x, x.shape[-2:]),
    "rms_norm residual": lambda x: tilewright.rms_norm(x, N, WEIGHT, residual=x * 2),
    "rms_norm gemma": lambda x: tilewright.rms_norm(
        x, N, WEIGHT, weight_offset=1.0, casting="gemma"
    ),
    "layer_norm": lambda x: tilewright.layer_norm(x, N, WEIGHT, BIAS),
    "layer_norm no weight": lambda x: tilewright.layer_norm(x, [N], bias=BIAS),
    "layer_norm two dims": lambda x: tilewright.layer_norm(x, x.shape[-2:]),
    "rope": lambda x: tilewright.rope(x, x[:, :1], COS, SIN, layout="thd"),
    "rope in part": lambda x: tilewright.rope(
        x, x, COS[:, :2], SIN[:, :2], layout="thd", rotary_dim=4, interleaved=True
    ),
    "swiglu": lambda x: tilewright.swiglu(x, x * 2),
    "swiglu of chunks": lambda x: tilewright.swiglu(*x.chunk(2, -1)),
    "swiglu_packed": tilewright.swiglu_packed,
    "geglu": lambda x: tilewright.geglu(x, x * 2, "none"),
    "geglu_packed": lambda x: tilewright.geglu_packed(x, "up_gate"),
}


def _outputs_and_grads(f: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    outputs = f(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(o.float().square().sum() * (i + 1) for i, o in enumerate(outputs))
    wanted = [x, WEIGHT, BIAS]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [*outputs, *(g for g in grads if g is not None)]


@pytest.mark.drawn(seconds=0.4, family="slow")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager_in_one_graph(name: str) -> None:
    """fullgraph forbids graph breaks; shapes of one rank share one graph, forward and backward."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (5, 3, 16):
        x = torch.randn(batch, 3, N)
        eager, got = _outputs_and_grads(COMPILED[name], x), _outputs_and_grads(compiled, x)
        assert len(eager) == len(got)
        for e, g in zip(eager, got, strict=True):
            assert (e.dtype, e.stride()) == (g.dtype, g.stride())
            assert torch.equal(e, g)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_compiled_in_place_changes_the_callers_tensor() -> None:
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: tilewright.relu(x, inplace=True) + 1, backend="aot_eager", fullgraph=True
    )
    x = torch.randn(4, N)
    wanted = x.relu()
    assert torch.equal(step(x), wanted + 1)
    assert torch.equal(x, wanted)


def test_compiled_bad_input_names_the_mistake() -> None:
    torch._dynamo.reset()
    step = torch.compile(
        lambda x, w: tilewright.rms_norm(x, (N,), w), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"weight has shape \(4,\)"):
        step(torch.ones(2, N), torch.ones(4))


def test_compiled_softmax_follows_autocast() -> None:
    torch._dynamo.reset()
    step = torch.compile(tilewright.softmax, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(torch.randn(2, N).bfloat16()).dtype == torch.float32


class _Norm(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.weight = torch.nn.Parameter(torch.randn(N))

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x, self.weight)


@pytest.mark.drawn(seconds=0.55, family="slow")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize(
    ("node", "call"),
    [
        ("relu", lambda x, w: tilewright.relu(x)),
        ("softmax", lambda x, w: tilewright.softmax(x)),
        ("rms_norm", lambda x, w: tilewright.rms_norm(x, N, w)),
        ("add_rms_norm", lambda x, w: tilewright.rms_norm(x, (N,), w, residual=x)),
        ("layer_norm", lambda x, w: tilewright.layer_norm(x, N, w, w)),
    ],
    ids=["relu", "softmax", "rms_norm", "add_rms_norm", "layer_norm"],
)
def test_export_keeps_one_node_for_any_batch(node: str, call: Any, strict: bool) -> None:
    batch = torch.export.Dim("batch", min=2, max=1024)
    model = _Norm(call)
    program = torch.export.export(
        model, (torch.randn(4, N),), dynamic_shapes=({0: batch},), strict=strict
    ).run_decompositions()
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert [n for n in names if "getitem" not in n] == [f"tilewright.{node}.default"]
    x = torch.randn(9, N)
    assert all(map(torch.equal, _tuple(program.module()(x)), _tuple(model(x))))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_takes_a_normalized_shape_that_is_symbolic() -> None:
    """x.shape[-1] is a torch.SymInt there, which is no int."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return tilewright.rms_norm(x, x.shape[-1])

    hidden = torch.export.Dim("hidden", min=2, max=1024)
    program = torch.export.export(
        Norm(), (torch.randn(4, N),), dynamic_shapes=({1: hidden},), strict=False
    )
    x = torch.randn(4, 24)
    assert torch.equal(program.module()(x), tilewright.rms_norm(x, 24))


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "softmax"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_autocast_table(dtype: torch.dtype, softmax: torch.dtype, path: str) -> None:
    x = torch.randn(4, N).to(dtype)
    for _ in range(3):  # later calls find a plan, then a launch, and autocast must still be seen
        tilewright.softmax(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert tilewright.softmax(x).dtype == softmax
            assert tilewright.softmax(x, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert tilewright.relu(x).dtype == dtype
            assert tilewright.rms_norm(x, N).dtype == dtype
            y, total = tilewright.rms_norm(x, N, residual=x)
            assert (y.dtype, total.dtype) == (dtype, dtype)


def test_softmax_under_autocast_returns_the_gradient_in_the_inputs_dtype() -> None:
    """torch itself has the float32 rule on CUDA only; ours is one rule for both."""
    x = torch.randn(4, N).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = tilewright.softmax(x), F.softmax(x, -1, dtype=torch.float32)
    assert torch.equal(y, wanted)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.square().sum(), x)[0])


# --- first-order gradients -----------------------------------------------------------------------

DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "relu": (tilewright.relu, ((5, N),)),
    "relu in place": (lambda x: tilewright.relu(x * 1, inplace=True), ((5, N),)),
    "softmax": (tilewright.softmax, ((5, N),)),
    "softmax dim=0": (lambda x: tilewright.softmax(x, 0), ((5, 3, 2),)),
    "softmax dim=1": (lambda x: tilewright.softmax(x, 1), ((5, 3, 2),)),
    "rms_norm": (lambda x, w: tilewright.rms_norm(x, N, w), ((5, N), (N,))),
    "rms_norm no weight": (lambda x: tilewright.rms_norm(x, N, eps=1e-3), ((5, N),)),
    "rms_norm offset": (
        lambda x, w: tilewright.rms_norm(x, N, w, weight_offset=1.0, casting="gemma"),
        ((5, N), (N,)),
    ),
    "rms_norm llama": (lambda x, w: tilewright.rms_norm(x, N, w, casting="llama"), ((5, N), (N,))),
    "rms_norm two dims": (lambda x, w: tilewright.rms_norm(x, (3, 4), w), ((2, 3, 4), (3, 4))),
    "add_rms_norm": (
        lambda x, w, r: tilewright.rms_norm(x, N, w, residual=r),
        ((5, N), (N,), (5, N)),
    ),
    "add_rms_norm norm only": (
        lambda x, w, r: tilewright.rms_norm(x, N, w, residual=r)[0],
        ((5, N), (N,), (5, N)),
    ),
    "add_rms_norm sum only": (
        lambda x, w, r: tilewright.rms_norm(x, N, w, residual=r)[1],
        ((5, N), (N,), (5, N)),
    ),
    "add_rms_norm to itself": (
        lambda x, w: tilewright.rms_norm(x, N, w, residual=x),
        ((5, N), (N,)),
    ),
    "rms_norm_swiglu": (tilewright.rms_norm_swiglu, ((5, N), (5, N), (N,))),
    "rms_norm_swiglu no weight": (tilewright.rms_norm_swiglu, ((5, N), (5, N))),
    "layer_norm": (
        lambda x, w, b: tilewright.layer_norm(x, N, w, b),
        ((5, N), (N,), (N,)),
    ),
    "layer_norm no weight": (lambda x, b: tilewright.layer_norm(x, N, None, b), ((5, N), (N,))),
    "layer_norm no bias": (lambda x, w: tilewright.layer_norm(x, N, w), ((5, N), (N,))),
    "layer_norm two dims": (
        lambda x, w, b: tilewright.layer_norm(x, (3, 4), w, b),
        ((2, 3, 4), (3, 4), (3, 4)),
    ),
    "rope": (
        lambda q, k: tilewright.rope(q, k, COS, SIN, layout="thd"),
        ((5, 2, N), (5, 1, N)),
    ),
    "rope k only": (
        lambda q, k: tilewright.rope(q, k, COS, SIN, layout="thd", interleaved="to_halves")[1],
        ((5, 2, N), (5, 1, N)),
    ),
    "swiglu": (tilewright.swiglu, ((5, N), (5, N))),
    "swiglu_packed": (tilewright.swiglu_packed, ((5, N),)),
    "swiglu_packed up_gate": (lambda x: tilewright.swiglu_packed(x, "up_gate"), ((5, N),)),
    "geglu": (tilewright.geglu, ((5, N), (5, N))),
    "geglu erf": (lambda x, u: tilewright.geglu(x, u, "none"), ((5, N), (5, N))),
    "geglu_packed": (tilewright.geglu_packed, ((5, N),)),
    "geglu_packed erf": (lambda x: tilewright.geglu_packed(x, "up_gate", "none"), ((5, N),)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str, path: str) -> None:
    f, shapes = DIFFERENTIABLE[name]
    torch.manual_seed(0)
    inputs = [leaf(*shape) for shape in shapes]
    with torch.no_grad():
        for x in inputs:
            x[x.abs() < 0.01] = 0.5  # finite differences must not cross relu's kink
    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("wanted", ["input", "weight", "residual"])
@pytest.mark.parametrize("outputs", ["both", "norm", "sum"])
@pytest.mark.parametrize("form", ["rms_norm", "add_rms_norm"])
def test_partial_gradients_match_torch(form: str, outputs: str, wanted: str, path: str) -> None:
    if form == "rms_norm" and (wanted == "residual" or outputs != "norm"):
        wanted, outputs = "weight", "norm"  # that form has one output and no residual
    tensors = {"input": leaf(5, N), "weight": leaf(N), "residual": leaf(5, N)}
    for name, t in tensors.items():
        t.requires_grad_(name == wanted)
    x, w, r = tensors.values()

    def run(norm: Any, add: bool) -> torch.Tensor:
        y, total = norm(x, w, r) if add else (norm(x, w), None)
        loss = torch.zeros((), dtype=torch.float64)
        if outputs != "sum":
            loss = loss + (y * torch.arange(N)).square().sum()
        if add and outputs != "norm":
            loss = loss + total.pow(3).sum()
        if not loss.requires_grad:  # the sum does not depend on the weight
            return torch.zeros(())
        (grad,) = torch.autograd.grad(loss, tensors[wanted], allow_unused=True)
        return torch.zeros(()) if grad is None else grad

    def torchs(x: Any, w: Any, r: Any = None) -> Any:
        total = x if r is None else x + r
        y = F.rms_norm(total, (N,), w, 1e-6)
        return y if r is None else (y, total)

    def ours(x: Any, w: Any, r: Any = None) -> Any:
        return tilewright.rms_norm(x, N, w, 1e-6, residual=r)

    add = form == "add_rms_norm"
    got = warm(lambda: run(ours, add))
    expected = run(torchs, add)
    if wanted == "weight" and outputs == "sum":
        expected = torch.zeros_like(got)  # torch says "unused", or zeros
    torch.testing.assert_close(got, expected, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gradients_match_torch_functional(dtype: torch.dtype, path: str) -> None:
    x, w = leaf(6, N, dtype=dtype), leaf(N, dtype=dtype)
    grad = torch.randn(6, N).to(dtype)
    pairs = [
        (lambda: tilewright.relu(x), lambda: F.relu(x)),
        (lambda: tilewright.softmax(x), lambda: F.softmax(x, -1)),
        (lambda: tilewright.softmax(x, 0), lambda: F.softmax(x, 0)),
        (lambda: tilewright.rms_norm(x, N, w), lambda: F.rms_norm(x, (N,), w)),
    ]
    for ours, torchs in pairs:
        got = warm(lambda f=ours: torch.autograd.grad(f(), [x, w], grad, allow_unused=True))
        wanted = torch.autograd.grad(torchs(), [x, w], grad, allow_unused=True)
        for g, t in zip(got, wanted, strict=True):
            assert (g is None) == (t is None)
            if g is not None:
                assert g.dtype == t.dtype
                torch.testing.assert_close(g, t)


def test_mixed_dtypes_give_each_argument_a_gradient_of_its_own_dtype() -> None:
    x, w = leaf(4, N, dtype=torch.bfloat16), leaf(N, dtype=torch.float32)
    for casting, out in (("torch", torch.bfloat16), ("llama", torch.float32)):
        y = tilewright.rms_norm(x, N, w, casting=casting)
        assert y.dtype == out
        grads = torch.autograd.grad(y.float().square().sum(), [x, w])
        assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


@public
def test_backward_twice_with_retain_graph_gives_equal_gradients(name: str, path: str) -> None:
    x = leaf(5, N)
    y = warm(lambda: PUBLIC[name](x)).square().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(y, x)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


@public
def test_no_graph_without_grad_mode(name: str, path: str) -> None:
    x = leaf(5, N)
    with torch.no_grad():
        assert not warm(lambda: PUBLIC[name](x)).requires_grad
    assert warm(lambda: PUBLIC[name](x)).requires_grad
    assert not warm(lambda: PUBLIC[name](x.detach())).requires_grad


@public
def test_checkpointing_gives_the_same_gradient(name: str) -> None:
    x = leaf(5, N)
    wanted = torch.autograd.grad(PUBLIC[name](x).square().sum(), x)[0]
    y = checkpoint(PUBLIC[name], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], wanted)


# --- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("relu", 1), ("softmax", 1), ("rms_norm", 2), ("add_rms_norm", 2), ("layer_norm", 3)),
        *(("swiglu", 2), ("geglu_packed", 1), ("rope", 2)),
    ],
)
def test_saves_no_more_than_the_backward_reads(name: str, count: int, path: str) -> None:
    x, w = leaf(5, N), leaf(N)
    calls: dict[str, Callable[[], Any]] = {
        "relu": lambda: tilewright.relu(x),
        "softmax": lambda: tilewright.softmax(x),
        "rms_norm": lambda: tilewright.rms_norm(x, N, w),
        "add_rms_norm": lambda: tilewright.rms_norm(x, N, w, residual=x.detach()),
        "layer_norm": lambda: tilewright.layer_norm(x, N, w, w.detach()),
        "swiglu": lambda: tilewright.swiglu(x, x.detach()),
        "geglu_packed": lambda: tilewright.geglu_packed(x),
        "rope": lambda: _rope_of(x),  # its tables; neither q nor k
    }
    calls[name]()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        calls[name]()
    assert len(saved) == count


@pytest.mark.parametrize("name", ["relu", "softmax", "rms_norm", "weight", "residual sum"])
def test_changing_a_saved_tensor_before_backward_raises(name: str, path: str) -> None:
    x, w = leaf(5, N) * 1, leaf(N) * 1
    calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "relu": lambda: (tilewright.relu(x),) * 2,
        "softmax": lambda: (tilewright.softmax(x),) * 2,
        "rms_norm": lambda: (tilewright.rms_norm(x, N, w), x),
        "weight": lambda: (tilewright.rms_norm(x, N, w), w),
        "residual sum": lambda: tilewright.rms_norm(x, N, w, residual=x),
    }
    output, saved = warm(calls[name])
    loss = output.square().sum()
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_relu_does_not_need_its_input_for_the_backward(path: str) -> None:
    start = leaf(5, N)
    x = start * 1
    y = warm(lambda: tilewright.relu(x))
    with torch.no_grad():
        x.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), start)[0], (start > 0).double())


# --- forward only --------------------------------------------------------------------------------

FORWARD_ONLY: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "rms_norm_fp8": lambda x, w: tilewright.rms_norm_fp8(x, N, w),
    "layer_norm_fp8": lambda x, w: tilewright.layer_norm_fp8(x, (N,), w, scaling="tensor"),
}
forward_only = pytest.mark.parametrize("name", FORWARD_ONLY)


def test_every_op_without_a_gradient_is_tested_as_such() -> None:
    assert {n for n, op in ops.registry().items() if op.autograd is None} == set(FORWARD_ONLY)


@forward_only
@pytest.mark.parametrize("through", [0, 1], ids=["q", "scale"])
def test_a_backward_through_forward_only_ops_is_refused_by_name(
    name: str, through: int, path: str
) -> None:
    """Not at the call: a module's weight asks for a gradient in inference too."""
    x, w = leaf(5, N), leaf(N)
    outputs = warm(lambda: FORWARD_ONLY[name](x, w))
    with pytest.raises(RuntimeError, match=rf"{name}: it is forward only.*no_grad"):
        outputs[through].double().sum().backward()
    with torch.no_grad():
        assert not any(o.requires_grad for o in warm(lambda: FORWARD_ONLY[name](x, w)))


@forward_only
def test_compiled_forward_only_ops_equal_eager_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    f = FORWARD_ONLY[name]
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch in (5, 3, 16):
        x, w = torch.randn(batch, 3, N), torch.randn(N)
        for e, g in zip(f(x, w), compiled(x, w), strict=True):
            assert (e.dtype, e.stride()) == (g.dtype, g.stride())
            assert torch.equal(e.float(), g.float())


# --- in place ------------------------------------------------------------------------------------


def test_in_place_returns_its_argument_and_bumps_its_version(
    path: str, silent_kernel: None
) -> None:
    for _ in range(2):
        x = torch.randn(5, N)
        wanted, before = x.relu(), x._version
        assert tilewright.relu(x, inplace=True) is x
        assert x._version > before
        assert torch.equal(x, wanted)


def test_rope_in_place_bumps_the_versions_of_both(path: str, silent_kernel: None) -> None:
    for _ in range(3):
        q, k = torch.randn(5, 2, N), torch.randn(5, 1, N)
        wanted, before = tilewright.rope(q, k, COS, SIN, layout="thd"), (q._version, k._version)
        got = tilewright.rope(q, k, COS, SIN, layout="thd", inplace=True)
        assert got[0] is q and got[1] is k
        assert q._version > before[0] and k._version > before[1]
        assert torch.equal(q, wanted[0]) and torch.equal(k, wanted[1])


def test_in_place_on_what_another_backward_saved_raises(path: str, silent_kernel: None) -> None:
    for _ in range(2):
        w = leaf(5, N)
        x = torch.randn(5, N, dtype=torch.float64)
        loss = (w * x).sum()  # saves x
        tilewright.relu(x, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_in_place_on_a_non_leaf_differentiates(path: str) -> None:
    for _ in range(2):
        x = leaf(5, N)
        y = x * 3
        assert tilewright.relu(y, inplace=True) is y
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, 3.0 * (x > 0))


def test_in_place_on_a_view_of_a_non_leaf_differentiates(path: str) -> None:
    for _ in range(2):
        x = leaf(4, N)
        base = x * 1
        tilewright.relu(base[1:3], inplace=True)
        (grad,) = torch.autograd.grad(base.sum(), x)
        wanted = torch.ones_like(x)
        wanted[1:3] = (x[1:3] > 0).double()
        assert torch.equal(grad, wanted)


def test_in_place_on_a_leaf_that_requires_grad_raises_and_changes_nothing(path: str) -> None:
    x = leaf(5, N)
    before = x.detach().clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="leaf"):
            tilewright.relu(x, inplace=True)
        assert torch.equal(x, before)
    with torch.no_grad():
        tilewright.relu(x, inplace=True)  # an optimiser's kind of update
    assert torch.equal(x, before.relu())


def test_inference_mode(path: str) -> None:
    x, w = leaf(5, N), leaf(N)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(tilewright.relu(x), F.relu(x))
            assert torch.equal(tilewright.softmax(x), F.softmax(x, -1))
            torch.testing.assert_close(tilewright.rms_norm(x, N, w), F.rms_norm(x, (N,), w))
            made_here = torch.randn(5, N)
            wanted = made_here.relu()
            assert tilewright.relu(made_here, inplace=True) is made_here
            assert torch.equal(made_here, wanted)
            assert tilewright.relu(x).is_inference()


def test_in_place_in_inference_mode_bumps_the_version_of_an_ordinary_tensor(
    path: str, silent_kernel: None
) -> None:
    for _ in range(2):
        w = leaf(5, N)
        x = torch.randn(5, N, dtype=torch.float64)
        loss = (w * x).sum()
        with torch.inference_mode():
            tilewright.relu(x, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what is not implemented says so -------------------------------------------------------------


@public
def test_double_backward_raises_and_names_the_op(name: str, path: str) -> None:
    x = leaf(5, N)
    y = warm(lambda: PUBLIC[name](x))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=f"{name.removeprefix('add_')}_backward: double backward"
    ):
        torch.autograd.grad(grad.sum(), x)


@public
def test_hessian_raises_and_names_the_op(name: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"{name.removeprefix('add_')}_backward: double backward"
    ):
        torch.autograd.functional.hessian(lambda x: PUBLIC[name](x).pow(2).sum(), torch.randn(2, N))


@public
def test_the_way_out_that_the_double_backward_error_names_works(name: str) -> None:
    """A message that sends the reader to backend="torch" must not come from backend="torch"."""
    with pytest.raises(RuntimeError) as caught:
        x = leaf(2, N)
        (grad,) = torch.autograd.grad(PUBLIC[name](x).square().sum(), x, create_graph=True)
        grad.sum().backward()
    if 'backend="torch"' not in str(caught.value):
        return
    with tilewright.use_backend("torch"):
        x = leaf(2, N)
        (grad,) = torch.autograd.grad(PUBLIC[name](x).square().sum(), x, create_graph=True)
        grad.sum().backward()


FORWARD_MODE = {**PUBLIC, "relu_": lambda x: tilewright.relu(x * 1, inplace=True)}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_ad_raises_and_names_the_op(name: str, path: str) -> None:
    x = torch.randn(2, N)
    warm(lambda: FORWARD_MODE[name](x))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=f"{name}: forward-mode AD"):
            FORWARD_MODE[name](dual)
        # a tensor without a tangent is still served
        assert torch.equal(FORWARD_MODE[name](x), FORWARD_MODE[name](x.clone()))


def _transformed(transform: str, f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return f(x).square().sum()

    return {
        "jvp": lambda: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        "vjp": lambda: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
        "jacrev": lambda: torch.func.jacrev(f)(x),
        "grad": lambda: torch.func.grad(loss)(x),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(loss))(x),
    }[transform]()


TORCHS: dict[str, Public] = {
    "relu": F.relu,
    "relu_": F.relu,
    "softmax": lambda x: F.softmax(x, -1),
    "rms_norm": lambda x: F.rms_norm(x, (N,)),
    "add_rms_norm": lambda x: F.rms_norm(3 * x, (N,)),
    "layer_norm": lambda x: F.layer_norm(x, (N,)),
    "rope": lambda x: 0.6 * x + 0.8 * torch.cat((-x[..., N // 2 :], x[..., : N // 2]), -1),
    "swiglu": lambda x: F.silu(x) * x * 2,
    "geglu_packed": lambda x: F.gelu(x[..., : N // 2], approximate="tanh") * x[..., N // 2 :],
}


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("transform", ["jvp", "vjp", "jacrev", "grad", "vmap of grad"])
def test_func_transforms_are_right_or_refused_by_name(transform: str, name: str, path: str) -> None:
    """Today they are refused. The message must name the op: a user wrote no autograd.Function."""
    x = torch.randn(2, N)
    warm(lambda: FORWARD_MODE[name](x))
    message = ""
    try:
        got = _transformed(transform, FORWARD_MODE[name], x)
    except RuntimeError as error:
        message = str(error)
    if message:
        assert name.rstrip("_") in message
    else:
        torch.testing.assert_close(got, _transformed(transform, TORCHS[name], x))


@public
def test_vmap_is_right(name: str, path: str) -> None:
    """By torch's own fallback: one call per sample."""
    x = torch.randn(3, 2, N)
    warm(lambda: PUBLIC[name](x))
    assert torch.equal(torch.func.vmap(PUBLIC[name])(x), PUBLIC[name](x))
    moved = torch.func.vmap(PUBLIC[name], in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(moved, PUBLIC[name](x))


def test_vmap_of_softmax_counts_dims_without_the_batch() -> None:
    x = torch.randn(3, 2, N)
    got = torch.func.vmap(lambda x: tilewright.softmax(x, 0))(x)
    torch.testing.assert_close(got, F.softmax(x, 1))


def test_vmap_in_place_is_right() -> None:
    x = torch.randn(3, N)
    wanted = x.relu()
    assert torch.equal(torch.vmap(lambda t: tilewright.relu(t, inplace=True))(x), wanted)
    assert torch.equal(x, wanted)


# --- modes and subclasses see an ordinary operator -----------------------------------------------


@public
def test_dispatch_mode_sees_every_call(name: str, path: str, plain_calls: Counter[str]) -> None:
    x = torch.randn(2, N)
    for _ in range(3):
        PUBLIC[name](x)
    assert plain_calls[f"tilewright::{name}"] == 3


@public
def test_function_mode_sees_every_call(name: str, path: str) -> None:
    seen: Counter[Any] = Counter()

    class Count(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, N)
    warm(lambda: PUBLIC[name](x))
    with Count():
        for _ in range(3):
            PUBLIC[name](x)
    assert seen[f"tilewright.{name}.default"] == 3


class Tagged(torch.Tensor):
    """A subclass that lives by __torch_function__."""

    seen: Counter[str] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen[str(func)] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@public
def test_subclass_sees_the_call_and_stays_itself(name: str, path: str) -> None:
    Tagged.seen.clear()
    x = torch.randn(2, N)
    warm(lambda: PUBLIC[name](x))
    y = PUBLIC[name](x.as_subclass(Tagged))
    assert type(y) is Tagged
    assert Tagged.seen[f"tilewright.{name}.default"] == 1
    assert torch.equal(y.as_subclass(torch.Tensor), PUBLIC[name](x))


@pytest.mark.parametrize("place", ["weight", "residual"])
def test_subclass_in_a_later_argument_is_seen(place: str, path: str) -> None:
    Tagged.seen.clear()
    x, others = torch.randn(2, N), {"weight": torch.randn(N), "residual": torch.randn(2, N)}
    warm(lambda: tilewright.rms_norm(x, N, **others))
    y, _ = tilewright.rms_norm(x, N, **{**others, place: others[place].as_subclass(Tagged)})
    assert type(y) is Tagged
    assert Tagged.seen["tilewright.add_rms_norm.default"] == 1


@public
def test_parameters_take_the_way_of_plain_tensors(name: str, path: str) -> None:
    x = torch.nn.Parameter(torch.randn(2, N))
    y = warm(lambda: PUBLIC[name](x))
    assert type(y) is torch.Tensor
    assert torch.equal(y, PUBLIC[name](x.detach()))


def test_fake_tensors_get_the_declared_outputs() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, N, dtype=torch.bfloat16)
        assert tilewright.softmax(x, dtype=torch.float32).dtype == torch.float32
        y, total = tilewright.rms_norm(x, N, residual=x)
        assert y.shape == total.shape == x.shape


# --- the shortcut itself -------------------------------------------------------------------------


def dispatched(f: Callable[[], Any]) -> list[str]:
    """The operators that a call reaches through the dispatcher."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f()
    names = [e.name for e in profile.events()]
    return [n.removeprefix("tilewright::") for n in names if n.startswith("tilewright::")]


@public
def test_the_shortcut_steps_around_the_dispatcher(name: str, path: str) -> None:
    """Or the `path` fixture tests nothing."""
    x = torch.randn(3, N, requires_grad=True)
    warm(lambda: PUBLIC[name](x).sum().backward())
    seen = dispatched(lambda: PUBLIC[name](x).sum().backward())
    both = [name, f"{name.removeprefix('add_')}_backward"]
    assert sorted(set(seen)) == (both if path == "dispatcher" else [])


def test_a_negated_view_is_another_layout(path: str) -> None:
    """Its memory holds the other sign: a plan for plain tensors must not serve it."""
    negated = torch.randn(3, N, dtype=torch.cfloat).conj().imag
    assert negated.is_neg()
    plain = torch.randn(3, N, dtype=torch.cfloat).imag
    assert plain.stride() == negated.stride()
    assert library.layout_key(negated) != library.layout_key(plain)
    warm(lambda: tilewright.relu(plain))
    assert torch.equal(warm(lambda: tilewright.relu(negated)), negated.relu())


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=str)
def test_tensors_without_strides_are_refused_and_not_misread(make: Any, path: str) -> None:
    x = make(torch.randn(3, N))
    for _ in range(3):
        with pytest.raises((RuntimeError, NotImplementedError)):
            tilewright.relu(x)


def test_the_shortcut_tells_layouts_dtypes_and_options_apart(path: str) -> None:
    base = torch.randn(N, N, dtype=torch.float64)
    for _ in range(3):
        for x in (
            base,
            base.t(),
            base[:, 1:],
            base[:, 1:].float(),
            base[::2],
            base[1:2].expand(4, N),
        ):
            assert torch.equal(tilewright.relu(x), F.relu(x))
            for dim in (0, 1, -1):
                torch.testing.assert_close(tilewright.softmax(x, dim), F.softmax(x, dim))
            n = x.shape[-1]
            for eps in (1e-6, 1e-1):
                got = tilewright.rms_norm(x, n, None, eps)
                torch.testing.assert_close(got, F.rms_norm(x, (n,), None, eps))
            with pytest.raises(tilewright.InputError, match="weight"):
                tilewright.rms_norm(x, n, torch.ones(n + 1, dtype=x.dtype))


def test_the_shortcut_tells_ropes_calls_apart(path: str) -> None:
    """One shape of q, and whatever else a call may differ in."""
    q, k = torch.randn(2, 3, 4, N), torch.randn(2, 3, 4, N)
    cos, sin = torch.randn(2, 9, N)
    ids = torch.tensor([8, 0, 3])
    calls: list[tuple[Any, Any, Any, dict[str, Any]]] = [
        (k, cos, sin, {}),
        (k, cos, sin, {"interleaved": True}),
        (k, cos, sin, {"interleaved": "to_halves"}),
        (k, cos[:, :4], sin[:, :4], {}),
        (k, cos[:, :4], sin[:, :4], {"rotary_dim": 4}),
        (k, cos.expand(2, 9, N), sin.expand(2, 9, N), {}),
        (k[:, :, :1], cos, sin, {}),
        (k.transpose(0, 1).contiguous().transpose(0, 1), cos, sin, {}),
        (k, cos, sin, {"position_ids": ids}),
        (k, cos, sin, {"position_ids": ids.flip(0).int()}),
        (k, cos, sin, {"position_ids": ids.expand(2, 3)}),
    ]
    wanted = [
        tilewright.rope(q.clone(), k, c, s, layout="bshd", **options) for k, c, s, options in calls
    ]
    for _ in range(3):
        for (k, c, s, options), expected in zip(calls, wanted, strict=True):
            got = tilewright.rope(q, k, c, s, layout="bshd", **options)
            assert all(map(torch.equal, got, expected)), options


@pytest.mark.parametrize("how", ["poisoned", "use_backend", "another dtype"])
def test_the_short_way_is_not_taken(how: str, path: str) -> None:
    x = torch.randn(3, N)
    warm(lambda: tilewright.relu(x))
    context: Any = nullcontext()
    if how == "poisoned":  # a plan keeps its allocator, which would hand out unguarded memory
        context = memory.guarded()
    elif how == "use_backend":
        context = tilewright.use_backend("torch")
    else:
        x = x.double()
    with context:
        assert dispatched(lambda: tilewright.relu(x)) == ["relu"]


def test_tensors_on_another_device_are_told_apart() -> None:
    """Neither a CPU tensor nor a meta tensor has a device index."""
    x, w = torch.randn(2, N), torch.randn(N)
    warm(lambda: tilewright.rms_norm(x, N, w))
    for _ in range(3):
        with pytest.raises(tilewright.InputError, match="weight is on meta but input on cpu"):
            tilewright.rms_norm(x, N, w.to("meta"))
        assert tilewright.rms_norm(x.to("meta"), N, w.to("meta")).is_meta
        assert tilewright.relu(x.to("meta")).is_meta


def test_eight_threads_at_once(path: str) -> None:
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        start.wait()
        try:
            for i in range(40):
                x = torch.randn(1 + i % 5, 3 + (seed + i) % 7, generator=rng).double()
                x.requires_grad_()
                n = x.shape[-1]
                for ours, torchs in (
                    (tilewright.relu(x), F.relu(x)),
                    (tilewright.softmax(x), F.softmax(x, -1)),
                    (tilewright.rms_norm(x, n), F.rms_norm(x, (n,))),
                ):
                    torch.testing.assert_close(ours, torchs)
                    got = torch.autograd.grad(ours.square().sum(), x)
                    torch.testing.assert_close(got, torch.autograd.grad(torchs.square().sum(), x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_deepcopy_of_a_module_and_of_an_output() -> None:
    model = _Norm(lambda x, w: tilewright.rms_norm(x, N, w))
    twin, x = copy.deepcopy(model), torch.randn(3, N)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        model.weight.zero_()
    assert not torch.equal(twin(x), model(x))
    y = tilewright.softmax(x)
    assert torch.equal(copy.deepcopy(y), y)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("path", ["ready"], indirect=True)
def test_the_third_call_is_launched_from_what_the_second_left(path: str, grad: bool) -> None:
    READY_LAUNCHES.clear()
    x = torch.randn(5, N, requires_grad=grad)
    for _ in range(4):
        y = tilewright.softmax(x)
    assert READY_LAUNCHES == {"softmax": 2}
    torch.testing.assert_close(y, F.softmax(x, -1))
    assert y.requires_grad == grad
    if grad:
        upstream = torch.randn(5, N)
        wanted = torch.autograd.grad(F.softmax(x, -1), x, upstream)
        torch.testing.assert_close(torch.autograd.grad(y, x, upstream), wanted)


@pytest.mark.parametrize("path", ["ready"], indirect=True)
def test_what_is_ready_serves_its_own_layout_alone(path: str) -> None:
    x = torch.randn(6, N)
    READY_LAUNCHES.clear()
    for _ in range(3):
        tilewright.relu(x)
    assert READY_LAUNCHES["relu"] == 1
    room = torch.randn(6 * N + 1)
    others = [torch.randn(N, 6).t(), x.double(), room[1:].view(6, N), torch.nn.Parameter(x)]
    for other in others:
        assert torch.equal(tilewright.relu(other), F.relu(other))
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="forward-mode"):
            tilewright.relu(forward_ad.make_dual(x, x))
    with tilewright.use_backend("torch"):
        tilewright.relu(x)
    with torch.inference_mode():
        assert torch.equal(tilewright.relu(x), F.relu(x))
    assert READY_LAUNCHES["relu"] == 1
    tilewright.relu(x)
    assert READY_LAUNCHES["relu"] == 2


@pytest.fixture
def ready_relu(path: str) -> Callable[[], int]:
    """Calls a warm relu; how many launches were ready for it: one, if nothing bars."""
    x = torch.randn(5, N)
    warm(lambda: tilewright.relu(x))

    def launches() -> int:
        before = READY_LAUNCHES["relu"]
        assert torch.equal(tilewright.relu(x), F.relu(x))
        return READY_LAUNCHES["relu"] - before

    assert launches() == 1
    return launches


ready_only = pytest.mark.parametrize("path", ["ready"], indirect=True)


@ready_only
def test_a_launch_hook_bars_what_is_ready(ready_relu: Callable[[], int]) -> None:
    HOOKS.append(print)
    try:
        assert ready_relu() == 0
    finally:
        HOOKS.clear()
    assert ready_relu() == 1


@ready_only
def test_another_current_device_bars_what_is_ready(
    ready_relu: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_current_device", lambda: 3)
    assert ready_relu() == 0


@ready_only
def test_somebody_who_explains_bars_what_is_ready(
    ready_relu: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(library.capturing, -1, [])
    assert ready_relu() == 0


@ready_only
def test_what_is_ready_gives_way_to_what_is_called(ready_relu: Callable[[], int]) -> None:
    """One slot for a shape: the dtype that is called now gets it in the end."""
    x = torch.randn(5, N, dtype=torch.float64)
    before = READY_LAUNCHES["relu"]
    for _ in range(library.TURNS + 3):
        assert torch.equal(tilewright.relu(x), F.relu(x))
    assert READY_LAUNCHES["relu"] > before


@pytest.mark.parametrize("path", ["shortcut"], indirect=True)
def test_a_weight_that_a_transform_wraps_has_no_address(path: str) -> None:
    """functionalize wraps it in a plain Tensor at address 0: no plan may take it for the weight."""
    x, w = torch.randn(3, N), torch.randn(N)
    wanted = warm(lambda: tilewright.rms_norm(x, N, w))
    before = PLAN_RUNS["rms_norm"]
    got = torch.func.functionalize(lambda w: tilewright.rms_norm(x, N, w))(w)
    assert torch.equal(got, wanted)
    assert PLAN_RUNS["rms_norm"] == before


@pytest.mark.parametrize("path", ["shortcut"], indirect=True)
def test_a_call_of_two_tensors_leaves_what_is_ready(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call is served without a look at its layout; other calls are looked at."""
    x, w = torch.randn(6, N), torch.randn(N)
    wanted = warm(lambda: tilewright.rms_norm(x, N, w))

    class Looked(Exception): ...

    def look(tensor: Any) -> Any:
        raise Looked

    monkeypatch.setattr(library, "layout_key", look)
    before = PLAN_RUNS["rms_norm"]
    assert torch.equal(tilewright.rms_norm(x, N, w), wanted)
    assert PLAN_RUNS["rms_norm"] == before + 1
    room = torch.randn(6 * N + 1)
    others = [
        (torch.randn(N, 6).t(), w),
        (room[1:].view(6, N), w),
        (x, room[1 : N + 1]),
        (x, torch.randn(2 * N)[::2]),
        (x, torch.nn.Parameter(w)),
        (x.double(), w.double()),
    ]
    for other, weight in others:
        with pytest.raises(Looked):
            tilewright.rms_norm(other, N, weight)
    with torch.inference_mode(), pytest.raises(Looked):
        tilewright.rms_norm(x, N, w)
    with pytest.raises(Looked):
        tilewright.rms_norm(x, N, w, eps=1e-3)
    assert PLAN_RUNS["rms_norm"] == before + 1


@pytest.mark.parametrize("path", ["shortcut"], indirect=True)
def test_what_two_tensors_left_minds_gradients(path: str) -> None:
    x, w = torch.randn(6, N, requires_grad=True), torch.randn(N)
    with torch.no_grad():
        assert not warm(lambda: tilewright.rms_norm(x, N, w)).requires_grad
    made_by = tilewright.rms_norm(x, N, w).grad_fn  # ours, not those of the reference that ran
    assert made_by is not None and made_by.name() == "rms_norm_autogradBackward"
    for _ in range(2 * library.TURNS):  # until the slot is theirs
        y = tilewright.rms_norm(x, N, w)
    assert y.requires_grad
    (grad,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad(F.rms_norm(x, (N,), w, 1e-6).sum(), x)
    torch.testing.assert_close(grad, wanted)
    with torch.no_grad():
        assert not tilewright.rms_norm(x, N, w).requires_grad


@pytest.mark.parametrize("path", ["shortcut"], indirect=True)
def test_what_two_tensors_left_minds_autocast(path: str) -> None:
    """An op with a rule for it; and the rule holds for that block alone."""
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    wanted = warm(lambda: tilewright.matmul(a, b))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilewright.matmul(a, b).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(tilewright.matmul(a, b), wanted)
    before = PLAN_RUNS["matmul"]
    assert torch.equal(tilewright.matmul(a, b), wanted)
    assert PLAN_RUNS["matmul"] == before + 1


@pytest.mark.parametrize("path", ["shortcut"], indirect=True)
def test_one_tensor_twice_and_none_take_the_short_way(path: str) -> None:
    """Torch's guard is for different tensors: these are looked at in every call."""
    x = torch.randn(6, 6)
    for call, wanted in (
        (lambda: tilewright.matmul(x, x), x @ x),
        (lambda: tilewright.rms_norm(x, 6), F.rms_norm(x, (6,), None, 1e-6)),
    ):
        PLAN_RUNS.clear()
        torch.testing.assert_close(warm(call), wanted)
        assert sum(PLAN_RUNS.values()) == 2


def test_a_direct_way_to_torch_is_for_ops_that_autocast_has_passed() -> None:
    """Nothing of ours stands between the call and torch's function then."""
    direct = [op for op in EVERY_OP.values() if any(b.direct for b in op.backends)]
    assert [op.name for op in direct] == ["matmul"]
    assert all(op.autocast for op in direct)
