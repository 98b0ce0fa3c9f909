"""The names of the systems that tilewright grew out of, so that their users change one import.

    from tilewright.compat import flash_attention_backend, flash_attention_bhsd, softmax_triton

Thin aliases: each has its source's arguments and calls one function of tilewright, which does more
than the source's did (gradients, any strides and dtypes, any number of rows). New code should call
that function. Names join this list as their ops do.

| name                          | from                  | calls                              |
| ----------------------------- | --------------------- | ---------------------------------- |
| `attention_triton`            | cuda-triton-multiarch | `scaled_dot_product_attention`     |
| `flash_attention_backend`     | cuda-triton-multiarch | `explain`                          |
| `flash_attention_bhsd`        | cuda-triton-multiarch | `scaled_dot_product_attention`     |
| `flash_attention_forward`     | triton_llm_kernel_lab | `attention`                        |
| `flash_attention_full_triton` | cuda-triton-multiarch | `scaled_dot_product_attention`     |
| `flash_attention_triton`      | cuda-triton-multiarch | `scaled_dot_product_attention`     |
| `fp16_matmul`                 | triton_llm_kernel_lab | `matmul`                           |
| `fused_rmsnorm_swiglu_triton` | cuda-triton-multiarch | `rms_norm_swiglu`                  |
| `matmul_fp16_triton`          | cuda-triton-multiarch | `matmul`                           |
| `rms_norm_triton`             | cuda-kernels          | `rms_norm`                         |
| `rmsnorm_pytorch`             | cuda-triton-multiarch | `rms_norm(backend="torch")`        |
| `rmsnorm_triton`              | cuda-triton-multiarch | `rms_norm`                         |
| `rope_triton`                 | cuda-kernels          | `rope`                             |
| `row_softmax`                 | triton_llm_kernel_lab | `softmax`                          |
| `softmax_pytorch`             | cuda-triton-multiarch | `softmax(backend="torch")`         |
| `softmax_triton`              | cuda-triton-multiarch | `softmax`                          |
| `swiglu_triton`               | cuda-triton-multiarch | `swiglu`, the gate first           |

cuda-kernels has a `swiglu_triton` too, with the gate first: that one is `tilewright.swiglu`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilewright import checks, dispatch, sdpa
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.explain import explain
from tilewright.functional import scaled_dot_product_attention
from tilewright.ops.attention.op import OP as ATTENTION
from tilewright.ops.attention.op import attention
from tilewright.ops.matmul.op import matmul
from tilewright.ops.rms_norm.op import rms_norm
from tilewright.ops.rms_norm_swiglu.op import rms_norm_swiglu
from tilewright.ops.rope.op import rope
from tilewright.ops.softmax.op import softmax
from tilewright.ops.swiglu.op import swiglu

__all__ = [
    "attention_triton",
    "flash_attention_backend",
    "flash_attention_bhsd",
    "flash_attention_forward",
    "flash_attention_full_triton",
    "flash_attention_triton",
    "fp16_matmul",
    "fused_rmsnorm_swiglu_triton",
    "matmul_fp16_triton",
    "rms_norm_triton",
    "rmsnorm_pytorch",
    "rmsnorm_triton",
    "rope_triton",
    "row_softmax",
    "softmax_pytorch",
    "softmax_triton",
    "swiglu_triton",
]

Tensor = torch.Tensor
BHSD = "flash_attention_bhsd"
BACKENDS = {  # what cuda-triton-multiarch calls the technologies
    "triton": "flash_attention_triton (Triton)",
    "torch": "scaled_dot_product_attention (PyTorch)",
}

# --- attention -----------------------------------------------------------------------------------


def flash_attention_bhsd(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Attention of (batch, heads, tokens, elements), cuda-triton-multiarch's entry for all of it.

    is_causal aligns to the top left, as torch's. Where no kernel of ours serves the call, on a CPU
    above all, torch's scaled_dot_product_attention does; `flash_attention_backend` says which.

    >>> import torch, tilewright
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> tilewright.flash_attention_bhsd(q, q, torch.tensor([[[[1.0], [3.0]]]]), is_causal=True)
    tensor([[[[1.],
              [2.]]]])
    """
    checks.tensor(BHSD, "q", q)
    q, k, v = sdpa.as_autocast_says(q, k, v)
    sdpa.check(BHSD, q, k, v, ("q", "k", "v"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            got, wants = f"has shape {tuple(x.shape)}", "have four dims, (batch, heads, tokens, d)"
            raise InputError(sentence(BHSD, name, got, wants, "Reshape it."))
    checks.flag(BHSD, "is_causal", is_causal)
    _check_batch_and_heads(q, k, v)
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - of sizes yet unknown too
    attend: Callable[..., Tensor] = scaled_dot_product_attention
    if _is_torchs(q, v):
        attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def _check_batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What torch refuses too, but in words that name no argument."""

    def wrong(name: str, x: Tensor, wants: str, dim: int) -> InputError:
        return InputError(
            sentence(BHSD, name, f"has shape {tuple(x.shape)}", wants, f"Check its dim {dim}.")
        )

    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0] and x.shape[0] != 1 and q.shape[0] != 1:
            raise wrong(name, x, f"have q's batch of {q.shape[0]}, or 1", 0)
    if v.shape[1] != k.shape[1]:
        raise wrong("v", v, f"have the {k.shape[1]} heads of k, {tuple(k.shape)}", 1)
    if q.shape[1] != k.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise wrong("k", k, f"have heads that divide q's {q.shape[1]}, {tuple(q.shape)}", 1)


def flash_attention_backend() -> str:
    """What `flash_attention_bhsd` would run now for halves, in cuda-triton-multiarch's words.

    `tilewright.explain("attention", q, k, v)` says it for given tensors, with the reasons.

    >>> import tilewright
    >>> tilewright.flash_attention_backend()
    '... (...)'
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return BACKENDS[_technology(device, torch.float16, 64, 64, dispatch.override.get())]


def _is_torchs(q: Tensor, v: Tensor) -> bool:
    if torch.compiler.is_compiling():  # Dynamo traces no choice; `attention` makes it later
        return not q.is_cuda
    override = dispatch.override.get()
    return _technology(q.device, q.dtype, q.shape[-1], v.shape[-1], override) == "torch"


@lru_cache(maxsize=1024)
def _technology(
    device: torch.device, dtype: torch.dtype, head: int, value_head: int, override: Any
) -> str:
    """Which technology serves attention over such heads; `override` keeps choices apart."""
    q, v = (torch.empty(1, 1, 16, n, dtype=dtype, device=device) for n in (head, value_head))
    backend = ATTENTION.backend(explain("attention", q, q, v).backend)
    assert backend is not None
    return backend.technology


def flash_attention_full_triton(Q: Tensor, K: Tensor, V: Tensor, causal: bool = False) -> Tensor:
    """cuda-triton-multiarch's attention of (batch, heads, tokens, elements); calls SDPA."""
    return scaled_dot_product_attention(Q, K, V, is_causal=causal)


def flash_attention_triton(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """cuda-triton-multiarch's attention of one head, (tokens, elements); calls SDPA."""
    return scaled_dot_product_attention(Q, K, V)


def attention_triton(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """cuda-triton-multiarch's attention of one short head, (tokens, elements); calls SDPA."""
    return scaled_dot_product_attention(Q, K, V)


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """triton_llm_kernel_lab's attention, (batch, heads, tokens, elements); calls `attention`.

    With fewer queries than keys (decoding), causal aligns to the bottom right: the last query sees
    every key.
    """
    return attention(q, k, v, causal=causal)  # type: ignore[no-any-return]


# --- rows ----------------------------------------------------------------------------------------


def softmax_triton(x: Tensor) -> Tensor:
    """cuda-triton-multiarch's softmax of rows; calls `softmax`."""
    return softmax(x)


def softmax_pytorch(x: Tensor) -> Tensor:
    """cuda-triton-multiarch's reference for softmax_triton; calls `softmax` on torch."""
    return softmax(x, backend="torch")


def row_softmax(x: Tensor) -> Tensor:
    """triton_llm_kernel_lab's softmax of rows; calls `softmax`."""
    return softmax(x)


def rmsnorm_triton(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """cuda-triton-multiarch's RMSNorm of rows; calls `rms_norm`."""
    checks.tensor("rmsnorm_triton", "weight", weight)
    return rms_norm(x, weight.shape, weight, eps)  # type: ignore[no-any-return]


def rmsnorm_pytorch(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """cuda-triton-multiarch's reference for rmsnorm_triton; calls `rms_norm` on torch."""
    checks.tensor("rmsnorm_pytorch", "weight", weight)
    return rms_norm(x, weight.shape, weight, eps, backend="torch")  # type: ignore[no-any-return]


def rms_norm_triton(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """cuda-kernels' RMSNorm of rows; calls `rms_norm`."""
    checks.tensor("rms_norm_triton", "w", w)
    return rms_norm(x, w.shape, w, eps)  # type: ignore[no-any-return]


def swiglu_triton(x: Tensor, gate: Tensor) -> Tensor:
    """cuda-triton-multiarch's x * silu(gate); calls `swiglu`, which has the gate first."""
    return swiglu(gate, x)


def fused_rmsnorm_swiglu_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6
) -> Tensor:
    """cuda-triton-multiarch's rms_norm(x) * weight * silu(gate); calls `rms_norm_swiglu`."""
    return rms_norm_swiglu(x, gate, weight, eps)


def rope_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cuda-kernels' rotation of halves, (batch, heads, tokens, elements); calls `rope`.

    `rope` turns q and k in one launch; this is one of them, beside a k without heads.
    """
    checks.tensor("rope_triton", "x", x)
    if x.dim() != 4:
        got, wants = f"has shape {tuple(x.shape)}", "have four dims, (batch, heads, tokens, d)"
        raise InputError(sentence("rope_triton", "x", got, wants, "Reshape it."))
    return rope(x, x[:, :0], cos, sin)[0]


# --- matrices ------------------------------------------------------------------------------------


def fp16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """triton_llm_kernel_lab's a @ b of halves; calls `matmul`."""
    return _matmul("fp16_matmul", ("a", a), ("b", b))


def matmul_fp16_triton(x: Tensor, W: Tensor) -> Tensor:
    """cuda-triton-multiarch's x @ W of halves; calls `matmul`."""
    return _matmul("matmul_fp16_triton", ("x", x), ("W", W))


def _matmul(op: str, *named: tuple[str, Tensor]) -> Tensor:
    for name, x in named:
        checks.tensor(op, name, x)
        if x.dtype != torch.float16:
            got = f"has dtype {str(x.dtype).removeprefix('torch.')}"
            raise DTypeError(sentence(op, name, got, "be float16", f"Convert it: {name}.half()."))
        if x.dim() < 2:
            got = f"has shape {tuple(x.shape)}"
            raise InputError(sentence(op, name, got, "have two dims or more", f"Use {name}[None]."))
    (first, a), (second, b) = named
    checks.same_device(op, second, b, first, a)
    if a.shape[-1] != b.shape[-2]:
        wants = f"have {a.shape[-1]} rows, as many as {first} has columns, {tuple(a.shape)}"
        got, fix = f"has shape {tuple(b.shape)}", f"Check its dim -2, or pass {second}.mT."
        raise InputError(sentence(op, second, got, wants, fix))
    return matmul(a, b)
