"""Triton's interpreter, without the work that it does again at each call of a helper.

A kernel in the interpreter is Python. Before it runs, Triton puts functions on NumPy arrays in the
place of those of `triton.language`, and does so once more at every call of a jitted helper, tl.sum
among them: it looks through a thousand names to find that all have been replaced. That is half of
the time of a run. Here a helper finds the language as its kernel left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def language_patched_once() -> Iterator[None]:
    """While this lasts, the language is replaced at the launch of a kernel and not again in it."""
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)  # 3.6 ... 3.9
    if patch is None:
        yield
        return
    interpreter._patch_lang = _unless_patched(patch)
    try:
        yield
    finally:
        interpreter._patch_lang = patch


def _unless_patched(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import triton.language as tl
    from triton.runtime import interpreter

    named: dict[Any, list[Any]] = {}  # the modules of the language that a function can name

    def patch_unless_patched(fn: Any) -> Any:
        if fn not in named:
            named[fn] = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        # what has been replaced is no builtin of the language any more
        if named[fn] and not any(tl.core.is_builtin(module.load) for module in named[fn]):
            return interpreter._LangPatchScope()  # nothing was changed: nothing to restore
        return patch(fn)

    return patch_unless_patched
