"""layer_norm quantised to fp8 in CUDA C++ (device code: cuda_impl.cu; plans: toolkit/cuda_fp8.py).

A row is read once, stays in registers until it is fp8, and is written once as bytes, while the next
rows travel; with one scale for the whole tensor it is read twice. Limits: float32, float16,
bfloat16; weight and bias of the input's dtype; those of toolkit/cuda_fp8.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_fp8, nvrtc
from tilewright.toolkit.cuda_fp8 import Launch
from tilewright.toolkit.rows import on_rows

SOURCE = nvrtc.Source.beside(__file__)

STATISTICS = 3  # floats for each row that a second pass needs: `struct Statistics` of the .cu file


def launch(n: int, vec: int, gpu: Gpu, scaling: str) -> Launch | None:
    """The plan for rows of n columns, `vec` elements to a load; None: no block holds them."""
    return cuda_fp8.launch(n, vec, gpu, scaling, parameters=2)


def refuses(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    format: str,
    scaling: str,
) -> str | None:
    """Why a row does not fit, or None."""
    return cuda_fp8.refuses(gpu, input, weight, bias, scaling=scaling)


@on_rows
def prepare(
    gpu: Gpu,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    format: str,
    scaling: str,
) -> Callable[..., Any]:
    return cuda_fp8.prepare(
        SOURCE,
        "layer_norm_fp8",
        gpu,
        input,
        (weight, bias),
        format,
        scaling,
        statistics=STATISTICS,
        scalars=[ctypes.c_float(eps)],
        again_scalars=[],
    )
