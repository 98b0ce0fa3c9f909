"""A record that is whole at every moment, from the first result to whatever ends the run.

The file is replaced, never written over: a reader sees the state of a moment ago, or of now. A lock
keeps a second run away from the same file; the system lets go of it when the process ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tilewright.errors import InputError

EVERY = 2.0  # seconds between two states on disk
RARELY = 20.0  # the pause between two states, in times of what writing one takes


class Journal:
    """Keeps what `state()` returns in a file, while the block lasts and when it ends.

    Nothing is kept without a path, and as long as the state is None. A state that cannot be written
    does not end the run, whose results may still be shown; `error` says why.
    """

    def __init__(self, path: Path | None, state: Callable[[], Any], option: str = "--json") -> None:
        self.path, self.state, self.option = path, state, option
        self.error: InputError | None = None
        self._lock = None if path is None else lock(path, option)
        self._written, self._pause = 0.0, EVERY

    def __enter__(self) -> Journal:
        return self

    def note(self) -> None:
        """Keep the state as it is now, unless that was done a moment ago."""
        passing = self.path is None or _is_passing(self.path)
        if not passing and time.monotonic() - self._written >= self._pause:
            self.keep()

    def keep(self) -> None:
        """Keep the state as it is now."""
        state = self.state() if self.path is not None else None
        if self.path is None or state is None:
            return
        began = time.monotonic()
        try:
            write(self.path, state, self.option)
            self.error = None
        except InputError as e:
            self.error = e
        self._written = time.monotonic()
        self._pause = max(EVERY, RARELY * (self._written - began))

    def __exit__(self, *_: object) -> None:
        try:
            self.keep()
        finally:
            if self._lock is not None:
                unlock(self._lock)


def write(path: Path, record: Any, option: str = "--json") -> None:
    """Replace the file by this record as JSON, whole or not at all."""
    replace(path, json.dumps(finite(record), indent=1, default=str, allow_nan=False) + "\n", option)


def replace(path: Path, text: str, option: str) -> None:
    """Replace the file by this text, whole or not at all."""
    kept = None
    try:
        if _is_passing(path):
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
            return
        path = path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        number, kept = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(kept, 0o666 & ~_umask())
        os.replace(kept, path)
        kept = None
    except OSError as e:
        raise _unwritable(path, option, e) from e
    finally:
        if kept is not None:
            with contextlib.suppress(OSError):
                os.unlink(kept)


def lock(path: Path, option: str = "--json") -> IO[str]:
    """Return the lock of a record; the process that has it is the only one that writes it."""
    if _is_passing(path):
        return open(os.devnull, encoding="utf-8")
    while True:
        try:
            path = path.resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.parent / f".{path.name}.lock"
            file = open(beside, "a+", encoding="utf-8")  # noqa: SIM115 (held until the run ends)
        except OSError as e:
            raise _unwritable(path, option, e) from e
        try:
            _take(file)
        except OSError:
            file.close()
            raise InputError(
                f"{option}: another run is writing {path}. Wait for it, or name another file."
            ) from None
        with contextlib.suppress(OSError):  # who had it before may have removed the file meanwhile
            if os.path.samestat(os.fstat(file.fileno()), os.stat(beside)):
                return file
        file.close()


def unlock(file: IO[str]) -> None:
    """Let go of a lock and remove its file."""
    if file.name != os.devnull:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
    file.close()


def _is_passing(path: Path) -> bool:
    """Whether what is written there passes on: a pipe, a device, a shell's own file."""
    if path.parts[:2] in (("/", "dev"), ("/", "proc")):
        return True
    try:
        return path.exists() and not path.is_file()
    except OSError:
        return False


def _unwritable(path: Path, option: str, error: OSError) -> InputError:
    return InputError(f"{option}: {path} cannot be written ({error.strerror}). Name another file.")


def _take(file: IO[str]) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def finite(value: Any) -> Any:
    """Return what JSON can hold: infinity and NaN in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
