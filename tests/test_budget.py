"""How many binaries a user's shapes can ask for: at most twelve per op, backend, dtype and flags,
but for a kernel that has a reason.

Each one costs a compilation in somebody's first step. The launchers are asked, on meta tensors, for
a pretended H200, what they would compile; `reach.describe` says when two answers are one binary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tilewright import dispatch, gpu, library, ops, shapes
from tilewright.matrix.reach import describe
from tilewright.spec import FLOATS, Args, Backend, Op, as_tuple
from tilewright.toolkit import recording

LIMIT = 12
# The width of a tile, its consumers and its parts along K are template parameters: the point of
# this kernel. NVRTC takes half a second for each, once for all processes. What layers of models
# ask for is counted in test_matmul_routes.
MORE = {("matmul", "cuda"): 20}
H200 = gpu.pretend("h200")

Layout = Callable[..., torch.Tensor]


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# What users do to a [rows, n] tensor without thinking; the slices start off a 16-byte boundary.
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda r, n, dtype: _empty(r, n, dtype=dtype),
    "padded": lambda r, n, dtype: _empty(r, n + 64, dtype=dtype)[:, 32 : 32 + n],
    "shifted": lambda r, n, dtype: _empty(r, n + 3, dtype=dtype)[:, 1 : 1 + n],
    "offset": lambda r, n, dtype: _empty(r * n + 1, dtype=dtype)[1:].view(r, n),
    "step": lambda r, n, dtype: _empty(2 * r, n, dtype=dtype)[::2],
    "fused": lambda r, n, dtype: _empty(r, 3, n, dtype=dtype)[:, 1],
    "heads": lambda r, n, dtype: _empty(r, 2, n, dtype=dtype).transpose(0, 1),
    "expanded": lambda r, n, dtype: _empty(1, n, dtype=dtype).expand(r, n),
    "transposed": lambda r, n, dtype: _empty(n, r, dtype=dtype).t(),
}


@lru_cache(maxsize=1)
def calls() -> list[tuple[int, int, str]]:
    """(rows, columns, layout): a thousand random ones, then the models' sizes."""
    rng = random.Random(0)
    found = []
    for _ in range(1000):
        rows, columns = rng.randint(1, 5000), int(2 ** rng.uniform(0, 18))
        layout = "contiguous" if rng.random() < 0.5 else rng.choice(list(LAYOUTS))
        found.append((rows, columns, layout))
    for model in shapes.MODELS.values():
        for size in (model.hidden, model.intermediate, model.head_dim, model.vocab, model.qkv_size):
            found += [(tokens, size, "contiguous") for tokens in (1, 16, 2048)]
    return found


Flags = dict[str, Any]

