"""The command line as scripts see it: exit codes, one line on stderr, JSON; and what doctor finds.

Exit codes: 0 fine, 1 a check failed, 2 the command was not understood.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import apart
from tilewright import dispatch, doctor, gpu
from tilewright.ops import registry


def run(*words: str, **more: Any) -> apart.Done:
    return apart.run(list(words), **more)


def strict_json(text: str) -> Any:
    """JSON as the standard has it: Python alone also reads NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- commands ------------------------------------------------------------------------------------


def test_list_names_every_op_and_backend() -> None:
    done = run("list", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["op"]: row for row in strict_json(done.stdout)}
    assert list(rows) == list(registry())
    assert rows["softmax"]["forward"] == ["cuda_v2", "triton", "cuda_v1", "torch"]
    assert rows["relu"]["backward"] == ["triton", "torch"]


@pytest.mark.parametrize("words", ["doctor", "list", "verify relu --device cpu --only errors"])
def test_tables_fit_a_terminal_and_show_no_markup(words: str) -> None:
    done = run(*words.split(), COLUMNS="80")
    assert done.returncode == 0
    assert "[/]" not in done.stdout
    assert "…" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_list_is_a_table_without_json() -> None:
    done = run("list")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("relu", "rms_norm", "softmax", "cuda_v2"))
    with pytest.raises(ValueError):
        json.loads(done.stdout)


def test_json_goes_to_a_file_in_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "list.json"
    done = run("list", "--json", str(path))
    assert done.returncode == 0
    assert "softmax" in done.stdout
    assert {row["op"] for row in strict_json(path.read_text())} == set(registry())


def test_explain_says_why_and_why_not() -> None:
    words = ("explain", "softmax", "--shape", "8,40000", "--gpu", "t4", "--json", "-")
    done = run(*words)
    assert (done.returncode, done.stderr) == (0, "")
    found = strict_json(done.stdout)
    assert (found["backend"], found["asked_by"], found["gpu"]) == (
        "triton",
        "automatic",
        "Tesla T4",
    )
    assert "40000 columns" in found["refused"]["cuda_v2"]
    assert found["kernels"] == ["_softmax_wide_rows"]
    assert found["bytes_moved"] == 2 * 8 * 40000 * 2


def test_explain_takes_the_backend_asked_for() -> None:
    done = run("explain", "softmax", "--gpu", "h100", "--backend", "cuda_v1", "--dtype", "float16")
    assert done.returncode == 0
    assert "cuda_v1 (backend=)" in done.stdout
    assert "not triton: cuda_v1 was asked for" in " ".join(done.stdout.split())


def test_verify_prints_json_only() -> None:
    words = ("relu", "--device", "cpu", "--only", "nan", "--only", "empty", "--json", "-")
    done = run("verify", *words)
    assert done.returncode == 0
    report = strict_json(done.stdout)
    assert report["failures"] == []
    assert {row["check"] for row in report["checks"]} == {"nan", "empty"}
    assert report["environment"]["torch"] == torch.__version__


def test_verify_says_what_failed_in_whole_lines(tmp_path: Path) -> None:
    """Exit code 1, JSON that any parser reads, and a command on one line to copy."""
    package = Path(shutil.copytree(apart.PACKAGE, tmp_path / "tilewright"))
    path = package / "ops/relu/triton_impl.py"
    right, wrong = "y = tl.where(x <= 0.0, 0.0, x)", "y = tl.where(x <= 0.0, 0.0, x + 1.0)"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    words = ("relu", "--device", "cpu", "--only", "random", "--cases", "3", "--json", "-")
    done = run("verify", *words, package=package)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    report = strict_json(done.stdout)
    assert report["failures"]
    repro = "tilewright verify relu --device cpu --only random --backend triton --seed 0 --cases 1"
    assert repro in [line.strip() for line in done.stderr.splitlines()]
    # the command that it prints finds the same failure again
    again = run(*repro.split()[1:], "--json", "-", package=package)
    assert again.returncode == 1
    first = [f["line"] for f in report["failures"] if f["seed"] == 0]
    assert [f["line"] for f in strict_json(again.stdout)["failures"]] == first


def test_a_check_that_raises_is_a_failure_not_a_traceback(tmp_path: Path) -> None:
    package = Path(shutil.copytree(apart.PACKAGE, tmp_path / "tilewright"))
    path = package / "ops/relu/triton_impl.py"
    right = "    strides = _result_strides(input)\n    new_y"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, f"    raise MemoryError\n{right}"))
    words = ("--only", "nan", "--only", "repeat", "--only", "empty", "--json", "-")
    done = run("verify", "relu", "--device", "cpu", *words, package=package)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    failed = {f["check"] for f in strict_json(done.stdout)["failures"]}
    assert failed == {"nan", "repeat", "empty"}


