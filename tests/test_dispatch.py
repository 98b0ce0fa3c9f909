"""Which backend serves a call, and whether every refusal says why."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright
from tilewright import dispatch, gpu, ops, use_backend
from tilewright.errors import InputError, UnsupportedError
from tilewright.spec import Backend, Op

X = torch.randn(4, 64)
RELU, SOFTMAX, NORM = (ops.registry()[name] for name in ("relu", "softmax", "rms_norm"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.reset()
    yield
    dispatch.reset()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def reasons(op: Op, *args: Any, on: str | None = None, **kwargs: Any) -> dict[str, str]:
    target = gpu.pretend(on) if on else None
    return dict(dispatch.choose(op, args, gpu=target, **kwargs).refused)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    src = os.path.dirname(os.path.dirname(tilewright.__file__))
    environment = {**os.environ, "PYTHONPATH": src, **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


# --- choose --------------------------------------------------------------------------------------


def _args(op: Op) -> tuple[Any, ...]:
    assert op.inputs is not None
    rng = torch.Generator().manual_seed(0)
    return tuple(op.inputs({"shape": (4, 64)}, torch.float32, "cpu", rng))


@pytest.mark.parametrize("name", ops.registry())
def test_on_a_cpu_every_kernel_is_refused_with_a_reason_and_torch_serves(name: str) -> None:
    op = ops.registry()[name]
    choice = dispatch.choose(op, _args(op))
    assert (choice.backend.name, choice.asked_by, choice.gpu) == ("torch", "automatic", None)
    others = [b.name for b in op.backends if b.name != "torch"]
    assert [name for name, _ in choice.refused] == others
    for _, reason in choice.refused:
        assert f"{op.layout_argument} is on cpu" in reason
        assert "CUDA devices" in reason


@pytest.mark.parametrize("name", ops.registry())
@pytest.mark.parametrize("on", ["t4", "h100", "rtx4090", "sm_86"])
def test_on_a_gpu_the_first_backend_serves_and_the_rest_say_why_not(name: str, on: str) -> None:
    op = ops.registry()[name]
    of_floats = [b for b in op.backends if b.dtypes is None or torch.float32 in b.dtypes]
    op = replace(op, backends=tuple(of_floats))
    target = gpu.pretend(on)
    choice = dispatch.choose(op, _args(op), gpu=target)
    if any(b.yields is not None for b in op.backends):  # one may give way: test_matmul_routes
        names = [b.name for b in op.backends]
        others = [name for name in names if name != choice.backend.name]
        assert [name for name, _ in choice.refused] == others
        assert all(reason for _, reason in choice.refused)
        return
    if target.sm < op.backends[0].min_sm:
        assert choice.backend.name == "torch"
        assert f"SM {op.backends[0].min_sm} and newer" in dict(choice.refused)["triton"]
        with pytest.raises(UnsupportedError, match=f"SM {target.sm}.*What would work: torch"):
            dispatch.choose(op, _args(op), gpu=target, backend="triton")
        return
    assert choice.backend is op.backends[0]
    assert [name for name, _ in choice.refused] == [b.name for b in op.backends[1:]]
    first = f"{op.backends[0].name} comes first"
    assert all(first in reason for _, reason in choice.refused)


def test_cuda_kernels_do_not_offer_tritons_interpreter() -> None:
    found = reasons(SOFTMAX, X, 1, None)
    assert "TRITON_INTERPRET" in found["triton"]
    assert "TRITON_INTERPRET" not in found["cuda_v1"]


@pytest.mark.parametrize(
    ("op", "args", "backend", "says"),
    [
        (SOFTMAX, (meta(2, 8, dtype=torch.float64), 1, None), "triton", "float64"),
        (SOFTMAX, (meta(2, 8, dtype=torch.float64), 1, None), "cuda_v1", "float16, bfloat16"),
        (SOFTMAX, (meta(2, 70_001), 1, None), "cuda_v2", "70001 columns"),
        (SOFTMAX, (meta(2, 8), 1, torch.float64), "cuda_v2", "result is torch.float64"),
        (SOFTMAX, (meta(2, 8), 1, torch.float64), "triton", "result is torch.float64"),
        (SOFTMAX, (meta(2, 8), 0, None), "cuda_v2", "dim is 0"),
        (SOFTMAX, (meta(2, 8), 0, None), "cuda_v1", "last dim, 1, only"),
        (NORM, (meta(2, 8), meta(8, dtype=torch.float32), 1e-6, 0.0, "torch"), "cuda", "one dtype"),
    ],
)
def test_what_a_backend_lacks_is_named(
    op: Op, args: tuple[Any, ...], backend: str, says: str
) -> None:
    assert says in reasons(op, *args, on="h200")[backend]


def test_sm_bounds_are_named() -> None:
    def limited(**bounds: int) -> Op:
        return replace(RELU, backends=(replace(RELU.backends[0], **bounds), RELU.backends[-1]))

    assert (
        "SM 90 and newer, and Tesla T4 is SM 75"
        in reasons(limited(min_sm=90), X, on="t4")["triton"]
    )
    found = reasons(limited(min_sm=75, max_sm=89), X, on="h100")["triton"]
    assert "SM 75 to 89" in found
    assert "triton" not in reasons(limited(min_sm=90, max_sm=90), X, on="h100")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)

    def refusal(backend: Backend) -> str | None:
        return dispatch.refusal(
            backend, SOFTMAX, (X, 1, None), X, gpu.pretend("h100"), pretending=False
        )

    by_name = {b.name: refusal(b) for b in SOFTMAX.backends}
    assert "pip install triton" in str(by_name["triton"])
    assert "tilewright[cuda]" in str(by_name["cuda_v1"])
    assert by_name["torch"] is None


def test_no_backend_at_all_lists_every_reason() -> None:
    with pytest.raises(
        UnsupportedError, match="no backend serves this call. triton: input is on cpu"
    ):
        dispatch.choose(replace(RELU, backends=RELU.backends[:1]), (X,))


def test_a_choice_prints_its_reasons() -> None:
    text = str(dispatch.choose(SOFTMAX, (meta(2, 70_001), 1, None), gpu=gpu.pretend("h100")))
    assert text.splitlines()[0] == "softmax on NVIDIA H100 80GB HBM3: triton (automatic)"
    assert "not cuda_v2: 70001 columns" in text
    assert str(dispatch.choose(RELU, (X,))).startswith("relu on the CPU: torch (automatic)")


# --- backend= ------------------------------------------------------------------------------------

CALLS = {
    "relu": lambda **kw: tilewright.relu(X.clone(), **kw),
    "relu in place": lambda **kw: tilewright.relu(X.clone(), inplace=True, **kw),
    "softmax": lambda **kw: tilewright.softmax(X, **kw),
    "rms_norm": lambda **kw: tilewright.rms_norm(X, 64, **kw),
    "add_rms_norm": lambda **kw: tilewright.rms_norm(X, 64, residual=X, **kw),
    "layer_norm": lambda **kw: tilewright.layer_norm(X, 64, **kw),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_an_explicit_backend_that_cannot_serve_says_what_would(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CALLS[name](backend="triton")
    assert "'triton' (backend=)" in str(caught.value)
    assert "on cpu" in str(caught.value)
    assert str(caught.value).endswith("What would work: torch.")


@every_call
def test_a_backend_that_only_another_op_has_is_refused(name: str) -> None:
    """An explicit choice never falls back, in place or not."""
    lacking = "cuda" if name in ("relu", "relu in place", "softmax") else "cuda_v1"
    with pytest.raises(UnsupportedError, match="it has no such backend.*What would work: torch"):
        CALLS[name](backend=lacking)


@every_call
def test_backend_torch_works(name: str) -> None:
    got, wanted = CALLS[name](backend="torch"), CALLS[name]()
    for g, w in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, wanted)), strict=True):
        assert torch.equal(g, w)


@every_call
@pytest.mark.parametrize(("typed", "meant"), [("tritn", "triton"), ("cuda_v3", "cuda_v2")])
def test_an_unknown_backend_gets_a_hint(name: str, typed: str, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        CALLS[name](backend=typed)
    assert typed in str(caught.value)
    assert f"Did you mean {meant!r}?" in str(caught.value)


def test_what_would_work_on_a_pretended_gpu_does_not_depend_on_where_the_tensor_lies() -> None:
    """A CPU tensor with gpu="h100" stands for one on that GPU, as a meta tensor does."""
    messages = []
    for x in (torch.empty(2, 70_001), meta(2, 70_001, dtype=torch.float32)):
        with pytest.raises(UnsupportedError) as caught:
            tilewright.explain("softmax", x, gpu="h100", backend="cuda_v2")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].endswith("What would work: triton, cuda_v1, torch.")


# --- use_backend ---------------------------------------------------------------------------------


def asked(op: Op, *args: Any) -> tuple[str | None, str]:
    return dispatch.requested(op, None)


@every_call
def test_use_backend_is_used_or_refused(name: str) -> None:
    with use_backend("triton"), pytest.raises(UnsupportedError, match=r"'triton' \(use_backend\)"):
        CALLS[name]()
    with use_backend("torch"):
        CALLS[name]()
    CALLS[name]()


@every_call
def test_use_backend_by_op_names_the_public_function(name: str) -> None:
    public = {"relu in place": "relu", "add_rms_norm": "rms_norm"}.get(name, name)
    with use_backend(**{public: "triton"}):
        with pytest.raises(UnsupportedError, match="triton"):
            CALLS[name]()
        for other in ("relu", "softmax", "rms_norm", "layer_norm"):
            if other != public:
                CALLS[other]()


def test_use_backend_nests_and_the_innermost_wins() -> None:
    with use_backend("torch"):
        with use_backend("triton", softmax="cuda_v1"):
            assert asked(SOFTMAX) == ("cuda_v1", "use_backend")
            assert asked(RELU) == ("triton", "use_backend")
            with use_backend(relu="torch"):
                assert asked(RELU) == ("torch", "use_backend")
                assert asked(SOFTMAX) == ("cuda_v1", "use_backend")
            with use_backend("torch"):
                assert asked(SOFTMAX) == ("torch", "use_backend")
        assert asked(SOFTMAX) == ("torch", "use_backend")
    assert asked(SOFTMAX) == (None, "automatic")


def test_use_backend_is_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("triton"):
        raise KeyError
    assert asked(RELU) == (None, "automatic")
    assert torch.equal(tilewright.relu(X), X.relu())


def test_a_keyword_beats_use_backend() -> None:
    with use_backend("triton"):
        assert torch.equal(tilewright.relu(X, backend="torch"), X.relu())


def test_use_backend_rejects_names_it_does_not_know() -> None:
    with pytest.raises(InputError, match="use_backend: backend is 'tritn'.*Did you mean 'triton'"):
        with use_backend("tritn"):
            pass
    with pytest.raises(InputError, match="cuda_v9"):
        with use_backend(softmax="cuda_v9"):
            pass


def test_use_backend_rejects_an_op_it_does_not_know() -> None:
    """Or a misspelt op runs on whatever the automatic choice is, and nobody hears of it."""
    with pytest.raises(InputError, match="sofmax"):
        with use_backend(sofmax="torch"):
            pass


def test_use_backend_stays_in_its_thread() -> None:
    result = []
    with use_backend("triton"):
        thread = threading.Thread(target=lambda: result.append(tilewright.relu(X)))
        thread.start()
        thread.join()
    assert torch.equal(result[0], X.relu())


@pytest.mark.parametrize("how", ["use_backend", "backend="])
def test_the_backward_runs_on_the_forwards_backend(how: str, monkeypatch: Any) -> None:
    """Even when the block is left before the backward, as autograd's own threads would see it."""
    seen = []
    prepare = dispatch.prepare

    def spy(op: Op, args: Any, backend: str | None) -> Any:
        seen.append((op.name, dispatch.requested(op, backend)[0]))
        return prepare(op, args, backend)

    monkeypatch.setattr(dispatch, "prepare", spy)
    x = torch.randn(
        3, 977 if how == "use_backend" else 976, requires_grad=True
    )  # shapes of no plan
    if how == "use_backend":
        with use_backend("torch"):
            y = tilewright.softmax(x)
    else:
        y = tilewright.softmax(x, backend="torch")
    y.square().sum().backward()
    assert seen == [("softmax", "torch"), ("softmax_backward", "torch")]


