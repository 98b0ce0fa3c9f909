"""The kernels that measure roofs: as little work per byte, or as few bytes per flop, as can be.

`_stream` moves bytes in a given mix and computes nothing worth the name. `_mma` multiplies the same
two tiles over and over: the accumulators stay in registers and the operands where the tensor cores
take them from (registers, on Hopper shared memory), so that no memory limits it. `_fma` does the
same for the ordinary float32 units. All are portable Triton: wgmma on SM 90, tcgen05 on SM 100,
mma.sync elsewhere, without a line per architecture.
"""

import triton
import triton.language as tl


@triton.jit
def _stream(out, inp, tiles, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """Program: reads READS tiles of BLOCK 4-byte words, writes WRITES such tiles."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(READS):
        mixed ^= tl.load(inp + (tile + i * tiles) * BLOCK + lane)
    for i in tl.static_range(WRITES):
        tl.store(out + (tile + i * tiles) * BLOCK + lane, mixed)
    if WRITES == 0:  # one word for the whole tile, or the loads would be dropped
        tl.store(out + tile, tl.xor_sum(mixed, 0))


@triton.jit
def _mma(
    out, a, b, steps,
    ACC: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program: [M, K] @ [K, N] `steps` times into the same accumulators."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])  # [M, K]
    right = tl.load(b + n[None, :] * K + k[:, None])  # [K, N], K contiguous
    total = tl.zeros((M, N), ACC)
    for _ in range(steps):
        total = tl.dot(left, right, total, out_dtype=ACC)
    tl.store(out + tl.program_id(0) * N + n, tl.sum(total, 0))


@triton.jit
def _fma(out, inp, steps, BLOCK: tl.constexpr):
    """Program: a fused multiply-add per element and step, in float32."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + lane)
    y = x
    for _ in range(steps):
        for _ in tl.static_range(16):
            y = y * x + x
    tl.store(out + lane, y)


@triton.jit
def _empty(out):
    """Nothing: what is left is the launch."""
