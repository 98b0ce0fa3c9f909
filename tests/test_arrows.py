"""The arrows of the design: an import that runs back up fails here. Rules in prose decay.

Every import statement of every file counts, those inside functions too; only `if TYPE_CHECKING` is
not followed, because it never runs.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewright

SRC = Path(tilewright.__file__).parent
FILES = sorted(SRC.rglob("*.py"))

LEAVES = ["errors", "gpu", "spec", "shapes", "checks", "norms", "gated", "fp8", "fp8_norms"]
LEAVES += ["debugging", "multiplying", "attending", "sdpa"]
BELOW_OPS = [*LEAVES, "tuned*", "dispatch", "library"]
FACES = ["functional", "explain", "compat"]
READERS = [*BELOW_OPS, "dims", "toolkit*", "ops", "ops.*", *FACES]  # of registry()

# Module -> what it may import of ours. The first pattern that fits a file decides.
# "." is the package itself, the public face; "{here}" is the op's own folder.
MAY_IMPORT: dict[str, list[str]] = {
    "errors": [],
    "spec": ["errors"],
    "gpu": ["errors"],
    "shapes": ["errors"],
    "checks": ["errors"],
    "debugging": [],
    "sdpa": ["errors", "checks"],
    "norms": ["errors", "checks"],
    "gated": ["errors", "spec", "shapes", "checks"],
    "multiplying": ["errors", "gpu", "spec", "checks"],
    "attending": ["errors", "spec", "checks", "multiplying"],
    "fp8": ["errors"],
    "fp8_norms": ["errors", "spec", "shapes", "fp8"],
    "quant": ["errors"],
    "dims": ["errors", "spec"],
    "toolkit": [],
    "tuned*": ["errors", "gpu", "spec", "tuned*"],
    "toolkit.*fp8*": ["errors", "gpu", "fp8", "toolkit", "toolkit.*"],
    "toolkit.*matmul*": ["errors", "gpu", "multiplying", "toolkit", "toolkit.*"],
    "toolkit.*": ["errors", "gpu", "toolkit", "toolkit.*"],
    "dispatch": ["errors", "gpu", "spec"],
    "library": [
        "errors",
        "spec",
        "dispatch",
        "toolkit.memory",
        "toolkit.launch",
    ],  # a poisoned call makes no plan
    "ops": ["spec"],
    "ops.*.op": [
        *("errors", "spec", "shapes", "checks", "norms", "gated", "fp8", "fp8_norms"),
        *("attending", "multiplying", "{here}.bounds"),
        *("debugging", "library", "{here}", "{here}.reference"),
    ],
    "ops.*.bounds": ["spec", "{here}.reference"],
    "ops.*.reference": ["ops.*.reference", "fp8", "gated", "multiplying"],
    # device code that fills a file of its own, or two
    "ops.*.*_math": ["toolkit", "toolkit.*"],
    "ops.*.*_kernels": ["toolkit", "toolkit.*", "{here}.*_math"],
    # how an op's kernels would be launched, and which of its backends a call takes
    "ops.*.launches": ["gpu", "toolkit", "toolkit.*"],
    "ops.*.routes": [
        *("gpu", "spec", "multiplying", "tuned", "dispatch", "toolkit", "toolkit.*"),
        "{here}.launches",
    ],
    "ops.*.*_impl": [
        *("gpu", "fp8", "multiplying", "tuned", "toolkit", "toolkit.*"),
        *("{here}.*_kernels", "{here}.*_math", "{here}.launches", "{here}.routes"),
    ],
    "ops.*": [],  # a folder's __init__
    "functional": ["errors", "checks", "sdpa", "library", "ops.*.op"],
    "explain": [*BELOW_OPS, "ops", "functional", "toolkit.recording"],
    "compat": [*LEAVES, "dispatch", "functional", "explain", "ops.*.op"],
    "": ["starting", *BELOW_OPS, *FACES, "nn", "ops.*.op"],
    "nn": [*LEAVES, "functional", "ops.*.op", "quant"],
    "starting": [],
    "lab*": ["errors", ".", "lab*"],
    "verify*": [*READERS, ".", "lab*", "verify*"],
    "matrix*": [*READERS, ".", "lab*", "matrix*"],
    "bench*": [*READERS, ".", "lab*", "verify*", "doctor", "bench*"],
    "tuning*": [*READERS, ".", "lab*", "verify*", "doctor", "bench*", "tuning*"],
    "profiling*": [*READERS, ".", "doctor", "profiling*"],
    "integrations*": [*READERS, ".", "nn", "integrations*"],
    "doctor": [*READERS, ".", "verify*", "matrix*"],
    "readme": [*READERS, ".", "verify*", "matrix*", "bench*", "profiling*"],
    "cli*": ["*"],
    "__main__": ["cli"],
}


def module_of(path: Path) -> str:
    """Dotted name below the package: "ops.relu.op", "toolkit" for an __init__, "" for the top."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run."""
    yield node
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children = list(node.orelse)
    for child in children:
        yield from _live(child)