def test_a_backward_without_a_twin_of_the_forwards_backend_is_chosen_automatically() -> None:
    backward = SOFTMAX.autograd.op  # type: ignore[union-attr]
    assert backward.backend("cuda_v1") is None
    call = (meta(2, 8), meta(2, 8), 1, torch.bfloat16)
    with use_backend("cuda_v1"):
        choice = dispatch.choose(backward, call, gpu=gpu.pretend("h100"))
    assert (choice.backend.name, choice.asked_by) == ("cuda_v2", "automatic")


def test_no_kernel_differentiates_a_float64_input() -> None:
    """softmax(x64, dtype=float32): the gradient is float64 although grad and output are not."""
    backward = SOFTMAX.autograd.op  # type: ignore[union-attr]
    y = meta(2, 8, dtype=torch.float32)
    choice = dispatch.choose(backward, (y, y, 1, torch.float64), gpu=gpu.pretend("h100"))
    assert choice.backend.name == "torch"


def test_a_backward_whose_twin_cannot_serve_is_chosen_automatically() -> None:
    """The forward was asked for by name and was served; its gradient must not be lost."""
    backward = NORM.autograd.op  # type: ignore[union-attr]
    x, w = meta(2, 3001), meta(3001)
    with use_backend("cuda"):
        served = dispatch.choose(NORM, (x, w, 1e-6, 0.0, "torch"), gpu=gpu.pretend("h100"))
        call = (x, None, x, w, 1e-6, 0.0, True)
        choice = dispatch.choose(backward, call, gpu=gpu.pretend("h100"))
    assert served.backend.name == "cuda"
    assert (choice.backend.name, choice.asked_by) == ("triton", "automatic")
    assert "3001 columns" in dict(choice.refused)["cuda"]


