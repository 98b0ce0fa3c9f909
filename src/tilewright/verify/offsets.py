"""python -m tilewright.verify.offsets OP BACKEND DEVICE VARIANT: offsets past 2^31, sparse strides.

130 rows, 2^24 elements apart: the stride itself fits 32 bits, so Triton passes it as such, and the
last rows lie beyond 2^31. Memory is paged in lazily, so on a CPU only the rows themselves cost any.
A kernel that multiplies in 32 bits reads elsewhere or crashes; that is why this is a process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tilewright.library import call
from tilewright.ops import registry
from tilewright.spec import as_tuple
from tilewright.verify.compare import random_like, same_bits

ROWS, COLUMNS, STRIDE = 130, 64, 2**24


def sparse(values: torch.Tensor) -> torch.Tensor:
    """The same rows, STRIDE elements apart."""
    room = torch.empty((ROWS - 1) * STRIDE + COLUMNS, dtype=values.dtype, device=values.device)
    return room.as_strided((ROWS, COLUMNS), (STRIDE, 1)).copy_(values)


def main(name: str, backend: str, device: str, variant: str) -> int:
    op = registry()[name]
    assert op.inputs is not None
    rng = torch.Generator().manual_seed(0)
    dims = {"shape": (ROWS, COLUMNS), **op.variants[int(variant)]}
    near = tuple(op.inputs(dims, torch.float16, device, rng))

    def is_matrix(a: Any) -> bool:
        return isinstance(a, torch.Tensor) and a.dim() == 2

    far = tuple(sparse(a) if is_matrix(a) else a for a in near)
    bits = []
    for args in (near, far):
        if op.autograd is None:
            bits.append(list(as_tuple(call(op, args, backend))))
            continue
        leaves = [a.requires_grad_() if is_matrix(a) else a for a in args]
        outputs = as_tuple(call(op, leaves, backend))
        grads = random_like(outputs, 1)
        if args is far:
            grads = [sparse(g) for g in grads]
        matrices = [a for a in leaves if is_matrix(a)]
        bits.append([*outputs, *torch.autograd.grad(outputs, matrices, grads)])
    if not same_bits(*bits):
        print(f"{name} on {backend}: wrong beyond 2^31")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
