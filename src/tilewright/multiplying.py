"""What the arguments of a matrix product mean, which of them fit together, and what comes out.

torch.matmul's shapes: a vector in front is a row, a vector behind is a column, leading dims
broadcast. How float32 is multiplied is a word, `precision`, that attention has too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from tilewright import checks
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.gpu import ARCHS
from tilewright.spec import Args, BadInput

PRECISIONS = ("ieee", "tf32")
HALVES = (torch.float16, torch.bfloat16)
SMALLEST = 16  # rows, columns and depth of a block: one step of a tensor core
LARGEST = max(ARCHS.values(), key=lambda arch: arch.shared_per_block)

Tensor = torch.Tensor


# --- how float32 is multiplied -------------------------------------------------------------------


def precision_of(op: str, precision: str | None, dtype: torch.dtype) -> str:
    """As `precision` says, or as torch's own products are; halves know one way only."""
    if precision is not None:
        check_precision(op, precision)
    if dtype != torch.float32:
        return "ieee"
    return torchs_precision() if precision is None else precision


def check_precision(op: str, precision: Any) -> None:
    if not isinstance(precision, str) or precision not in PRECISIONS:
        names = ", ".join(repr(each) for each in PRECISIONS)
        fix = f"See help(tilewright.{op})."
        raise InputError(sentence(op, "precision", f"is {precision!r}", f"be one of {names}", fix))


def torchs_precision() -> str:
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # somebody set it by its newer name
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"


# to Dynamo, which guards what it reads: a graph is made anew when that changes
torchs_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def torch_multiplies(precision: str) -> Iterator[None]:
    """While this lasts, torch's products of float32 are of this precision, on a GPU."""
    if torchs_precision() == precision:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    except RuntimeError:  # set by its newer name, as above
        before_by_name = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            yield
        finally:
            torch.backends.cuda.matmul.fp32_precision = before_by_name
        return
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --- results -------------------------------------------------------------------------------------


def result_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """torch.matmul's, for shapes that fit."""
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    rows, columns = tuple(a[-2:-1]) if len(a) > 1 else (), tuple(b[-1:]) if len(b) > 1 else ()
    return (*batch, *rows, *columns)


def outputs(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, *_: Any) -> Tensor:
    return a.new_empty(result_shape(a.shape, b.shape), dtype=out_dtype or a.dtype)


