"""What a GPU can do: facts per SM version, datasheet peaks per product, and which GPU this is.

Launch choices are pure functions of shape, dtype and a `Gpu`. A `Gpu` therefore never needs a
device: `pretend("rtx4090")` lets a CPU machine compile for, and test the choices of, a card that
nobody in the room owns. This is the only file that asks torch about the device.

Three kinds of number, never mixed:
- `Arch`: what every chip of an SM version has, from NVIDIA's programming guide;
- the table of products: datasheet peaks, dense, each row with its source. A number that could not
  be confirmed is left out, and a GPU that is not in the table has no peaks at all: a roof borrowed
  from a neighbour is worse than none, because nobody sees that it is a guess;
- measured roofs, which live in `bench`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from tilewright.errors import InputError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


# --- what an SM version has ----------------------------------------------------------------------


@dataclass(frozen=True)
class Arch:
    """Facts shared by every chip of one SM version. Sizes are bytes."""

    sm: int
    family: str
    shared_per_block: int  # dynamic shared memory one block may opt in to
    shared_per_sm: int
    max_threads_per_sm: int
    tensor_core_dtypes: tuple[str, ...]  # operand types of dense matrix instructions
    async_copy: bool  # cp.async: global -> shared without registers
    tma: bool  # bulk tensor copies through descriptors
    clusters: bool  # blocks that share memory; sm_120 has them, but no multicast
    triton_tensor_cores: bool  # whether tl.dot becomes a tensor-core instruction
    triton_fp8: bool  # whether Triton compiles fp8 e4m3 there
    source: str
    registers_per_sm: int = 65536


_GUIDE = (
    "CUDA C++ Programming Guide, 'Technical Specifications per Compute Capability'; "
    "the same numbers in CCCL, cuda/__device/arch_traits.h"
)
_PTX = "PTX ISA, mma/wgmma/tcgen05 target notes"

_TURING = ("fp16", "int8")
_AMPERE = ("fp16", "bf16", "tf32", "int8")
_ADA = ("fp16", "bf16", "tf32", "fp8", "int8")
_BLACKWELL = ("fp16", "bf16", "tf32", "fp8", "fp4", "int8")


def _arch(
    sm: int, family: str, shared_kib: tuple[int, int], threads: int, dtypes: tuple[str, ...]
) -> Arch:
    per_block, per_sm = shared_kib
    return Arch(
        sm=sm,
        family=family,
        shared_per_block=per_block * KIB,
        shared_per_sm=per_sm * KIB,
        max_threads_per_sm=threads,
        tensor_core_dtypes=dtypes,
        async_copy=sm >= 80,
        tma=sm >= 90,
        clusters=sm >= 90,
        triton_tensor_cores=sm >= 80,
        triton_fp8=sm >= 89,
        source=f"{_GUIDE}; {_PTX}"
        + ("; Triton 3.x lowers tl.dot to FMA below sm_80 (triton#5066)" if sm < 80 else ""),
    )


# From sm_80 on the driver keeps 1 KiB of every block's shared memory, hence 227 of 228.
ARCHS: Mapping[int, Arch] = MappingProxyType(
    {
        a.sm: a
        for a in (
            _arch(75, "Turing", (64, 64), 1024, _TURING),
            _arch(80, "Ampere", (163, 164), 2048, _AMPERE),
            _arch(86, "Ampere", (99, 100), 1536, _AMPERE),
            _arch(89, "Ada", (99, 100), 1536, _ADA),
            _arch(90, "Hopper", (227, 228), 2048, _ADA),
            _arch(100, "Blackwell", (227, 228), 2048, _BLACKWELL),
            _arch(120, "Blackwell", (99, 100), 1536, _BLACKWELL),
        )
    }
)


@cache
def arch_of(sm: int) -> Arch:
    """The facts of `sm`; for an SM not in the table, those of the closest older one.

    A new chip must not stop a program, so this never raises: it takes the highest known SM of the
    same major version that is not above it, or else the newest older one, and says so in `source`.
    """
    if sm in ARCHS:
        return ARCHS[sm]
    older = [known for known in ARCHS if known <= sm]
    if not older:
        # Older than anything supported: only what every CUDA device has is safe.
        return replace(
            ARCHS[min(ARCHS)],
            sm=sm,
            family="unknown",
            shared_per_block=48 * KIB,
            shared_per_sm=48 * KIB,
            tensor_core_dtypes=(),
            source=f"sm_{sm} is older than every SM in the table: the minimum of any CUDA device",
        )
    base = ARCHS[max([known for known in older if known // 10 == sm // 10] or older)]
    return replace(
        base, sm=sm, source=f"sm_{sm} is not in the table: facts of sm_{base.sm} ({base.source})"
    )


# --- one GPU -------------------------------------------------------------------------------------

_UNITS = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU, real or pretended. Immutable and hashable, so that launch choices can be cached."""

    name: str  # the product name as the driver spells it
    sm: int
    sm_count: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float | None  # bytes/s, datasheet peak; None when unknown
    peak_rates: tuple[tuple[str, float], ...]  # read it through `peaks`
    source: str
    pretend: bool = False

    @property
    def peaks(self) -> Mapping[str, float]:
        """Dense operations per second by unit, at the rated boost clock; a missing unit is unknown.

        "fp32" is the CUDA cores; "fp16", "bf16", "fp8" and "int8" are the tensor cores, the float
        ones with FP32 accumulate. GeForce cards often clock above the rated boost, so a result a
        few percent above such a peak is not by itself an error.
        """
        return MappingProxyType(dict(self.peak_rates))

    @property
    def short_name(self) -> str:
        """What `pretend` takes and what files are called: "h200", "rtx4090", "sm_86"."""
        key = _key(self.name)
        return _SHORT_BY_KEY.get(key) or (self.name if self.name.startswith("sm_") else key)

    @property
    def arch(self) -> Arch:
        return arch_of(self.sm)

    @property
    def family(self) -> str:
        return self.arch.family

    @property
    def shared_per_block(self) -> int:
        return self.arch.shared_per_block

    @property
    def shared_per_sm(self) -> int:
        return self.arch.shared_per_sm

    @property
    def registers_per_sm(self) -> int:
        return self.arch.registers_per_sm

    @property
    def max_threads_per_sm(self) -> int:
        return self.arch.max_threads_per_sm

    def supports(self, dtype: str | torch.dtype) -> bool:
        """Whether the tensor cores multiply `dtype`: "fp8", "bfloat16", torch.float16, ..."""
        name = str(dtype).removeprefix("torch.")
        return _UNITS.get(name, name) in self.arch.tensor_core_dtypes


