"""relu in eager torch: the definition of correct."""

from __future__ import annotations

import torch


def relu(input: torch.Tensor) -> torch.Tensor:
    return torch.relu(input)


def relu_backward(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """A NaN output passes its gradient on, as torch's does."""
    return torch.where(output <= 0, torch.zeros_like(grad), grad)


def relu_in_place(input: torch.Tensor) -> None:
    torch.relu_(input)
