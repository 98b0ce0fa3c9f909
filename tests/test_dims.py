"""Dims as one word: what is written is read back, and what nobody would read is refused."""

from __future__ import annotations

import random

import pytest
import torch

from tilewright import dims
from tilewright.errors import InputError
from tilewright.ops import registry

OPS = registry()


def test_short_and_long_are_the_same() -> None:
    short = dims.parse(OPS["rms_norm"], "2048x4096,casting=llama", "bench")
    assert short == {"shape": (2048, 4096), "casting": "llama"}
    assert short == dims.parse(OPS["rms_norm"], "casting=llama, shape=2048x4096", "bench")


@pytest.mark.parametrize("op", OPS)
def test_every_declared_case_comes_back(op: str) -> None:
    rng = random.Random(0)
    drawn = [OPS[op].sample(rng) for _ in range(20)]
    for given in (*(case.dims for case in OPS[op].cases), *drawn):
        if 0 not in given["shape"]:
            parsed = dims.parse(OPS[op], dims.as_text(given), "bench")
            # as text: a case may hold NaN, which equals nothing
            assert {k: repr(v) for k, v in parsed.items()} == {k: repr(v) for k, v in given.items()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no k=v"),
        ("2048x", "'2048x' is no k=v"),
        ("-1x4", "no k=v"),
        ("rows=5", "needs a shape"),
        ("shape=", "'shape=' is no k=v"),
        ("shape=a", "needs a shape"),
        ("0x4", "at least 1"),
        ("8x8,8x8", "no k=v"),
        ("8x8,shape=8x8", "twice"),
        ("8x8,colour=red", "no 'colour'"),
        ("8x8,dim=7", "softmax cannot take it"),
        ("9999999999x9999999999", "so many elements"),
    ],
)
def test_what_is_malformed_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as told:
        dims.parse(OPS["softmax"], text, "bench")
    message = str(told.value)
    assert says in message
    assert message.startswith(f"bench: --shape is {text!r}")
    assert "\n" not in message


def test_values_have_types() -> None:
    found = dims.parse(OPS["softmax"], "8x8,scale=0.5,dtype=float32,masked=true,dim=0", "bench")
    assert found == {
        **{"shape": (8, 8), "scale": 0.5, "dtype": torch.float32, "masked": True, "dim": 0}
    }
