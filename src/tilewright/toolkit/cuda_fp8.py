"""Norms quantised to fp8 in CUDA C++: plans, and the run of one pass or two (fp8.cuh).

A row stays in registers as floats while the next ones travel through shared memory, where the
parameters are too, once for all owners of a block: groups of lanes (short rows), teams of warps or,
beyond one block, clusters. One scale for the whole tensor takes a second kernel, which reads the
rows again. Limits: loads of 16 bytes; in a block as many columns as its shared memory holds once
for each parameter and once for a row under way, and at most 32,768 halves or 16,384 floats; eight
or sixteen times that where there are clusters, up to 262,144.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.fp8 import FORMATS, GROUP, scale_shape
from tilewright.gpu import Gpu
from tilewright.toolkit import cuda_rows, memory, nvrtc
from tilewright.toolkit.cuda_args import TYPE_NAMES, instance, rows_argument
from tilewright.toolkit.cuda_rows import PACK_BYTES, WARP, Plan, ceil, power_of_two
from tilewright.toolkit.rows import common_width, rows

# The names in include/tilewright/fp8.cuh.
FORMAT_NAMES = {"e4m3": "E4M3", "e5m2": "E5M2"}
SCALING_NAMES = {"row": "PER_ROW", "group": "PER_GROUP", "tensor": "PER_TENSOR"}

STATIC_SHARED = 1024  # what the kernels' own exchange takes, rounded up
STAGES = 1  # rows under way, besides the one in registers (H200, 2026-11)
FEWEST_LANES = 8  # of a row, for whole sectors of memory
GROUP_PACKS = {1: (2, 4, 6, 8), 2: (2, 4, 6, 7)}  # that a thread may hold, by parameters
MANY_THREADS = 768  # of a block that has an SM for itself, with four packs each
TEAM_THREADS = 512  # with more packs; more threads would leave too few registers
TEAM_PACKS = (8, 6, 5)
SECOND_ROWS, SECOND_THREADS = 8, 256  # of the second pass: packs of a thread, threads of a block


@dataclass(frozen=True)
class Launch:
    plan: Plan
    stages: int
    most: int  # threads that the binary is compiled for
    blocks: int  # and blocks on an SM

    def shared(self, parameters: int) -> int:
        """Bytes of rows under way, and of the parameters."""
        held = parameters * self.plan.packs * max(self.plan.lanes, WARP) * PACK_BYTES
        return self.plan.shared(1, self.stages) + held

    def spread(self, count: int, gpu: Gpu) -> Plan:
        """The plan with smaller blocks, if `count` rows would not fill the GPU with large ones."""
        unit = max(self.plan.lanes, WARP)
        wanted = ceil(count * self.plan.lanes, unit * gpu.sm_count)
        return replace(self.plan, threads=unit * min(max(wanted, 1), self.plan.threads // unit))


def launch(n: int, vec: int, gpu: Gpu, scaling: str, parameters: int) -> Launch | None:
    """For rows of n columns in loads of 16 bytes and as many parameters, or None."""
    if n > cuda_rows.WIDEST:
        return None
    plan = group(n, vec, scaling, parameters)
    if plan:
        blocks = 5 if plan.packs <= 4 else 4
        return fitted(plan, cuda_rows.GROUP_THREADS, blocks, gpu, parameters)
    # with two parameters eight packs are at the edge of the registers, and beyond it on most SMs
    most = 8 if parameters < 2 or (gpu.sm == 90 and vec == 8) else 6
    four = cuda_rows.teams(n, vec, 4, MANY_THREADS)
    if four and scaling != "tensor" and (parameters < 2 or n % (4 * vec * WARP) == 0):
        many = fitted(four, MANY_THREADS, 1, gpu, parameters)
        if many and (parameters < 2 or many.plan.rows > 1):
            return many
    plans = [cuda_rows.teams(n, vec, packs, TEAM_THREADS) for packs in TEAM_PACKS if packs <= most]
    for plan in sorted(filter(None, plans), key=lambda each: -each.threads):
        found = fitted(plan, TEAM_THREADS, 1, gpu, parameters)
        if found:
            return found
    # fewer threads, then fewer packs, where shared memory is scarce
    for packs, threads in ((most, TEAM_THREADS), (most, TEAM_THREADS // 2), (4, TEAM_THREADS)):
        wide = cuda_rows.cluster(n, vec, packs, threads, threads, gpu)
        found = fitted(wide, threads, 1, gpu, parameters) if wide else None
        if found:
            return found
    return None


def group(n: int, vec: int, scaling: str, parameters: int) -> Plan | None:
    """The group of lanes with the fewest instructions for a row, or None if a warp is too small.

    In arbitrary units: what a thread does once, and for each pack.
    """
    least = max(FEWEST_LANES, GROUP // vec if scaling == "group" else 1)
    plans = []
    for packs in GROUP_PACKS[parameters]:
        lanes = max(power_of_two(ceil(n, vec * packs)), least)
        if lanes <= WARP:
            plans.append(Plan("GROUP", vec, packs, lanes, cuda_rows.GROUP_THREADS))
    return min(plans, key=lambda each: each.lanes * (2 * each.packs + 5), default=None)


def fitted(plan: Plan, most: int, blocks: int, gpu: Gpu, parameters: int) -> Launch | None:
    """The launch with the most owners in a block that its shared memory allows, or None."""
    unit = max(plan.lanes, WARP)
    for threads in range(plan.threads, 0, -unit):
        choice = Launch(replace(plan, threads=threads), STAGES, most, blocks)
        if choice.shared(parameters) <= gpu.shared_per_block - STATIC_SHARED:
            return choice
    return None


def refuses(
    gpu: Gpu, input: torch.Tensor, *parameters: torch.Tensor | None, scaling: str
) -> str | None:
    """Why a row does not fit, or None."""
    n = input.shape[-1]
    vec = common_width(n, input, *parameters)
    if vec == 1:
        return f"rows of {n} columns here allow no loads of 16 bytes, and it has no others"
    found = launch(n, vec, gpu, scaling, len(parameters))
    return None if found else cuda_rows.too_wide(n, vec, gpu)


def prepare(
    source: nvrtc.Source,
    name: str,
    gpu: Gpu,
    input: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    format: str,
    scaling: str,
    *,
    statistics: int,
    scalars: list[Any],
    again_scalars: list[Any],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`run(input, *parameters)`, which returns (q, scale), of the kernels `name`_rows and _again.

    Both take q, scale, `statistics` floats for each row, the largest magnitude, the input and its
    parameters, then layout, sizes and their own scalars.
    """
    shape, device, fp8 = tuple(input.shape), input.device, FORMATS[format].dtype
    new_q = memory.contiguous(shape, fp8, device)
    new_scale = memory.contiguous(scale_shape(shape, scaling), torch.float32, device)
    if not input.numel():
        return lambda *_: (new_q(), new_scale().fill_(1.0))

    view, given = rows(input), 1 + len(parameters)
    n, count, kind = view.n, view.count, TYPE_NAMES[input.dtype]
    vec = common_width(n, input, *parameters)
    choice = launch(n, vec, gpu, scaling, len(parameters))
    assert choice is not None  # `refuses` was asked
    plan, twice = choice.spread(count, gpu), scaling == "tensor"
    shape_of = (plan.packs, plan.owner, choice.stages, choice.most, choice.blocks)
    names = (FORMAT_NAMES[format], SCALING_NAMES[scaling])
    sizes = [rows_argument(view), ctypes.c_uint32(count), ctypes.c_int32(n)]
    outputs: list[Any] = [fp8, torch.float32]
    kept: list[Any] = [torch.float32, torch.float32]
    kernel = nvrtc.bind(
        source,
        instance(f"{name}_rows", kind, vec, *shape_of, *names),
        grid=(plan.grid(count), 1, 1),
        block=plan.threads,
        cluster=plan.cluster,
        waves=1,
        shared=replace(choice, plan=plan).shared(len(parameters)),
        tensors=[*([None, None, *kept] if twice else [*outputs, None, None]), input, *parameters],
        scalars=[*sizes, ctypes.c_int32(plan.lanes), *scalars],
        gpu=gpu,
    )
    if not twice:

        def run(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
            q, scale = new_q(), new_scale()
            kernel(q, scale, None, None, *tensors[:given])
            return q, scale

        return run
    again = nvrtc.bind(
        source,
        instance(f"{name}_again", kind, vec, SECOND_ROWS, SECOND_THREADS, names[0]),
        grid=(ceil(ceil(count, SECOND_ROWS) * (n // vec), SECOND_THREADS), 1, 1),
        block=SECOND_THREADS,
        tensors=[*outputs, *kept, input, *parameters],
        scalars=[*sizes, *again_scalars],
        gpu=gpu,
    )
    new_statistics = memory.contiguous((count, statistics), torch.float32, device)
    new_amax = memory.contiguous((1,), torch.float32, device)

    def run_twice(*tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale, found, amax = new_q(), new_scale(), new_statistics(), new_amax().zero_()
        kernel(None, None, found, amax, *tensors[:given])
        again(q, scale, found, amax, *tensors[:given])
        return q, scale

    return run_twice
