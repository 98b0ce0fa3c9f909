"""Softmax in pieces: a running maximum and a running sum give what the whole row gives.

Scores arrive piece by piece and are not kept. Three things are: the largest score so far (`peak`),
the sum of exp(score - peak) (`total`), and the values weighted by the same powers (`acc`). A piece
with a larger score makes all earlier powers too large, by exp(new peak - old peak): total and acc
are shrunk by it. At the end acc / total is softmax(scores) @ values.
"""

import torch

INF = float("inf")


def online(scores, values, piece, rescale=True, show=False):
    """softmax(scores) @ values, [rows, dim], and the log of its denominator, [rows]."""
    rows, dim = scores.shape[0], values.shape[1]
    peak = scores.new_full((rows,), -INF)
    total = scores.new_zeros(rows)
    acc = scores.new_zeros(rows, dim)
    for s, v in zip(scores.split(piece, 1), values.split(piece), strict=True):
        new_peak = torch.maximum(peak, s.amax(1))
        shift = new_peak.where(new_peak > -INF, 0.0)  # no key yet: -inf less -inf would be NaN
        p = (s - shift[:, None]).exp()  # [rows, piece], at most 1: nothing overflows
        shrink = (peak - shift).exp() if rescale else torch.ones_like(peak)
        total = total * shrink + p.sum(1)
        acc = acc * shrink[:, None] + p @ v
        peak = new_peak
        if show:
            seen = " ".join(f"{x:4.0f}" for x in s[0])
            print(f"  {seen}   {peak[0]:4.0f}   {shrink[0]:8.6f}   {total[0]:8.6f}")
    lse = peak + total.log()
    return acc / total.where(total > 0, 1.0)[:, None], lse


def error(found, wanted):
    return (found.double() - wanted).abs().max().item()


# One row, three pieces. The second piece has a larger score, the third has not.
row = torch.tensor([[1.0, 3.0, 2.0, 8.0, 5.0, 4.0]])
values = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
wanted = row.double().softmax(1) @ values.double()
print("    piece     peak     shrink      total")
out, lse = online(row, values, 2, show=True)
torch.testing.assert_close(out, wanted.float())
torch.testing.assert_close(lse, row.logsumexp(1))

# Without the rescale, powers of different peaks are added up.
wrong, _ = online(row, values, 2, rescale=False)
print(f"error {error(out, wanted):.0e}; without the rescale {error(wrong, wanted):.0e}")
assert error(wrong, wanted) > 0.1

# Why there is a peak at all: exp(100) is more than float32 holds.
assert torch.isinf(torch.tensor(100.0).exp())

# Many rows with scores of up to about 100, pieces that do not divide them, beside float64.
draw = torch.Generator().manual_seed(1)
scores, values = torch.randn(256, 1000, generator=draw) * 25, torch.randn(1000, 64, generator=draw)
wanted = scores.double().softmax(1) @ values.double()
whole, pieces = scores.softmax(1) @ values, online(scores, values, 96)[0]
print(f"256 rows of 1000, float32: whole {error(whole, wanted):.0e}, "
      f"in pieces {error(pieces, wanted):.0e} from float64")  # fmt: skip
assert error(pieces, wanted) < 4 * error(whole, wanted)
in_double, _ = online(scores.double(), values.double(), 96)
assert error(in_double, wanted) < 1e-13

# A row that sees no key: the formula says 0 / 0. The pieces leave total at 0, and so can tell.
scores[7] = -INF
scores[8, :960] = -INF  # sees nothing in its first ten pieces
out, lse = online(scores, values, 96)
assert scores.softmax(1)[7].isnan().all()
assert (out[7] == 0).all()
assert lse[7] == -INF
torch.testing.assert_close(out[8], scores[8].softmax(0) @ values)
print(f"a masked row: softmax gives nan, the pieces give {out[7, 0]:.0f} and an lse of {lse[7]}")

# A new peak is rare: piece n of a random row has the largest score so far in one row of n.
tops = torch.randn(4096, 128, 8, generator=draw).amax(2)  # of 128 pieces
grown = (tops[:, 1:] > tops.cummax(1).values[:, :-1]).sum(1).double().mean().item() + 1
predicted = sum(1 / n for n in range(1, 129))
print(f"of 128 pieces {grown:.2f} bring a new peak; 1 + 1/2 + ... + 1/128 = {predicted:.2f}")
assert abs(grown - predicted) < 0.1