# --- the table of products -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    gpu: Gpu
    products: tuple[str, ...]  # further names the driver may give the same product
    aliases: tuple[str, ...]  # further short names


def _row(
    name: str,
    sm: int,
    sm_count: int,
    l2_mib: float,
    memory_gib: int,
    gbytes: float,
    tera: Mapping[str, float],
    source: str,
    products: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> _Row:
    gpu = Gpu(
        name=name,
        sm=sm,
        sm_count=sm_count,
        l2_bytes=int(l2_mib * MIB),
        memory_bytes=memory_gib * GIB,
        bandwidth=gbytes * 1e9,
        peak_rates=tuple((unit, rate * 1e12) for unit, rate in tera.items()),
        source=source,
    )
    return _Row(gpu, products, aliases)


def _tera(
    fp32: float, fp16: float, *, int8: float, bf16: bool = True, fp8: float | None = None
) -> dict[str, float]:
    # From Ampere on bf16 runs at the rate of fp16 with FP32 accumulate and tf32, which is twice as
    # wide, at half of it; Turing has neither.
    rates = {"fp32": fp32, "fp16": fp16, "fp8": fp8, "int8": int8}
    if bf16:
        rates |= {"bf16": fp16, "tf32": fp16 / 2}
    return {unit: rate for unit, rate in rates.items() if rate is not None}


_HALVED = "GeForce: FP32 accumulate runs at half the FP16-accumulate rate; FP32 accumulate given"
_SPARSE = "printed with sparsity, halved here"
_UNCHECKED = "not yet compared with that document line by line"

# Marketing "GB" of memory are GiB to within ECC and reserved space; a detected GPU uses the
# driver's number. Rates are TFLOP/s or TOP/s, dense.
_TABLE: Mapping[str, _Row] = MappingProxyType(
    {
        "t4": _row(
            "Tesla T4", 75, 40, 4, 16, 320, _tera(8.1, 65, bf16=False, int8=130),
            f"NVIDIA T4 datasheet; SMs and L2: Turing TU104 whitepaper; {_UNCHECKED}",
            products=("NVIDIA T4",),
        ),
        "rtx2080ti": _row(
            "NVIDIA GeForce RTX 2080 Ti", 75, 68, 5.5, 11, 616,
            _tera(14.2, 56.9, bf16=False, int8=227.7),
            f"NVIDIA Turing architecture whitepaper, Founders Edition clocks. {_HALVED}; "
            f"{_UNCHECKED}",
        ),
        "a100-40gb": _row(
            "NVIDIA A100-SXM4-40GB", 80, 108, 40, 40, 1555, _tera(19.5, 312, int8=624),
            "NVIDIA A100 datasheet, dense column; SMs and L2: A100 whitepaper",
        ),
        "a100-80gb": _row(
            "NVIDIA A100-SXM4-80GB", 80, 108, 40, 80, 2039, _tera(19.5, 312, int8=624),
            "NVIDIA A100 datasheet, dense column; SMs and L2: A100 whitepaper",
            aliases=("a100",),
        ),
        "a10": _row(
            "NVIDIA A10", 86, 72, 6, 24, 600, _tera(31.2, 125, int8=250),
            "NVIDIA A10 datasheet, dense column (FP32 accumulate at full rate)",
        ),
        "a10g": _row(
            "NVIDIA A10G", 86, 80, 6, 24, 600, {},
            "NVIDIA A10G: bandwidth and memory only; its compute peaks were not confirmed",
        ),
        "rtx3090": _row(
            "NVIDIA GeForce RTX 3090", 86, 82, 6, 24, 936, _tera(35.6, 71, int8=284),
            f"NVIDIA Ampere GA102 whitepaper, appendix A, dense. {_HALVED}",
        ),
        "a40": _row(
            "NVIDIA A40", 86, 84, 6, 48, 696, _tera(37.4, 149.7, int8=299.3),
            "NVIDIA A40 datasheet, dense column (FP32 accumulate at full rate)",
        ),
        "rtxa6000": _row(
            "NVIDIA RTX A6000", 86, 84, 6, 48, 768, _tera(38.7, 154.8, int8=309.7),
            "NVIDIA Ampere GA102 whitepaper, appendix C, dense (FP32 accumulate at full rate); "
            f"{_UNCHECKED}",
            aliases=("a6000",),
        ),
        "l4": _row(
            "NVIDIA L4", 89, 58, 48, 24, 300, _tera(30.3, 121, fp8=242.5, int8=242.5),
            f"NVIDIA L4 datasheet: tensor rates {_SPARSE}; SMs and L2: Ada whitepaper",
        ),
        "l40s": _row(
            "NVIDIA L40S", 89, 142, 96, 48, 864, _tera(91.6, 366.5, fp8=733, int8=733),
            "NVIDIA L40S datasheet; fp16 is half the printed sparse 733 (the dense column prints "
            "362.05, which does not match its own sparse one); SMs and L2: Ada whitepaper",
        ),
        "rtx4090": _row(
            "NVIDIA GeForce RTX 4090", 89, 128, 72, 24, 1008,
            _tera(82.6, 165.2, fp8=330.3, int8=660.6),
            f"NVIDIA Ada whitepaper, dense. {_HALVED}, for fp8 too",
        ),
        "h100": _row(
            "NVIDIA H100 80GB HBM3", 90, 132, 50, 80, 3350, _tera(67, 989, fp8=1979, int8=1979),
            f"NVIDIA H100 SXM datasheet: tensor rates {_SPARSE}; SMs and L2: H100 whitepaper",
            aliases=("h100-sxm",),
        ),
        "h100-pcie": _row(
            "NVIDIA H100 PCIe", 90, 114, 50, 80, 2000, _tera(51, 756, fp8=1513, int8=1513),
            f"NVIDIA H100 PCIe datasheet: tensor rates {_SPARSE}; SMs and L2: H100 whitepaper",
        ),
        "h200": _row(
            "NVIDIA H200", 90, 132, 60, 141, 4800, _tera(67, 989, fp8=1979, int8=1979),
            f"NVIDIA H200 datasheet: tensor rates {_SPARSE}; L2: 60 MiB as the driver reports on "
            "an H200 (the H100 whitepaper says 50 MB), so that pretending takes the same choices",
            aliases=("h200-sxm",),
        ),
        "gh200": _row(
            "NVIDIA GH200 480GB", 90, 132, 50, 96, 4000, _tera(67, 989, fp8=1979, int8=1979),
            f"NVIDIA GH200 datasheet, 96 GB HBM3 version: tensor rates {_SPARSE}; SMs and L2: "
            f"H100 whitepaper; {_UNCHECKED}",
        ),
        "b200": _row(
            "NVIDIA B200", 100, 148, 126.5, 180, 7700, _tera(75, 2250, fp8=4500, int8=4500),
            f"NVIDIA Blackwell datasheet, HGX B200 column: tensor rates {_SPARSE}; SMs and L2 as "
            "the driver reports (pytorch/ao#4002)",
        ),
        "rtx5090": _row(
            "NVIDIA GeForce RTX 5090", 120, 170, 96, 32, 1792,
            _tera(104.8, 209.5, fp8=419, int8=838),
            f"NVIDIA RTX Blackwell whitepaper, dense. {_HALVED}, for fp8 too",
        ),
        "rtxpro6000": _row(
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 128, 96, 1792,
            _tera(126, 503.8, fp8=1007.6, int8=1007.6),
            "NVIDIA RTX PRO Blackwell whitepaper, dense (FP32 accumulate at full rate)",
            aliases=("rtx-pro-6000-blackwell",),
        ),
    }
)  # fmt: skip


def _key(name: str) -> str:
    """A name without case, spaces, dashes and the vendor: what two spellings have in common."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


# Short names, aliases and product names share one namespace; a test checks that none collide.
_SHORT_BY_KEY: Mapping[str, str] = MappingProxyType(
    {
        _key(name): short
        for short, row in _TABLE.items()
        for name in (short, row.gpu.name, *row.products, *row.aliases)
    }
)
_SHORT_BY_PRODUCT: Mapping[str, str] = MappingProxyType(
    {_key(name): short for short, row in _TABLE.items() for name in (row.gpu.name, *row.products)}
)


# --- which GPU -----------------------------------------------------------------------------------


def known() -> tuple[str, ...]:
    """Short names of the GPUs in the table."""
    return tuple(_TABLE)


@cache
def pretend(name: str) -> Gpu:
    """A GPU that is not here: "h100", "RTX 4090", or a whole SM version, "sm_86".

    An SM version has no peaks. It takes the SM count, L2 and memory of the smallest product of
    that version in the table: choices that fill the smallest chip fill the others.
    """
    key = _key(name)
    if key in _SHORT_BY_KEY:
        return replace(_TABLE[_SHORT_BY_KEY[key]].gpu, pretend=True)
    digits = re.fullmatch(r"(?:sm)?(\d{2,3})[af]?", key)
    if digits and int(digits[1]) in ARCHS:
        return _generic(int(digits[1]))
    close = difflib.get_close_matches(key, [*_SHORT_BY_KEY, *(f"sm{sm}" for sm in ARCHS)], n=1)
    hint = ""
    if close:
        hint = f" Did you mean {_SHORT_BY_KEY.get(close[0], close[0].replace('sm', 'sm_'))!r}?"
    raise InputError(
        f"pretend: name is {name!r}; it must be one of {', '.join(known())}, "
        f"or an SM version: {', '.join(f'sm_{sm}' for sm in ARCHS)}.{hint}"
    )


def _generic(sm: int) -> Gpu:
    smallest = min((row.gpu for row in _TABLE.values() if row.gpu.sm == sm), key=_size)
    return replace(
        smallest,
        name=f"sm_{sm}",
        bandwidth=None,
        peak_rates=(),
        source=f"{ARCHS[sm].source}; SM count, L2 and memory of {smallest.name}",
        pretend=True,
    )


def _size(gpu: Gpu) -> tuple[int, int]:
    return gpu.sm_count, gpu.memory_bytes


@cache
def detect(index: int = 0) -> Gpu | None:
    """The CUDA device `index` of this process, or None without CUDA.

    What the driver reports wins over the table. The table gives bandwidth and peaks, and only to
    the very product: same name, same SM version, and as many SMs, since a partition of a GPU may
    carry the name of the whole.
    """
    if torch.version.hip or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None  # ROCm answers to torch.cuda too, with versions that are no SM
    props = torch.cuda.get_device_properties(index)
    sm = props.major * 10 + props.minor
    found = Gpu(
        name=props.name,
        sm=sm,
        sm_count=props.multi_processor_count,
        l2_bytes=props.L2_cache_size,
        memory_bytes=props.total_memory,
        bandwidth=None,
        peak_rates=(),
        source=f"driver; not in the table of products, no peaks; {arch_of(sm).source}",
    )
    short = _SHORT_BY_PRODUCT.get(_key(props.name))
    if short is None:
        return found
    row = _TABLE[short].gpu
    if (row.sm, row.sm_count) != (found.sm, found.sm_count):
        why = f"the table's {row.name} is sm_{row.sm} with {row.sm_count} SMs"
        return replace(found, source=f"driver; no peaks: {why}; {arch_of(sm).source}")
    return replace(
        found,
        bandwidth=row.bandwidth,
        peak_rates=row.peak_rates,
        source=f"driver; bandwidth and peaks: {row.source}",
    )


def interpreter() -> Gpu:
    """The GPU that launch choices are made for when kernels run in Triton's interpreter.

    It is an H200, so that a run on a CPU walks through the choices that an H200 takes: a test that
    passes there has covered the path that is timed here. It has 17 SMs only, so that programs which
    walk over the rows have several tiles to walk over with inputs that a CPU can afford; and not
    fewer, because two programs for each leave more partials than one step of their sum takes, 32.
    """
    name = "Triton's interpreter (with the launch choices of an H200)"
    return replace(pretend("h200"), name=name, sm_count=17)
