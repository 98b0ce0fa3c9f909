"""What the declarations of norms quantised to fp8 share: cases, and mistakes of their users."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright import fp8
from tilewright.errors import DTypeError, InputError
from tilewright.shapes import EDGE_COLUMNS, MODELS, PLAN_COLUMNS, SWEEP_COLUMNS, by_tokens
from tilewright.spec import BadInput, Case

# the largest magnitude, in a tile that is not the last of its program
PEAK = {"bad": 1000.0, "bad_row": 0}
_BAD = {"zero-row": 0.0, "nan": math.nan, "inf": math.inf}

CASES = (
    *(
        Case(f"{name}-{scaling}", {"shape": (5, 384), "bad": bad, "scaling": scaling})
        for name, bad in _BAD.items()
        for scaling in fp8.SCALINGS
    ),
    *(
        Case(f"{name}-{scaling}-{form}", {"shape": shape, "scaling": scaling, "format": form})
        for name, shape in (("wide", (2, 33_000)), ("wide-odd", (2, 40_001)), ("whole", (3, 2048)))
        for scaling in fp8.SCALINGS
        for form in fp8.FORMATS
    ),
    # whole packs of 16 bytes, next to where a plan changes; rows of a group that are none
    *(
        Case(f"packs-{n}", {"shape": (5, n), "scaling": fp8.SCALINGS[i % 3]})
        for i, n in enumerate((8, 24, 136, 520, 1032, 2056, 4104, 16_392, 32_776))
    ),
    *(Case(f"eps-zero-{s}", {"shape": (5, 248), "eps": 0.0, "scaling": s}) for s in fp8.SCALINGS),
    # more rows than an H200 has programs
    Case("walk-h200", {"shape": (40_000, 48)}, "plan"),
    Case("walk-h200-group", {"shape": (33_000, 1100), "scaling": "group"}, "plan"),
    Case("walk-h200-tensor", {"shape": (33_000, 300), "scaling": "tensor"}, "plan"),
    Case("widest", {"shape": (1, 262_144)}),
    Case("widest-group", {"shape": (1, 262_144), "scaling": "group"}),
    *(Case(f"tile-{n}", {"shape": (2, n)}) for n in (64, 256, 2048, 4096, 8192, 16384, 32768)),
    *(Case(f"group-{n}", {"shape": (2, n), "scaling": "group"}) for n in (256, 4096, 8192, 16384)),
    *(Case(f"tensor-{n}", {"shape": (2, n), "scaling": "tensor"}) for n in (64, 4096, 8192, 16384)),
    *(
        Case(f"columns-{n}", {"shape": (3, n), "scaling": fp8.SCALINGS[i % 3]})
        for i, n in enumerate(EDGE_COLUMNS)
    ),
    *(Case(m.name, {"shape": (2048, m.hidden)}, "model") for m in MODELS.values()),
    *(
        Case(f"Llama-3-8B, {s}", {"shape": (2048, 4096), "scaling": s}, "model")
        for s in ("group", "tensor")
    ),
    *(Case(n, {"shape": (t, c)}, g) for g, n, t, c in by_tokens(lambda m: m.hidden)),
    *(
        Case(f"plan-{n}-{s}", {"shape": (5, n), "scaling": s}, "plan")
        for n in PLAN_COLUMNS
        for s in fp8.SCALINGS
    ),
    *(Case(f"sweep-{n}", {"shape": (2**27 // n, n)}, "sweep") for n in SWEEP_COLUMNS),
    *(
        Case(f"sweep-{n}-group", {"shape": (2**27 // n, n), "scaling": "group"}, "sweep")
        for n in SWEEP_COLUMNS
    ),
)


def one_dtype(input: torch.Tensor, *rest: Any) -> str | None:
    """Why a kernel of a single dtype cannot serve a norm's arguments, or None."""
    for name, other in zip(("weight", "bias"), rest, strict=False):
        if isinstance(other, torch.Tensor) and other.dtype != input.dtype:
            return f"{name} is {other.dtype} and input {input.dtype}; it takes one dtype for all"
    return None


def ones(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 8, device=device), torch.ones(8, device=device)


def mistakes(op: str) -> tuple[BadInput, ...]:
    """Bad inputs of the norm `op`, of every argument but those that only one of them has."""
    return (
        BadInput(
            "unknown format",
            lambda norm, device: norm(ones(device)[0], 8, format="fp8"),
            InputError,
            (op, "format", "'fp8'", "'e4m3', 'e5m2'", "format='e4m3'"),
        ),
        BadInput(
            "a dtype for a format",
            lambda norm, device: norm(ones(device)[0], 8, format=torch.float8_e4m3fn),
            InputError,
            (op, "format", "torch.float8_e4m3fn", "'e4m3'"),
        ),
        BadInput(
            "unknown scaling",
            lambda norm, device: norm(ones(device)[0], 8, scaling="column"),
            InputError,
            (op, "scaling", "'column'", "'row', 'group', 'tensor'", "scaling='row'"),
        ),
        BadInput(
            "negative eps",
            lambda norm, device: norm(ones(device)[0], 8, eps=-1e-6),
            InputError,
            (op, "eps", "-1e-06", "0 or more"),
        ),
        BadInput(
            "integer tensor",
            lambda norm, device: norm(ones(device)[0].int(), 8),
            DTypeError,
            (op, "input", "int32", "float16", "input.float()"),
        ),
        BadInput(
            "an input that is fp8 already",
            lambda norm, device: norm(ones(device)[0].to(torch.float8_e4m3fn), 8),
            DTypeError,
            (op, "input", "float8_e4m3fn", "bfloat16"),
        ),
        BadInput(
            "wrong last dim",
            lambda norm, device: norm(ones(device)[0], (7,)),
            InputError,
            (op, "normalized_shape", "(7,)", "(2, 8)", "input.shape[-1:]"),
        ),
        BadInput(
            "weight of another size",
            lambda norm, device: norm(ones(device)[0], (8,), ones(device)[1][:4]),
            InputError,
            (op, "weight", "(4,)", "(8,)"),
        ),
    )
