"""The command line of the package, or of a copy of it, in a process of its own.

The process is forked from one that has imported torch, on which a new interpreter for each command
would spend seconds. Triton it imports itself, for Triton asks then whether it shall interpret.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = Path(__file__).parents[1] / "src" / "tilewright"
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes", "typer", "rich"])


@dataclass(frozen=True)
class Done:
    returncode: int | None  # None if it took too long
    stdout: str
    stderr: str


def run(words: list[str], *, package: Path = PACKAGE, seconds: float = 500, **env: str) -> Done:
    """`tilewright WORDS`, in this folder."""
    with TemporaryDirectory() as folder:
        said = [Path(folder) / stream for stream in ("stdout", "stderr")]
        where = (str(package.parent), str(Path.cwd()), [str(path) for path in said])
        process = _FORKED.Process(target=_run, args=(words, env, *where))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        return Done(None if late else process.exitcode, *(path.read_text() for path in said))


def _run(words: list[str], env: dict[str, str], source: str, folder: str, said: list[str]) -> None:
    assert "tilewright" not in sys.modules
    for stream, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    for name in list(os.environ):  # as they were when the first test ran
        if name.startswith(("TILEWRIGHT", "TRITON_INTERPRET")):
            del os.environ[name]
    os.environ.update(env)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, source)
    sys.argv = ["tilewright", *words]
    import torch

    torch.set_num_threads(1)
    import tilewright
    from tilewright.__main__ import main

    assert str(Path(tilewright.__file__).parent.parent) == source
    main()
