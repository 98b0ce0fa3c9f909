"""The names of the source systems: each alias is its op, and says truly what would run."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewright
from tilewright import compat
from tilewright.errors import DTypeError, InputError, UnsupportedError

SRC = Path(tilewright.__file__).parents[1]
TRITON = "flash_attention_triton (Triton)"
PYTORCH = "scaled_dot_product_attention (PyTorch)"


def python(code: str, **env: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), **env}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


# --- every alias is its op -----------------------------------------------------------------------

X, W, GATE = rand(6, 16), rand(16), rand(6, 16)
Q, K, V = rand(2, 4, 6, 16), rand(2, 4, 6, 16), rand(2, 4, 6, 16)
DECODED = rand(2, 4, 2, 16)
COS, SIN = rand(6, 8), rand(6, 8)
HALVES = rand(5, 8).half(), rand(8, 3).half()


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, corner: str) -> torch.Tensor:
    return tilewright.attention(q, k, v, causal=True, causal_alignment=corner)


ALIASES: dict[str, list[tuple[Any, Any]]] = {
    "softmax_triton": [(lambda f: f(X), lambda: tilewright.softmax(X))],
    "softmax_pytorch": [(lambda f: f(X), lambda: tilewright.softmax(X, backend="torch"))],
    "row_softmax": [(lambda f: f(X), lambda: tilewright.softmax(X))],
    "rmsnorm_triton": [
        (lambda f: f(X, W), lambda: tilewright.rms_norm(X, 16, W, 1e-6)),
        (lambda f: f(X, weight=W, eps=0.5), lambda: tilewright.rms_norm(X, 16, W, 0.5)),
    ],
    "rmsnorm_pytorch": [
        (lambda f: f(X, W), lambda: tilewright.rms_norm(X, 16, W, 1e-6, backend="torch"))
    ],
    "rms_norm_triton": [
        (lambda f: f(X, W), lambda: tilewright.rms_norm(X, 16, W, 1e-6)),
        (lambda f: f(X, w=W, eps=0.5), lambda: tilewright.rms_norm(X, 16, W, 0.5)),
    ],
    "swiglu_triton": [(lambda f: f(X, gate=GATE), lambda: tilewright.swiglu(GATE, X))],
    "fused_rmsnorm_swiglu_triton": [
        (lambda f: f(X, GATE, W), lambda: tilewright.rms_norm_swiglu(X, GATE, W, 1e-6)),
        (lambda f: f(X, GATE, W, eps=0.5), lambda: tilewright.rms_norm_swiglu(X, GATE, W, 0.5)),
    ],
    "rope_triton": [(lambda f: f(Q, COS, SIN), lambda: tilewright.rope(Q, K, COS, SIN)[0])],
    "attention_triton": [
        (lambda f: f(Q[0, 0], K[0, 0], V[0, 0]), lambda: tilewright.attention(Q, K, V)[0, 0])
    ],
    "flash_attention_triton": [
        (lambda f: f(Q[0, 0], K[0, 0], V[0, 0]), lambda: tilewright.attention(Q, K, V)[0, 0])
    ],
    "flash_attention_full_triton": [
        (lambda f: f(Q, K, V), lambda: tilewright.attention(Q, K, V)),
        (lambda f: f(Q, K, V, causal=True), lambda: causal(Q, K, V, "top_left")),
    ],
    "flash_attention_bhsd": [
        (lambda f: f(Q, K, V), lambda: tilewright.attention(Q, K, V)),
        (lambda f: f(Q, K, V, is_causal=True), lambda: causal(Q, K, V, "top_left")),
        (lambda f: f(DECODED, K, V, True), lambda: causal(DECODED, K, V, "top_left")),
        (lambda f: f(Q, K[:, :2], V[:, :2]), lambda: tilewright.attention(Q, K[:, :2], V[:, :2])),
    ],
    "flash_attention_forward": [
        (lambda f: f(Q, K, V), lambda: tilewright.attention(Q, K, V)),
        (lambda f: f(Q, K, V, causal=True), lambda: causal(Q, K, V, "top_left")),
        (lambda f: f(DECODED, K, V, True), lambda: causal(DECODED, K, V, "bottom_right")),
    ],
    "fp16_matmul": [(lambda f: f(*HALVES), lambda: torch.matmul(*HALVES))],
    "matmul_fp16_triton": [(lambda f: f(*HALVES), lambda: torch.matmul(*HALVES))],
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_its_op(name: str) -> None:
    for call, op in ALIASES[name]:
        got, wanted = call(getattr(compat, name)), op()
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


def test_the_swiglu_of_cuda_triton_multiarch_has_the_gate_second() -> None:
    torch.testing.assert_close(compat.swiglu_triton(X, GATE), X * F.silu(GATE))


def test_every_name_is_tested_documented_and_in_the_table() -> None:
    assert sorted(compat.__all__) == compat.__all__
    assert set(ALIASES) == {*compat.__all__} - {"flash_attention_backend"}
    table = re.findall(r"^\| `(\w+)` +\| ([\w-]+) +\| ", inspect.getdoc(compat) or "", re.M)
    assert [name for name, _ in table] == compat.__all__
    for name, source in table:
        assert source in (inspect.getdoc(getattr(compat, name)) or "")


def test_two_names_are_public_in_tilewright_itself() -> None:
    for name in ("flash_attention_bhsd", "flash_attention_backend"):
        assert name in tilewright.__all__
        assert getattr(tilewright, name) is getattr(compat, name)
    assert tilewright.compat is compat


def test_gradients_pass_through() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    tilewright.flash_attention_bhsd(*leaves, is_causal=True).sum().backward()
    theirs = [x.clone().requires_grad_() for x in (Q, K, V)]
    F.scaled_dot_product_attention(*theirs, is_causal=True).sum().backward()
    for ours, wanted in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad)


# --- what would run ------------------------------------------------------------------------------

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available() or tilewright.dispatch.interpreting(),
    reason="with a GPU, or in Triton's interpreter, a kernel runs",
)


def test_the_backend_is_the_one_that_explain_names() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.empty(1, 1, 16, 64, dtype=torch.float16, device=device)
    found = tilewright.explain("attention", q, q, q)
    wanted = PYTORCH if found.backend == "torch" else TRITON
    assert tilewright.flash_attention_backend() == wanted
    with tilewright.use_backend("torch"):
        assert tilewright.flash_attention_backend() == PYTORCH


@on_a_cpu
def test_on_a_cpu_it_really_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tilewright.flash_attention_backend() == PYTORCH
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or real(*a, **k)
    )
    tilewright.flash_attention_bhsd(Q, K, V, is_causal=True)
    assert [call["is_causal"] for call in calls] == [True]


@on_a_cpu
def test_a_backend_that_was_asked_for_is_never_replaced() -> None:
    for call in (lambda: tilewright.flash_attention_bhsd(Q, K, V), compat.flash_attention_backend):
        with tilewright.use_backend("triton"), pytest.raises(UnsupportedError, match="triton"):
            call()


INTERPRETED = """
import torch, tilewright
import torch.nn.functional as F

