"""The wheel: one top-level name, every file the kernels need, and the metadata pip acts on."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import tilewright

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "tilewright"
PROJECT = (REPOSITORY / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(REPOSITORY)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_is_pure_python_of_this_version(wheel: zipfile.ZipFile) -> None:
    name = Path(str(wheel.filename)).name
    assert name == f"tilewright-{tilewright.__version__}-py3-none-any.whl"


def test_tilewright_is_the_only_name_it_installs(wheel: zipfile.ZipFile) -> None:
    """A wheel that installs `kernels`, `cuda` or `tests` shadows somebody else's."""
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert top == {"tilewright", f"tilewright-{tilewright.__version__}.dist-info"}


def test_every_source_file_is_in_it(wheel: zipfile.ZipFile) -> None:
    there = {n for n in wheel.namelist() if n.startswith("tilewright/")}
    here = {
        f"tilewright/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there == here
    assert {Path(n).suffix for n in there} >= {".py", ".cu", ".cuh", ".typed"}
    assert not any(n.endswith((".pyc", ".so")) or Path(n).name.startswith("test") for n in there)


def test_the_metadata_asks_for_what_pyproject_does(metadata: Message) -> None:
    wanted = {"torch>=2.11", "numpy"}
    wanted |= {"triton>=3.6;platform_system=='Linux'"}
    wanted |= {"triton-windows>=3.6;platform_system=='Windows'"}
    asked = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {plain(line) for line in asked} == wanted


def plain(requirement: str) -> str:
    return requirement.replace(" ", "").replace('"', "'")


def test_the_extras_are_those_the_messages_name(metadata: Message) -> None:
    extras = {"cli", "cuda", "bench", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    lines = metadata.get_all("Requires-Dist", [])
    for extra in extras:
        assert any(f"extra == '{extra}'" in line.replace('"', "'") for line in lines), extra


def test_version_and_python_are_stated_once(metadata: Message) -> None:
    assert 'dynamic = ["version", "readme"]' in PROJECT
    assert metadata["Version"] == tilewright.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Name"] == "tilewright"


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "tilewright = tilewright.__main__:main" in wheel.read(name).decode()


def test_typing_marker_is_there(wheel: zipfile.ZipFile) -> None:
    assert "tilewright/py.typed" in wheel.namelist()


def test_the_licence_is_in_the_wheel_and_named(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    (name,) = [n for n in wheel.namelist() if n.endswith("/LICENSE")]
    text = wheel.read(name).decode()
    assert text == (REPOSITORY / "LICENSE").read_text() and text.startswith("MIT License")


def test_every_extra_is_of_use(metadata: Message) -> None:
    """A package that an extra installs is imported, or run, by something here."""
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" in line]
    named = {re.split(r"[\[<>=; ]", line)[0] for line in lines}
    modules = {"cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings", "cuda-toolkit": "nvrtc"}
    modules |= {"pytest-xdist": "-n auto", "pytest-timeout": "timeout"}
    folders = [SOURCE, REPOSITORY / "tests"]
    texts = [p.read_text() for folder in folders for p in folder.rglob("*.py")]
    texts += [(REPOSITORY / "Makefile").read_text(), PROJECT.split("[tool.", 1)[1]]
    for name in named - {"tilewright", "build", "hatchling", "hatch-fancy-pypi-readme"}:
        word = modules.get(name, name)
        assert any(word in text for text in texts), name


def test_the_links_of_a_package_page_lead_out_of_it(metadata: Message) -> None:
    """Each is absolute, below the repository's address, and what it names exists."""
    text = str(metadata.get_payload())
    (address,) = [u.split(", ")[1] for u in metadata.get_all("Project-URL", [])]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 15
    raw = address.replace("https://github.com", "https://raw.githubusercontent.com")
    for link in links:
        start = f"{raw}/main/" if link.endswith(".svg") else f"{address}/blob/main/"
        assert link.startswith(start), link
        assert (REPOSITORY / link.removeprefix(start)).exists(), link
