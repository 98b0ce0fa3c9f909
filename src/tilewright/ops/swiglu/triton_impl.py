"""swiglu on Triton: toolkit.triton_gated with silu.

2 elements are read and 1 is written for each of the result; backward 3 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import triton_gated


def prepare(gpu: Gpu, gate: torch.Tensor, up: torch.Tensor) -> Callable[..., Any]:
    return triton_gated.prepare(gpu, "silu", gate, up)


def prepare_packed(gpu: Gpu, x: torch.Tensor, order: str) -> Callable[..., Any]:
    return triton_gated.prepare_packed(gpu, "silu", x, order)


def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> Callable[..., Any]:
    return triton_gated.prepare_backward(gpu, "silu", grad, gate, up)


def prepare_packed_backward(
    gpu: Gpu, grad: torch.Tensor, x: torch.Tensor, order: str
) -> Callable[..., Any]:
    return triton_gated.prepare_packed_backward(gpu, "silu", grad, x, order)
