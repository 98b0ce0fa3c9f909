"""The public face: torch's signatures, docstrings that run, and an import that costs nothing."""

from __future__ import annotations

import doctest
import inspect
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tilewright
import tilewright.functional
from tilewright import ops
from tilewright.errors import TilewrightError
from tilewright.verify import CHECKS, Context

SRC = Path(tilewright.__file__).parents[1]
FUNCTIONS = {name: getattr(tilewright.functional, name) for name in tilewright.functional.__all__}
# torch's functions that are another view of an op: in tilewright.functional alone
FACES = {"scaled_dot_product_attention": tilewright.attention}


def python(code: str, **env: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SRC), **env}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- signatures ----------------------------------------------------------------------------------

# Where we depart from torch on purpose: (function, parameter) -> our default
OTHER_DEFAULTS = {("softmax", "dim"): -1}
OMITTED = {("softmax", "_stacklevel")}  # of the warning about an implicit dim, which we do not have


def torchs_parameters(name: str) -> list[inspect.Parameter]:
    """torch's, from its schema where the function is written in C++."""
    function = getattr(F, name)
    if not inspect.isbuiltin(function):
        return list(inspect.signature(function).parameters.values())
    return [
        inspect.Parameter(
            a.name,
            inspect.Parameter.KEYWORD_ONLY
            if a.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in getattr(torch.ops.aten, name).default._schema.arguments
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_starts_with_torchs(name: str) -> None:
    theirs = [p for p in torchs_parameters(name) if (name, p.name) not in OMITTED]
    ours = list(inspect.signature(FUNCTIONS[name]).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for our, their in zip(ours, theirs, strict=False):
        assert our.kind == their.kind, our.name
        assert our.default == OTHER_DEFAULTS.get((name, our.name), their.default), our.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_torch_does_not_have_is_keyword_only_with_a_default(name: str) -> None:
    theirs = {p.name for p in torchs_parameters(name)}
    extra = [
        p for p in inspect.signature(FUNCTIONS[name]).parameters.values() if p.name not in theirs
    ]
    assert "backend" in [p.name for p in extra]
    for p in extra:
        assert p.kind == inspect.Parameter.KEYWORD_ONLY
        assert p.default is not inspect.Parameter.empty


def test_every_op_is_public_in_both_faces() -> None:
    """Those that torch has, in tilewright.functional; those it lacks, in tilewright alone."""
    public = {op.public for op in ops.registry().values() if op.public is not None}
    shared = {name: f for name, f in FUNCTIONS.items() if name not in FACES}
    assert {f for f in public if hasattr(F, f.__name__)} == set(shared.values())
    assert all(getattr(tilewright, f.__name__) is f for f in public)
    for name, function in shared.items():
        assert getattr(tilewright, name) is function
        assert name in tilewright.__all__
    assert all(hasattr(tilewright, name) for name in tilewright.__all__)


@pytest.mark.parametrize("name", FACES)
def test_a_face_is_in_functional_alone_and_its_op_in_tilewright(name: str) -> None:
    assert name in FUNCTIONS
    assert not hasattr(tilewright, name)
    assert FACES[name] in {op.public for op in ops.registry().values()}


def test_torchs_call_styles_work() -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8)
    pairs = [
        (tilewright.relu(x), F.relu(x)),
        (tilewright.relu(x.clone(), True), F.relu(x)),
        (tilewright.relu(input=x, inplace=False), F.relu(x)),
        (tilewright.softmax(x, 1), F.softmax(x, 1)),
        (tilewright.softmax(x, dim=-2), F.softmax(x, dim=-2)),
        (tilewright.softmax(x, dim=1, dtype=torch.float64), F.softmax(x, 1, dtype=torch.float64)),
        (tilewright.rms_norm(x, (8,), w, 1e-5), F.rms_norm(x, (8,), w, 1e-5)),
        (tilewright.rms_norm(x, [3, 8]), F.rms_norm(x, [3, 8])),
        (tilewright.rms_norm(x, torch.Size([8]), weight=w), F.rms_norm(x, [8], weight=w)),
        (tilewright.rms_norm(input=x, normalized_shape=x.shape), F.rms_norm(x, x.shape)),
        (tilewright.layer_norm(x, (8,), w, w, 1e-6), F.layer_norm(x, (8,), w, w, 1e-6)),
        (tilewright.layer_norm(x, [3, 8]), F.layer_norm(x, [3, 8])),
        (tilewright.layer_norm(x, [8], bias=w), F.layer_norm(x, [8], bias=w)),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_eps_none_is_torchs(dtype: torch.dtype) -> None:
    """Inputs so small that epsilon decides the result: a wrong one is off by a factor."""
    for scale in (1.0, 1e-3, 3e-4 if dtype != torch.float64 else 1e-8):
        x = (torch.randn(4, 64, dtype=torch.float64) * scale).to(dtype)
        got, wanted = tilewright.rms_norm(x, 64), F.rms_norm(x, (64,))
        torch.testing.assert_close(got, wanted, msg=lambda m, s=scale: f"scale {s}: {m}")


# --- docstrings ----------------------------------------------------------------------------------

PUBLIC = {op.public_name: op.public for op in ops.registry().values() if op.public is not None}
DOCUMENTED = {
    **PUBLIC,
    "debug": tilewright.debug,
    "explain": tilewright.explain,
    "flash_attention_backend": tilewright.flash_attention_backend,
    "flash_attention_bhsd": tilewright.flash_attention_bhsd,
    **{name: FUNCTIONS[name] for name in FACES},
    "use_backend": tilewright.use_backend,
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings_run(name: str) -> None:
    function = inspect.unwrap(DOCUMENTED[name])
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in doctest.DocTestFinder(recurse=False).find(function, name, globs={}):
        runner.run(test)
    result = runner.summarize(verbose=False)
    assert result.failed == 0
    assert result.attempted or name == "use_backend", "no example in the docstring"


@pytest.mark.parametrize("name", tilewright.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(tilewright, name)
    assert name == "__version__" or inspect.getdoc(thing)


# --- bad inputs ----------------------------------------------------------------------------------


def _bad_inputs() -> list[Any]:
    return [
        pytest.param(op, bad, id=f"{op.name}: {bad.name}")
        for op in ops.registry().values()
        for bad in op.errors
    ]


@pytest.mark.parametrize(("op", "bad"), _bad_inputs())
def test_bad_inputs_raise_what_the_declaration_says(op: Any, bad: Any) -> None:
    with pytest.raises(bad.raises) as caught:
        bad.call(op.public, "cpu")
    assert isinstance(caught.value, TilewrightError)
    for word in bad.says:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ops.registry())
def test_verify_finds_the_same(name: str) -> None:
    context = Context(ops.registry()[name], "torch", "cpu", False, 0, 0)
    results = list(CHECKS["errors"](context))
    assert [r.message for r in results if not r.passed] == []


with torch.inference_mode():
    INFERENCE = torch.ones(4)
X = torch.ones(3, 8)

MISTAKES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "softmax dim None": (lambda: tilewright.softmax(X, None), ("softmax", "dim", "None")),
    "softmax dim float": (lambda: tilewright.softmax(X, 1.5), ("softmax", "dim", "float")),
    "softmax dim -3": (lambda: tilewright.softmax(X, -3), ("softmax", "dim is -3", "[-2, 1]")),
    "softmax dtype str": (
        lambda: tilewright.softmax(X, 1, "float32"),
        ("softmax", "dtype", "float32"),
    ),
    "norm shape float": (
        lambda: tilewright.rms_norm(X, 8.0),
        ("rms_norm", "normalized_shape", "float"),
    ),
    "norm shape None": (
        lambda: tilewright.rms_norm(X, None),
        ("rms_norm", "normalized_shape", "None"),
    ),
    "norm shape empty": (
        lambda: tilewright.rms_norm(X, ()),
        ("rms_norm", "normalized_shape", "()"),
    ),
    "norm eps str": (lambda: tilewright.rms_norm(X, 8, eps="tiny"), ("rms_norm", "eps", "tiny")),
    "norm weight list": (
        lambda: tilewright.rms_norm(X, 8, [1.0] * 8),
        ("rms_norm", "weight", "list"),
    ),
    "norm weight list of two dims": (
        lambda: tilewright.rms_norm(X, (3, 8), [1.0] * 8),
        ("rms_norm", "weight", "list"),
    ),
    "norm residual list of two dims": (
        lambda: tilewright.rms_norm(X, (3, 8), residual=[1.0]),
        ("rms_norm", "residual", "list"),
    ),
    "norm residual dtype": (
        lambda: tilewright.rms_norm(X, 8, residual=X.double()),
        ("rms_norm", "residual", "float64", "float32"),
    ),
    "norm list": (lambda: tilewright.rms_norm([1.0], 1), ("rms_norm", "input", "list")),
    "relu None": (lambda: tilewright.relu(None), ("relu", "input", "NoneType")),
    "relu list in place": (lambda: tilewright.relu([1.0], inplace=True), ("relu", "input", "list")),
    "relu complex": (
        lambda: tilewright.relu(X.to(torch.complex64)),
        ("relu", "input", "complex64"),
    ),
    "relu bool in place": (
        lambda: tilewright.relu(X.bool(), inplace=True),
        ("relu", "input", "bool"),
    ),
    "relu of an inference tensor in place": (
        lambda: tilewright.relu(INFERENCE, inplace=True),
        ("relu", "input", "inference", "inplace=False"),
    ),
    "nested": (
        lambda: tilewright.relu(torch.nested.nested_tensor([X[0], X[1]])),
        ("relu", "input", "nested"),
    ),
    "sparse over several dims": (
        lambda: tilewright.rms_norm(X.to_sparse(), X.shape),
        ("rms_norm", "input", "sparse"),
    ),
    "sparse residual": (
        lambda: tilewright.rms_norm(X, X.shape[-1], residual=X.to_sparse()),
        ("rms_norm", "residual", "sparse"),
    ),
    "eps beyond every float": (
        lambda: tilewright.rms_norm(X, X.shape[-1], eps=10**400),
        ("rms_norm", "eps", "float"),
    ),
    "eps tensor": (
        lambda: tilewright.rms_norm(X, X.shape[-1], eps=torch.tensor(1e-6)),
        ("rms_norm", "eps", "Tensor", "item()"),
    ),
    "float sizes": (
        lambda: tilewright.rms_norm(X, [float(X.shape[-1])]),
        ("rms_norm", "normalized_shape", "int"),
    ),
    "backend list": (lambda: tilewright.softmax(X, backend=["triton"]), ("backend", "['triton']")),
}


def test_whole_numbers_of_other_types_are_taken() -> None:
    n = np.int64(X.shape[-1])
    assert torch.equal(tilewright.softmax(X, np.int64(1)), tilewright.softmax(X, 1))
    assert torch.equal(tilewright.rms_norm(X, n), tilewright.rms_norm(X, X.shape[-1]))
    assert torch.equal(tilewright.rms_norm(X, [n]), tilewright.rms_norm(X, X.shape[-1]))
    with pytest.raises(TypeError, match=r"dim is 1\.0"):
        tilewright.softmax(X, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_softmax_casts_integers_to_the_dtype_it_is_given(dtype: torch.dtype) -> None:
    x = torch.arange(6).view(2, 3)
    wanted = torch.softmax(x, -1, dtype=dtype)
    torch.testing.assert_close(tilewright.softmax(x, -1, dtype), wanted)


def test_a_long_contiguous_relu_is_one_row_and_a_tall_one_in_pieces_is_refused() -> None:
    x = torch.empty(2**31 + 8, 2, device="meta", dtype=torch.float16)
    assert tilewright.explain("relu", x, gpu="h200").backend == "triton"
    found = tilewright.explain("relu", x[:, :1], gpu="h200")
    assert found.backend == "torch"
    assert "32 bits" in found.refused["triton"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("softmax", (1, 2**31)), ("softmax", (2**31, 2)), ("softmax", (2**16, 2**16, 2))],
    ids=str,
)
def test_sizes_beyond_32_bits_are_left_to_torch(name: str, shape: tuple[int, ...]) -> None:
    """Rows and columns are numbered in 32 bits in kernels."""
    x = torch.empty(shape, device="meta", dtype=torch.float16)
    found = tilewright.explain(name, x, gpu="h200")
    assert found.backend == "torch"
    assert "32 bits" in found.refused["triton"]
    with pytest.raises(NotImplementedError, match="32 bits"):
        tilewright.explain(name, x, gpu="h200", backend="triton")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_no_declaration_lists_are_named_too(name: str) -> None:
    """Ours, or torch's own schema error: both name the op, the argument and the value."""
    call, says = MISTAKES[name]
    with pytest.raises(RuntimeError) as caught:
        call()
    for word in says:
        assert word in str(caught.value)


# --- import --------------------------------------------------------------------------------------

TIMED = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import tilewright
print(time.perf_counter() - start)
new = set(sys.modules) - before
print(*sorted(m for m in new if m.split(".")[0] in ("triton", "cuda", "numpy", "platformdirs")))
"""

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cuda", "platformdirs", "typer", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTriton())
for name in [m for m in sys.modules if m.split(".")[0] in ("triton", "cuda")]:
    del sys.modules[name]
import torch
import torch.nn.functional as F
import tilewright

x = torch.randn(3, 8, requires_grad=True)
assert torch.equal(tilewright.relu(x), F.relu(x))
torch.testing.assert_close(tilewright.softmax(x), F.softmax(x, -1))
y, total = tilewright.rms_norm(x, 8, torch.ones(8), residual=x)
torch.testing.assert_close(y, F.rms_norm(2 * x, (8,)))
y.sum().backward()
assert x.grad is not None
found = tilewright.explain("softmax", x, gpu="h100")
print(found.backend)
assert "triton" not in sys.modules
print("fine")
"""


@pytest.mark.drawn(seconds=8.8, family="slow")
def test_import_is_cheap_and_brings_no_compiler() -> None:
    python("import tilewright")  # writes what bytecode is not there yet
    outputs = [python(TIMED).splitlines() for _ in range(3)]
    assert [lines[1:] for lines in outputs] == [[""]] * 3, "modules that an import must not bring"
    assert statistics.median(float(lines[0]) for lines in outputs) <= 0.3


@pytest.mark.drawn(seconds=2.9, family="slow")
def test_everything_works_on_a_cpu_without_triton_and_cuda() -> None:
    assert python(WITHOUT_TRITON).split() == ["cuda_v2", "fine"]


@pytest.mark.drawn(seconds=3.0, family="slow")
def test_import_and_first_calls_write_nothing(tmp_path: Path) -> None:
    """An import must work where nothing can be written, and leave nothing where it can."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    code = (
        "import torch, tilewright; x = torch.ones(2, 4); tilewright.relu(x); tilewright.softmax(x);"
        "tilewright.rms_norm(x, 4)"
    )
    folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(work)}
    python(f"import os; os.chdir({str(work)!r}); {code}", **folders, PYTHONDONTWRITEBYTECODE="1")
    assert [*home.rglob("*"), *work.rglob("*")] == []