def test_plans_made_inside_use_backend_do_not_leak_out() -> None:
    x = torch.randn(3, 61)
    tilewright.relu(x)
    for _ in range(2):
        with use_backend("triton"), pytest.raises(UnsupportedError):
            tilewright.relu(x)
        assert torch.equal(tilewright.relu(x), x.relu())


# --- TILEWRIGHT_BACKEND --------------------------------------------------------------------------

CALL = "import torch, tilewright; print('imported'); tilewright.relu(torch.ones(2))"


def test_variable_chooses_the_backend(monkeypatch: Any) -> None:
    refused = python(CALL, TILEWRIGHT_BACKEND="triton").stderr
    assert "UnsupportedError" in refused
    assert "'triton' (TILEWRIGHT_BACKEND)" in refused
    assert "What would work: torch." in refused
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    dispatch.reset()
    assert dispatch.choose(RELU, (X,)).asked_by == "TILEWRIGHT_BACKEND"


def test_variable_is_read_at_the_first_call_and_not_at_import() -> None:
    done = python(CALL, TILEWRIGHT_BACKEND="tritn")
    assert done.stdout.strip() == "imported"
    assert "InputError: TILEWRIGHT_BACKEND: backend is 'tritn'" in done.stderr
    assert "Did you mean 'triton'?" in done.stderr


