"""The compile matrix: it asks for every kernel, compiles what it must, and notices a lie."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from tilewright import dispatch, gpu, library, matrix
from tilewright.cli import app
from tilewright.matrix import Built, Ledger, Wanted, reach, tables
from tilewright.ops import every_op, registry
from tilewright.ops.matmul import launches
from tilewright.toolkit import nvrtc, recording

SOURCE = Path(__file__).parents[1] / "src"
run = sys.modules["tilewright.matrix.run"]
BUILD = sys.modules["tilewright.matrix.build"]  # whose name in the package is its function's


@pytest.fixture(scope="module")
def everything() -> list[Wanted]:
    return list(matrix.reachable())


@pytest.fixture(scope="module")
def relu_75() -> list[Wanted]:
    return list(matrix.reachable(["relu"], [75]))


@pytest.fixture(scope="module")
def cuda_90() -> Wanted:
    wanted = matrix.reachable(["softmax"], [90])
    return next(w for w in wanted if w.backend == "cuda_v1")


def as_built(wanted: Wanted, **facts: Any) -> Built:
    """A ledger's entry without compiling anything."""
    facts = {"registers": 32, **facts}
    return Built(
        wanted.key, wanted.op, wanted.backend, wanted.kernel, wanted.dtype, wanted.sm, wanted.case,
        "", reach.compiler(wanted.request.technology), **facts,
    )  # fmt: skip


def ledger_of(*entries: Built) -> Ledger:
    ledger = Ledger(None)
    ledger.known = {b.key: b for b in entries}
    return ledger


# --- what can be reached -------------------------------------------------------------------------


def asks(name: str, backend: str, sm: int) -> bool:
    """Whether an op has binaries there: those it shares with another op count for the first."""
    for public in registry().values():
        parts = (public, public.in_place, public.autograd and public.autograd.op)
        if name in [part.name for part in parts if part]:
            calls = itertools.islice(reach._calls(public), 60)
            found = reach._of_op(public, calls, gpu.pretend(f"sm_{sm}"))
            return any((w.op, w.backend) == (name, backend) for w in found)
    return False


def test_every_backend_of_both_passes_on_every_sm(everything: list[Wanted]) -> None:
    found = {(w.op, w.backend, w.sm) for w in everything}
    for op in every_op().values():
        for backend in op.backends:
            for sm in matrix.SMS if backend.technology != "torch" else ():
                wanted = backend.min_sm <= sm <= backend.max_sm
                there = (op.name, backend.name, sm) in found or asks(op.name, backend.name, sm)
                assert there == wanted, (op.name, backend.name, sm)
    assert matrix.SMS == tuple(gpu.ARCHS)


def test_every_launch_that_a_table_may_name_is_compiled() -> None:
    public = every_op()["matmul"]
    found = list(reach._of_op(public, reach._calls(public), gpu.pretend("sm_90")))
    how = [dict((*w.request.constants, *w.request.options)) for w in found if w.op == "matmul"]
    widths = {h["COLUMNS"] + h["REST"] for h in how if "WORKERS" in h}
    assert widths == set(launches.STEP_US)
    strips = {(h["BLOCK_N"], h["num_stages"]) for h in how if "EVEN_K" in h}
    stages = launches.STAGES
    assert strips == {(columns, some) for columns in stages for some in stages[columns]}


def test_every_registered_op_is_reached(everything: list[Wanted]) -> None:
    """The in-place ops too, which are no public ops of their own."""
    missing = set(library.calls) - {w.op for w in everything}
    assert all(asks(name, "triton", 90) for name in missing)


def test_every_kernel_that_is_written_is_reached(everything: list[Wanted]) -> None:
    """A @triton.jit function that takes pointers is a kernel; one that nothing asks for is dead.

    One that another function of the module calls is a part of it.
    """
    found = {w.kernel for w in everything}
    backends = [b for op in every_op().values() for b in op.backends if b.technology == "triton"]
    seen = 0
    for name in {backend.entry.partition(":")[0] for backend in backends}:
        functions = {
            function: value
            for function, value in vars(sys.modules[name]).items()
            if type(value).__name__ == "JITFunction" and value.fn.__module__ == name
        }
        for function, value in functions.items():
            called = any(
                f" {function}(" in inspect.getsource(other.fn)
                for other in functions.values()
                if other is not value
            )
            if any(a.endswith("_ptr") for a in inspect.signature(value.fn).parameters):
                assert called or function in found
                seen += 1
    assert seen > 20