def imports(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Full names of the modules that a file imports."""
    for node in _live(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if module else []
                up = node.level - (1 if is_package else 0)
                base = ".".join(["tilewright", *package[: len(package) - up], *base.split(".")])
                base = base.rstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner.removeprefix("tilewright.") in MODULES else base
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant):
                yield str(first.value)


def _name(node: ast.AST) -> str:
    """ "os.environ.get" for the expression that spells it."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def rule_of(module: str) -> list[str] | None:
    for pattern, allowed in MAY_IMPORT.items():
        if fnmatch.fnmatchcase(module, pattern):
            here = ".".join(module.split(".")[:-1])
            return [name.format(here=here) for name in allowed]
    return None


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    allowed = rule_of(module)
    if allowed is None:
        return [f"{module}: in no layer; give it a line in MAY_IMPORT"]
    found = []
    for name in imports(source, module, is_package):
        if name != "tilewright" and not name.startswith("tilewright."):
            continue
        target = name.removeprefix("tilewright").removeprefix(".") or "."
        if not any(fnmatch.fnmatchcase(target, pattern) for pattern in allowed):
            found.append(f"{module or 'tilewright'} imports {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p) or "tilewright")
def test_no_import_runs_back_up(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not wrong_arrows(source, module_of(path), path.name == "__init__.py")


def test_every_rule_is_about_something() -> None:
    """A pattern that no file fits may be misspelt; only rooms that are planned may be empty."""
    planned = {"quant", "nn", "integrations*", "bench*"}
    unused = {p for p in MAY_IMPORT if not any(fnmatch.fnmatchcase(m, p) for m in MODULES)}
    assert unused <= planned


# --- the checker can fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "from tilewright import gpu"),
        ("debugging", "from tilewright import errors"),
        ("toolkit.rotary", "from tilewright import debugging"),
        ("spec", "from tilewright.dispatch import choose"),
        ("toolkit.rows", "from tilewright.spec import Op"),
        ("toolkit.rows", "import tilewright.ops.relu.op"),
        ("tuned.file", "from tilewright import dispatch"),
        ("bench.clock", "import tilewright.tuning.measure"),
        ("dispatch", "from tilewright import library"),
        ("dispatch", "from tilewright.toolkit.launch import bind"),
        ("library", "def f():\n    from tilewright.ops import registry"),
        ("ops.relu.op", "from tilewright.ops.relu import triton_impl"),
        ("ops.relu.op", "from tilewright.ops.softmax import reference"),
        ("ops.relu.op", "from tilewright import dispatch"),
        ("ops.relu.reference", "from tilewright.toolkit import memory"),
        ("ops.relu.triton_impl", "from tilewright.ops.relu import reference"),
        ("ops.relu.triton_impl", "from tilewright.ops.relu.cuda_impl import prepare"),
        ("ops.relu.triton_impl", "from tilewright.ops.softmax.triton_impl import _online"),
        ("ops.relu.triton_impl", "from tilewright.library import calls"),
        ("ops.relu.triton_impl", "from . import reference"),
        ("ops.relu.triton_impl", "from .. import softmax"),
        ("ops.relu.triton_impl", "from ...dispatch import choose"),
        ("ops.relu.triton_impl", "import importlib\nimportlib.import_module('tilewright.library')"),
        ("explain", "from tilewright.verify import run"),
        ("verify.checks", "from tilewright.cli import app"),
        ("matrix.reach", "from tilewright import cli"),
        ("verify.checks", "import tilewright.bench"),
        ("explain", "if not TYPE_CHECKING:\n    import tilewright.cli"),
        ("explain", "if TYPE_CHECKING:\n    pass\nelse:\n    import tilewright.cli"),
        ("attic", "import torch"),
    ],
)
def test_the_checker_catches(module: str, source: str) -> None:
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "import torch, triton"),
        ("toolkit.rows", "if TYPE_CHECKING:\n    from tilewright.spec import Op"),
        ("toolkit.rows", "from tilewright.toolkit import memory\nfrom . import memory"),
        ("ops.swiglu.reference", "from tilewright.ops.relu import reference"),
        ("ops.relu.op", "from tilewright.ops.relu import reference"),
        ("ops.relu.triton_impl", "from tilewright.toolkit.rows import rows_of"),
        ("cli", "import tilewright.verify"),
    ],
)
def test_the_checker_lets_pass(module: str, source: str) -> None:
    assert not wrong_arrows(source, module)