def test_variable_gives_way_to_use_backend_and_to_the_keyword(monkeypatch: Any) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    dispatch.reset()
    assert asked(RELU) == ("triton", "TILEWRIGHT_BACKEND")
    with use_backend("torch"):
        assert asked(RELU) == ("torch", "use_backend")
    assert dispatch.requested(RELU, "torch") == ("torch", "backend=")


def test_an_empty_variable_is_no_choice(monkeypatch: Any) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "")
    dispatch.reset()
    assert asked(RELU) == (None, "automatic")


# --- explain -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["h100", "t4", "rtx4090", "sm_86"])
def test_explain_on_meta_tensors_for_a_gpu_that_is_not_here(on: str) -> None:
    found = tilewright.explain("rms_norm", meta(8, 4096), (4096,), meta(4096), gpu=on)
    assert (found.op, found.backend, found.asked_by) == ("rms_norm", "cuda", "automatic")
    assert found.gpu == gpu.pretend(on).name
    assert [name.split("<")[0] for name in found.kernels] == ["rms_norm_rows"]
    assert found.backward == "cuda"
    assert found.bytes_moved == 2 * (8 * 4096 * 2 + 4096)
    bandwidth = gpu.pretend(on).bandwidth
    assert found.floor_us == (found.bytes_moved / bandwidth * 1e6 if bandwidth else None)


def test_explain_prints_the_same_text_every_time() -> None:
    texts = {str(tilewright.explain("softmax", meta(8, 70_001), gpu="h100")) for _ in range(3)}
    assert texts == {
        "softmax on NVIDIA H100 80GB HBM3: triton (automatic)\n"
        "  not cuda_v2: 70001 columns, read element by element, for alignment allows no more, are "
        "more than its blocks hold on SM 90\n"
        "  not cuda_v1: triton comes first and serves it\n"
        "  not torch: triton comes first and serves it\n"
        "  launches _softmax_wide_rows\n"
        "  moves 2,240,032 bytes: at least 0.67 us at the datasheet's bandwidth\n"
        "  backward: triton"
    }


def test_explain_says_why_triton_refuses_float64() -> None:
    found = tilewright.explain("softmax", meta(2, 8, dtype=torch.float64), gpu="h100")
    assert found.backend == found.backward == "torch"
    assert found.refused["triton"] == "input is float64; it takes float32, float16, bfloat16"
    assert found.refused["triton"] in str(found)


