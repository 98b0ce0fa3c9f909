"""rope: the declaration and the public function."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tilewright import checks, debugging, library
from tilewright.errors import DTypeError, InputError, sentence
from tilewright.ops.rope import reference
from tilewright.shapes import LLAMA_3_8B, MODELS
from tilewright.spec import Args, Autograd, Backend, BadInput, Case, Cost, Op, Rounding, normal

HERE = "tilewright.ops.rope"
STYLES = {False: "halves", True: "pairs", "to_halves": "to_halves"}  # by `interleaved`
RANKS = {"bhsd": 4, "bshd": 4, "thd": 3}
HEAD_DIMS = {"bhsd": 1, "bshd": 2, "thd": 1}  # where heads are counted

Tensor = torch.Tensor


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    interleaved: bool | str = False,
    rotary_dim: int | None = None,
    layout: str = "bhsd",
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k in one launch; they may differ in their heads.

    layout: "bhsd" (batch, heads, tokens, head dim), "bshd", or "thd", sequences packed one after
    another. cos and sin: (rows, W), (batch or 1, tokens, W) or (batch or 1, 1, tokens, W), where W
    is rotary_dim (an entry for each element of the result) or half of it (for each pair), in
    float32 or the dtype of q. A token takes the row of its place in its sequence, or with
    `position_ids`, (tokens,) or (batch or 1, tokens), the row of that number.

    interleaved=False turns elements i and i + rotary_dim/2 (Llama), True 2i and 2i + 1 (GPT-J),
    "to_halves" reads these and writes those (DeepSeek). What lies beyond `rotary_dim` is passed
    through. Arithmetic is in float32, with one rounding; results lie in memory as q and k do.
    A position outside the tables gives NaN; `with tilewright.debug()` it is an error.

    >>> import torch, tilewright
    >>> q, cos, sin = torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 2), torch.ones(1, 2)
    >>> tilewright.rope(q, q, cos, sin, layout="thd")[0]
    tensor([[[-4.,  3.]]])
    """
    style = STYLES.get(interleaved) if isinstance(interleaved, (bool, str)) else None
    if style is None:
        fix = "See help(tilewright.rope)."
        got, wants = f"is {interleaved!r}", "be False, True or 'to_halves'"
        raise InputError(sentence("rope", "interleaved", got, wants, fix))
    if rotary_dim is None:
        checks.tensor("rope", "q", q)
        rotary_dim = q.shape[-1] if q.dim() else 0
    elif rotary_dim.__class__ is not int:
        rotary_dim = checks.index("rope", "rotary_dim", rotary_dim, "Pass an int.")
    for name, table in (("cos", cos), ("sin", sin)):
        if getattr(table, "requires_grad", False) and torch.is_grad_enabled():
            got, wants = "requires grad", "be a constant: rope has no gradient for its tables"
            raise InputError(sentence("rope", name, got, wants, f"Pass {name}.detach()."))
    # Dynamo cannot trace a ContextVar, and a graph reads nothing back
    if position_ids is not None and not torch.compiler.is_compiling() and debugging.active():
        check(q, k, cos, sin, position_ids, style, rotary_dim, layout)
        _check_positions(position_ids, cos)
    call = _in_place if inplace else _rope
    return call(q, k, cos, sin, position_ids, (style, rotary_dim, layout, backend))  # type: ignore[no-any-return]


def _in_place(q: Tensor, k: Tensor, cos: Any, sin: Any, ids: Any, rest: Args) -> Any:
    for name, x in (("q", q), ("k", k)):
        checks.floating("rope", name, x)
        checks.writable("rope", name, x)
    if torch.compiler.is_compiling():  # which knows how to functionalise copy_
        if q is k:
            raise checks.shared("rope", "q", "k")
        new_q, new_k = _rope(q, k, cos, sin, ids, rest)
        return q.copy_(new_q), k.copy_(new_k)
    checks.apart("rope", "q", q, "k", k)  # on each call: what a plan knows says nothing of it
    for name, table in (("cos", cos), ("sin", sin)):
        if isinstance(table, torch.Tensor) and table.layout == torch.strided:
            checks.apart("rope", "q", q, name, table)
            checks.apart("rope", "k", k, name, table)
    library.write_in_place(_rope_, (q, k), cos, sin, ids, rest)
    return q, k


