"""Sizes that matter, with names: dimensions of real models, token counts, and sizes that break.

Benchmarks use what models use, so that a number means something to somebody; tests use sizes
around powers of two, where masks, vector widths and tile boundaries go wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Model:
    """The dimensions of one decoder-only model, as its published config.json states them."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    source: str  # the repository whose config.json holds these numbers

    @property
    def q_size(self) -> int:
        """Columns of the query projection; not `hidden` when heads are wider (Gemma 2)."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Columns of a fused query-key-value projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def gate_up_size(self) -> int:
        """Columns of a fused gate-and-up projection."""
        return 2 * self.intermediate


LLAMA_3_8B = Model(
    name="Llama-3-8B",
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    source="meta-llama/Meta-Llama-3-8B config.json",
)
LLAMA_3_70B = Model(
    name="Llama-3-70B",
    hidden=8192,
    intermediate=28672,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    source="meta-llama/Meta-Llama-3-70B config.json",
)
QWEN_2_5_7B = Model(
    name="Qwen2.5-7B",
    hidden=3584,
    intermediate=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152064,
    source="Qwen/Qwen2.5-7B config.json",
)
MISTRAL_7B = Model(
    name="Mistral-7B",
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32768,
    source="mistralai/Mistral-7B-v0.3 config.json",
)
GEMMA_2_9B = Model(
    name="Gemma-2-9B",
    hidden=3584,
    intermediate=14336,
    layers=42,
    heads=16,
    kv_heads=8,
    head_dim=256,
    vocab=256000,
    source="google/gemma-2-9b config.json",
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {m.name: m for m in (LLAMA_3_8B, LLAMA_3_70B, QWEN_2_5_7B, MISTRAL_7B, GEMMA_2_9B)}
)

# Decode: one token per sequence, so tokens are the batch. Prefill: whole prompts.
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)

# Powers of two and their neighbours: a mask off by one, a vector load past the end, a row that
# ends inside a warp. Kept small enough for Triton's interpreter (about 2 ms per program).
EDGE_COLUMNS = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(255, 256, 257, 511, 513, 1000, 1023, 1024, 1025, 2047, 2049, 4095, 4097),
)
# Row lengths at a constant 2^27 elements: where a kernel changes its plan, the curve shows it.
SWEEP_COLUMNS = (
    8192, 256, 896, 1024, 1536, 3072, 3584, 4096, 5120, 11_008, 16_384, 18_944, 32_768, 65_536,
    131_072, 262_144,
)  # fmt: skip
# Row lengths for which a CUDA C++ kernel has a binary of its own that no edge case asks for. A GPU
# takes them; a CPU, which has no such kernel, need not.
PLAN_COLUMNS = (
    96, 480, 640, 768, 896, 1536, 2560, 3072, 4224, 5120, 5504, 7168, 9472, 11_008, 14_336, 17_000,
    18_944, 22_016, 30_000, 34_000, 67_000, 100_000, 134_000,
)  # fmt: skip
EDGE_ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65)


def by_tokens(columns: Callable[[Model], int]) -> Iterator[tuple[str, str, int, int]]:
    """(group, name, tokens, columns) of decoding and of prefilling, for every size in MODELS.

    Models that share a size share a case, under the name of the first.
    """
    sizes: dict[int, str] = {}
    for model in MODELS.values():
        sizes.setdefault(columns(model), model.name)
    for size, name in sizes.items():
        for group, counts in (("decode", (1, 16, 128)), ("prefill", (512, 2048, 8192))):
            for tokens in counts:
                yield group, f"{name}, {tokens} tokens", tokens, size


def random_shape(rng: random.Random, elements: int = 8192) -> tuple[int, ...]:
    """(..., columns): an edge size or a random one under leading dims, `elements` at most."""
    columns = rng.choice(EDGE_COLUMNS) if rng.random() < 0.7 else rng.randint(1, 5000)
    leading: list[int] = []
    room = max(elements // columns, 1)
    for _ in range(rng.randint(0, 3)):
        size = rng.randint(1, max(min(room, 9), 1))
        leading.append(size)
        room //= size
    return (*leading, columns)