def test_explain_an_explicit_backend() -> None:
    found = tilewright.explain("softmax", meta(2, 8), gpu="h100", backend="cuda_v1")
    assert (found.backend, found.asked_by, found.backward) == ("cuda_v1", "backend=", "cuda_v2")
    assert found.refused["triton"] == "cuda_v1 was asked for (backend=)"
    with use_backend(rms_norm="cuda"):
        found = tilewright.explain("rms_norm", meta(2, 8), 8, gpu="h100")
    assert (found.backend, found.asked_by, found.backward) == ("cuda", "use_backend", "cuda")


def test_explain_a_residual_and_an_in_place_call() -> None:
    found = tilewright.explain("rms_norm", meta(2, 8), 8, residual=meta(2, 8), gpu="h100")
    assert found.op == "add_rms_norm"
    assert tilewright.explain("relu", meta(2, 8), inplace=True, gpu="h100").op == "relu_"


def test_explain_on_the_cpu() -> None:
    found = tilewright.explain("relu", X)
    assert (found.backend, found.gpu, found.kernels, found.floor_us) == ("torch", None, (), None)
    assert "relu on the CPU: torch" in str(found)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tilewright.explain("relu", X, gpu="h1000"), "Did you mean 'h100'?"),
        (lambda: tilewright.explain("relu", X, gpu="sm_33"), "sm_86"),
        (lambda: tilewright.explain("rela", X), "relu"),
        (lambda: tilewright.explain("rms_norm", X, (7,)), "normalized_shape"),
        (lambda: tilewright.explain("relu", X, backend="tritn"), "Did you mean 'triton'?"),
    ],
    ids=["gpu", "sm", "op", "arguments", "backend"],
)
def test_explain_refuses_nonsense_with_a_hint(call: Any, says: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert says in str(caught.value)
    assert torch.equal(tilewright.relu(X), X.relu())  # and leaves no trace


def test_explain_runs_nothing_and_changes_nothing() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = x * 1
    before, version = y.detach().clone(), y._version
    for f in ("relu", "softmax"):
        tilewright.explain(f, y, gpu="h100")
    tilewright.explain("relu", y.detach(), inplace=True, gpu="h100")
    assert torch.equal(y, before)
    assert y._version == version
    assert torch.equal(tilewright.relu(y), y.relu())
    torch.testing.assert_close(tilewright.softmax(y), y.softmax(-1))
    assert asked(RELU) == (None, "automatic")


def test_explain_does_not_capture_another_threads_call() -> None:
    """While one thread explains, the others compute."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(tilewright.rms_norm(X, 64))
        except BaseException as error:
            results.append(error)

    class Shape(list[int]):
        """Read inside the public function, while explain() listens."""

        def __iter__(self) -> Iterator[int]:
            other = threading.Thread(target=work)
            other.start()
            other.join()
            return super().__iter__()

    assert tilewright.explain("rms_norm", X, Shape([64])).backend == "torch"
    assert len(results) == 1
    assert isinstance(results[0], torch.Tensor), repr(results[0])


def test_use_backend_stays_in_its_own_task() -> None:
    """Two tasks of one event loop interleave; neither sees the other's choice."""
    seen: dict[str, list[str | None]] = {"triton": [], "torch": []}

    async def work(name: str) -> None:
        with tilewright.use_backend(name):
            for _ in range(3):
                await asyncio.sleep(0)
                seen[name].append(dispatch.requested(ops.registry()["relu"], None)[0])

    async def both() -> None:
        await asyncio.gather(work("triton"), work("torch"))

    asyncio.run(both())
    assert seen == {"triton": ["triton"] * 3, "torch": ["torch"] * 3}


def test_a_triton_without_the_gluon_we_know_leaves_the_other_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gluon is experimental: what was renamed there must not stop a call that Triton can serve."""
    q = torch.empty(4, 16, 4096, 128, device="meta", dtype=torch.bfloat16)
    assert tilewright.explain("attention", q, q, q, gpu="h200").backend == "gluon"
    ours = (".gluon_compat", ".gluon_attention", ".hopper_math", ".hopper_kernels", ".gluon_impl")
    for name in [name for name in sys.modules if name.endswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    dispatch.load.cache_clear()
    try:
        told = tilewright.explain("attention", q, q, q, gpu="h200")
    finally:
        monkeypatch.undo()
        dispatch.load.cache_clear()
    assert told.backend == "triton" and "Gluon of this Triton" in told.refused["gluon"]
