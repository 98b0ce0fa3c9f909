"""python -m tilewright.verify.touch: which calls it plans, and that it runs them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
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
from tilewright.verify.checks import edge_cases

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


# --- scripts/check_hazards.py --------------------------------------------------------------------

# Stands in for compute-sanitizer: it says what the tool and touch would, and part 2 goes wrong as
# the name of the op says.
SANITIZER = """#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 9
echo "$@" >> "$SEEN"
echo 1 >> "$SEEN.now"
for last; do :; done
case "$*" in *"--part 2/"*) how=$last ;; *) how=well ;; esac
binaries=3 status=0
summary="========= ERROR SUMMARY: 0 errors"
[ "$2" = racecheck ] &&
  summary="========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
echo "3/7 rope triton: tall bfloat16" >&2
case "$how" in
  slow) sleep 100 & sleep 100 ;;
  away) setsid sleep 60 & sleep 100 ;;
  dies) printf 'Traceback:\\nAcceleratorError: launch failed\\n' >&2; exit 1 ;;
  none) echo "touch: no op or backend is named 'none'"; exit 2 ;;
  idle) echo "$summary"; exit 0 ;;
  hollow) binaries=0 ;;
  wrong) summary="========= ERROR SUMMARY: 1 error" ;;
  deaf) summary="========= Error: no attachable process found" ;;
  torn) echo "========= Internal Sanitizer Error" ;;
  split) echo "$summary"; summary="========= ERROR SUMMARY: 5 errors" ;;
  fails) status=3 ;;
esac
echo "========= COMPUTE-SANITIZER"
echo "rope triton: $binaries binaries, forward and backward"
echo "$summary"
sleep 0.1
echo -1 >> "$SEEN.now"
exit $status
"""


@pytest.fixture(scope="module")
def hazards() -> ModuleType:
    path = REPOSITORY / "scripts" / "check_hazards.py"
    spec = importlib.util.spec_from_file_location("check_hazards", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands that it was given."""
    fake, seen = tmp_path / "bin" / "compute-sanitizer", tmp_path / "seen.txt"
    fake.parent.mkdir()
    fake.write_text(SANITIZER)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(seen))
    return seen


def all_end(sanitizer: Path) -> bool:
    """What was killed may need a moment."""
    until = time.monotonic() + 10
    while under_way(sanitizer) and time.monotonic() < until:
        time.sleep(0.05)
    return not under_way(sanitizer)


def under_way(sanitizer: Path) -> list[str]:
    """Processes that a sanitizer began."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended, or be somebody else's
            if f"SEEN={sanitizer}\0".encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_every_tool_watches_every_part(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "sanitizer-rope"
    more = ["--parts", "3", "--workers", "2", "--record", str(record)]
    assert hazards.main(["rope", "triton", *more]) == 0
    watched = [line.split() for line in sanitizer.read_text().splitlines()]
    parts = [(line[1], line[line.index("--part") + 1]) for line in watched]
    assert sorted(parts) == sorted((t, f"{i}/3") for t in hazards.TOOLS for i in (1, 2, 3))
    assert all(line[-2:] == ["rope", "triton"] and "--smallest" in line for line in watched)
    at_a_time = accumulate(map(int, Path(f"{sanitizer}.now").read_text().split()))
    assert max(at_a_time) == 2
    options = {line[1]: "--report-api-errors no" in " ".join(line) for line in watched}
    assert [tool for tool, told in options.items() if told] == ["memcheck"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("12/12 ")
    names = {path.name for path in tmp_path.glob("sanitizer-*")}
    assert names == {f"sanitizer-rope-{tool}.txt" for tool in hazards.TOOLS}
    for tool in hazards.TOOLS:
        said = Path(f"{record}-{tool}.txt").read_text().split("$ ")[1:]
        assert [f"--part {i}/3 rope triton\n" in one for i, one in enumerate(said, 1)] == [True] * 3
        assert all(
            f"--tool {tool} " in one
            and re.search("\nrope triton: 3 binaries, forward and backward\n=.*: 0 ", one)
            and "3/7" not in one  # touch's progress
            for one in said
        )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("slow", "did not end in 3 s: 3/7 rope triton: tall bfloat16"),
        ("away", "did not end in 3 s: 3/7 rope triton"),  # and a child of it never does
        (
            "dies",
            "ended with status 1, 3/7 rope triton: tall bfloat16: AcceleratorError: launch failed",
        ),
        ("none", "touch: no op or backend is named 'none'"),
        ("fails", "ended with status 3, 3/7"),
        ("idle", "ended with status 0, 3/7"),  # nothing ran, and nothing was wrong
        ("hollow", "nothing ran: there are fewer calls than parts"),
        ("wrong", "found something: ERROR SUMMARY: 1 error"),
        ("deaf", "the sanitizer did not watch to the end"),
        ("split", "the sanitizer did not watch to the end"),
        ("torn", "the sanitizer did not watch to the end"),
    ],
)
def test_a_part_that_fails_is_told_and_kept(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    how: str, told: str,
) -> None:  # fmt: skip
    record = str(tmp_path / "sanitizer-rope")
    more = ["--tool", "memcheck", "--parts", "3", "--limit", "3", "--record", record]
    begun = time.monotonic()
    assert hazards.main([how, *more]) == 1
    assert time.monotonic() - begun < 50
    assert under_way(sanitizer) if how == "away" else all_end(sanitizer)
    by_part = sorted(line.split(" memcheck ")[1] for line in capsys.readouterr().out.splitlines())
    assert [told in line for line in by_part] == [False, True, False]
    said = Path(f"{record}-memcheck.txt").read_text().split("$ ")[1:]
    assert [f"-- {told}" in one for one in said] == [False, True, False]
    assert ["3/7" in one for one in said] == [False, True, False]  # the standard error


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_stops_the_sanitizers(sanitizer: Path, tmp_path: Path, how: int) -> None:
    """And leaves no record that looks whole."""
    record = tmp_path / "sanitizer-rope"
    more = ["--tool", "memcheck", "--parts", "3", "--workers", "2", "--record", str(record)]
    script = str(REPOSITORY / "scripts" / "check_hazards.py")
    command = [sys.executable, script, "slow", *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        # a shell that runs the tests in the background has them ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for _ in range(2):  # parts 1 and 3 have ended: part 2 alone is under way
                process.stdout.readline()
            assert under_way(sanitizer)
            process.send_signal(how)
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
    assert all_end(sanitizer)
    assert [path.name for path in tmp_path.glob("sanitizer-*")] == [
        f"{record.name}-memcheck.txt.part"
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--parts", "0"], "--parts"),
        (["--limit", "nan"], "--limit"),
        (["--record", "nowhere/a"], "no folder nowhere"),
    ],
)
def test_hazards_refuse_what_they_cannot_do(
    hazards: ModuleType, sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    more: list[str], told: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        hazards.main(["rope", "--record", str(tmp_path / "a"), *more])
    assert ended.value.code == 2 and told in capsys.readouterr().err
    assert not sanitizer.exists()


def test_hazards_want_a_sanitizer(
    hazards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        hazards.main(["rope", "--record", str(tmp_path / "a")])
    assert ended.value.code == 2 and "compute-sanitizer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
