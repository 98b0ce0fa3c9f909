"""python -m tilewright.verify.touch: which calls it plans, and that it runs them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import dispatch
from tilewright.ops import registry
from tilewright.spec import Case
from tilewright.verify import Context, touch
from tilewright.verify.runner import backends_on

REPOSITORY = Path(__file__).parents[1]

TOUCH = """
import itertools, sys, torch
from tilewright.dims import meta_inputs
from tilewright.ops import registry
from tilewright.spec import FLOATS, as_tuple
from tilewright.verify import touch
from tilewright.verify.context import edge_cases

def asked(op, args, backend):  # of tensors with values
    outputs, wanted = as_tuple(op.outputs(*args)), touch._asked(op, args, backend)
    if op.autograd is not None:
        call = op.backward_call(args, outputs, outputs)
        wanted |= touch._asked(op.autograd.op, call, "triton")
    return wanted

for name in sys.argv[1:]:
    planned = set()
    for one in touch.calls([(name, "triton")], "cpu", smallest=True):
        assert one.new and not one.new & planned, one
        planned |= one.new
    context = one.context
    cases = [case for case in edge_cases(context) if touch.size(case) <= 2**16]
    for case, dtype, aligned in itertools.product(cases, FLOATS, (True, False)):
        one = touch.Call(context, case, dtype, aligned)
        args = one.laid(context.inputs(case.dims, dtype, 0))
        if context.serves(args):
            missing = asked(context.op, args, "triton") - planned
            assert not missing, (str(one), missing)
    print(name)

few = list(touch.calls([("matmul", "skinny")], "cpu", smallest=True))
print(*sorted({str(one.launch) for one in few if one.launch}))
touch.run(next(one for one in few if one.launch))
op, seen, blank = registry()["rms_norm"], set(), touch.Blank("cpu")
for n in (64, 60, 64, 2000):
    args = meta_inputs(op, {"shape": (3, n)}, torch.float16)
    found = touch.binaries(op, args, "triton", blank)
    print(len(found - seen))
    seen |= found
"""


@pytest.mark.drawn(seconds=9.4, family="slow")
def test_touch_asks_for_every_binary_once() -> None:
    """What a sanitizer watches; in the interpreter, where a binary is a launch choice."""
    ops = [name for name in registry() if "triton" in backends_on(name, "cuda")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TOUCH, *ops]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    # forward, backward and the sum of partials; 60 columns lose the 16-byte loads, but not the sum
    launches = [
        "skinny:128x4",
        "skinny:64x3",
        "skinny:64x4",
    ]  # 64x6 is what calls without a table take
    assert done.stdout.split() == [*ops, *launches, "3", "2", "0", "2"], done.stderr[-1000:]


def test_touch_runs_both_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    op, phases = registry()["rms_norm"], []
    both = dispatch.load

    def noted(entry: str) -> Any:
        phases.append(entry)
        return both(entry)

    monkeypatch.setattr(dispatch, "load", noted)
    context = Context(op, "torch", "cpu", False, 0, 0)
    touch.run(touch.Call(context, Case("some", {"shape": (3, 64)}), torch.float16, aligned=False))
    assert [entry.split(":")[1] for entry in phases] == ["rms_norm", "rms_norm_backward"]


@pytest.mark.parametrize("smallest", [False, True], ids=["declared", "smallest"])
def test_touch_can_begin_with_the_smallest(smallest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(_: Any, dims: Any, *__: Any) -> tuple[torch.Tensor]:
        sizes.append(math.prod(dims["shape"]))
        return (torch.empty(2, 8, device="meta"),)

    monkeypatch.setattr(touch, "meta_inputs", noted)
    monkeypatch.setattr(Context, "serves", lambda *_: False)  # nothing is run
    assert list(touch.calls([("softmax", "cuda_v1")], "cpu", smallest)) == []
    assert (sizes == sorted(sizes)) is smallest


def test_the_parts_of_a_touch_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call is one part's."""
    context = Context(registry()["softmax"], "cuda_v1", "cuda", False, 0, 0)
    plan = [
        touch.Call(context, Case(name, {"shape": (1,)}), torch.float16, True, frozenset((name, "")))
        for name in "0123456"
    ]
    monkeypatch.setattr(touch, "calls", lambda *_: plan)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran: list[str] = []
    monkeypatch.setattr(touch, "run", lambda one: ran.append(one.case.name))
    parts = []
    for part in (None, "1/3", "2/3", "3/3"):
        ran.clear()
        assert touch.main([*(["--part", part] if part else []), "softmax", "cuda_v1"]) == 0
        parts.append("".join(ran))
    assert parts == ["0123456", "036", "14", "25"]
    counts = re.findall(r"softmax cuda_v1: (\d+) binaries", capsys.readouterr().out)
    assert counts == ["14", "6", "4", "4"]


@pytest.mark.parametrize("part", [[], ["softmax"], ["0/3"], ["4/3"], ["1/3/4"]], ids=str)
def test_touch_refuses_a_part_that_is_none(
    part: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert touch.main(["softmax", "--part", *part]) == 2
    assert "3/15" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (["cuda", "cdua"], "'cdua'"),
        (["relu", "cuda"], "relu"),
        (["relu", "softmax", "cuda_v2"], "relu"),
        (["--smalest", "softmax"], "'--smalest'"),
        (["--smallest", "cdua"], "'cdua'"),
        (["softmax", "cuda_v1", "cuda"], "cuda"),
    ],
)
def test_touch_refuses_names_that_leave_it_idle(
    names: list[str], idle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sanitizer that watched nothing would report no error."""
    assert touch.main(names) == 2
    assert idle in capsys.readouterr().out.split(";")[0]


def test_touch_wants_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert touch.main(["softmax"]) == 2
    assert capsys.readouterr().out.startswith("touch: torch sees no GPU")
