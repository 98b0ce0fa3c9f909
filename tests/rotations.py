"""What tests of rope share: heads as models make them, tables, the definition once more.

Triton's kernel runs in the interpreter in a process of its own: Triton asks when it is imported
whether it shall interpret.
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

SRC = Path(tilewright.__file__).parents[1]
B, T, D = 2, 5, 32
Q_HEADS, K_HEADS = 4, 2

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

BACKENDS = ["torch", *(["cuda", "triton"] if torch.cuda.is_available() else [])]
backends = pytest.mark.parametrize("backend", BACKENDS)
STYLES = {"halves": False, "pairs": True, "to_halves": "to_halves"}
styles = pytest.mark.parametrize("style", STYLES)
PLACES = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3)}  # of (batch, tokens, heads, dim)
layouts = pytest.mark.parametrize("layout", PLACES)


def device_of(backend: str) -> str:
    return "cpu" if backend == "torch" else "cuda"


def projected(heads: int, dim: int = D, dtype: Any = torch.float32, device: str = "cpu") -> Tensor:
    """(batch, heads, tokens, dim) as models make it: a projection, viewed and transposed."""
    return torch.randn(B, T, heads, dim).to(dtype).to(device).transpose(1, 2)


def q_and_k(backend: str = "torch", dtype: Any = torch.float32) -> Pair:
    device = device_of(backend)
    return projected(Q_HEADS, dtype=dtype, device=device), projected(
        K_HEADS, dtype=dtype, device=device
    )


def tables(*leading: int, width: int = D // 2, device: str = "cpu") -> Pair:
    """Of pairs, in float32."""
    angle = 3 * torch.randn(*leading, width)
    return angle.cos().to(device), angle.sin().to(device)


def full(table: Tensor, style: str = "halves") -> Tensor:
    """An entry for each element of the result."""
    if style == "pairs":
        return table.repeat_interleave(2, -1)
    return torch.cat((table, table), -1)


def grads_of(outputs: Any, leaves: Any, upstream: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)


def formula(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Written from the definition once more: x cos + (the other of its pair, signed) sin."""
    half = x.shape[-1] // 2
    if style == "to_halves":
        x = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
    if style == "pairs":
        other = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + other * sin


IN_THE_INTERPRETER = """
import sys, torch, tilewright
made = []
for (q, k, cos, sin), upstream, options in torch.load(sys.argv[1]):
    leaves = [q.requires_grad_(), k.requires_grad_()]
    outputs = tilewright.rope(q, k, cos, sin, backend="triton", **options)
    grads = torch.autograd.grad(outputs, leaves, upstream) if upstream else ()
    made.append([*(o.detach() for o in outputs), *grads])
torch.save(made, sys.argv[2])
"""


def interpreted(calls: list[Any], folder: Path) -> list[list[Tensor]]:
    """Results and gradients of Triton's kernel for (tensors, upstream, options) each."""
    given, made = folder / "calls.pt", folder / "made.pt"
    torch.save(calls, given)
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER, str(given), str(made)],
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(made)  # type: ignore[no-any-return]
