"""The command line of a copy of the package, in a process of its own.

The process is forked from one that has imported torch, on which a new interpreter for each copy
would spend seconds. Triton it imports itself, for Triton asks then whether it shall interpret.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["torch", "typer", "rich"])


def run(package: Path, words: list[str], *, seconds: float) -> tuple[int | None, str]:
    """The exit code of `tilewright WORDS`, or None if it took too long, and what it wrote."""
    said = package.parent / "said.txt"
    process = _FORKED.Process(target=_run, args=(str(package.parent), words, str(said)))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None, said.read_text()
    return process.exitcode, said.read_text()


def _run(folder: str, words: list[str], said: str) -> None:
    assert "tilewright" not in sys.modules
    with open(said, "w") as file:  # noqa: PTH123
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.pop("TRITON_INTERPRET", None)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    sys.argv = ["tilewright", *words]
    import torch

    torch.set_num_threads(1)
    import tilewright
    from tilewright.__main__ import main

    assert Path(tilewright.__file__).parent.parent == Path(folder)
    main()
