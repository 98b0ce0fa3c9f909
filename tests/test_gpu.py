"""gpu.py and shapes.py: tables that other code believes, so every number is checked twice."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tilewright import gpu, shapes
from tilewright.errors import InputError, TilewrightError

SHARED_PER_BLOCK = {
    75: 65536,
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
MAX_THREADS = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}

# Operations per clock and SM: CUDA-core fp32, and dense fp16 on tensor cores at full rate.
FP32_PER_CLOCK = {75: 128, 80: 128, 86: 256, 89: 256, 90: 256, 100: 256, 120: 256}
FP16_PER_CLOCK = {75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}


# --- arch ----------------------------------------------------------------------------------------


def test_every_supported_sm_is_in_the_table() -> None:
    assert list(gpu.ARCHS) == [75, 80, 86, 89, 90, 100, 120]


@pytest.mark.parametrize("sm", SHARED_PER_BLOCK)
def test_arch_limits_are_exact(sm: int) -> None:
    arch = gpu.ARCHS[sm]
    assert arch.sm == sm
    assert arch.shared_per_block == SHARED_PER_BLOCK[sm]
    assert arch.max_threads_per_sm == MAX_THREADS[sm]
    assert arch.registers_per_sm == 65536
    reserved = 0 if sm == 75 else 1024
    assert arch.shared_per_sm == arch.shared_per_block + reserved
    assert arch.source


@pytest.mark.parametrize("sm", SHARED_PER_BLOCK)
def test_arch_features_follow_the_sm(sm: int) -> None:
    arch = gpu.ARCHS[sm]
    assert arch.async_copy == (sm >= 80)
    assert arch.tma == arch.clusters == (sm >= 90)
    assert arch.triton_tensor_cores == (sm != 75)
    assert arch.triton_fp8 == (sm >= 89)
    assert ("bf16" in arch.tensor_core_dtypes) == (sm >= 80)
    assert ("fp8" in arch.tensor_core_dtypes) == (sm >= 89)
    assert {"fp16", "int8"} <= set(arch.tensor_core_dtypes)


@pytest.mark.parametrize(
    ("sm", "base"), [(87, 86), (88, 86), (103, 100), (110, 100), (121, 120), (130, 120), (999, 120)]
)
def test_unknown_sm_takes_the_facts_of_an_older_one(sm: int, base: int) -> None:
    arch = gpu.arch_of(sm)
    assert arch.sm == sm
    assert f"sm_{sm} is not in the table: facts of sm_{base}" in arch.source
    assert dataclasses.replace(arch, sm=base, source="") == dataclasses.replace(
        gpu.ARCHS[base], source=""
    )


@pytest.mark.parametrize("sm", [61, 70, 72])
def test_sm_older_than_the_table_promises_only_the_minimum(sm: int) -> None:
    arch = gpu.arch_of(sm)
    assert arch.shared_per_block == 49152
    assert arch.tensor_core_dtypes == ()
    assert not (arch.async_copy or arch.tma or arch.triton_tensor_cores)


# --- the table of products -----------------------------------------------------------------------


def every() -> list[gpu.Gpu]:
    return [gpu.pretend(name) for name in gpu.known()]


def test_known_names() -> None:
    wanted = {"t4", "a10", "a10g", "a40", "l4", "l40s", "h100", "h100-pcie", "h200", "gh200"}
    wanted |= {"rtx2080ti", "rtx3090", "rtxa6000", "rtx4090", "rtx5090", "rtxpro6000", "b200"}
    wanted |= {"a100-40gb", "a100-80gb"}
    assert wanted == set(gpu.known())


@pytest.mark.parametrize("g", every(), ids=gpu.known())
def test_row_is_sane(g: gpu.Gpu) -> None:
    assert g.source
    assert g.sm in gpu.ARCHS
    assert 16 <= g.sm_count <= 200
    assert 4 * gpu.MIB <= g.l2_bytes <= 128 * gpu.MIB
    assert 8 * gpu.GIB <= g.memory_bytes <= 300 * gpu.GIB
    assert g.bandwidth is not None and 1e11 < g.bandwidth < 1e13
    assert set(g.peaks) <= {"fp32", "fp16", "bf16", "tf32", "fp8", "int8"}
    for unit, rate in g.peaks.items():
        assert 1e12 < rate < 1e16
        assert unit == "fp32" or g.supports(unit), f"a peak for {unit}, which {g.name} lacks"


@pytest.mark.parametrize("g", [g for g in every() if g.peaks], ids=lambda g: g.short_name)
def test_peaks_are_dense_and_consistent(g: gpu.Gpu) -> None:
    """A rate copied from a sparse column is twice too high: the clock it implies gives it away."""
    peaks = g.peaks
    assert peaks["fp32"] < peaks["fp16"]
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert ("tf32" in peaks) == g.supports("tf32")
    assert peaks.get("tf32", peaks["fp16"] / 2) == peaks["fp16"] / 2
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.01)
    assert peaks["int8"] >= 2 * peaks["fp16"] * 0.99

    clock = peaks["fp32"] / (g.sm_count * FP32_PER_CLOCK[g.sm])
    assert 1.3e9 < clock < 2.7e9
    full_rate = FP16_PER_CLOCK[g.sm] / (2 if "GeForce" in g.name else 1)
    assert peaks["fp16"] / (g.sm_count * full_rate) == pytest.approx(clock, rel=0.11)


def test_geforce_rows_say_which_accumulate_is_meant() -> None:
    for g in every():
        if "GeForce" in g.name:
            assert "FP32 accumulate" in g.source


def test_only_the_unconfirmed_row_lacks_peaks() -> None:
    assert [g.short_name for g in every() if not g.peaks] == ["a10g"]


def test_h200_by_the_datasheet() -> None:
    g = gpu.pretend("h200")
    assert (g.sm, g.sm_count, g.bandwidth) == (90, 132, 4.8e12)
    assert g.peaks == {
        "fp32": 67e12,
        "fp16": 989e12,
        "bf16": 989e12,
        "tf32": 494.5e12,
        "fp8": 1979e12,
        "int8": 1979e12,
    }


def test_no_two_rows_share_a_name() -> None:
    names: dict[str, str] = {}
    for short, row in gpu._TABLE.items():
        for key in {gpu._key(n) for n in (short, row.gpu.name, *row.products, *row.aliases)}:
            assert names.setdefault(key, short) == short
    assert names == dict(gpu._SHORT_BY_KEY)


# --- Gpu -----------------------------------------------------------------------------------------


def test_gpu_is_immutable_hashable_and_picklable() -> None:
    g = gpu.pretend("t4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        g.sm = 90  # type: ignore[misc]
    with pytest.raises(TypeError):
        g.peaks["fp16"] = 1.0  # type: ignore[index]
    assert hash(g) == hash(gpu.pretend("T4"))
    assert pickle.loads(pickle.dumps(g)) == g
    assert dataclasses.asdict(g)["name"] == "Tesla T4"
    assert len({*every()}) == len(gpu.known())


def test_gpu_delegates_to_its_arch() -> None:
    g = gpu.pretend("rtx4090")
    assert g.arch is gpu.ARCHS[89]
    assert (g.family, g.shared_per_block, g.shared_per_sm) == ("Ada", 101376, 102400)
    assert (g.max_threads_per_sm, g.registers_per_sm) == (1536, 65536)


def test_supports_takes_units_and_torch_dtypes() -> None:
    t4, h200 = gpu.pretend("t4"), gpu.pretend("h200")
    assert t4.supports("fp16") and t4.supports(torch.float16)
    assert not t4.supports("bf16") and not t4.supports(torch.bfloat16)
    assert h200.supports("bfloat16") and h200.supports(torch.float8_e4m3fn)
    assert h200.supports(torch.int8) and not h200.supports("fp4")
    assert not h200.supports(torch.float32)  # tf32 has to be asked for by name
    assert h200.supports("tf32")


# --- pretend -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "short"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("A100", "a100-80gb"),
        ("a100 40GB", "a100-40gb"),
        ("h100_pcie", "h100-pcie"),
        ("RTX PRO 6000", "rtxpro6000"),
    ],
)
def test_pretend_forgives_spelling(spelling: str, short: str) -> None:
    g = gpu.pretend(spelling)
    assert g == gpu.pretend(short)
    assert g.short_name == short
    assert g.pretend


@pytest.mark.parametrize("sm", SHARED_PER_BLOCK)
def test_pretend_sm_has_facts_and_no_peaks(sm: int) -> None:
    g = gpu.pretend(f"sm_{sm}")
    assert g == gpu.pretend(f"sm{sm}") == gpu.pretend(str(sm)) == gpu.pretend(f"SM_{sm}")
    assert (g.name, g.short_name, g.sm) == (f"sm_{sm}", f"sm_{sm}", sm)
    assert g.arch is gpu.ARCHS[sm]
    assert g.pretend and not g.peaks and g.bandwidth is None
    assert g.sm_count == min(k.sm_count for k in every() if k.sm == sm)
    assert g.source


def test_pretend_accepts_the_arch_specific_suffix() -> None:
    assert gpu.pretend("sm_90a") == gpu.pretend("sm_90")


@pytest.mark.parametrize("name", ["", "rtx9999", "sm_42", "H20O", "cpu"])
def test_pretend_of_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu.pretend(name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(short in message for short in gpu.known())
    assert all(f"sm_{sm}" in message for sm in gpu.ARCHS)
    assert isinstance(caught.value, (TilewrightError, ValueError))


def test_pretend_suggests_the_closest_name() -> None:
    with pytest.raises(InputError, match="Did you mean 'rtx4090'"):
        gpu.pretend("rtx4099")
    with pytest.raises(InputError, match="Did you mean 'sm_90'"):
        gpu.pretend("sm_9")


def test_interpreter_takes_the_choices_of_an_h200() -> None:
    h200, found = gpu.pretend("h200"), gpu.interpreter()
    assert dataclasses.replace(found, name=h200.name, sm_count=h200.sm_count) == h200
    assert found.sm_count < h200.sm_count  # walks over rows that a CPU can afford
    assert "interpreter" in gpu.interpreter().name


# --- detect --------------------------------------------------------------------------------------

Install = Callable[..., None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretend that torch sees one CUDA device with the given properties."""

    def install(name: str, major: int, minor: int, sms: int, l2: int, memory: int) -> None:
        props = SimpleNamespace(
            name=name,
            major=major,
            minor=minor,
            multi_processor_count=sms,
            L2_cache_size=l2,
            total_memory=memory,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
        gpu.detect.cache_clear()

    yield install
    gpu.detect.cache_clear()


def test_detect_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.detect.cache_clear()
    assert gpu.detect() is None
    gpu.detect.cache_clear()


def test_detect_prefers_the_driver_and_adds_peaks(device: Install) -> None:
    device("NVIDIA H200", 9, 0, 132, 61 * gpu.MIB, 139 * gpu.GIB)
    g = gpu.detect()
    assert g is not None
    assert (g.name, g.sm, g.sm_count, g.short_name) == ("NVIDIA H200", 90, 132, "h200")
    assert (g.l2_bytes, g.memory_bytes) == (61 * gpu.MIB, 139 * gpu.GIB)
    assert g.bandwidth == 4.8e12
    assert g.peaks == gpu.pretend("h200").peaks
    assert not g.pretend
    assert "driver" in g.source and "datasheet" in g.source
    assert gpu.detect(0) == g
    assert gpu.detect(1) is None


def test_detect_of_an_unknown_gpu_gets_facts_and_no_peaks(device: Install) -> None:
    device("NVIDIA Foo 9000", 8, 7, 16, 4 * gpu.MIB, 32 * gpu.GIB)
    g = gpu.detect()
    assert g is not None
    assert (g.sm, g.sm_count, g.short_name) == (87, 16, "foo9000")
    assert not g.peaks and g.bandwidth is None
    assert g.shared_per_block == 101376
    assert "facts of sm_86" in g.source


@pytest.mark.parametrize(
    "name", ["NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA GeForce RTX 4090 D"]
)
def test_detect_takes_no_neighbours_peaks(device: Install, name: str) -> None:
    device(name, 9, 0, 132, 50 * gpu.MIB, 80 * gpu.GIB)
    g = gpu.detect()
    assert g is not None and not g.peaks and g.bandwidth is None


def test_detect_gives_a_partition_no_peaks(device: Install) -> None:
    device("NVIDIA H200", 9, 0, 60, 30 * gpu.MIB, 70 * gpu.GIB)
    g = gpu.detect()
    assert g is not None and not g.peaks
    assert "132 SMs" in g.source


@pytest.mark.parametrize(
    ("name", "sm", "sms", "short"),
    [
        ("Tesla T4", 75, 40, "t4"),
        ("GeForce RTX 2080 Ti", 75, 68, "rtx2080ti"),  # drivers before 2021 leave the vendor out
        ("NVIDIA A100-SXM4-80GB", 80, 108, "a100-80gb"),
        ("A100-SXM4-40GB", 80, 108, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 89, 128, "rtx4090"),
        ("NVIDIA H100 80GB HBM3", 90, 132, "h100"),
        ("NVIDIA H100 PCIe", 90, 114, "h100-pcie"),
    ],
)
def test_detect_knows_driver_names(
    device: Install, name: str, sm: int, sms: int, short: str
) -> None:
    device(name, sm // 10, sm % 10, sms, 4 * gpu.MIB, 16 * gpu.GIB)
    g = gpu.detect()
    assert g is not None
    assert g.peaks == gpu.pretend(short).peaks
    assert g.short_name == short


def test_detect_asks_the_driver_once(device: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    device("NVIDIA H200", 9, 0, 132, 60 * gpu.MIB, 140 * gpu.GIB)
    first = gpu.detect()
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert gpu.detect() is first


# --- shapes --------------------------------------------------------------------------------------


def test_models_are_the_published_ones() -> None:
    dims = {
        name: (m.hidden, m.intermediate, m.layers, m.heads, m.kv_heads, m.head_dim, m.vocab)
        for name, m in shapes.MODELS.items()
    }
    assert dims == {
        "Llama-3-8B": (4096, 14336, 32, 32, 8, 128, 128256),
        "Llama-3-70B": (8192, 28672, 80, 64, 8, 128, 128256),
        "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152064),
        "Mistral-7B": (4096, 14336, 32, 32, 8, 128, 32768),
        "Gemma-2-9B": (3584, 14336, 42, 16, 8, 256, 256000),
    }


@pytest.mark.parametrize("model", shapes.MODELS.values(), ids=lambda m: m.name)
def test_model_is_consistent(model: shapes.Model) -> None:
    assert model.source.endswith("config.json")
    assert model.heads % model.kv_heads == 0
    assert model.qkv_size == (model.heads + 2 * model.kv_heads) * model.head_dim
    assert model.gate_up_size == 2 * model.intermediate
    if model is not shapes.GEMMA_2_9B:
        assert model.q_size == model.hidden
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.hidden = 1  # type: ignore[misc]


def test_fused_projections_of_qwen() -> None:
    assert shapes.QWEN_2_5_7B.qkv_size == 4608
    assert shapes.QWEN_2_5_7B.gate_up_size == 37888


def test_sizes_are_sorted_and_cover_the_boundaries() -> None:
    for sizes in (
        shapes.DECODE_TOKENS,
        shapes.PREFILL_TOKENS,
        shapes.EDGE_COLUMNS,
        shapes.EDGE_ROWS,
    ):
        assert list(sizes) == sorted(set(sizes))
    assert (shapes.DECODE_TOKENS[0], shapes.DECODE_TOKENS[-1]) == (1, 128)
    assert (shapes.PREFILL_TOKENS[0], shapes.PREFILL_TOKENS[-1]) == (512, 16384)
    neighbours = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025}
    assert neighbours <= set(shapes.EDGE_COLUMNS)
