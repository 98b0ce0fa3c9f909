"""The registry: every folder here that holds an `op.py`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from tilewright.spec import Op


@lru_cache(maxsize=1)
def registry() -> dict[str, Op]:
    """Every public op by name, in alphabetical order of folders."""
    found: dict[str, Op] = {}
    for folder in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg):
        module = importlib.import_module(f"{__name__}.{folder}.op")
        found.update((op.name, op) for op in module.OPS)
    return found


def every_op() -> dict[str, Op]:
    """The registry and the backward ops that hang from it."""
    found = dict(registry())
    for op in registry().values():
        if op.autograd is not None:
            found[op.autograd.op.name] = op.autograd.op
    return found
