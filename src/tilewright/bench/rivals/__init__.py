"""Whom a user would pick instead: eager torch, torch.compile, the vendor's kernel, and peers.

The first three stand beside every op. A peer is a package that may be installed or not; its module
here is one small adapter that calls it with an op's arguments.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewright.spec import Args, Op

ALWAYS = ("eager", "compile", "vendor")  # no speed-up is shown without them
PEERS = {  # name -> the module it needs
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


@dataclass(frozen=True)
class Rival:
    """`call` takes the op's arguments; `refuses` says why it cannot take these, or nothing.

    If it `binds`, `call` prepares what is no part of a call (packs weights) and returns the call.
    """

    call: Callable[..., Any]
    missing: str = ""
    refuses: Callable[..., str] = serves_all
    binds: bool = False

    def bind(self, args: Args) -> Callable[[], Any]:
        return self.call(*args) if self.binds else lambda: self.call(*args)


def of(op: Op) -> dict[str, Rival]:
    """Every rival of an op by name; of the peers only those that have such an op."""
    reference = op.reference
    found = {"eager": Rival(reference), "compile": Rival(Compiled(reference))}
    vendor = op.baselines.get("vendor")
    missing = "" if vendor else f"neither torch nor the GPU's maker ships a kernel for {op.name}"
    found["vendor"] = Rival(vendor or reference, missing)
    for name in PEERS:
        rival = peer(name, op.name)
        if rival is not None:
            found[name] = rival
    return found


def peer(name: str, op: str) -> Rival | None:
    """A peer's version of an op, or None if it has none."""
    adapter: Any = importlib.import_module(f"{__name__}.{name}")
    if op not in adapter.CALLS:
        return None
    refuses = adapter.REFUSES.get(op, serves_all)
    return Rival(adapter.CALLS[op], _not_importable(PEERS[name]), refuses, op in adapter.BINDS)


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
            if not _not_importable(PEERS[name]):
                module = importlib.import_module(PEERS[name])
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
