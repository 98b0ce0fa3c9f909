"""Triton's interpreter, without the work that it does again and again.

A kernel in the interpreter is Python. Before it runs, Triton puts functions on NumPy arrays in the
place of those of `triton.language`, and does so once more at every call of a jitted helper, tl.sum
among them: it looks through a thousand names to find that all have been replaced. That is half of
the time of a run. Here a helper finds the language as its kernel left it.

A third of the rest goes into types: every value of a kernel gets one, whose shape is checked and
whose name is put together anew, and whose NumPy twin is looked up in a table that is built for the
purpose. Here that is done once for each type.

Every sum and product of 32-bit integers is made once more in 64 bits, to see whether it overflowed,
and nobody is told unless kernels are debugged. Here it is not. And operands of one shape, which are
most, are not fitted to one another dim by dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_repetition() -> Iterator[None]:
    """While this lasts, a kernel is interpreted in a quarter of the time, to the same effect."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    with (
        _wrapped(interpreter, "_patch_lang", _unless_patched),
        _wrapped(interpreter, "_get_np_dtype", _kept_by_scalar),
        _wrapped(TritonSemantic, "binary_op_sanitize_overflow_impl", _if_debugged),
        _wrapped(TritonSemantic, "broadcast_impl_value", _unless_alike),
        _wrapped(tl.block_type, "__init__", _kept_by_shape),
        _wrapped(tl.tensor, "__init__", _kept_by_type),
    ):
        yield


@contextmanager
def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """While this lasts, `owner` has `wrap` of what it had, if it has one (Triton 3.6 ... 3.9)."""
    plain = getattr(owner, name, None)
    if plain is None:
        yield
        return
    setattr(owner, name, wrap(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


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


def _if_debugged(check: Callable[..., None]) -> Callable[..., None]:
    def check_if_debugged(self: Any, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    return check_if_debugged


def _unless_alike(fit: Callable[..., Any]) -> Callable[..., Any]:
    def fit_unless_alike(self: Any, a: Any, b: Any) -> Any:
        one, other = a.type, b.type
        if one is other or (one.is_block() and other.is_block() and one.shape is other.shape):
            return a, b  # types of one shape share it: _kept_by_shape
        return fit(self, a, b)

    return fit_unless_alike


def _kept_by_scalar(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def look_up(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in known:
            known[name] = numpy_type(type_)
        return known[name]

    return look_up


def _kept_by_shape(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_or_copy(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key in known:
            vars(self).update(known[key], element_ty=element_ty)
            return
        make(self, element_ty, shape)
        known[key] = dict(vars(self))

    return make_or_copy


def _kept_by_type(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, dict[str, Any]] = {}  # the shape, as constants of the language, and the size

    def make_or_copy(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)
            return
        make(self, handle, type)
        known[type.name] = {**vars(self), "handle": None}

    return make_or_copy
