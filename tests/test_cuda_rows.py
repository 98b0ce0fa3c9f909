"""Plans of the CUDA row kernels: every length a GPU can hold has one, and it fits the block."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tilewright import gpu as gpus
from tilewright.ops import registry
from tilewright.ops.layer_norm import cuda_backward_impl as layer_norm_backward
from tilewright.ops.layer_norm import cuda_impl as layer_norm
from tilewright.ops.rms_norm import cuda_backward_impl as rms_norm_backward
from tilewright.ops.rms_norm import cuda_impl as rms_norm
from tilewright.ops.rms_norm_swiglu import cuda_backward_impl as rms_norm_swiglu_backward
from tilewright.ops.rms_norm_swiglu import cuda_impl as rms_norm_swiglu
from tilewright.ops.softmax import cuda_impl as softmax
from tilewright.toolkit import cuda_rows, nvrtc
from tilewright.verify.context import GROUPS


def pretend_gpu(sm: int = 90) -> Any:
    return gpus.pretend(f"sm_{sm}")


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def launches(vec: int, n: int, gpu: Any) -> dict[str, cuda_rows.Launch | None]:
    """What the launchers of the norms choose for rows of n columns."""
    return {
        "rms_norm": rms_norm.launch(n, vec, gpu),
        "add_rms_norm": rms_norm.launch(n, vec, gpu, operands=2),
        "layer_norm": layer_norm.launch(n, vec, gpu),
        "rms_norm_backward": rms_norm_backward.launch(n, vec, gpu),
        "add_rms_norm_backward": rms_norm_backward.launch(n, vec, gpu, operands=3),
        "layer_norm_backward": layer_norm_backward.launch(n, vec, gpu),
        "rms_norm_swiglu": rms_norm_swiglu.launch(n, vec, gpu),
        "rms_norm_swiglu_backward": rms_norm_swiglu_backward.launch(n, vec, gpu),
    }


def plans(vec: int, n: int, gpu: Any) -> dict[str, cuda_rows.Plan | None]:
    """What every launcher of the ops plans for rows of n columns."""
    of_softmax, of_dots = (softmax.launch(n, vec, gpu, operands=k) for k in (1, 2))
    of_norms = {k: v.plan if v else None for k, v in launches(vec, n, gpu).items()}
    return of_norms | {
        "softmax": of_softmax[0] if of_softmax else None,
        "softmax_backward": of_dots[0] if of_dots else None,
    }


@pytest.mark.drawn(seconds=4.9, family="slow")
@pytest.mark.parametrize("vec", [4, 8])
def test_a_gpu_runs_every_binary_of_an_h200(vec: int) -> None:
    """verify and the sanitizers take the cases that are declared, and no others."""
    gpu = gpus.pretend("h200")

    def binaries(op: str, n: int) -> dict[str, Any]:
        """By kernel: what of its template the length decides."""
        if op == "softmax":
            return {str(k): wide_or_not(softmax.launch(n, vec, gpu, operands=k)) for k in (1, 2)}
        of_norms = launches(vec, n, gpu)
        return {
            k: v and v.template for k, v in of_norms.items() if k.removesuffix("_backward") == op
        }

    def wide_or_not(found: tuple[cuda_rows.Plan, bool] | None) -> Any:
        plan, wide = found or (None, False)
        return plan and (
            (plan.owner, wide) if wide else (plan.owner, plan.packs, plan.compiled_for)
        )

    for op in ("rms_norm", "add_rms_norm", "rms_norm_swiglu", "layer_norm", "softmax"):
        taken = {c.dims["shape"][-1] for c in registry()[op].cases if c.group in GROUPS["cuda"]}
        run = {b for n in taken if n % vec == 0 for b in binaries(op, n).items()}
        for n in range(vec, 262_145, vec * 4):
            for kernel, binary in binaries(op, n).items():
                assert binary is None or (kernel, binary) in run, (op, kernel, n, binary)


OPERANDS = {"add_rms_norm": 2, "rms_norm_backward": 2, "add_rms_norm_backward": 3,
            "rms_norm_swiglu": 2, "rms_norm_swiglu_backward": 3,
            "layer_norm_backward": 2}  # fmt: skip
VALUES = {"layer_norm": 2, "rms_norm_backward": 2, "add_rms_norm_backward": 2,
          "rms_norm_swiglu_backward": 2,
          "layer_norm_backward": 4}  # fmt: skip


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("vec", [1, 4, 8])
def test_binaries_allow_for_the_blocks_that_plans_want(vec: int, sm: int) -> None:
    gpu = pretend_gpu(sm)
    for n in (*range(vec, 4097, vec * 7), *range(4096, 262_145, vec * 509), 262_144):
        for name, choice in launches(vec, n, gpu).items():
            if choice is None:
                continue
            assert choice.plan.threads <= choice.threads, (name, n, choice)
            assert choice.threads * choice.blocks <= 2048
            held = int(name == "layer_norm_backward")
            assert choice.fits(gpu, OPERANDS.get(name, 1), VALUES.get(name, 1), held)
            walks = choice.stages > 0
            assert walks or not (choice.at_once or choice.plan.cluster > 1)
            known = [choice.at_once, choice.stages] if choice.at_once else [choice.stages]
            bounds = [choice.threads, choice.blocks, *(["true"] if choice.aside else [])]
            assert list(choice.template[2:]) == [*(known if walks else []), *bounds]
            for count in (1, 5, 2**31 - 2**16):
                owners = choice.grid(count) // choice.plan.cluster * choice.plan.rows
                assert owners * (choice.at_once or 1) >= count


@pytest.mark.parametrize("sm", [75, 80, 90, 120])
@pytest.mark.parametrize("vec", [1, 4, 8])
def test_plans_cover_the_rows(vec: int, sm: int) -> None:
    gpu = pretend_gpu(sm)
    for n in range(vec, 262_145, vec * 61):
        for name, plan in plans(vec, n, gpu).items():
            if plan is None:
                assert n > 1536, (name, n)  # whoever cannot hold a row can hold a short one
                continue
            held = plan.packs * plan.lanes * plan.cluster * vec
            assert held >= n, (name, n, plan)
            assert plan.threads % 32 == 0 and plan.threads <= 1024
            assert plan.threads % plan.lanes == 0
            if plan.owner == "GROUP":
                assert 32 % plan.lanes == 0
            elif plan.owner == "TEAM":
                assert plan.lanes % 32 == 0 and 1 < plan.rows <= 15
            else:
                assert plan.lanes == plan.threads
            assert (plan.cluster > 1) == (plan.owner == "CLUSTER")
            assert plan.cluster <= cuda_rows.largest_cluster(gpu)
            for count in (1, 5, 2**31 - 2**16):
                assert plan.grid(count) // plan.cluster * plan.rows >= count


def test_clusters_hold_what_no_block_does_and_only_where_there_are_some() -> None:
    for name, plan in plans(8, 65_536, pretend_gpu(90)).items():
        assert plan and plan.owner == "CLUSTER", name
    for name, plan in plans(8, 65_536, pretend_gpu(80)).items():
        assert plan is None, name
    for name, plan in plans(4, 262_144, pretend_gpu(90)).items():
        assert name.endswith("backward") or plan, name
    assert "65536 columns" in str(rms_norm.refuses(pretend_gpu(80), meta(4, 65_536), None))
    assert "element by element" in str(softmax.refuses(pretend_gpu(90), meta(4, 65_537)))


@pytest.mark.drawn(seconds=0.4, family="slow")
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("vec", [4, 8])
def test_no_length_below_the_longest_is_left_out(vec: int, sm: int) -> None:
    gpu = pretend_gpu(sm)
    longest: dict[str, int] = {}
    lengths = sorted({*range(vec, 16_385, vec), *range(16_384, 262_145, 32 * vec)}, reverse=True)
    for n in lengths:
        for name, choice in launches(vec, n, gpu).items():
            assert choice or name not in longest, (name, n, longest)
            if choice:
                longest.setdefault(name, n)
    assert min(longest.values()) >= 384 * vec
    if sm in (86, 89):  # a hidden size that models have
        assert longest["rms_norm_backward"] >= 1024 * vec
    if sm == 75:
        assert {longest[f"{name}rms_norm"] for name in ("", "add_")} == {2048 * vec}
        assert softmax.launch(2048 * vec, vec, gpu, operands=2)
    if sm == 90:
        assert longest["rms_norm"] == longest["layer_norm"] == 262_144
    halves = {75: 6_144, 80: 12_288, 90: 262_144, 100: 262_144, 120: 65_536}
    if sm in halves:
        assert longest["layer_norm_backward"] == halves[sm] * vec // 8


def test_sums_aside_have_their_place_in_shared_memory() -> None:
    gpu = gpus.pretend("h200")
    wide, narrow = (layer_norm_backward.launch(n, 8, gpu) for n in (262_144, 131_072))
    assert wide and wide.aside and narrow and not narrow.aside
    each = wide.plan.packs * wide.plan.threads * 16  # bytes of a row of halves
    # two stages of x and of its gradient, the weight, and the bias' sums, which are floats
    assert wide.shared(2, held=1) == (2 * 2 + 1 + 2) * each == 229_376


def test_some_clusters_are_for_full_rows_alone() -> None:
    gpu = gpus.pretend("h200")
    full, other = (layer_norm_backward.launch(n, 8, gpu) for n in (16_384, 11_008))
    assert full and (full.plan.cluster, full.plan.threads) == (4, 128)
    assert other and (other.plan.cluster, other.plan.threads) == (2, 352)


def test_a_block_that_has_one_row_gets_a_grid_of_all() -> None:
    """The kernels leave after a row where they are compiled so; a grid that counts on more of them
    would leave rows out."""
    one_row = set()
    for vec, sm in itertools.product((4, 8), (80, 89, 90, 100, 120)):
        for n in range(4096, 40_001, vec * 8):
            for name, choice in launches(vec, n, pretend_gpu(sm)).items():
                if choice is None or name.endswith("backward"):
                    continue
                once = choice.plan.owner == "BLOCK" and choice.stages == 1
                assert (choice.waves == 0) == once, (name, n, choice)
                if name != "layer_norm":
                    assert once or choice.plan.owner != "BLOCK" or not choice.stages, (name, n)
                if once:
                    one_row.add(name)
    assert one_row == {"rms_norm", "add_rms_norm", "rms_norm_swiglu", "layer_norm"}


def test_teams_leave_hardly_a_thread_idle() -> None:
    """Two packs a thread where that fills the block, else three; and never one team alone."""
    found = {n: cuda_rows.full_teams(n, 8, 512) for n in (1280, 2048, 3072, 3584, 4096, 5120)}
    assert {n: (p.packs, p.rows, p.threads) for n, p in found.items() if p} == {
        1280: (3, 8, 512),
        2048: (2, 4, 512),
        3072: (3, 4, 512),
        3584: (3, 3, 480),
        4096: (2, 2, 512),
        5120: (3, 2, 448),
    }
    assert cuda_rows.full_teams(6152, 8, 512) is None


def test_a_softmax_that_no_block_holds_takes_a_cluster() -> None:
    """A GPU with less shared memory in a block holds the gradient of long rows in several."""
    alone, together = (softmax.launch(32_768, 8, pretend_gpu(sm), operands=2) for sm in (90, 120))
    assert alone and (alone[0].owner, alone[0].cluster) == ("BLOCK", 1)
    assert together and (together[0].owner, together[0].cluster) == ("CLUSTER", 2)
    for sm in (90, 100):
        longest = softmax.launch(262_144, 8, pretend_gpu(sm), operands=2)
        assert longest and (longest[0].cluster, longest[0].threads) == (16, 256)


def test_rows_that_registers_hold_do_not_walk() -> None:
    for n in range(8, 8193, 8):
        for choice in (
            layer_norm.launch(n, 8, pretend_gpu(90)),
            rms_norm.launch(n, 8, pretend_gpu(90)),
        ):
            assert choice and not choice.stages, n


def test_the_planned_exchange_is_the_one_that_kernels_compile_to() -> None:
    text = (nvrtc.INCLUDE / "tilewright" / "reduce.cuh").read_text("utf-8")
    assert "float warps[2][MAX_WARPS * VALUES];" in text
    assert "float blocks[2][MAX_CLUSTER * VALUES];" in text
    assert "Signal signals[2];" in text
    assert [cuda_rows.exchange_bytes(k) for k in (1, 2, 4, 8)] == [512, 896, 1664, 3200]
