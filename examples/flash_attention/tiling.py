"""The tiled forward: scores live in a tile, never in memory; tiles that nobody sees are skipped.

A block of rows stays, and the keys it sees pass by, tile by tile, with a running peak and sum
(online_softmax.py). Every tensor is read through `fetch`, so that the bytes can be counted.
"""

from collections import Counter

import torch

import tilewright

ROWS, KEYS = 64, 32  # of a tile
HALF = 2  # bytes of an element, as a GPU would hold it
moved = Counter()


def fetch(who, x):
    moved[who] += x.numel() * HALF
    return x


def kind(first_row, first_key, rows=ROWS, keys=KEYS):
    """Row i sees keys 0 to i. What of a tile is seen?"""
    if first_key > first_row + rows - 1:
        return "skipped"  # its first key lies behind the last row
    return "whole" if first_key + keys - 1 <= first_row else "masked"


def naive(q, k, v):
    """Three steps, each of which reads and writes all scores."""
    s = fetch("naive", fetch("naive", q) @ fetch("naive", k).T * q.shape[1] ** -0.5)
    hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
    p = fetch("naive", fetch("naive", s).masked_fill(hidden, -torch.inf).softmax(1))
    return fetch("naive", fetch("naive", p) @ fetch("naive", v))


def tiled(q, k, v, kinds):
    out = torch.empty_like(q)
    for first, q_rows in zip(range(0, len(q), ROWS), q.split(ROWS), strict=True):
        q_rows = fetch("tiled", q_rows) * q.shape[1] ** -0.5  # [ROWS, D], read once
        peak = q.new_full((ROWS, 1), -torch.inf)
        total, acc = q.new_zeros(ROWS, 1), q.new_zeros(ROWS, q.shape[1])
        for start in range(0, len(k), KEYS):
            what = kind(first, start)
            kinds[what] += 1
            if what == "skipped":
                continue
            s = q_rows @ fetch("tiled", k[start : start + KEYS]).T  # [ROWS, KEYS]
            if what == "masked":
                i, j = torch.arange(first, first + ROWS), torch.arange(start, start + KEYS)
                s = s.masked_fill(j[None, :] > i[:, None], -torch.inf)
            new_peak = torch.maximum(peak, s.amax(1, keepdim=True))  # tile 0 is seen by every row
            p, shrink = (s - new_peak).exp(), (peak - new_peak).exp()
            total = total * shrink + p.sum(1, keepdim=True)
            acc = acc * shrink + p @ fetch("tiled", v[start : start + KEYS])
            peak = new_peak
        out[first : first + ROWS] = fetch("tiled", acc / total)
    return out


T, D = 512, 64
q, k, v = torch.randn(3, T, D, generator=torch.Generator().manual_seed(0))
kinds = Counter()
out, plain = tiled(q, k, v, kinds), naive(q, k, v)
torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
ours = tilewright.attention(*(x[None, None] for x in (q, k, v)), causal=True)[0, 0]
torch.testing.assert_close(out, ours, atol=1e-5, rtol=1e-5)

signs = {"skipped": ".", "masked": "/", "whole": "#"}
print(f"{T} rows and keys, tiles of {ROWS} x {KEYS}, causal:")
for first in range(0, T, ROWS):
    print(f"{first:6}  " + " ".join(signs[kind(first, start)] for start in range(0, T, KEYS)))
print(", ".join(f"{signs[what]} {kinds[what]} {what}" for what in signs))
blocks, wide = T // ROWS, ROWS // KEYS  # the diagonal cuts `wide` tiles of each block
assert kinds["masked"] == blocks * wide
assert kinds["whole"] == kinds["skipped"] == wide * blocks * (blocks - 1) // 2

# Bytes: 4 T^2 + 4 T D elements if scores are kept; else q and o, and a tile of k and of v a step.
steps = kinds["masked"] + kinds["whole"]
assert moved["naive"] == HALF * (4 * T * T + 4 * T * D)
assert moved["tiled"] == HALF * (2 * T * D + steps * 2 * KEYS * D)
print(f"moved: naive {moved['naive']:,} bytes, tiled {moved['tiled']:,}")
print(f"scores held at once: naive {T * T:,}, tiled {ROWS * KEYS:,}")
assert moved["tiled"] < moved["naive"] / 3
