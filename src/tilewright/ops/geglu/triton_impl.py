"""geglu on Triton: toolkit.triton_gated with gelu, or its approximation by a tanh.

2 elements are read and 1 is written for each of the result; backward 3 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import triton_gated

ACTS = {"tanh": "gelu_tanh", "none": "gelu"}


def prepare(gpu: Gpu, gate: torch.Tensor, up: torch.Tensor, approximate: str) -> Callable[..., Any]:
    return triton_gated.prepare(gpu, ACTS[approximate], gate, up)


def prepare_packed(gpu: Gpu, x: torch.Tensor, order: str, approximate: str) -> Callable[..., Any]:
    return triton_gated.prepare_packed(gpu, ACTS[approximate], x, order)


def prepare_backward(
    gpu: Gpu, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, approximate: str
) -> Callable[..., Any]:
    return triton_gated.prepare_backward(gpu, ACTS[approximate], grad, gate, up)


def prepare_packed_backward(
    gpu: Gpu, grad: torch.Tensor, x: torch.Tensor, order: str, approximate: str
) -> Callable[..., Any]:
    return triton_gated.prepare_packed_backward(gpu, ACTS[approximate], grad, x, order)