# --- words that must not appear ------------------------------------------------------------------


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run at import: not function bodies, but their decorators and defaults."""
    yield node
    for field, value in ast.iter_fields(node):
        later = field == "body" and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not later:
                yield from _at_module_level(child)


def forbidden(source: str, module: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"):
                found.append(f"calls {name}")
            for keyword in node.keywords:
                constant = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "shell" and not constant:
                    found.append("shell=True")
        if isinstance(node, ast.Attribute | ast.Name):
            name = _name(node).split(".")[-1]
            if module != "gpu" and name in ("get_device_capability", "get_device_properties"):
                found.append(f"{name} outside gpu.py")
    for name in imports(source, module):
        if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve"):
            found.append(f"imports {name}")
        if name.split(".")[0] in ("pytest", "hypothesis", "_pytest", "tests"):
            found.append(f"imports {name}")
        if name in ("os.system", "os.environ", "os.getenv"):
            found.append(f"imports {name}")
    for node in _at_module_level(tree):
        if _name(node) in ("os.environ", "os.getenv"):
            found.append(f"reads {_name(node)} at import")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p) or "tilewright")
def test_nothing_forbidden(path: Path) -> None:
    assert not forbidden(path.read_text(encoding="utf-8"), module_of(path))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import pytest",
        "from hypothesis import given",
        "eval('1')",
        "def f(x):\n    exec(x)",
        "import os\nos.system('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "torch.cuda.get_device_capability()",
        "from torch.cuda import get_device_properties\nget_device_properties(0)",
        "import os\nX = os.environ.get('A')",
        "import os\ndef f(x=os.environ['A']): pass",
        "import os\nclass A:\n    x = os.getenv('A')",
        "import os\n@g(os.environ)\ndef f(): pass",
    ],
)
def test_forbidden_words_are_caught(source: str) -> None:
    assert forbidden(source, "somewhere")


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f():\n    return os.environ.get('A')",
        "model.eval()",
        "subprocess.run(['ls'], shell=False)",
        "import torch",
    ],
)
def test_innocent_words_pass(source: str) -> None:
    assert not forbidden(source, "somewhere")


def test_gpu_py_may_ask_the_device() -> None:
    assert not forbidden("torch.cuda.get_device_properties(0)", "gpu")
