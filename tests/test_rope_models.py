"""rope against the functions of the models in transformers: within one rounding of float64."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from rotations import (
    K_HEADS,
    Q_HEADS,
    B,
    D,
    Pair,
    T,
    Tensor,
    backends,
    device_of,
    grads_of,
    interpreted,
    projected,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    module: str  # under transformers.models
    config: str
    rotary: str  # the class that makes the tables
    function: str = "apply_rotary_pos_emb"
    interleaved: bool | str = False
    options: tuple[tuple[str, Any], ...] = ()
    k_heads: int = K_HEADS
    dim: int = D
    rotary_dim: int = D


MODELS = {
    "llama": Model("llama.modeling_llama", "LlamaConfig", "LlamaRotaryEmbedding"),
    "qwen2": Model("qwen2.modeling_qwen2", "Qwen2Config", "Qwen2RotaryEmbedding"),
    "phi3": Model(
        "phi3.modeling_phi3", "Phi3Config", "Phi3RotaryEmbedding",
        options=(("partial_rotary_factor", 0.75), ("pad_token_id", None)), rotary_dim=24,
    ),
    "gpt_neox": Model(
        "gpt_neox.modeling_gpt_neox", "GPTNeoXConfig", "GPTNeoXRotaryEmbedding",
        options=(("rotary_pct", 0.25),), k_heads=Q_HEADS, rotary_dim=8,
    ),
    "deepseek_v3": Model(
        "deepseek_v3.modeling_deepseek_v3", "DeepseekV3Config", "DeepseekV3RotaryEmbedding",
        options=(("qk_rope_head_dim", 16),), k_heads=1, dim=16, rotary_dim=16,
    ),
    "deepseek_v3 interleave": Model(
        "deepseek_v3.modeling_deepseek_v3", "DeepseekV3Config", "DeepseekV3RotaryEmbedding",
        "apply_rotary_pos_emb_interleave", "to_halves",
        (("qk_rope_head_dim", 16),), k_heads=1, dim=16, rotary_dim=16,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A call of a model's function, what it gives in float64, and how far from it we may be."""

    tensors: tuple[Tensor, ...]  # q, k, cos, sin
    upstream: Pair
    options: dict[str, Any]
    wanted: tuple[Tensor, ...]  # q', k' and the gradients of q and k
    bounds: tuple[Tensor, ...]

    def hold(self, got: Any) -> None:
        width = self.options["rotary_dim"]
        sources = (*self.tensors[:2], *self.upstream)
        for mine, theirs, bound, source in zip(got, self.wanted, self.bounds, sources, strict=True):
            mine = mine.cpu()
            assert mine.dtype == source.dtype
            error = (mine.double() - theirs).abs()
            assert (error <= bound).all(), (error / bound).max()
            assert torch.equal(mine[..., width:], source[..., width:])  # passed through, bit by bit


def example(model: Model, dtype: torch.dtype) -> Example:
    module = importlib.import_module(f"transformers.models.{model.module}")
    config = getattr(module, model.config)(
        hidden_size=Q_HEADS * model.dim, num_attention_heads=Q_HEADS, **dict(model.options)
    )
    q, k = projected(Q_HEADS, model.dim, dtype), projected(model.k_heads, model.dim, dtype)
    positions = torch.arange(T) + torch.tensor([[0], [700]])
    cos, sin = getattr(module, model.rotary)(config)(q, positions)
    assert cos.shape == (B, T, model.rotary_dim)
    assert cos.dtype == dtype
    upstream = torch.randn(q.shape).to(dtype), torch.randn(k.shape).to(dtype)
    function = getattr(module, model.function)

    def theirs(cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.double().requires_grad_() for x in (q, k)]
        outputs = function(*leaves, cos.double(), sin.double())
        grads = torch.autograd.grad(outputs, leaves, [g.double() for g in upstream])
        return (*(o.detach() for o in outputs), *grads)

    wanted = theirs(cos, sin)
    # it is linear in the tables, so these are the two products that every element is a sum of
    products = zip(theirs(cos, 0 * sin), theirs(0 * cos, sin), strict=True)
    unit, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny
    bounds = tuple(
        unit * y.abs() + 2 * 2.0**-24 * (a.abs() + b.abs()) + tiny
        for y, (a, b) in zip(wanted, products, strict=True)
    )
    options = {"interleaved": model.interleaved, "rotary_dim": model.rotary_dim}
    return Example((q, k, cos, sin), upstream, options, wanted, bounds)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_within_one_rounding_of_the_models_own(name: str, dtype: torch.dtype, backend: str) -> None:
    given = example(MODELS[name], dtype)
    q, k, cos, sin = (t.to(device_of(backend)) for t in given.tensors)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    outputs = tilewright.rope(q, k, cos, sin, backend=backend, **given.options)
    grads = grads_of(outputs, leaves, [g.to(q.device) for g in given.upstream])
    given.hold((*(o.detach() for o in outputs), *grads))


@pytest.mark.drawn(seconds=5.5, family="slow")
def test_the_kernel_is_within_one_rounding_of_the_models_own(tmp_path: Path) -> None:
    """Not in bfloat16: there the interpreter truncates where a GPU rounds."""
    examples = [example(m, d) for m in MODELS.values() for d in (torch.float32, torch.float16)]
    calls = [(e.tensors, e.upstream, e.options) for e in examples]
    for given, got in zip(examples, interpreted(calls, tmp_path), strict=True):
        given.hold(got)
