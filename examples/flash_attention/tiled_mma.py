"""Who holds what: the accumulator of q kT, rounded to halves, is the A operand of p v.

wgmma m64nNk16 multiplies for a warpgroup, 128 threads. A is 64 x 16 halves, from registers or
shared memory; B is 16 x N halves, from shared memory; D is 64 x N floats, in registers. Each of the
four warps has 16 rows. A thread has parts of two rows, eight apart, and of every eight columns two
that lie side by side. D and A have that in common, so weights need no way through shared memory.
"""

import numpy as np

THREADS, ROWS = 128, 64


def threads(count):
    """A thread's first row and its place in it, and a number for each of its elements."""
    thread, number = np.indices((THREADS, count))
    return 16 * (thread // 32) + thread % 32 // 4, thread % 4, number


def holds_d(columns):
    """(row, column) of the floats of D, [128, columns / 2]: four for each 8 columns."""
    row, place, number = threads(columns // 2)
    block, lower, second = number // 4, number // 2 % 2, number % 2
    return row + 8 * lower, 8 * block + 2 * place + second


def holds_a():
    """(row, column) of the halves of A, [128, 8]: four registers, two halves in each."""
    row, place, number = threads(8)
    register, half = number // 2, number % 2
    return row + 8 * (register % 2), 8 * (register // 2) + 2 * place + half


def holds_a_bytes():
    """The same for 64 x 32 bytes, such as fp8, [128, 16]: four bytes in each."""
    row, place, number = threads(16)
    register, byte = number // 4, number % 4
    return row + 8 * (register % 2), 16 * (register // 2) + 4 * place + byte


def spread(registers, places, columns):
    """Registers as the matrix that the hardware sees."""
    matrix = np.full((ROWS, columns), np.nan)
    matrix[places] = registers
    return matrix


def wgmma(d, a, b):
    """m64n8k16: d, [128, 4] floats, plus a, [128, 8] halves, times b, [16, 8] halves."""
    assert (a.dtype, b.dtype, a.shape, b.shape) == (np.float16, np.float16, (THREADS, 8), (16, 8))
    product = spread(a, holds_a(), 16) @ b.astype(float)
    return (d + product[holds_d(8)]).astype(np.float32)


def multiply(a, b):
    """a, 8 halves a thread for each 16 of K, times b, [K, N] in shared memory: [128, N / 2]."""
    d = [np.zeros((THREADS, 4), np.float32) for _ in range(0, b.shape[1], 8)]
    for k in range(0, b.shape[0], 16):
        for n in range(len(d)):
            d[n] = wgmma(d[n], a[:, k // 2 : k // 2 + 8], b[k : k + 16, 8 * n : 8 * n + 8])
    return np.hstack(d)


row, column = holds_d(16)
owner = spread(np.indices(row.shape)[0], (row, column), 16).astype(int)  # the thread, [64, 16]
print("the thread that holds each element of an accumulator, rows 0 to 9, columns 0 to 15:")
print(owner[:10])

# Floats 8 k to 8 k + 7 of D belong to keys 16 k to 16 k + 15: they lie as A wants those.
KEYS, D = 64, 32
row, column = holds_d(KEYS)
for k in range(KEYS // 16):
    part = slice(8 * k, 8 * k + 8)
    assert (row[:, part] == holds_a()[0]).all()
    assert (column[:, part] == holds_a()[1] + 16 * k).all()
print("halves: each weight is in the thread and the register where the next product wants it")
at_home = np.equal(holds_d(32), holds_a_bytes()).all(0).mean()
print(f"bytes: {at_home:.1%} of them are; fp8 needs an exchange between threads")
assert at_home < 0.2

# Attention of 64 rows and 64 keys. From the queries to the result nothing leaves its thread but
# the maximum and the sum of a row, which four neighbours share.
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, D)).astype(np.float16) for n in (ROWS, KEYS, KEYS))
a = np.hstack([q[:, first : first + 16][holds_a()] for first in range(0, D, 16)])
s = multiply(a, k.T).reshape(THREADS, KEYS // 8, 2, 2) * D**-0.5  # [thread, block, row, pair]
thread, peak = np.arange(THREADS), s.max((1, 3))  # [thread, row]
for step in (1, 2):  # shuffles with the neighbours
    peak = np.maximum(peak, peak[thread ^ step])
p = np.exp(s - peak[:, None, :, None])
total = p.sum((1, 3))
for step in (1, 2):
    total = total + total[thread ^ step]
o = multiply(p.reshape(THREADS, -1).astype(np.float16), v)  # p as it lies
o = o.reshape(THREADS, D // 8, 2, 2) / total[:, None, :, None]

weights = np.exp(q.astype(float) @ k.astype(float).T * D**-0.5)
wanted = weights / weights.sum(1, keepdims=True) @ v.astype(float)
error = np.abs(spread(o.reshape(THREADS, -1), holds_d(D), D) - wanted).max()
print(f"attention on fragments, weights never out of their registers: {error:.0e} from float64")
assert error < 1e-3