def test_every_dtype_and_alignment_is_reached(everything: list[Wanted]) -> None:
    relu = [w for w in everything if w.op == "relu" and w.sm == 90]
    assert {w.dtype for w in relu} == {"float32", "float16", "bfloat16"}
    assert {dict(w.request.constants)["VEC"] for w in relu} == {1, 4, 8}


def named_calls(*compiled: str) -> list[tuple[str, str, bool]]:
    """(case, dtype, whether its rows hold whole vectors) of relu, if it named these cases."""
    op = dataclasses.replace(registry()["relu"], compiled=compiled)
    return [
        (case, str(dtype).removeprefix("torch."), args[0].is_contiguous())
        for args, dtype, case, _ in reach._calls(op)
    ]


def test_an_op_may_name_the_cases_to_compile() -> None:
    """The first as all would be, in every dtype; float16 is bfloat16's twin. Suites are aligned."""
    every = {case for case, *_ in named_calls()}
    cases = [c for c in registry()["relu"].cases if len(c.dims["shape"]) > 1]
    first, second = [c.name for c in cases if c.group == "edge"][:2]
    large = next(c.name for c in cases if c.group != "edge")
    assert {first, second, large} < every
    dtypes, two = ("float32", "float16", "bfloat16"), ("float32", "bfloat16")
    wanted = [(first, dtype, whole) for dtype in dtypes for whole in (True, False)]
    wanted += [(second, dtype, whole) for dtype in two for whole in (True, False)]
    wanted += [(large, dtype, True) for dtype in two]
    assert sorted(named_calls(first, second, large)) == sorted(wanted)
    swapped = [(case, dtype) for case, dtype, whole in named_calls(large, first) if not whole]
    assert sorted(swapped) == sorted([(first, d) for d in two] + [(large, d) for d in dtypes])
    assert {(c, d) for c, d, _ in named_calls() if c == first} == {(first, d) for d in dtypes}


@pytest.mark.parametrize(
    "op", [op for op in registry().values() if op.compiled], ids=lambda op: op.name
)
def test_the_cases_that_are_named_exist_and_reach_every_kernel(
    op: Any, everything: list[Wanted]
) -> None:
    names = [case.name for case in op.cases]
    assert set(op.compiled) <= set(names)
    assert len(set(op.compiled)) == len(op.compiled)
    ours = {op.name, op.autograd.op.name}
    for_one = [name for backend in op.backends for name in backend.compiled]
    assert set(for_one) <= set(names) and not set(for_one) & set(op.compiled)
    found = {w.case for w in everything if w.op in ours}
    assert found == {*op.compiled, *for_one}  # none is in vain


def test_no_binary_is_wanted_twice(everything: list[Wanted]) -> None:
    assert max(Counter(w.key for w in everything).values()) == 1


def test_an_sm_asks_for_the_same_in_any_order() -> None:
    one = [w.key for w in matrix.reachable(["relu"], [75, 90])]
    other = [w.key for w in matrix.reachable(["relu"], [90, 75])]
    assert sorted(one) == sorted(other)


# --- keys ----------------------------------------------------------------------------------------


def changed(wanted: Wanted, **facts: Any) -> Wanted:
    return dataclasses.replace(wanted, request=dataclasses.replace(wanted.request, **facts))


