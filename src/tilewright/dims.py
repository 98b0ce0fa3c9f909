"""The dims of a case as one word of a command line, and back: "2048x4096,casting=llama".

`parse` refuses what the op would not read: a misspelt dim would otherwise change nothing, and the
result would be taken for something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.spec import Args, Op, on_meta

MOST_ELEMENTS = 2**60  # what torch can describe, whatever the dtype
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_SIZES = re.compile(r"\d+(x\d+)*")
_WORDS = {"true": True, "false": False, "none": None}


def parse(op: Op, text: str, command: str) -> dict[str, Any]:
    """k=v,... with "2048x4096" for short where it stands for shape=2048x4096."""

    def malformed(why: str) -> InputError:
        return InputError(
            f"{command}: --shape is {text!r}: {why}. Write k=v,... such as shape=2048x4096."
        )

    words = [word.strip() for word in text.split(",")]
    if _SIZES.fullmatch(words[0]):
        words[0] = f"shape={words[0]}"
    dims: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not (key.isidentifier() and value):
            raise malformed(f"{word!r} is no k=v")
        if key in dims:
            raise malformed(f"{key} stands there twice")
        dims[key] = _sizes(value) if key == "shape" and _SIZES.fullmatch(value) else _value(value)
    shape = dims.get("shape")
    if not isinstance(shape, tuple) or min(shape) < 1:
        raise malformed("it needs a shape of sizes of at least 1")
    if math.prod(shape) >= MOST_ELEMENTS:
        raise malformed("no tensor has so many elements")
    try:
        op.check(*meta_inputs(op, dims, torch.bfloat16))
    except Exception as e:
        raise malformed(f"{op.name} cannot take it: {str(e).splitlines()[0]}".rstrip(".")) from e
    return dims


def as_text(dims: Mapping[str, Any]) -> str:
    """What `parse` turns back into these dims."""
    rest = [f"{name}={_word(value)}" for name, value in dims.items() if name != "shape"]
    return ",".join([_word(dims["shape"]), *rest])


def meta_inputs(op: Op, dims: Mapping[str, Any], dtype: torch.dtype) -> Args:
    """The op's inputs without data; raises if there is a dim that nobody reads."""
    assert op.inputs is not None
    watched = _Watched(dims)
    with torch.device("meta"):  # no generator: a meta tensor takes no numbers
        args = on_meta(tuple(op.inputs(watched, dtype, "meta", None)))
    unread = [name for name in dims if name not in watched.read]
    if unread:
        raise InputError(f"there is no {unread[0]!r}; it reads {', '.join(watched.read)}")
    return args


class _Watched(dict[str, Any]):
    """Dims that remember which of them were asked for."""

    def __init__(self, dims: Mapping[str, Any]) -> None:
        super().__init__(dims)
        self.read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read[name] = None
        return super().get(name, default)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _word(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "x".join(str(size) for size in value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    if _SIZES.fullmatch(text):
        return _sizes(text)
    found = DTYPES.get(text, getattr(torch, text, None))
    return found if isinstance(found, torch.dtype) else text
