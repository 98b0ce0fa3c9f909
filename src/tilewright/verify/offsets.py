"""Offsets past 2^31, by sparse strides.

130 rows, 2^24 elements apart: the stride itself fits 32 bits, so Triton passes it as such, and the
last rows lie beyond 2^31. Memory is paged in lazily, so on a CPU only the rows themselves cost any.
A kernel that multiplies in 32 bits reads elsewhere or crashes; that is why a process does this.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import torch

from tilewright.library import call
from tilewright.ops import registry
from tilewright.spec import as_tuple
from tilewright.verify.compare import random_like, same_bits, with_leaves

ROWS, COLUMNS, STRIDE = 130, 64, 2**24
SECONDS = 600
TRIES, PAUSE = 20, 3.0  # where another process has the memory; seconds


def sparse(values: torch.Tensor) -> torch.Tensor:
    """The same rows, STRIDE elements apart."""
    row = values[0]
    size = (ROWS - 1) * STRIDE + row.numel()
    room = torch.empty(size, dtype=values.dtype, device=values.device)
    return room.as_strided(values.shape, (STRIDE, *row.contiguous().stride())).copy_(values)


def wrong(name: str, backend: str, device: str, variant: int) -> str:
    """What a process of its own finds wrong with a variant of an op; "" if nothing is.

    It is forked, which is quick, where torch sees no GPU: neither a driver nor autograd works in a
    fork where there is one. Else it imports the main module anew, as any that is spawned.
    """
    forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_available()
    way = "fork" if forks else "spawn"
    context: Any = multiprocessing.get_context(way)
    found, tell = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(tell, name, backend, device, variant))
    process.start()
    tell.close()
    try:
        return str(found.recv()) if found.poll(SECONDS) else f"no end after {SECONDS} s"
    except EOFError:  # it ended without a word
        process.join()
        return f"exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def wrong_here(name: str, backend: str, device: str, variant: int) -> str:
    """As `wrong`, in this process: on a GPU a wrong offset is an error that all later calls get.

    Gigabytes are wanted for a moment, which another process may have just now.
    """
    for left in reversed(range(TRIES)):
        try:
            return compare(name, backend, device, variant)
        except torch.OutOfMemoryError:
            if not left:
                raise
            time.sleep(PAUSE)
        finally:
            torch.cuda.empty_cache()
    raise AssertionError("unreachable")


def _tell(tell: Any, *words: Any) -> None:
    torch.set_num_threads(1)  # those of a process that was forked are not there
    try:
        tell.send(compare(*words))
    except Exception as error:
        tell.send(f"raised {type(error).__name__}: {error}")


def compare(name: str, backend: str, device: str, variant: int) -> str:
    """The bits of rows far apart against those of the same rows close together."""
    op = registry()[name]
    assert op.inputs is not None
    rng = torch.Generator().manual_seed(0)
    dims = {"shape": (ROWS, COLUMNS), **op.variants[variant]}
    near = tuple(op.inputs(dims, torch.float16, device, rng))

    def has_rows(a: Any) -> bool:
        return isinstance(a, torch.Tensor) and a.dim() > 1 and len(a) == ROWS

    far = tuple(sparse(a) if has_rows(a) else a for a in near)
    bits = []
    for args in (near, far):
        if op.autograd is None:
            bits.append(list(as_tuple(call(op, args, backend))))
            continue
        given, leaves = with_leaves(op, args)
        outputs = as_tuple(call(op, given, backend))
        grads = random_like(outputs, 1)
        if args is far:
            grads = [sparse(g) for g in grads]
        bits.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    return "" if same_bits(*bits) else "wrong beyond 2^31"