# Flag sets: what selects another kernel rather than another shape of the same one.
FORWARD: dict[str, dict[str, Flags]] = {
    "relu": {"": {}},
    "relu_": {"": {}},
    "softmax": {"": {}, "to float32": {"dtype": torch.float32}, "dim 0": {"dim": 0}},
    "rms_norm": {
        "": {},
        "no weight": {"weight": False},
        "llama": {"casting": "llama"},
        "llama mixed": {"casting": "llama", "weight_dtype": torch.float32},
    },
}
FORWARD["add_rms_norm"] = FORWARD["rms_norm"]
FORWARD["layer_norm"] = {
    "": {},
    "no weight": {"weight": False},
    "no bias": {"bias": False},
    "mixed": {"weight_dtype": torch.float32},
}
FORWARD["rms_norm_swiglu"] = {
    "": {},
    "no weight": {"weight": False},
    "mixed": {"weight_dtype": torch.float32},
}
FORWARD["rms_norm_fp8"] = {
    "": {},
    "no weight": {"weight": False},
    "gemma": {"offset": 1.0},
    "e5m2": {"format": "e5m2"},
    "mixed": {"weight_dtype": torch.float32},
    "group": {"scaling": "group"},
    "tensor": {"scaling": "tensor"},
}
FORWARD["layer_norm_fp8"] = {
    "": {},
    "no weight": {"weight": False},
    "no bias": {"bias": False},
    "mixed": {"weight_dtype": torch.float32},
    "group": {"scaling": "group"},
    "tensor": {"scaling": "tensor"},
}
FORWARD["rope"] = {
    "": {},
    "pairs": {"style": "pairs"},
    "to_halves": {"style": "to_halves"},
    "half table": {"table": "half"},
    "float32 table": {"table_dtype": torch.float32},
    "partial": {"partial": True},
    "positions": {"positions": True},
}
FORWARD["rope_"] = FORWARD["rope"]
FORWARD["swiglu"] = {"": {}, "chunks": {"chunks": True}}
FORWARD["swiglu_packed"] = {"": {}}
FORWARD["geglu"] = {"": {}, "erf": {"approximate": "none"}}
FORWARD["geglu_packed"] = {"": {}, "erf": {"approximate": "none"}}
# How the operands lie is known when a kernel is compiled, and so is what a gradient is for: each of
# the two is a product whose operands lie in another way.
FORWARD["matmul"] = {
    "": {"need": "a"},
    "gradient of b": {"need": "b"},
    "few columns": {"need": "a", "columns": 24},
    "by columns": {"need": "a", "way": "columns"},
    "b by columns": {"need": "a", "b": "columns"},
    "to float32": {"need": "a", "dtype": torch.float32},
    "tf32": {"need": "a", "precision": "tf32"},
    "tf32, b by columns": {"need": "a", "precision": "tf32", "b": "columns"},
}
# Every option is a kernel of its own, and so is every width of a head.
FORWARD["attention"] = {
    "": {},
    "heads of 64": {"dim": 64},
    "heads of 256": {"dim": 256},
    "other values": {"value_dim": 64},
    "causal": {"causal": True},
    "window": {"window": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
    "bias": {"bias": True},
    "packed": {"packed": True},
    "lengths": {"lengths": True},
    "lse": {"lse": True},
}


def _gated_args(name: str, x: torch.Tensor, flags: Flags) -> Args:
    more = (flags.get("approximate", "tanh"),) if name.startswith("geglu") else ()
    if name.endswith("_packed"):  # every other row length is made even
        return x[..., : x.shape[-1] // 2 * 2], "gate_up", *more
    if flags.get("chunks"):
        return *_empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype).chunk(2, -1), *more
    return x, torch.empty_like(x, memory_format=torch.contiguous_format), *more


HEAD_DIMS = (128, 192, 96, 80, 64, 48, 32, 16, 8, 4, 2, 1)


def _rope_args(x: torch.Tensor, flags: Flags) -> Args:
    """Rows are tokens: short ones are a head, longer ones as many as they hold of a usual size."""
    n = x.shape[-1]
    dim = n if n <= 512 else next(d for d in HEAD_DIMS if n % d == 0)
    q = x.unflatten(-1, (-1, dim))
    k = _empty(*q.shape[:-2], max(q.shape[-2] // 4, 1), dim, dtype=x.dtype)
    rotary = dim // 4 * 2 if flags.get("partial") else dim // 2 * 2
    width = rotary // 2 if flags.get("table") == "half" else rotary
    tokens = x.shape[-2]
    cos, sin = (_empty(tokens, width, dtype=flags.get("table_dtype", x.dtype)) for _ in "cs")
    ids = _empty(tokens, dtype=torch.int64) if flags.get("positions") else None
    layout = "thd" if q.dim() == 3 else "bshd"
    return q, k, cos, sin, ids, flags.get("style", "halves"), rotary, layout


def _attention_args(x: torch.Tensor, flags: Flags) -> Args:
    """Rows are tokens of as many heads as they hold; x is already as wide as whole heads are."""
    dim = flags.get("dim", ATTENTION_DIM)
    q = x.unflatten(-1, (-1, dim))
    q, layout = q if q.dim() == 4 else q[None], "bshd"
    batch, tokens, heads, _ = q.shape
    keys = tokens if heads % 2 else tokens % 64 + 1  # as many, or few enough for one tile
    kv_heads = heads // 4 if heads % 4 == 0 else heads
    lengths: list[Any] = [None, None, None]
    if flags.get("packed"):
        q, layout, batch = q.flatten(0, 1), "thd", 3
        lengths = [_empty(batch + 1, dtype=torch.int32) for _ in "qk"] + [None]
    elif flags.get("lengths"):
        lengths[-1] = _empty(batch, dtype=torch.int32)
    sizes = (batch, keys) if layout == "bshd" else (keys,)
    k = _empty(*sizes, kv_heads, dim, dtype=x.dtype)
    v = _empty(*sizes, kv_heads, flags.get("value_dim", dim), dtype=x.dtype)
    sinks = _empty(heads, dtype=x.dtype) if flags.get("sinks") else None
    slopes = _empty(heads, dtype=torch.float32) if flags.get("alibi") else None
    bias = _empty(1, heads, tokens, keys, dtype=x.dtype) if flags.get("bias") else None
    left, right = (9 if flags.get("window") else -1), (0 if flags.get("causal") else -1)
    mask = (left, right, False, flags.get("softcap", 0.0))
    return q, k, v, sinks, slopes, bias, *lengths, layout, 0.1, *mask, tokens, keys, "ieee"


ATTENTION_DIM = 128


def _width(name: str, columns: int, flags: Flags) -> int:
    """Columns of a call: attention's make whole heads."""
    dim = flags.get("dim", ATTENTION_DIM)
    return min(max(columns // dim, 1), 64) * dim if name == "attention" else columns


def _matmul_args(x: torch.Tensor, flags: Flags) -> Args:
    """A call whose a lies by rows or, if the flags say so, by columns."""
    if (x.stride(-1) != 1) != (flags.get("way") == "columns"):
        swapped = torch.empty_like(x.mT, memory_format=torch.contiguous_format)
        x = swapped.mT if flags.get("way") else torch.empty_like(x).contiguous()
    n = flags.get("columns", 4096)
    b = _empty(x.shape[-1], n, dtype=x.dtype)
    b = _empty(n, x.shape[-1], dtype=x.dtype).t() if flags.get("b") == "columns" else b
    return x, b, flags.get("dtype"), flags.get("precision", "ieee"), None, False


def _forward_args(name: str, x: torch.Tensor, flags: Flags) -> Args:
    if name == "matmul":
        return _matmul_args(x, flags)
    if name == "attention":
        return _attention_args(x, flags)
    if name in ("rope", "rope_"):
        return _rope_args(x, flags)
    if name in ("swiglu", "swiglu_packed", "geglu", "geglu_packed"):
        return _gated_args(name, x, flags)
    if name in ("relu", "relu_"):
        return (x,)
    if name == "softmax":
        return x, flags.get("dim", x.dim() - 1), flags.get("dtype")
    # one weight out of a packed buffer for each odd row length, as a state dict may hold it
    n, shift = x.shape[-1], x.shape[-1] % 2
    packed = _empty(n + shift, dtype=flags.get("weight_dtype", x.dtype))[shift:]
    weight = packed if flags.get("weight", True) else None
    bias = packed if flags.get("bias", True) else None
    options = flags.get("format", "e4m3"), flags.get("scaling", "row")
    if name == "rms_norm_swiglu":
        return x, torch.empty_like(x), weight, 1e-6
    if name == "layer_norm":
        return x, weight, bias, 1e-5
    if name == "layer_norm_fp8":
        return x, weight, bias, 1e-5, *options
    if name == "rms_norm_fp8":
        return x, weight, 1e-6, flags.get("offset", 0.0), *options
    residual = (torch.empty_like(x),) if name == "add_rms_norm" else ()
    return x, *residual, weight, 1e-6, 0.0, flags.get("casting", "torch")


def _op(name: str) -> Op:
    op = ops.registry()[name.removesuffix("_")]
    if not name.endswith("_"):
        return op
    assert op.in_place is not None
    return op.in_place


def _backward_args(op: Op, args: Args, like: torch.Tensor, flags: Flags) -> Args:
    """As autograd calls it, with an incoming gradient of the input's own strange layout."""
    outputs = as_tuple(op.outputs(*args))
    if op.name == "attention":
        grad = args[0] if args[0].shape == outputs[0].shape else outputs[0]
        return op.backward_call(args, outputs, (grad, outputs[1] if flags.get("lse") else None))
    if op.name == "rope":
        return op.backward_call(args, outputs, (args[0], outputs[1]))
    if op.name == "matmul":
        return op.backward_call(args, outputs, outputs, {flags["need"]: True})
    grads = tuple(like[..., : o.shape[-1]] if o.dtype == like.dtype else o for o in outputs)
    return op.backward_call(args, outputs, grads)


def _requests(op: Op, backend: Any, args: Args) -> list[Any]:
    tensor = next(a for a in args if isinstance(a, torch.Tensor))
    if dispatch.refusal(backend, op, args, tensor, H200, pretending=True) is not None:
        return []
    with recording.recording() as requests:
        dispatch.load(backend.entry)(H200, *args)
    return requests


REFUSED = {
    "cuda": ("dim 0", "llama mixed", "mixed", "tf32", "tf32, b by columns"),
    "naive": ("heads of 256", "sinks", "softcap", "alibi", "bias", "packed", "lengths"),
    "gluon": ("alibi", "bias"),
    # of tf32, the tensor cores want rows of the first operand and columns of the second
    "forward gluon": ("tf32",),
    "backward gluon": ("tf32, b by columns",),
    "skinny": ("tf32",),
    # like `b by columns`; a K of one, which lies both ways, would be its thirteenth
    "triton": ("tf32, b by columns",),
}  # by technology, backend, or phase and backend; see test_dispatch


def _budgets() -> Iterator[Any]:
    for name, flag_sets in FORWARD.items():
        forward = _op(name)
        for backward in (False, True):
            if backward and forward.autograd is None:
                continue
            op = forward.autograd.op if backward and forward.autograd else forward
            for backend in op.backends:
                phase = "backward" if backward else "forward"
                names = {backend.technology, backend.name, f"{phase} {backend.name}"}
                refused = {flags for key in names for flags in REFUSED.get(key, ())}
                for flags in flag_sets:
                    if backend.technology == "torch" or flags in refused:
                        continue
                    parts = (name, phase, backend.name, flags)
                    yield pytest.param(
                        name, backward, backend.name, flags, id=" ".join(p for p in parts if p)
                    )


def _dtypes(name: str, backend: Backend, flags: str) -> list[torch.dtype]:
    """Every dtype without flags, and one with them; float32 of matmul's gluon is tf32 alone."""
    if "precision" in FORWARD[name][flags]:
        return [torch.float32]
    assert backend.dtypes is not None
    is_tf32 = (name, backend.name) == ("matmul", "gluon")
    taken = [d for d in FLOATS if d in backend.dtypes and not (is_tf32 and d == torch.float32)]
    return taken if flags == "" else [torch.bfloat16]


@pytest.mark.drawn(seconds=0.3)
@pytest.mark.parametrize(("name", "backward", "backend", "flags"), list(_budgets()))
def test_shapes_compile_few_binaries(name: str, backward: bool, backend: str, flags: str) -> None:
    forward = _op(name)
    op = forward.autograd.op if backward and forward.autograd else forward
    chosen = op.backend(backend)
    flags_of = FORWARD[name][flags]
    assert chosen is not None
    for dtype in _dtypes(name, chosen, flags):
        binaries: dict[str, Any] = {}
        for rows, columns, layout in calls()[:: 4 if name == "attention" and flags else 1]:
            x = LAYOUTS[layout](rows, _width(name, columns, flags_of), dtype=dtype)
            if name.endswith("_") and layout == "expanded":
                continue
            args = _forward_args(name, x, flags_of)
            if backward:
                args = _backward_args(forward, args, x, flags_of)
            for request in _requests(op, chosen, args):
                # a launch may ask for more or less shared memory of the same binary
                binary = describe(replace(request, dynamic_shared=0))
                binaries.setdefault(binary, (rows, columns, layout, request.constants))
        assert binaries, "nothing was asked for: this test would pass on anything"
        reached = "\n".join(map(str, binaries.values()))
        assert len(binaries) <= MORE.get((name, backend), LIMIT), (
            f"{dtype}: {len(binaries)} binaries, first reached by\n{reached}"
        )


def test_every_op_with_kernels_has_a_budget() -> None:
    rules = [_op(name).autograd for name in FORWARD]
    assert set(library.calls) == {*FORWARD, *(rule.op.name for rule in rules if rule)}


def test_a_launcher_that_specialises_on_the_shape_would_be_caught() -> None:
    """The count sees constants, options and integer widths; not the value of an integer."""
    from tilewright.ops.relu import triton_impl

    def described(n: int, scalar: int) -> str:
        request = recording.Request(
            "triton", triton_impl._relu, (torch.float32, scalar), (("N", n),), ()
        )
        return describe(request)

    assert described(1, 5) == described(1, 6)
    assert described(1, 5) != described(2, 5)
    assert described(1, 5) != described(1, 2**40)