MISUNDERSTOOD = {
    "more elements than a tensor has": (
        "explain softmax --shape 4294967296,4294967296,64",
        ("explain", "--shape", "elements"),
    ),
    "verify of no op": ("verify nonsense --device cpu", ("op", "nonsense", "softmax")),
    "verify on no device": ("verify relu --device tpu", ("--device", "tpu", "cpu or cuda")),
    "verify without a GPU": ("verify relu --device cuda", ("no GPU", "--device cpu")),
    "no such check": ("verify relu --device cpu --only nonsense", ("--only", "layouts")),
    "a case for another check": (
        "verify relu --device cpu --case one-dim --only random",
        ("--case", "random", "--seed"),
    ),
    "no such case": ("verify relu --device cpu --case nonsense", ("--case", "one-dim")),
    "no such backend": ("verify relu --device cpu --backend nonsense", ("backend", "triton")),
    "nothing to check": ("verify relu --device cpu --only large", ("--only is large", "relu")),
    "explain of no op": ("explain nonsense", ("op", "nonsense", "softmax")),
    "no such dtype": ("explain relu --dtype float99", ("--dtype", "float99")),
    "a dtype no kernel takes": ("explain relu --dtype int32", ("int32", "float16")),
    "no such GPU": ("explain relu --gpu rtx9999", ("rtx9999", "h100", "sm_90")),
    "a check for ops with tables": (
        "verify relu --device cpu --only launches",
        ("--only is launches", "relu"),
    ),
    "no such backend to explain": ("explain relu --backend tritn", ("tritn", "'triton'")),
    "a shape that is none": ("explain relu --shape 4,x", ("--shape", "4,x")),
    "a negative size": ("explain relu --shape 4,-1", ("--shape", "-1")),
    "doctor for no GPU": ("doctor --arch sm_42", ("sm_42", "sm_75")),
    "compile of no op": ("compile nonsense", ("op", "nonsense", "softmax")),
    "compile for no SM": ("compile relu --arch 42", ("42", "sm_75")),
    "an update of nothing": ("compile relu --update", ("--update", "--ledger")),
}


@pytest.mark.parametrize(
    "words",
    [
        "verify relu --device cpu --cases 0",
        "verify relu --device cpu --workers 0",
        "compile relu --workers -1",
    ],
)
def test_numbers_out_of_range_are_refused_before_the_work(words: str) -> None:
    done = run(*words.split())
    assert done.returncode == 2
    assert "Invalid value" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_result_that_could_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file" / "below.json"):
        done = run("verify", "relu", "--device", "cpu", "--json", str(path))
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "--json" in line
        assert str(path) in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("words", "says"), MISUNDERSTOOD.values(), ids=MISUNDERSTOOD)
def test_a_mistake_is_one_line_and_exit_code_2(words: str, says: tuple[str, ...]) -> None:
    done = run(*words.split())
    assert done.returncode == 2, done.stderr[-1000:]
    lines = [line for line in done.stderr.splitlines() if "verify on cpu" not in line]
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in says), lines[0]