print(tilewright.flash_attention_backend())
q, k, v = torch.randn(3, 1, 2, 9, 16)
wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
F.scaled_dot_product_attention = None  # nobody may call it
torch.testing.assert_close(tilewright.flash_attention_bhsd(q, k, v, is_causal=True), wanted)
print("fine")
"""

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
import torch, tilewright

print(tilewright.flash_attention_backend())
q = torch.randn(1, 2, 9, 16)
print(tuple(tilewright.flash_attention_bhsd(q, q, q).shape))
"""


@pytest.mark.drawn(seconds=3.6, family="slow")
def test_in_the_interpreter_it_is_the_kernel() -> None:
    code = python(INTERPRETED, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert code == [TRITON, "fine"]


def test_without_triton_it_is_torch() -> None:
    said = python(WITHOUT_TRITON, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert said == [PYTORCH, "(1, 2, 9, 16)"]


def test_it_compiles_without_a_break() -> None:
    torch.compiler.reset()
    compiled = torch.compile(tilewright.flash_attention_bhsd, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(Q, K, V, True), tilewright.flash_attention_bhsd(Q, K, V, True)
    )


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "raises", "says"),
    [
        (lambda: compat.fp16_matmul(X, X), DTypeError, ("fp16_matmul", "a", "float32", "half()")),
        (lambda: compat.matmul_fp16_triton(HALVES[0], 1), DTypeError, ("matmul_fp16", "W", "int")),
        (
            lambda: tilewright.flash_attention_bhsd(Q[0], K[0], V[0]),
            InputError,
            ("flash_attention_bhsd", "q", "(4, 6, 16)", "four dims"),
        ),
        (
            lambda: tilewright.flash_attention_bhsd(Q, K, V[:, :, :5]),
            InputError,
            ("flash_attention_bhsd", "v", "(2, 4, 5, 16)", "6 tokens", "k"),
        ),
        (lambda: tilewright.flash_attention_bhsd(Q, None, V), DTypeError, ("k", "NoneType")),
        (
            lambda: tilewright.flash_attention_bhsd(Q, K[:, :3], V[:, :3]),
            InputError,
            ("flash_attention_bhsd", "k", "(2, 3, 6, 16)", "divide q's 4"),
        ),
        (
            lambda: tilewright.flash_attention_bhsd(Q, K, V[:, :2]),
            InputError,
            ("flash_attention_bhsd", "v", "(2, 2, 6, 16)", "4 heads of k"),
        ),
        (
            lambda: tilewright.flash_attention_bhsd(Q, K.repeat(2, 1, 1, 1), V),
            InputError,
            ("flash_attention_bhsd", "k", "(4, 4, 6, 16)", "batch of 2"),
        ),
        (
            lambda: tilewright.flash_attention_bhsd(Q, K, V, torch.ones(6, 6)),
            DTypeError,
            ("flash_attention_bhsd", "is_causal", "True or False"),
        ),
        (lambda: compat.rmsnorm_triton(X, None), DTypeError, ("rmsnorm_triton", "weight", "None")),
        (lambda: compat.rope_triton(X[0], X, X), InputError, ("rope_triton", "x", "four dims")),
        (
            lambda: compat.fp16_matmul(HALVES[0], HALVES[0]),
            InputError,
            ("fp16_matmul", "b", "has shape", "as many as a has columns"),
        ),
    ],
)
def test_mistakes_are_named(call: Any, raises: type[Exception], says: tuple[str, ...]) -> None:
    with pytest.raises(raises) as caught:
        call()
    for word in says:
        assert word in str(caught.value)
