"""Whom a user would pick instead: eager torch, torch.compile, the vendor's kernel, and peers.

The first three stand beside every op. A peer is a package that may be installed or not; its module
here is one small adapter that calls it with an op's arguments. Where a package has several ways to
compute an op, each is a peer of its own: "sdpa-flash" is the way "flash" of the adapter `sdpa`.
Without a way that one leaves the choice to torch, and is the vendor's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from tilewright.attending import HEADS, TOKENS
from tilewright.bench.timing import Setting, Within
from tilewright.spec import Args, Op, as_tuple

ALWAYS = ("eager", "compile", "vendor")  # no speed-up is shown without them
PEERS = ("sdpa-flash", "sdpa-cudnn", "liger", "quack", "fa4", "gemlite")
MODULES = {  # adapter -> the module it needs
    "sdpa": "torch.nn.attention",
    "liger": "liger_kernel",
    "quack": "quack",
    "fa4": "flash_attn.cute",  # FlashAttention-4
    "gemlite": "gemlite",
}
DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "fa4": "flash-attn-4",
    "gemlite": "gemlite",
}
NAMES = (*ALWAYS, *PEERS)


def serves_all(*args: Any) -> str:
    return ""


def last_dim_only(x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> str:
    """What a softmax without dim and dtype refuses."""
    if dim % x.dim() != x.dim() - 1:
        return "it reduces the last dim only"
    return "" if dtype in (None, x.dtype) else "it has no dtype argument"


class Attention(NamedTuple):
    """The arguments of our attention, by name."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    alibi_slopes: Any
    bias: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seq_lens_k: Any
    layout: str
    scale: float
    left: int  # below 0: no border
    right: int
    top_left: bool
    softcap: float
    max_q: int
    max_k: int
    precision: str

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    @property
    def is_square(self) -> bool:
        """As many queries as keys in every sequence, as far as shapes tell."""
        tokens = TOKENS[self.layout]
        return self.layout != "thd" and bool(self.q.shape[tokens] == self.k.shape[tokens])

    @property
    def is_grouped(self) -> bool:
        """Several query heads share a key head."""
        heads = HEADS[self.layout]
        return bool(self.q.shape[heads] != self.k.shape[heads])


@dataclass(frozen=True)
class Rival:
    """`call` takes the op's arguments; `refuses` says why it cannot take these, or nothing.

    If it `binds`, `call` prepares what is no part of a call (packs weights) and returns the call.
    A `setting` is what a program enters before its first call to get this rival and no other.
    """

    call: Callable[..., Any]
    missing: str = ""
    refuses: Callable[..., str] = serves_all
    binds: bool = False
    setting: Setting | None = None

    def bind(self, args: Args) -> Callable[[], Any]:
        call = self.call(*args) if self.binds else lambda: self.call(*args)
        return Within(self.setting, call) if self.setting else call

    def __call__(self, *args: Any) -> Any:
        return self.bind(args)()


def of(op: Op) -> dict[str, Rival]:
    """Every rival of an op by name; of the peers only those that have such an op."""
    reference = _as_returned(op)
    found = {"eager": Rival(reference), "compile": Rival(Compiled(reference))}
    missing = f"neither torch nor the GPU's maker ships a kernel for {op.name}"
    declared = op.baselines.get("vendor")
    vendor = Rival(declared) if declared else peer("sdpa", op.name)
    found["vendor"] = vendor or Rival(reference, missing)
    for name in PEERS:
        rival = peer(name, op.name)
        if rival is not None:
            found[name] = rival
    return found


def _as_returned(op: Op) -> Callable[..., Any]:
    """The reference, cut down to what a user gets: a compiler then leaves out the rest."""
    reference, count = op.reference, op.returned
    return (lambda *args: as_tuple(reference(*args))[:count]) if count else reference


def peer(name: str, op: str) -> Rival | None:
    """A peer's version of an op, or None if it has none."""
    module, _, way = name.partition("-")
    adapter: Any = importlib.import_module(f"{__name__}.{module}")
    if op not in adapter.CALLS:
        return None
    return Rival(
        adapter.CALLS[op],
        _not_importable(MODULES[module]),
        adapter.REFUSES.get(op, serves_all),
        op in adapter.BINDS,
        adapter.WAYS[way] if way else None,
    )


def _not_importable(package: str) -> str:
    try:
        importlib.import_module(package)
    except Exception as e:  # a peer's package may fail in its own way
        if isinstance(e, ModuleNotFoundError) and f"{package}.".startswith(f"{e.name}."):
            return f"{package} is not installed"
        return f"{package} cannot be imported: {type(e).__name__}: {str(e)[:200]}"
    return ""


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # a bare checkout may still tell
            if not _not_importable(MODULES[name]):
                module = importlib.import_module(MODULES[name])
                found[name] = str(getattr(module, "__version__", "of unknown version"))
    return found


class Compiled:
    """torch.compile of a function, made at the first call and kept for this subject.

    Dynamo gives up after a few shapes of one function and then runs it eagerly without a word, and
    makes shapes symbolic before that. Both would flatter us: every subject compiles afresh, for its
    own shapes. Inductor's cache on disk makes that cheap.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            torch._dynamo.reset()
            self.compiled = torch.compile(partial(self.function), dynamic=False, fullgraph=True)
        return self.compiled(*args)