def _check_positions(position_ids: Tensor, cos: Tensor) -> None:
    if not position_ids.numel() or position_ids.__class__ is not torch.Tensor:
        return  # a fake tensor has no values
    if position_ids.is_meta or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    least, most = (int(found) for found in torch.aminmax(position_ids))
    if least < 0 or most >= cos.shape[0]:
        got = f"has positions from {least} to {most}"
        wants = f"stay within the {cos.shape[0]} rows of cos and sin"
        fix = "Pass longer tables, or mend the positions."
        raise InputError(sentence("rope", "position_ids", got, wants, fix))


def check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    style: str, rotary_dim: int, layout: str,
) -> None:  # fmt: skip
    if not isinstance(layout, str) or layout not in RANKS:
        names = ", ".join(repr(name) for name in RANKS)
        fix = "See help(tilewright.rope)."
        raise InputError(sentence("rope", "layout", f"is {layout!r}", f"be one of {names}", fix))
    for name, x in (("q", q), ("k", k)):
        checks.floating("rope", name, x)
        if x.dim() != RANKS[layout]:
            got = f"has shape {tuple(x.shape)}"
            wants = f"have {RANKS[layout]} dims, as layout={layout!r} says"
            fix = "Reshape it, or name its layout."
            raise InputError(sentence("rope", name, got, wants, fix))
    sizes = list(q.shape)
    sizes[HEAD_DIMS[layout]] = k.shape[HEAD_DIMS[layout]]
    checks.same_shape("rope", "k", k, tuple(sizes), "q's but for the heads")
    checks.same_dtype("rope", "k", k, "q", q)
    checks.same_device("rope", "k", k, "q", q)
    if rotary_dim % 2 or not 0 <= rotary_dim <= q.shape[-1]:
        wants = f"be even, and at most the head dim, {q.shape[-1]}"
        fix = f"Pass rotary_dim={q.shape[-1] - q.shape[-1] % 2} to turn all there is."
        raise InputError(sentence("rope", "rotary_dim", f"is {rotary_dim}", wants, fix))
    _check_tables(q, cos, sin, position_ids, rotary_dim, layout)


def _check_tables(
    q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, layout: str
) -> None:
    tokens = q.shape[reference.token_dim(layout)]
    batch = None if layout == "thd" else q.shape[0]
    for name, table in (("cos", cos), ("sin", sin)):
        checks.floating("rope", name, table)
        checks.same_device("rope", name, table, "q", q)
        if table.dtype not in (q.dtype, torch.float32):
            got, wants = f"has dtype {_name(table)}", f"have q's, {_name(q)}, or float32"
            fix = f"Convert it: {name}.to(q.dtype)."
            raise DTypeError(sentence("rope", name, got, wants, fix))
    checks.same_shape("rope", "sin", sin, cos.shape, "that of cos")
    checks.same_dtype("rope", "sin", sin, "cos", cos)

    shape = tuple(cos.shape)
    width, half = f"{rotary_dim} or {rotary_dim // 2}", rotary_dim // 2
    dims = [2] if batch is None or position_ids is not None else [2, 3, 4]
    fits = len(shape) in dims and shape[-1] in (rotary_dim, half)
    if len(shape) > 2:
        fits = fits and shape[0] in (1, batch) and (len(shape) == 3 or shape[1] == 1)
    if not fits:
        wants = f"have shape (rows, {width})"
        if len(dims) > 1:
            some = f"{batch} or 1"
            wants += f", ({some}, tokens, {width}) or ({some}, 1, tokens, {width})"
        fix = "Slice or reshape it, and name rotary_dim if only a part of a head is turned."
        raise InputError(sentence("rope", "cos", f"has shape {shape}", wants, fix))
    if position_ids is None:
        if shape[-2] < tokens:
            got = f"has {shape[-2]} rows, {shape}"
            wants = f"have one for each of the {tokens} tokens"
            raise InputError(sentence("rope", "cos", got, wants, "Pass longer tables."))
        return
    checks.dense("rope", "position_ids", position_ids)
    if shape[0] == 0 and tokens:
        got, wants = f"has no rows, {shape}", "have the rows that position_ids names"
        raise InputError(sentence("rope", "cos", got, wants, "Pass tables."))
    if position_ids.dtype not in (torch.int64, torch.int32):
        got, wants = f"has dtype {_name(position_ids)}", "be int64 or int32"
        fix = "Convert it: position_ids.long()."
        raise DTypeError(sentence("rope", "position_ids", got, wants, fix))
    checks.same_device("rope", "position_ids", position_ids, "q", q)
    allowed = [(tokens,)] + ([] if batch is None else [(1, tokens), (batch, tokens)])
    if tuple(position_ids.shape) not in allowed:
        wants = "have shape " + " or ".join(str(size) for size in dict.fromkeys(allowed))
        got, fix = f"has shape {tuple(position_ids.shape)}", "Pass a position for each token."
        raise InputError(sentence("rope", "position_ids", got, wants, fix))