@pytest.mark.parametrize("words", ["nonsense", "verify --nonsense", "explain"])
def test_words_that_are_no_command(words: str) -> None:
    done = run(*words.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_typer_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no', name='typer')")
    path = f"{tmp_path}{os.pathsep}{apart.PACKAGE.parent}"
    command = [sys.executable, "-m", "tilewright", "list"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert 'pip install "tilewright[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


# --- doctor --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TILEWRIGHT_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


def findings(arch: str | None = None) -> dict[str, list[doctor.Finding]]:
    found: dict[str, list[doctor.Finding]] = {}
    for f in doctor.examine(arch):
        found.setdefault(f.what, []).append(f)
    return found


def faults(arch: str | None = None) -> list[doctor.Finding]:
    return [f for rows in findings(arch).values() for f in rows if f.state == "fault"]


def test_doctor_on_this_machine_finds_no_fault() -> None:
    done = run("doctor", "--json", "-")
    assert done.returncode == 0
    assert all(line.startswith("doctor: ") for line in done.stderr.splitlines())
    rows = {row["what"]: row for row in strict_json(done.stdout)}
    assert rows["torch"]["detail"].startswith(torch.__version__)
    assert {"tilewright", "torch", "GPU", "triton", "numpy", "NVRTC", "cache folder"} < set(rows)
    assert rows["op softmax"]["detail"] == "torch for float32, float16, bfloat16"


def test_doctor_shows_what_each_op_runs_on_a_t4() -> None:
    done = run("doctor", "--arch", "t4", "--json", "-")
    assert done.returncode == 0
    rows = {row["what"]: row["detail"] for row in strict_json(done.stdout)}
    for name, op in registry().items():
        first = op.backends[0] if op.backends[0].min_sm <= 75 else op.backends[-1]
        assert rows[f"op {name}"] == f"{first.name} for float32, float16, bfloat16"


def test_a_fault_is_exit_code_1() -> None:
    done = run("doctor", TILEWRIGHT_BACKEND="nonsense")
    assert done.returncode == 1
    assert "fault" in done.stdout
    assert "unset TILEWRIGHT_BACKEND" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arch", [None, "t4"])
def test_doctor_reports_a_backend_that_does_not_exist(
    arch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "nonsense")
    (fault,) = [f for f in faults(arch) if f.what == "TILEWRIGHT_BACKEND"]
    assert "nonsense" in fault.detail
    assert fault.fix == "unset TILEWRIGHT_BACKEND"


def test_doctor_reports_ops_without_the_backend_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_BACKEND", "cuda_v1")
    found = findings("h100")
    assert found["TILEWRIGHT_BACKEND"][0].state == "note"
    assert found["op softmax"][0].detail.startswith("cuda_v1 for")
    assert found["op relu"][0].state == "fault"


@pytest.mark.parametrize("place", [".", "cubin"])
def test_doctor_reports_a_cache_that_others_can_write(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cubin").mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    (tmp_path / place).chmod(0o777)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    (fault,) = faults()
    assert fault.what == "cache folder"
    assert "777" in fault.detail
    assert "chmod 700" in fault.fix


def test_doctor_reports_a_cache_folder_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cubin").write_text("")
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    (fault,) = faults()
    assert fault.what == "cache folder"


def test_a_cache_of_ones_own_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    (found,) = findings()["cache folder"]
    assert (found.state, "not made yet" in found.detail) == ("ok", True)


@pytest.fixture
def with_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dataclasses.replace(gpu.pretend("h100"), pretend=False)
    monkeypatch.setattr(gpu, "detect", lambda index=0: found)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Pretend these versions; None: not installed."""

    def pretend(torch_wants: str | None = None, **versions: str | None) -> None:
        real_version, real_requires = importlib.metadata.version, importlib.metadata.requires

        def version(name: str) -> str:
            found = versions.get(name.replace("-", "_"), "")
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found or real_version(name)

        def requires(name: str) -> list[str] | None:
            if name == "torch" and torch_wants:
                return ["filelock", f'triton=={torch_wants}; platform_system == "Linux"']
            return real_requires(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", requires)

    return pretend


def test_doctor_knows_the_gpu(with_h100: None) -> None:
    found = findings()
    assert "SM 90" in found["GPU"][0].detail
    assert "3.35 TB/s" in found["GPU"][0].detail
    assert found["op rms_norm"][0].detail.startswith("cuda for")


def test_doctor_reports_the_interpreter_on_a_gpu(
    with_h100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TRITON_INTERPRET" not in findings()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    dispatch.reset()
    (fault,) = findings()["TRITON_INTERPRET"]
    assert (fault.state, fault.fix) == ("fault", "unset TRITON_INTERPRET")


@pytest.mark.parametrize("there", ["3.6.0", "3.10.1"])
def test_doctor_reports_a_triton_that_torch_did_not_ask_for(
    there: str, with_h100: None, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    installed(torch_wants="3.9.0", triton=there, numpy="2.3.0")
    (fault,) = faults()
    assert fault.what == "triton"
    assert there in fault.detail
    assert fault.fix == "pip install triton==3.9.0"
    installed(torch_wants="3.9.0", triton="3.9.0")
    assert faults() == []


def test_a_cpu_build_of_torch_pins_no_triton(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    installed(torch_wants="3.4.0", triton="3.9.0")
    assert faults() == []


def test_doctor_reports_what_is_too_old_or_missing(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    installed(triton="3.5.1", numpy=None)
    assert {f.what: f.fix for f in faults()} == {
        "torch": 'pip install "torch>=2.11"',
        "triton": 'pip install "triton>=3.6"',
        "numpy": "pip install numpy",
    }
    installed(triton=None, triton_windows=None)
    assert ("triton", "not installed") in [(f.what, f.detail) for f in faults()]


@pytest.mark.parametrize(
    ("triton", "numpy", "state"),
    [("3.6.0", "2.4.0", "note"), ("3.6.0", "2.3.5", "ok"), ("3.9.0", "2.4.6", "ok")],
)
def test_doctor_notes_numpy_that_triton_3_6_cannot_interpret(
    triton: str, numpy: str, state: str, installed: Installed
) -> None:
    installed(triton=triton, numpy=numpy)
    (found,) = findings()["numpy"]
    assert found.state == state
    assert ("numpy<2.4" in found.fix) == (state == "note")


def test_doctor_reports_a_missing_compiler_where_triton_needs_one(
    with_h100: None, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(torch_wants="3.6.0", triton="3.6.0", numpy="2.3.0")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert [f.what for f in faults()] == ["C compiler"]
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert faults() == []


def test_doctor_reports_a_cpu_build_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (fault,) = faults()
    assert "CPU build" in fault.detail
    assert "torch" in fault.fix


def test_the_environment_of_a_record_names_what_decides_a_number() -> None:
    environment = doctor.environment()
    assert environment["torch"] == torch.__version__
    assert set(environment) > {"tilewright", "python", "triton", "gpu", "sm", "interpreter"}
