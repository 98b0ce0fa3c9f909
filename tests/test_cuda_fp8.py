"""Plans of the CUDA norms that are quantised to fp8, and what their kernels are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilewright import fp8, gpu, ops
from tilewright.ops.layer_norm_fp8 import cuda_impl as layer_norm
from tilewright.ops.rms_norm_fp8 import cuda_impl as rms_norm
from tilewright.toolkit import cuda_fp8, cuda_rows, recording
from tilewright.verify.context import GROUPS

LAUNCHERS: dict[str, Any] = {"layer_norm_fp8": layer_norm, "rms_norm_fp8": rms_norm}
PARAMETERS = {"layer_norm_fp8": 2, "rms_norm_fp8": 1}
SMS = (89, 90, 100, 120)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def choices(name: str, vec: int, sm: int) -> Iterator[tuple[int, str, cuda_fp8.Launch | None]]:
    """(columns, scaling, launch) for every short row and a sample of the long ones."""
    card = gpu.pretend(f"sm_{sm}")
    for n in (*range(vec, 4097, vec), *range(4096, 262_145, vec * 61), 262_144):
        for scaling in fp8.SCALINGS:
            yield n, scaling, LAUNCHERS[name].launch(n, vec, card, scaling)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_plans_cover_the_rows_and_fit_the_block(name: str, vec: int, sm: int) -> None:
    card = gpu.pretend(f"sm_{sm}")
    for n, scaling, choice in choices(name, vec, sm):
        if choice is None:
            assert n > 1024 * vec, (n, scaling)  # whoever cannot hold a row can hold a short one
            continue
        plan = choice.plan
        assert plan.packs * plan.lanes * plan.cluster * vec >= n, (n, plan)
        room = card.shared_per_block - cuda_fp8.STATIC_SHARED
        assert choice.shared(PARAMETERS[name]) <= room, (n, choice)
        assert plan.threads % cuda_rows.WARP == 0 and plan.threads % plan.lanes == 0
        assert plan.threads <= choice.most
        many = plan.packs <= 4  # 80 registers to a thread, else 128
        assert choice.most * choice.blocks <= (768 if many else 512)
        if plan.owner == "GROUP":
            assert cuda_rows.WARP % plan.lanes == 0
        elif plan.owner == "TEAM":
            assert plan.lanes % cuda_rows.WARP == 0 and plan.rows <= 15
        else:
            assert plan.owner == ("CLUSTER" if plan.cluster > 1 else "BLOCK")
            assert plan.lanes == plan.threads
            assert plan.cluster <= cuda_rows.largest_cluster(card)


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_lanes_that_share_a_scale_are_neighbours_in_a_warp(name: str, vec: int) -> None:
    sharing = fp8.GROUP // vec
    for n, scaling, choice in choices(name, vec, 90):
        if choice and scaling == "group":
            assert choice.plan.lanes % sharing == 0, (n, choice)
            assert choice.plan.packs <= sharing  # each lane makes the scale of one pack at most


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_gpu_runs_every_binary_of_an_h200(name: str, vec: int) -> None:
    """verify and the sanitizers take the cases that are declared, and no others."""

    def binary(n: int, scaling: str) -> Any:
        found = LAUNCHERS[name].launch(n, vec, gpu.pretend("h200"), scaling)
        return found and (scaling, found.plan.packs, found.plan.owner, found.most, found.blocks)

    taken = [c.dims for c in ops.registry()[name].cases if c.group in GROUPS["cuda"]]
    run = {binary(d["shape"][-1], d.get("scaling", "row")) for d in taken
           if d["shape"][-1] % vec == 0}  # fmt: skip
    for n in (*range(vec, 8192, vec), *range(8192, 262_145, 64)):
        for scaling in fp8.SCALINGS:
            assert binary(n, scaling) in run | {None}, (n, scaling, binary(n, scaling))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_few_rows_are_spread_over_the_gpu_and_many_fill_it(name: str) -> None:
    card = gpu.pretend("h200")
    for n, _, choice in choices(name, 8, 90):
        if choice is None:
            continue
        for count in (1, 7, 500, 3000, 2**31 - 2**16):
            plan = choice.spread(count, card)
            assert plan.threads % cuda_rows.WARP == 0 and plan.threads % plan.lanes == 0
            assert plan.grid(count) // plan.cluster * plan.rows >= count
            smallest = max(plan.lanes, cuda_rows.WARP)
            if count == 1:
                assert plan.threads == smallest, n
            if plan.threads > smallest:  # no SM is idle
                assert plan.grid(count) >= card.sm_count // 2, (n, count, plan)
        assert choice.spread(2**31 - 2**16, card) == choice.plan


LONGEST = {  # columns of halves and of floats that are served; no shorter row is refused
    ("layer_norm_fp8", 89): (16_640, 8_320),
    ("layer_norm_fp8", 90): (262_144, 196_608),
    ("layer_norm_fp8", 100): (262_144, 196_608),
    ("layer_norm_fp8", 120): (131_072, 65_536),
    ("rms_norm_fp8", 89): (24_576, 12_288),
    ("rms_norm_fp8", 90): (262_144, 262_144),
    ("rms_norm_fp8", 100): (262_144, 262_144),
    ("rms_norm_fp8", 120): (196_608, 98_304),
}


@pytest.mark.parametrize(("name", "sm"), LONGEST)
def test_rows_are_served_up_to_a_length_and_not_beyond(name: str, sm: int) -> None:
    card = gpu.pretend(f"sm_{sm}")
    for vec, longest in zip((8, 4), LONGEST[name, sm], strict=True):
        for n, scaling, choice in choices(name, vec, sm):
            assert (choice is not None) == (n <= longest), (n, scaling)
        for scaling in fp8.SCALINGS:
            assert LAUNCHERS[name].launch(longest, vec, card, scaling)
            assert LAUNCHERS[name].launch(longest + vec, vec, card, scaling) is None


def test_refusals_name_the_reason() -> None:
    h200, l4 = gpu.pretend("h200"), gpu.pretend("l4")
    tail = (1e-5, "e4m3", "row")
    assert "no loads of 16 bytes" in str(layer_norm.refuses(h200, meta(4, 33), None, None, *tail))
    assert "65536 columns" in str(rms_norm.refuses(l4, meta(4, 65_536), None, 0.0, *tail))
    assert layer_norm.refuses(h200, meta(4, 65_536), None, None, *tail) is None
    accepts = ops.registry()["layer_norm_fp8"].backend("cuda").accepts
    weight, other = meta(32), meta(32, dtype=torch.float32)
    assert accepts(meta(4, 32), weight, weight, *tail) is None
    assert "bias is torch.float32" in str(accepts(meta(4, 32), weight, other, *tail))


@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("scaling", fp8.SCALINGS)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_is_compiled_has_the_names_of_format_and_scaling(
    name: str, scaling: str, format: str
) -> None:
    args = [meta(64, 4096), *[meta(4096)] * PARAMETERS[name], 1e-5]
    args += [0.0] if name == "rms_norm_fp8" else []
    with recording.recording() as requests:
        LAUNCHERS[name].prepare(gpu.pretend("h200"), *args, format, scaling)
    kernels = [request.kernel for request in requests]
    assert len(kernels) == (2 if scaling == "tensor" else 1)
    assert all(cuda_fp8.FORMAT_NAMES[format] in kernel for kernel in kernels)
    assert cuda_fp8.SCALING_NAMES[scaling] in kernels[0]
    for request in requests:
        template = f"{request.kernel.split('<')[0]}("
        assert template in request.source.text