def outputs_backward(grad: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_a, need_b = rest[-2:]
    return (
        a.new_empty(a.shape) if need_a else a.new_empty(0),
        b.new_empty(b.shape) if need_b else b.new_empty(0),
    )


def autocast(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None, precision: str, *rest: Any
) -> Args:
    """torch's rule for matmul: everything but float64 in autocast's dtype."""
    a, b = (x.to(_under_autocast(x)) for x in (a, b))
    return a, b, out_dtype, precision if a.dtype == torch.float32 else "ieee", *rest


def cast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which an operand is multiplied: its own, or what autocast gives it."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return _under_autocast(x) if on else x.dtype


def _under_autocast(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.get_autocast_dtype(x.device.type)


# --- gradients -----------------------------------------------------------------------------------


class Factors(NamedTuple):
    """A gradient is their product, summed to `shape`, in the shape of its operand."""

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]


def factors_of_da(grad: Tensor, a: Tensor, b: Tensor) -> Factors:
    """dA = dC Bᵀ."""
    grad, rows, columns = _matrices(grad, a, b)
    return Factors(grad, columns.mT, tuple(rows.shape))


def factors_of_db(grad: Tensor, a: Tensor, b: Tensor) -> Factors:
    """dB = Aᵀ dC. One matrix for all rows of a stack: these are one long sum."""
    grad, rows, columns = _matrices(grad, a, b)
    if prod(b.shape[:-2]) == 1:
        count, (deep, wide) = prod(rows.shape[:-1]), columns.shape[-2:]
        return Factors(rows.reshape(count, deep).mT, grad.reshape(count, wide), (deep, wide))
    return Factors(rows.mT, grad, tuple(columns.shape))


def _matrices(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors as matrices of one row or column."""
    if b.dim() == 1:
        grad, b = grad.unsqueeze(-1), b.unsqueeze(-1)
    if a.dim() == 1:
        grad, a = grad.unsqueeze(-2), a.unsqueeze(-2)
    return grad, a, b


# --- checks --------------------------------------------------------------------------------------


def check(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None, precision: str,
    block: tuple[int, ...] | None, deterministic: bool,
) -> None:  # fmt: skip
    for name, x in (("a", a), ("b", b)):
        checks.floating("matmul", name, x)
        checks.has_dims("matmul", name, x)
    checks.same_device("matmul", "b", b, "a", a)
    if a.dtype != b.dtype and cast_dtype(a) != cast_dtype(b):
        checks.same_dtype("matmul", "b", b, "a", a)
    _check_shapes(a, b)
    if out_dtype is not None:
        _check_out_dtype(a, out_dtype)
    check_precision("matmul", precision)
    checks.flag("matmul", "deterministic", deterministic)
    if block is not None:
        _check_block(block, cast_dtype(a))


def _check_shapes(a: Tensor, b: Tensor) -> None:
    shapes = f"has shape {tuple(b.shape)}"
    deep = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != deep:
        wants = f"have {a.shape[-1]} rows, as many as a has columns, {tuple(a.shape)}"
        fix = "Pass b.mT if its columns are the rows, or reshape one of them."
        raise InputError(sentence("matmul", "b", shapes, wants, fix))
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        wants = f"broadcast with a, {tuple(a.shape)}, in the dims before the last two"
        fix = "Slice one of them, or give it a dim of 1 there."
        raise InputError(sentence("matmul", "b", shapes, wants, fix)) from None


def _check_out_dtype(a: Tensor, out_dtype: Any) -> None:
    dtype = cast_dtype(a)
    known = (dtype, torch.float32) if dtype in HALVES else (dtype,)
    if out_dtype not in known:
        wants = f"be {' or '.join(map(str, known))}, for operands of {dtype}"
        fix = "Leave it out, or convert the result."
        raise DTypeError(sentence("matmul", "out_dtype", f"is {out_dtype!r}", wants, fix))


def block_bytes(block: Sequence[int], element_size: int) -> int:
    """Shared memory of one step: a tile of a and a tile of b."""
    rows, columns, depth = block
    return (rows + columns) * depth * element_size


def _check_block(block: Any, dtype: torch.dtype) -> None:
    def wrong(got: str, wants: str, fix: str) -> InputError:
        return InputError(sentence("matmul", "block", got, wants, fix))

    fix = "Pass (rows, columns, depth), such as (128, 128, 64)."
    if not isinstance(block, tuple | list) or len(block) != 3:
        raise wrong(f"is {block!r}", "be three numbers", fix)
    for size in block:
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or size < SMALLEST or size & (size - 1):
            raise wrong(f"is {tuple(block)}", f"be powers of two, {SMALLEST} or more", fix)
    needs = block_bytes(block, dtype.itemsize)
    sums, registers = 4 * block[0] * block[1], 4 * LARGEST.registers_per_sm
    where = f"of the largest SM, {LARGEST.sm}"
    if needs > LARGEST.shared_per_block:
        got = f"is {tuple(block)}, whose tiles of {dtype} take {needs} bytes of shared memory"
        raise wrong(got, f"fit the {LARGEST.shared_per_block} {where}", "Pass a smaller one.")
    if sums >= registers:
        got = f"is {tuple(block)}, whose float32 sums take {sums} bytes of registers"
        raise wrong(got, f"leave some of the {registers} {where}", "Pass a smaller one.")


def check_backward(grad: Tensor, a: Tensor, b: Tensor, *rest: Any) -> None:
    shape = result_shape(a.shape, b.shape)
    checks.same_shape("matmul_backward", "grad", grad, shape, "the product's")
    checks.same_device("matmul_backward", "grad", grad, "a", a)


# --- mistakes ------------------------------------------------------------------------------------


def _bad(name: str, change: Any, raises: type[Exception], *says: str) -> BadInput:
    """A call that is wrong in one way: `change(a, b)` gives (arguments, options)."""

    def call(matmul: Any, device: str) -> Any:
        a, b = torch.ones(4, 6, device=device), torch.ones(6, 8, device=device)
        arguments, options = change(a, b)
        return matmul(*arguments, **options)

    return BadInput(name, call, raises, ("matmul", *says))


ERRORS = (
    _bad(
        "inner dims that do not match",
        lambda a, b: ((a, b.mT), {}),
        *(InputError, "b has shape (8, 6)", "6 rows", "(4, 6)", "b.mT"),
    ),
    _bad(
        "vector of another length",
        lambda a, b: ((a, b[0]), {}),
        *(InputError, "b has shape (8,)", "6 rows", "(4, 6)"),
    ),
    _bad(
        "batch dims that do not broadcast",
        lambda a, b: ((a.expand(2, 4, 6), b.expand(3, 6, 8)), {}),
        *(InputError, "b has shape (3, 6, 8)", "broadcast", "(2, 4, 6)"),
    ),
    _bad("0-dim tensor", lambda a, b: ((a[0, 0], b), {}), InputError, "a is 0-dim", "a[None]"),
    _bad("0-dim b", lambda a, b: ((a, b[0, 0]), {}), InputError, "b is 0-dim", "b[None]"),
    _bad("not a tensor", lambda a, b: (([[1.0]], b), {}), DTypeError, "a is a list", "Tensor"),
    _bad("b that is no tensor", lambda a, b: ((a, 2.0), {}), DTypeError, "b is a float", "Tensor"),
    _bad(
        "integer tensors",
        lambda a, b: ((a.int(), b.int()), {}),
        *(DTypeError, "a has dtype int32", "a.float()"),
    ),
    _bad(
        "dtypes that differ",
        lambda a, b: ((a, b.half()), {}),
        *(DTypeError, "b has dtype float16", "a's, float32", "b.to(a.dtype)"),
    ),
    _bad(
        "b on another device",
        lambda a, b: ((a, b.to("meta")), {}),
        *(InputError, "b is on meta", "b.to(a.device)"),
    ),
    _bad(
        "unknown precision",
        lambda a, b: ((a, b), {"precision": "fp8"}),
        *(InputError, "precision is 'fp8'", "'ieee', 'tf32'"),
    ),
    _bad(
        "narrower result",
        lambda a, b: ((a, b), {"out_dtype": torch.float16}),
        *(DTypeError, "out_dtype is torch.float16", "be torch.float32", "convert"),
    ),
    _bad(
        "result of the other half",
        lambda a, b: ((a.half(), b.half()), {"out_dtype": torch.bfloat16}),
        *(DTypeError, "out_dtype is torch.bfloat16", "torch.float16 or torch.float32"),
    ),
    _bad(
        "block of two",
        lambda a, b: ((a, b), {"block": (64, 64)}),
        *(InputError, "block is (64, 64)", "three", "(128, 128, 64)"),
    ),
    _bad(
        "block that is no power of two",
        lambda a, b: ((a, b), {"block": (64, 48, 32)}),
        *(InputError, "block is (64, 48, 32)", "powers of two", "16"),
    ),
    _bad(
        "block that is too small",
        lambda a, b: ((a, b), {"block": [8, 64, 32]}),
        *(InputError, "block is (8, 64, 32)", "16 or more"),
    ),
    _bad(
        "block that is a number",
        lambda a, b: ((a, b), {"block": 64}),
        *(InputError, "block is 64", "three"),
    ),
    _bad(
        "block that no SM can hold",
        lambda a, b: ((a, b), {"block": (128, 256, 256)}),
        *(InputError, "(128, 256, 256)", "393216 bytes", str(LARGEST.shared_per_block)),
    ),
    _bad(
        "block of more sums than registers",
        lambda a, b: ((a, b), {"block": (256, 256, 16)}),
        *(InputError, "(256, 256, 16)", "262144 bytes of registers"),
    ),
    _bad(
        "block for another backend",
        lambda a, b: ((a, b), {"block": (64, 64, 32), "backend": "torch"}),
        *(InputError, "backend is 'torch'", "block", "'triton'"),
    ),
    _bad(
        "deterministic that is no flag",
        lambda a, b: ((a, b), {"deterministic": "yes"}),
        *(DTypeError, "deterministic is 'yes'", "True or False"),
    ),
    _bad(
        "unknown backend",
        lambda a, b: ((a, b), {"backend": "tritn"}),
        *(InputError, "tritn", "triton"),
    ),
)
