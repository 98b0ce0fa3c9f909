"""What the vendor's libraries and the peers reach on this GPU, on work that is no op of ours yet.

A copy, matrix products, attention, a linear layer with 4-bit weights: measured by the same clock,
held against the same roofs. They say how good "fast" is here, and they check the clock:
`python -m tilewright.bench.agreement` compares it with Triton's on some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.bench import rivals
from tilewright.bench.rivals.gemlite import GROUP
from tilewright.bench.rivals.sdpa import WAYS
from tilewright.bench.subject import Contender, Subject
from tilewright.spec import Args, Cost, Traffic
from tilewright.verify.compare import Truth

UNITS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "tf32",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}
ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-11,  # tf32 keeps ten bits of its operands
    torch.float8_e4m3fn: 2.0**-8,  # the result is bfloat16
    torch.int8: 0.0,
}


def subjects(device: str = "cuda") -> list[Subject]:
    """Every yardstick; their tensors are made when they are measured."""
    return [
        *(copy(mib, device) for mib in (16, 256, 1024)),
        *(matmul(n, dtype, device) for dtype in UNITS for n in (4096, 8192)),
        *(attention(2, 16, 8192, 128, causal, device) for causal in (False, True)),
        *(int4_linear(rows, device) for rows in (1, 16)),
    ]


def copy(mib: int, device: str) -> Subject:
    """`mib` read and as many written."""
    size = mib * 2**20

    def make(seed: int) -> Args:
        rng = torch.Generator(device).manual_seed(seed)
        return (torch.randn(size // 4, generator=rng, device=device),)

    def truth(args: Args) -> list[Truth]:
        return [Truth("copy", args[0].double(), torch.zeros((), device=device))]

    contenders = _simple({"vendor": lambda x: x.clone()})
    return _subject("copy", f"{mib} MiB", {"mib": mib}, torch.float32, make, truth,
                    Traffic(size, size), Cost(0.0), contenders)  # fmt: skip


def matmul(n: int, dtype: torch.dtype, device: str) -> Subject:
    """n x n x n: cuBLAS through torch.mm, `_scaled_mm` for fp8, `_int_mm` for int8."""

    def make(seed: int) -> Args:
        rng = torch.Generator(device).manual_seed(seed)
        if dtype == torch.int8:
            draw = (n, n)
            return tuple(
                torch.randint(-128, 128, draw, generator=rng, device=device, dtype=dtype)
                for _ in range(2)
            )
        return tuple(torch.randn(n, n, generator=rng, device=device).to(dtype) for _ in range(2))

    def truth(args: Args) -> list[Truth]:
        a, b = (x.double() for x in args)
        wanted = a @ b.T
        bound = wanted.abs() * ROUNDOFF[dtype] + (a.abs() @ b.abs().T) * 4 * n**0.5 * 2.0**-23
        if dtype == torch.float32:
            bound = bound + (a.abs() @ b.abs().T) * 2.0**-11
        return [Truth("product", wanted, bound)]

    size = torch.empty((), dtype=dtype).element_size()
    out = {torch.int8: 4, torch.float32: 4}.get(dtype, 2)
    contenders = _simple({"vendor": _vendor_matmul(dtype, device)})
    return _subject("matmul", f"{n} x {n} x {n}", {"n": n}, dtype, make, truth,
                    Traffic(2 * n * n * size, n * n * out), Cost(2.0 * n**3, UNITS[dtype]),
                    contenders)  # fmt: skip


def _vendor_matmul(dtype: torch.dtype, device: str) -> Callable[..., Any]:
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda a, b: torch._scaled_mm(
            a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
    if dtype == torch.int8:
        return lambda a, b: torch._int_mm(a, b.T)
    if dtype == torch.float32:
        return _tf32_matmul
    return lambda a, b: torch.mm(a, b.T)


def _tf32_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(a, b.T)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def attention(
    batch: int, heads: int, tokens: int, width: int, causal: bool, device: str
) -> Subject:
    """(batch, heads, tokens, head dim) in bfloat16: SDPA's two best backends, FlashAttention-4."""
    shape = (batch, heads, tokens, width)

    def make(seed: int) -> Args:
        rng = torch.Generator(device).manual_seed(seed)
        return tuple(
            torch.randn(shape, generator=rng, device=device).to(torch.bfloat16) for _ in range(3)
        )

    def truth(args: Args) -> list[Truth]:
        wanted = torch.empty(shape, dtype=torch.float64, device=device)
        for i in range(batch):  # a head at a time: the scores are tokens squared
            for j in range(heads):
                q, k, v = (x[i, j].double() for x in args)
                scores = q @ k.T * width**-0.5
                if causal:
                    scores.masked_fill_(~torch.ones_like(scores, dtype=torch.bool).tril_(), -inf)
                wanted[i, j] = scores.softmax(-1) @ v
        # p and the result are rounded to bfloat16; |v| reaches 5 in so many draws
        return [Truth("attention", wanted, wanted.abs() * 2.0**-7 + 2.0**-8)]

    sdpa = partial(F.scaled_dot_product_attention, is_causal=causal)
    cudnn, flash = (rivals.Rival(sdpa, setting=WAYS[way]) for way in ("cudnn", "flash"))
    peer = rivals.peer("fa4", "attention yardstick")
    assert peer is not None
    fa4 = replace(peer, call=lambda q, k, v: peer.call(q, k, v, causal))
    elements = batch * heads * tokens * width
    flops = 4.0 * elements * tokens / (2 if causal else 1)
    return _subject("attention", f"{batch}x{heads}x{tokens}x{width}{', causal' * causal}",
                    {"shape": shape, "causal": causal}, torch.bfloat16, make, truth,
                    Traffic(6 * elements, 2 * elements), Cost(flops, "bf16"),
                    (_contender("vendor", cudnn), _contender("sdpa_flash", flash),
                     _contender("fa4", fa4)))  # fmt: skip


