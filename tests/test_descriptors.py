"""toolkit/launch.Described: a kernel that reads a tile through a TMA descriptor.

The interpreter has none of its own, so it runs in a process in which Triton interprets.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import gpu
from tilewright.matrix import reach
from tilewright.toolkit import recording
from tilewright.toolkit.launch import Described, bind

SOURCE = Path(__file__).parents[1] / "src"

KERNEL = """
import torch, triton
import triton.language as tl
from tilewright.toolkit.launch import Described, bind

@triton.jit
def copy_tile(out_ptr, tiles, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.reshape(tiles.load([1, first, 0]), (ROWS, COLUMNS))
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, tile)

def described(x, rows, columns):
    return Described(x.dtype, tuple(x.shape), x.stride(), (1, rows, columns))

def bound(x, first):
    sizes = {"ROWS": 4, "COLUMNS": 8}
    tensors = [x.dtype, described(x, 4, 8)]
    return bind(copy_tile, (1,), tensors, (first,), sizes, aligned=True, num_warps=4)
"""


def interpreted(tmp_path: Path, script: str) -> None:
    """Triton reads a kernel's source from its file."""
    path = tmp_path / "script.py"
    path.write_text(KERNEL + textwrap.dedent(script))
    environment = {"PYTHONPATH": str(SOURCE), "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_tile_is_read_and_zeros_beyond_the_end(tmp_path: Path) -> None:
    interpreted(
        tmp_path,
        """
        room = torch.arange(2.0 * 7 * 16).reshape(2, 7, 16)
        for x in (room[:, :, :8], torch.arange(2.0 * 7 * 5).reshape(2, 7, 5).contiguous()):
            if x.stride(1) % 4:  # whole 16 bytes
                x = torch.nn.functional.pad(x, (0, 3))[:, :, :5]
            for first in (0, 2, 5, 7):
                out = torch.full((4, 8), -1.0)
                bound(x, first)(out, x)
                wanted = torch.zeros(4, 8)
                rows = x[1, first : first + 4]
                wanted[: len(rows), : rows.shape[1]] = rows
                assert torch.equal(out, wanted), (first, out)
        """,
    )


def test_a_binding_serves_every_tensor_of_its_layout(tmp_path: Path) -> None:
    """The descriptor is made anew for each call: it must not hold on to the first tensor."""
    interpreted(
        tmp_path,
        """
        x, y = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
        run, first, second = bound(x, 1), torch.empty(4, 8), torch.empty(4, 8)
        run(first, x)
        run(second, y)
        assert torch.equal(first, x[1, 1:5]) and torch.equal(second, y[1, 1:5])
        run(first, y)
        assert torch.equal(first, second)
        """,
    )


def recorded(columns: int = 8, dtype: torch.dtype = torch.float16) -> Any:
    from tilewright.ops.attention.triton_impl import _attend

    place = Described(dtype, (2, 7, 16), (112, 16, 1), (1, 4, columns))
    with recording.recording() as requests:
        run = bind(_attend, (1,), [dtype, place], (3,), {}, aligned=True, num_warps=4)
    with pytest.raises(AssertionError, match="recorded for compilation only"):
        run()
    (request,) = requests
    return request


def test_a_recording_keeps_the_descriptor() -> None:
    pointer, descriptor, first = recorded().arguments
    assert (pointer.dtype, first) == (torch.float16, 3)
    assert descriptor.base.dtype == torch.float16
    assert (descriptor.shape, descriptor.strides) == ([2, 7, 16], [112, 16, 1])
    assert descriptor.block_shape == [1, 4, 8]


def test_attention_asks_for_descriptors_only_where_there_is_tma() -> None:
    """With them `compile` sees the binary that an H200 would run."""
    calls = [
        (op, case, torch.bfloat16)
        for op in (reach.registry()["attention"],)
        for case in op.cases
        if case.name == "D128 T8192 causal"
    ]
    for sm in (80, 90):
        found = {w.kernel: w.request for w in reach.of_cases(calls, sm)}
        described = [
            [type(a).__name__ for a in found[kernel].arguments].count("TensorDescriptor")
            for kernel in ("_attend", "_grad_queries", "_grad_keys")
        ]
        assert described == ([2, 2, 3] if gpu.ARCHS[sm].tma else [0, 0, 0])