def _name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def check_in_place(q: Tensor, k: Tensor, *rest: Any) -> None:
    check(q, k, *rest)
    for name, x in (("q", q), ("k", k)):
        checks.no_overlap("rope", name, x)


def check_backward(grad_q: Tensor, grad_k: Tensor, cos: Tensor, *rest: Any) -> None:
    for name, x in (("grad_q", grad_q), ("grad_k", grad_k)):
        checks.floating("rope_backward", name, x)
        checks.same_device("rope_backward", name, x, "cos", cos)


def results(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _result(q), _result(k)


def _result(x: Tensor) -> Tensor:
    """Dense, its heads' elements side by side, its other dims in the order of x."""
    last = x.dim() - 1
    order = list(range(last))
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        order.sort(key=lambda i: x.stride(i), reverse=True)
    return torch.empty_permuted(x.shape, (*order, last), dtype=x.dtype, device=x.device)


def inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """q of dims["shape"]; of two dims, tokens and columns, it makes heads of a packed batch."""
    return _arguments(dims, dtype, device, rng, lambda size: normal(size, rng), _angles)


def exact_inputs(dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any) -> Args:
    """Small integers and quarter turns."""

    def integers(size: Any) -> Tensor:
        return torch.randint(-8, 9, size, generator=rng).float()

    def quarters(size: Any, rng: Any) -> tuple[Tensor, Tensor]:
        turns = torch.randint(0, 4, size, generator=rng)
        return (turns - 1) * (turns % 2 - 1.0), (2.0 - turns) * (turns % 2)

    return _arguments(dims, dtype, device, rng, integers, quarters)


def _angles(size: Any, rng: Any) -> tuple[Tensor, Tensor]:
    angle = 3 * normal(size, rng)
    return angle.cos(), angle.sin()


def _arguments(
    dims: Mapping[str, Any], dtype: torch.dtype, device: Any, rng: Any, values: Any, tables: Any
) -> Args:
    shape, layout = dims["shape"], dims.get("layout")
    if len(shape) == 2:
        tokens, columns = shape
        dim = next((d for d in range(min(columns, 128), 0, -1) if columns % d == 0), 1)
        shape = (tokens, columns // dim, dim)
    layout = layout or ("thd" if len(shape) == 3 else "bhsd")
    place = HEAD_DIMS[layout]
    of_k = list(shape)
    of_k[place] = dims.get("kv_heads") or max(shape[place] // 4, 1)
    rotary = dims.get("rotary")
    rotary = shape[-1] - shape[-1] % 2 if rotary is None else rotary
    width = rotary if dims.get("table", "full") == "full" else rotary // 2
    tokens, batch = shape[reference.token_dim(layout)], shape[0]
    leading = {2: (), 3: (batch,), 4: (batch, 1)}[dims.get("table_dims", 2)]
    kind = dims.get("table_dtype") or dtype
    style, positions = dims.get("style", "halves"), dims.get("positions")

    def heads(size: Any) -> Tensor:
        x: Tensor = values(_swapped(size) if dims.get("from_bshd") else size)
        x = x.to(dtype).to(device)
        return x.transpose(1, 2) if dims.get("from_bshd") else x

    rows = tokens + 3 if positions else tokens  # a table may be longer than the sequence
    repeats = width == rotary and not dims.get("unequal", False)
    drawn = tables((*leading, rows, rotary // 2 if repeats else width), rng)
    if repeats:  # as models' tables do
        drawn = tuple(_twice(table, reference.PAIRS_OUT[style]) for table in drawn)
    cos, sin = (table.to(kind).to(device) for table in drawn)
    ids = None
    if positions:
        size = (tokens,) if layout == "thd" else (batch, tokens)
        drawn = normal(size, rng).abs() * rows
        ids = drawn.clamp(max=max(rows - 1, 0)).to(positions).to(device)
    return heads(shape), heads(tuple(of_k)), cos, sin, ids, style, rotary, layout


def _twice(table: Tensor, pairs: bool) -> Tensor:
    """Each angle for both elements of its pair."""
    return table.repeat_interleave(2, -1) if pairs else torch.cat((table, table), -1)


def _swapped(size: Any) -> tuple[int, ...]:
    b, h, t, d = size
    return b, t, h, d


def sample(rng: random.Random) -> dict[str, Any]:
    dim = rng.choice([2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 33, 130, 256])
    layout = rng.choice(["bhsd", "bshd", "thd"])
    room = max(4096 // dim, 1)
    heads, batch = rng.randint(1, min(6, room)), rng.randint(1, 3)
    tokens = rng.randint(1, max(min(room // (heads * batch), 24), 1))
    shapes = {
        "bhsd": (batch, heads, tokens, dim),
        "bshd": (batch, tokens, heads, dim),
        "thd": (tokens, heads, dim),
    }
    positions = rng.choice([None, None, torch.int64, torch.int32])
    table_dims = 2 if positions or layout == "thd" else rng.choice([2, 3, 4])
    even = dim - dim % 2
    return {
        "shape": shapes[layout],
        "layout": layout,
        "kv_heads": rng.choice([1, heads, rng.randint(1, 6)]),
        "style": rng.choice(["halves", "pairs", "to_halves"]),
        "rotary": rng.choice([None, None, even // 4 * 2, min(16, even)]),
        "table": rng.choice(["full", "narrow"]),
        "table_dtype": rng.choice([None, torch.float32]),
        "table_dims": table_dims,
        "positions": positions,
    }


def tolerance(rounding: Rounding, outputs: Args, *args: Any) -> tuple[Tensor, ...]:
    """Two products and their difference in float32, then one rounding."""
    return _bounds(rounding, outputs, args, back=False)


def tolerance_backward(rounding: Rounding, outputs: Args, *args: Any) -> tuple[Tensor, ...]:
    return _bounds(rounding, outputs, args, back=True)


def _bounds(rounding: Rounding, outputs: Args, args: Args, *, back: bool) -> tuple[Tensor, ...]:
    def reach(a: Tensor, b: Tensor, cos: Any, sin: Any) -> tuple[Tensor, Tensor]:
        first, second = (1, 0) if back else (0, 1)
        return a * cos[0] + b * sin[first], b * cos[1] + a * sin[second]

    q, k, cos, sin, ids, style, rotary_dim, layout = args
    sizes, tables = (q.abs(), k.abs()), (cos.abs(), sin.abs())
    reaches = reference.rotated(sizes, tables, ids, style, rotary_dim, layout, reach, back=back)
    pairs = zip(outputs, reaches, strict=True)
    return tuple(
        y.abs() * rounding.u_out + 2 * rounding.u32 * reach.nan_to_num(0.0) + 2 * rounding.tiny
        for y, reach in pairs
    )


def saved(kept: Args, dtype: Any, rest: Args, needs: Mapping[str, bool]) -> Args:
    return *kept, *rest


def _edges() -> Iterator[Case]:
    for dim in (2, 6, 16, 31, 64, 80, 128, 192, 256, 512):
        yield Case(f"head-{dim}", {"shape": (1, 3, 5, dim)})
    for style in ("pairs", "to_halves"):
        for table in ("full", "narrow"):
            yield Case(f"{style}-{table}", {"shape": (2, 3, 7, 64), "style": style, "table": table})
        partial = {"shape": (2, 7, 3, 96), "layout": "bshd", "style": style, "rotary": 32}
        yield Case(f"{style}-partial", partial)
    thd = {"shape": (19, 5, 64), "layout": "thd"}
    yield Case("half-table", {"shape": (2, 3, 7, 128), "table": "narrow"})
    yield Case("partial", {"shape": (2, 3, 7, 80), "rotary": 64})
    yield Case("partial-odd", {"shape": (2, 3, 7, 37), "rotary": 12, "style": "pairs"})
    yield Case("nothing-turned", {"shape": (2, 3, 7, 16), "rotary": 0})
    yield Case("thd", {**thd, "positions": torch.int64})
    yield Case("thd-int32", {**thd, "positions": torch.int32, "style": "pairs"})
    yield Case("bshd", {"shape": (2, 9, 6, 128), "layout": "bshd", "kv_heads": 2})
    yield Case("more-k-heads", {"shape": (2, 9, 2, 64), "layout": "bshd", "kv_heads": 11})
    yield Case("from-bshd", {"shape": (2, 6, 9, 128), "from_bshd": True})
    for style in ("halves", "pairs", "to_halves"):  # tables whose pairs do not share an angle
        yield Case(f"unequal-{style}", {"shape": (1, 3, 4, 64), "style": style, "unequal": True})
    yield Case("batched-table", {"shape": (3, 4, 5, 64), "table_dims": 3})
    yield Case("float32-table", {"shape": (3, 4, 5, 64), "table_dims": 4, **FLOAT32_TABLE})
    yield Case("many-tokens", {"shape": (1, 1, 300, 64), "positions": torch.int64})
    yield Case("many-heads", {"shape": (1, 70, 2, 64), "kv_heads": 33})


FLOAT32_TABLE = {"table_dtype": torch.float32}
LLAMA = {"kv_heads": LLAMA_3_8B.kv_heads}


def _by_model(group: str, batches: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Case]:
    """As models call it: heads of a projection (batch, tokens, heads, dim), transposed."""
    seen: set[tuple[int, int, int]] = set()
    for m in MODELS.values():
        size = (m.heads, m.kv_heads, m.head_dim)
        if group != "model" and size in seen:
            continue
        seen.add(size)
        for b, t in ((b, t) for b in batches for t in counts):
            name = m.name if group == "model" else f"{m.name}, {b * t} tokens"
            dims = {"shape": (b, m.heads, t, m.head_dim), "kv_heads": m.kv_heads}
            yield Case(name, {**dims, "from_bshd": True}, group)


def _sweep() -> Iterator[Case]:
    """Llama-3-8B's heads, dense, both conventions, both orders."""
    heads, dim = LLAMA_3_8B.heads, LLAMA_3_8B.head_dim
    for t in (8192, 512, 2048, 32_768):
        for layout, shape in (("bhsd", (1, heads, t, dim)), ("bshd", (1, t, heads, dim))):
            for style in ("halves", "pairs"):
                dims = {"shape": shape, **LLAMA, "layout": layout, "style": style}
                yield Case(f"T{t} {layout} {style}", dims, "sweep")


CASES = (
    *_edges(),
    *_by_model("model", (1,), (2048,)),
    *_by_model("decode", (1, 16, 128), (1,)),
    *_by_model("prefill", (1,), (512, 2048, 8192)),
    *_sweep(),
)


def _given(device: str, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q (also k), cos and sin of the smallest call."""
    q, table = torch.ones(1, heads, 4, 8, device=device), torch.ones(4, 8, device=device)
    return q, table, table


def _bad(name: str, change: Any, raises: type[Exception], *says: str) -> BadInput:
    """A call that is wrong in one way: `change(q, cos, sin)` gives (arguments, options)."""

    def call(rope: Any, device: str) -> Any:
        arguments, options = change(*_given(device))
        return rope(*arguments, **options)

    return BadInput(name, call, raises, ("rope", *says))


ERRORS = (
    _bad(
        "tables too short",
        lambda q, c, s: ((q, q, c[:3], s[:3]), {}),
        *(InputError, "cos", "3 rows", "4 tokens", "longer"),
    ),
    _bad(
        "odd rotary_dim",
        lambda q, c, s: ((q, q, c, s), {"rotary_dim": 5}),
        *(InputError, "rotary_dim is 5", "even", "8"),
    ),
    _bad(
        "rotary_dim above the head dim",
        lambda q, c, s: ((q, q, c, s), {"rotary_dim": 10}),
        *(InputError, "rotary_dim is 10", "head dim, 8"),
    ),
    _bad(
        "table of another width",
        lambda q, c, s: ((q, q, c[:, :6], s[:, :6]), {}),
        *(InputError, "cos", "(4, 6)", "8 or 4", "rotary_dim"),
    ),
    _bad(
        "sin of another shape",
        lambda q, c, s: ((q, q, c, s[:, :4]), {}),
        *(InputError, "sin", "(4, 4)", "(4, 8)"),
    ),
    _bad(
        "table of another dtype",
        lambda q, c, s: ((q.half(), q.half(), c.bfloat16(), s.bfloat16()), {}),
        *(DTypeError, "cos", "bfloat16", "float16", "float32", "cos.to(q.dtype)"),
    ),
    _bad(
        "table that requires grad",
        lambda q, c, s: ((q, q, c.clone().requires_grad_(), s), {}),
        *(InputError, "cos", "requires grad", "detach"),
    ),
    _bad(
        "in place on a tensor that needs grad",
        lambda q, c, s: ((q.clone().requires_grad_(), q.clone(), c, s), {"inplace": True}),
        *(InputError, "q", "requires grad", "inplace=False"),
    ),
    _bad(
        "in place on an expanded tensor",
        lambda q, c, s: ((q[:, :1].expand(1, 3, 4, 8), q.clone(), c, s), {"inplace": True}),
        *(InputError, "q", "overlap itself", "inplace=False"),
    ),
    _bad(
        "in place on one tensor twice",
        lambda q, c, s: ((q, q, c, s), {"inplace": True}),
        *(InputError, "q", "may share memory with k", "inplace=False"),
    ),
    _bad(
        "unknown layout",
        lambda q, c, s: ((q, q, c, s), {"layout": "sbhd"}),
        *(InputError, "layout", "'sbhd'", "'bhsd'"),
    ),
    _bad(
        "q of too few dims",
        lambda q, c, s: ((q[0], q[0], c, s), {}),
        *(InputError, "q", "(2, 4, 8)", "4 dims", "layout"),
    ),
    _bad(
        "k of other tokens",
        lambda q, c, s: ((q, q[:, :, :3], c, s), {}),
        *(InputError, "k", "(1, 2, 3, 8)", "(1, 2, 4, 8)"),
    ),
    _bad(
        "k of another dtype",
        lambda q, c, s: ((q, q.half(), c, s), {}),
        *(DTypeError, "k", "float16", "float32"),
    ),
    _bad(
        "unknown interleaving",
        lambda q, c, s: ((q, q, c, s), {"interleaved": "halves"}),
        *(InputError, "interleaved", "'halves'", "'to_halves'"),
    ),
    _bad(
        "positions of another shape",
        lambda q, c, s: ((q, q, c, s), {"position_ids": torch.arange(3, device=q.device)}),
        *(InputError, "position_ids", "(3,)", "(4,)"),
    ),
    _bad(
        "positions that are no integers",
        lambda q, c, s: ((q, q, c, s), {"position_ids": torch.zeros(4, device=q.device)}),
        *(DTypeError, "position_ids", "float32", "int64"),
    ),
    _bad(
        "positions and a table of each batch",
        lambda q, c, s: (
            (q, q, c[None], s[None]),
            {"position_ids": torch.arange(4, device=q.device)},
        ),
        *(InputError, "cos", "(1, 4, 8)", "(rows, 8 or 4)"),
    ),
    _bad(
        "integer tensor",
        lambda q, c, s: ((q.int(), q.int(), c, s), {}),
        *(DTypeError, "q", "int32", "q.float()"),
    ),
    _bad("not a tensor", lambda q, c, s: (([1.0], q, c, s), {}), DTypeError, "q", "list"),
    _bad(
        "k on another device",
        lambda q, c, s: ((q, q.to("meta"), c, s), {}),
        *(InputError, "k", "meta", "k.to(q.device)"),
    ),
    _bad(
        "unknown backend",
        lambda q, c, s: ((q, q, c, s), {"backend": "tritn"}),
        *(InputError, "backend", "tritn", "triton"),
    ),
)


def _called(backend: Any, q: Any, k: Any, cos: Any, sin: Any, ids: Any, *rest: Any) -> Any:
    style, rotary_dim, layout = rest
    interleaved: Any = next(key for key, value in STYLES.items() if value == style)
    options = {"rotary_dim": rotary_dim, "layout": layout, "backend": backend}
    return rope(q, k, cos, sin, position_ids=ids, interleaved=interleaved, **options)


def _backends(entry: str, name: str) -> tuple[Backend, ...]:
    cuda, triton = f"{HERE}.cuda_impl", f"{HERE}.triton_impl"
    return (
        Backend("cuda", "cuda", f"{cuda}:{entry}", limits=f"{cuda}:refuses"),
        Backend("triton", "triton", f"{triton}:{entry}", limits=f"{triton}:refuses"),
        Backend("torch", "torch", f"{HERE}.reference:{name}", dtypes=None),
    )


REST = "Tensor cos, Tensor sin, Tensor? position_ids, str style, int rotary_dim, str layout"

BACKWARD = Op(
    name="rope_backward",
    summary="gradients of rope: the inverse rotation",
    schema=f"(Tensor grad_q, Tensor grad_k, {REST}) -> (Tensor, Tensor)",
    reference=reference.rope_backward,
    outputs=results,
    check=check_backward,
    backends=_backends("prepare_backward", "rope_backward"),
    tolerance=tolerance_backward,
    layout_argument="grad_q",
)

IN_PLACE = Op(
    name="rope_",
    summary="rope written over q and k",
    schema=f"(Tensor(a!) q, Tensor(b!) k, {REST}) -> ()",
    reference=reference.rope_in_place,
    outputs=lambda *_: None,
    check=check_in_place,
    backends=_backends("prepare_in_place", "rope_in_place"),
    public=rope,
    tolerance=tolerance,
    layout_argument="q",
)

OP = Op(
    name="rope",
    summary="rotary position embedding of q and k in one launch",
    schema=f"(Tensor q, Tensor k, {REST}) -> (Tensor, Tensor)",
    reference=reference.rope,
    outputs=results,
    check=check,
    backends=_backends("prepare", "rope"),
    public=rope,
    inputs=inputs,
    exact_inputs=exact_inputs,
    sample=sample,
    tolerance=tolerance,
    cases=CASES,
    cost=lambda dims, dtype: Cost(3.0 * math.prod(dims["shape"])),
    as_called=_called,
    autograd=Autograd(BACKWARD, ("cos", "sin", "position_ids"), saved, (("q",), ("k",))),
    in_place=IN_PLACE,
    layout_argument="q",
    ranks=(3, 4),
    variants=({}, {"style": "pairs"}, {"style": "to_halves", "rotary": 32}),
    errors=ERRORS,
)

OPS = (OP,)
_rope = library.register_with_backward(OP)
_rope_ = library.register(IN_PLACE)