def int4_linear(rows: int, device: str, k: int = 4096, n: int = 14336) -> Subject:
    """x @ W with W of 4 bits, a scale and a zero point per group of 128."""

    def make(seed: int) -> Args:
        rng = torch.Generator(device).manual_seed(seed)
        x = torch.randn(rows, k, generator=rng, device=device).to(torch.float16)
        weight = torch.randint(0, 16, (n, k), generator=rng, device=device, dtype=torch.uint8)
        groups = (n, k // GROUP)
        scales = torch.rand(groups, generator=rng, device=device).to(torch.float16) * 0.02
        zeros = torch.full(groups, 8.0, device=device, dtype=torch.float16)
        return x, weight, scales, zeros

    def dense(args: Args, dtype: torch.dtype) -> Any:
        _, weight, scales, zeros = args
        wide = weight.to(dtype).view(n, -1, GROUP)
        return ((wide - zeros.to(dtype)[..., None]) * scales.to(dtype)[..., None]).view(n, k)

    def truth(args: Args) -> list[Truth]:
        x, w = args[0].double(), dense(args, torch.float64)
        wanted, reach = x @ w.T, x.abs() @ w.abs().T
        # the weights are rounded to float16 on the way, products summed in float32
        bound = wanted.abs() * 2.0**-11 + reach * (2.0**-10 + 4 * k**0.5 * 2.0**-23)
        return [Truth("product", wanted, bound)]

    def cublas(args: Args) -> Callable[[], Any]:
        x, w = args[0], dense(args, torch.float16)
        return lambda: torch.mm(x, w.T)

    peer = rivals.peer("gemlite", "int4 linear yardstick")
    assert peer is not None
    contenders = (
        Contender("vendor", False, cublas),  # cuBLAS on weights of 16 bits: what int4 must beat
        _contender("gemlite", peer),
    )
    size = rows * k * 2 + n * k // 2 + 2 * n * (k // GROUP) * 2
    return _subject("int4 linear", f"{rows} x {k} x {n}", {"rows": rows, "k": k, "n": n},
                    torch.float16, make, truth, Traffic(size, rows * n * 2),
                    Cost(2.0 * rows * k * n, "fp16"), contenders)  # fmt: skip


def _simple(calls: Mapping[str, Callable[..., Any]]) -> tuple[Contender, ...]:
    return tuple(_contender(name, rivals.Rival(call)) for name, call in calls.items())


def _contender(name: str, rival: rivals.Rival) -> Contender:
    return Contender(name, False, rival.bind, missing=rival.missing)


def _subject(
    op: str, case: str, dims: Mapping[str, Any], dtype: torch.dtype,
    make: Callable[[int], Args], truth: Callable[[Args], list[Truth]],
    traffic: Traffic, cost: Cost, contenders: tuple[Contender, ...],
) -> Subject:  # fmt: skip
    return Subject(
        op, case, dims, dtype, "forward", make, truth, traffic, traffic, cost, contenders
    )