def test_a_key_changes_with_what_is_compiled(
    relu_75: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = relu_75[0]
    request = first.request
    constants = tuple((k, 2 * v if k == "BLOCK" else v) for k, v in request.constants)
    options = tuple((k, 8 if k == "num_warps" else v) for k, v in request.options)
    pointer = dataclasses.replace(request.arguments[0], dtype=torch.float64)
    aligned = dataclasses.replace(request.arguments[0], aligned=not request.arguments[0].aligned)
    keys = {
        "as it is": first.key,
        "SM": dataclasses.replace(first, sm=80).key,
        "constants": changed(first, constants=constants).key,
        "options": changed(first, options=options).key,
        "dtype": changed(first, arguments=(pointer, *request.arguments[1:])).key,
        "alignment": changed(first, arguments=(aligned, *request.arguments[1:])).key,
        "64-bit size": changed(first, arguments=(*request.arguments[:2], 2**31)).key,
    }
    monkeypatch.setattr(reach, "compiler", lambda technology: "triton 9.9")
    keys["compiler"] = first.key
    monkeypatch.undo()
    monkeypatch.setattr(reach, "_source", lambda kernel: "another text")
    keys["source"] = first.key
    assert len(set(keys.values())) == len(keys), keys


def test_a_key_does_not_change_with_the_exact_size(relu_75: list[Wanted]) -> None:
    """Integers are not specialised, so one binary serves every size of a class."""
    request = relu_75[0].request
    sizes = tuple(a + 1 if isinstance(a, int) else a for a in request.arguments)
    assert sizes != request.arguments
    assert changed(relu_75[0], arguments=sizes).key == relu_75[0].key


def test_the_source_is_the_kernels_file_and_the_shared_helpers(
    relu_75: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, real = relu_75[0].request.kernel, inspect.getsource
    texts = {"as it is": reach._source.__wrapped__(kernel)}
    for file in ("triton_lib", "triton_impl"):

        def edited(what: Any, file: str = file) -> str:
            return real(what) + "# edited" * inspect.getmodule(what).__name__.endswith(file)

        monkeypatch.setattr(inspect, "getsource", edited)
        texts[file] = reach._source.__wrapped__(kernel)
    assert len(set(texts.values())) == 3


def test_a_cuda_key_changes_with_source_flags_and_shared_memory(cuda_90: Wanted) -> None:
    other = nvrtc.Source(Path(nvrtc.__file__).with_name("none.cu"))
    other.__dict__["digest"] = "another"
    keys = {
        cuda_90.key,
        changed(cuda_90, source=other).key,
        changed(cuda_90, options=(("fma", False),)).key,
        changed(cuda_90, dynamic_shared=1024).key,
        changed(cuda_90, kernel=cuda_90.request.kernel + " ").key,
        dataclasses.replace(cuda_90, sm=80).key,
    }
    assert len(keys) == 6


@pytest.mark.drawn(seconds=3.5, family="slow")
def test_keys_are_the_same_in_another_process(relu_75: list[Wanted]) -> None:
    code = (
        "from tilewright import matrix\nprint(*(w.key for w in matrix.reachable(['relu'], [75])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [w.key for w in relu_75]


# --- what to compile now -------------------------------------------------------------------------


def seconds(wanted: list[Wanted]) -> float:
    return sum(matrix.seconds_of(w) for w in wanted)


def test_everything_is_compiled_without_a_budget(relu_75: list[Wanted]) -> None:
    chosen = matrix.select(relu_75, Ledger(None), None, "a")
    assert (chosen.now, chosen.known, chosen.left) == (relu_75, [], [])


def test_what_changed_comes_first_and_the_rest_of_the_budget_looks_at_the_ledger(
    everything: list[Wanted],
) -> None:
    new, keys = everything[::397], {w.key for w in everything[::397]}
    ledger = ledger_of(*(as_built(w) for w in everything if w.key not in keys))
    whole = seconds(new) + 20
    chosen = matrix.select(everything, ledger, whole, "a")
    compiled = {w.key for w in chosen.now}
    assert {w.key for w in new} < compiled
    assert whole <= chosen.seconds <= whole + max(matrix.seconds_of(w) for w in everything)
    assert len(chosen.now) + len(chosen.known) == len(everything) and not chosen.left
    assert not compiled & {b.key for b in chosen.known}


def test_what_is_new_has_a_budget_too_and_what_is_left_is_told(everything: list[Wanted]) -> None:
    chosen = matrix.select(everything, Ledger(None), 15.0, "a")
    assert 15 <= chosen.seconds <= 15 + max(matrix.seconds_of(w) for w in everything)
    ops = [{run.public_of(w.op) for w in some} for some in (chosen.now, everything)]
    assert ops[0] == ops[1] == set(registry())  # each op has its share
    assert len(chosen.now) + len(chosen.left) == len(everything) and not chosen.known


def test_a_key_selects_the_same_and_another_key_another(everything: list[Wanted]) -> None:
    ledger = ledger_of(*(as_built(w) for w in everything))
    chosen = [[w.key for w in matrix.select(everything, ledger, 30, k).now] for k in "aab"]
    assert chosen[0] == chosen[1] != chosen[2]


def test_the_ledger_knows_every_binary(everything: list[Wanted]) -> None:
    """`tilewright compile --ledger results/compile --all --update` after a change to a kernel."""
    known = Ledger(SOURCE.parent / "results" / "compile").known
    versions = {b.compiler for b in known.values()}
    left = [w for w in everything if w.key not in known]
    left = [w for w in left if reach.compiler(w.request.technology) in versions]
    assert not left, sorted({f"{w.op} {w.backend}" for w in left})


# --- the ledger ----------------------------------------------------------------------------------


def test_the_ledger_gives_back_what_was_written(tmp_path: Path, relu_75: list[Wanted]) -> None:
    entries = [as_built(w, shared=i, violation="spills" * (i % 2)) for i, w in enumerate(relu_75)]
    Ledger(tmp_path / "new").write(entries)
    assert list((tmp_path / "new").iterdir()) == [
        tmp_path / "new" / f"triton-{triton.__version__}.jsonl"
    ]
    again = Ledger(tmp_path / "new")
    assert again.known == {b.key: b for b in entries}
    text = next((tmp_path / "new").iterdir()).read_text()
    again.write(reversed(entries))
    assert next((tmp_path / "new").iterdir()).read_text() == text


def test_a_part_that_is_written_leaves_the_rest(tmp_path: Path, relu_75: list[Wanted]) -> None:
    first, *others = [as_built(w) for w in relu_75]
    elsewhere = dataclasses.replace(first, key="elsewhere", sm=90)
    older = dataclasses.replace(first, key="older", compiler="triton 3.6.0")
    Ledger(tmp_path).write([first, *others, elsewhere, older])
    assert len(list(tmp_path.iterdir())) == 2
    newer = dataclasses.replace(first, key="newer", op=first.op)
    Ledger(tmp_path).write([newer])
    known = Ledger(tmp_path).known
    assert {"newer", "elsewhere", "older"} <= set(known)
    assert first.key not in known  # nothing reaches it any more


def test_no_folder_is_an_empty_ledger(tmp_path: Path) -> None:
    assert Ledger(None).known == Ledger(tmp_path / "none").known == {}


def test_facts_that_differ_are_drift(relu_75: list[Wanted]) -> None:
    entry = as_built(relu_75[0])
    assert not tables.differs(entry, dataclasses.replace(entry, case="another", dtype="another"))
    for fact in ({"registers": 33}, {"shared": 1}, {"spills": 4}, {"violation": "no"}):
        assert tables.differs(entry, dataclasses.replace(entry, **fact))


# --- compiling -----------------------------------------------------------------------------------


def compile_cli(*words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "tilewright", "compile", *words, "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.drawn(seconds=8, family="slow")
def test_relu_compiles_and_an_edited_ledger_shows(tmp_path: Path) -> None:
    words = ("relu", "--arch", "h200", "--ledger", str(tmp_path), "--all")
    code, record, _ = compile_cli(*words, "--update", "--workers", "1")
    assert (code, record["violations"]) == (0, [])
    assert (record["sms"], record["complete"], record["draw"]) == ([90], True, None)
    assert record["compiled"] == record["binaries"] >= 24
    assert {row["kernel"] for row in record["kernels"]} == {"_relu", "_relu_backward"}
    (path,) = tmp_path.iterdir()
    entries = [Built(**json.loads(line)) for line in path.read_text().splitlines()]
    assert all(8 <= b.registers <= 255 and not b.spills and not b.shared for b in entries)

    edited = dataclasses.replace(entries[0], registers=entries[0].registers + 1)
    Ledger(tmp_path).write([edited, *(b for b in entries[1:])])
    words = ("relu", "--arch", str(edited.sm), "--ledger", str(tmp_path))
    code, record, said = compile_cli(*words, "--budget", "1000", "--workers", "1")
    assert code == 1
    (violation,) = record["violations"]
    assert violation.startswith(f"{edited.op} triton {edited.kernel} {edited.dtype} SM {edited.sm}")
    assert "the ledger holds other facts" in violation
    assert violation in said  # on one line, whatever the width of the terminal


def test_known_binaries_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relu_75: list[Wanted]
) -> None:
    def compiled(wanted: Any, *_: Any) -> Any:
        return iter([as_built(w) for w in wanted])

    monkeypatch.setattr(matrix, "run", compiled)
    Ledger(tmp_path).write(as_built(w) for w in relu_75)
    words = ["compile", "relu", "--arch", "75", "--ledger", str(tmp_path), "--json", "-"]
    record = json.loads(CliRunner().invoke(app, [*words, "--budget", "0"]).stdout)
    assert (record["compiled"], record["known"]) == (0, len(relu_75))
    record = json.loads(CliRunner().invoke(app, [*words, "--all"]).stdout)
    assert (record["compiled"], record["known"]) == (len(relu_75), 0)


def violations_of(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Exit code and violations of a matrix of one binary."""
    monkeypatch.setattr(matrix, "reachable", lambda ops, sms: [wanted])
    done = CliRunner().invoke(app, ["compile", "--arch", "90", "--workers", "1", "--json", "-"])
    return done.exit_code, json.loads(done.stdout)["violations"]


def test_a_fitting_cuda_kernel_is_no_violation(
    cuda_90: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert violations_of(cuda_90, monkeypatch) == (0, [])


def test_too_much_shared_memory_is_a_violation(
    cuda_90: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(gpu.ARCHS[90], shared_per_block=1024)
    monkeypatch.setattr(gpu, "arch_of", lambda sm: small)
    code, (violation,) = violations_of(cuda_90, monkeypatch)
    assert code == 1
    assert "exceeds the 1024 bytes of SM 90" in violation


def test_dynamic_shared_memory_counts(cuda_90: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = gpu.ARCHS[90].shared_per_block
    code, (violation,) = violations_of(changed(cuda_90, dynamic_shared=limit), monkeypatch)
    assert code == 1
    assert "shared memory" in violation


HUNGRY = """
__global__ void hungry(float* y, const float* x) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[threadIdx.x + 32 * i];
  #pragma unroll
  for (int k = 0; k < 64; ++k) {
    float s = 0;
    #pragma unroll
    for (int i = 0; i < 64; ++i) s += v[i] * v[(i * 7 + k) % 64];
    y[threadIdx.x + 32 * k] = s;
  }
}
"""


@pytest.mark.drawn(seconds=3.1, family="slow")
def test_flags_reach_the_compiler_and_a_spill_is_a_violation(
    cuda_90: Wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hungry.cu").write_text(HUNGRY)
    source = nvrtc.Source(tmp_path / "hungry.cu")
    hungry = changed(cuda_90, source=source, kernel="hungry")
    assert violations_of(hungry, monkeypatch) == (0, [])
    few = changed(hungry, options=(("max_register_count", 32),))
    code, (violation,) = violations_of(few, monkeypatch)
    assert code == 1
    assert "spills" in violation


@pytest.mark.drawn(seconds=5.6, family="slow")
def test_a_triton_kernel_that_spills_is_a_violation(
    everything: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = next(w for w in everything if w.sm == 90 and w.kernel == "_softmax_rows")
    constants = tuple((k, 8192 if k == "BLOCK" else 1) for k, _ in wanted.request.constants)
    options = tuple((k, 1 if k == "num_warps" else v) for k, v in wanted.request.options)
    huge = changed(wanted, constants=constants, options=options)
    code, (violation,) = violations_of(huge, monkeypatch)
    assert code == 1
    assert "spills" in violation


@pytest.mark.parametrize(("limit", "spills"), [((), False), ((("maxnreg", 32),), True)])
def test_a_limit_of_registers_makes_a_triton_kernel_spill(
    limit: Any, spills: bool, everything: list[Wanted]
) -> None:
    wanted = next(w for w in everything if w.sm == 90 and w.kernel == "_softmax_rows")
    constants = tuple((k, 8192 if k == "BLOCK" else 1) for k, _ in wanted.request.constants)
    options = tuple((k, 8 if k == "num_warps" else v) for k, v in wanted.request.options)
    built = matrix.build(changed(wanted, constants=constants, options=(*options, *limit)))
    assert (built.spills > 0, "spills" in built.violation) == (spills, spills)


@pytest.mark.parametrize(
    ("may_spill", "violation"), [(0, "spills 64 bytes"), (63, "spills 64 bytes"), (64, "")]
)
def test_a_spill_that_is_allowed_is_no_violation(
    may_spill: int, violation: str, relu_75: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BUILD, "_triton", lambda request, sm: (255, 64, 0, "", []))
    built = matrix.build(dataclasses.replace(relu_75[0], may_spill=may_spill))
    assert (built.violation, built.spills) == (violation, 64)


def test_a_backend_declares_what_may_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op for its own: what is in place or backward declares its backends itself."""
    op = registry()["relu"]
    backends = tuple(dataclasses.replace(b, may_spill=48) for b in op.backends)
    loose = dataclasses.replace(op, backends=backends)
    monkeypatch.setattr(reach, "registry", lambda: {"relu": loose})
    allowed = {(w.op, w.may_spill) for w in matrix.reachable(["relu"], [75])}
    assert allowed == {("relu", 48), ("relu_", 0), ("relu_backward", 0)}


def test_a_kernel_that_does_not_compile_is_a_violation(
    cuda_90: Wanted, relu_75: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, (violation,) = violations_of(changed(cuda_90, kernel="no_such_kernel"), monkeypatch)
    assert code == 1
    assert "does not compile: BuildError" in violation
    odd = tuple((k, 3 if k == "BLOCK" else v) for k, v in relu_75[0].request.constants)
    code, (violation,) = violations_of(changed(relu_75[0], constants=odd), monkeypatch)
    assert code == 1
    assert "does not compile: CompilationError" in violation


def test_a_promise_of_tensor_cores_is_held_to(cuda_90: Wanted) -> None:
    built = matrix.build(dataclasses.replace(cuda_90, tensor_cores=True))
    assert "no tensor-core instruction" in built.violation


@pytest.mark.parametrize("text", ["wgmma.mma_async", "mma.sync.aligned", "tcgen05.mma", "add.f32"])
def test_tensor_cores_are_known_by_their_instructions(
    text: str, relu_75: list[Wanted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BUILD, "_triton", lambda request, sm: (32, 0, 0, f"\t{text} r0, r1;", []))
    on_cores, off = (dataclasses.replace(relu_75[0], tensor_cores=on) for on in (True, False))
    assert ("no tensor-core" in matrix.build(on_cores).violation) == (text == "add.f32")
    assert not matrix.build(off).violation


def test_tensor_cores_are_promised_by_kernel_and_not_for_float32(
    everything: list[Wanted],
) -> None:
    promised = {
        kernel
        for op in every_op().values()
        for backend in op.backends
        for kernel in backend.tensor_cores
    }
    assert {w.kernel for w in everything if w.tensor_cores} == promised >= {"_attend", "_grad_keys"}
    for wanted in everything:
        may = wanted.dtype != "float32" and gpu.arch_of(wanted.sm).triton_tensor_cores
        assert wanted.tensor_cores == (wanted.kernel in promised and may)
    others = {w.kernel for w in everything if w.op == "attention_backward"} - promised
    assert others == {"_summaries"}  # which only adds up


def test_a_matrix_of_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "reachable", lambda ops, sms: [])
    assert CliRunner().invoke(app, ["compile", "--arch", "90"]).exit_code == 1


def test_a_damaged_ledger_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "triton-3.9.0.jsonl").write_text('{"key"\n')
    done = CliRunner().invoke(app, ["compile", "relu", "--arch", "90", "--ledger", str(tmp_path)])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "triton-3.9.0.jsonl" in done.stderr


def test_a_recorded_kernel_cannot_be_launched(relu_75: list[Wanted]) -> None:
    with recording.recording() as requests:
        op = every_op()["relu"]
        x = torch.empty(3, 8, device="meta")
        run = dispatch.load(op.backends[0].entry)(gpu.pretend("h100"), x)
    assert len(requests) == 1
    with pytest.raises(AssertionError, match="recorded for compilation only"):
        run(x)
