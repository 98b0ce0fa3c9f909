"""Compiled CUDA C++ kept on disk: one file per cubin, trusted only in a folder that is ours alone.

A cubin from this folder is run on the GPU, so whoever can write here can run code as the user. A
folder that others can write, that somebody else owns or that is a symlink is therefore refused
(CacheError). Everything else that can go wrong (a torn file, a full disk, no permission) costs a
recompilation and one warning, never the call: a cache may only ever save time.

An entry is one JSON line (the full key, what the assembler said about it, a SHA-256 of that and of
the cubin), then the cubin. The key inside is compared on every read, so a renamed or colliding
file is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilewright.errors import CacheError

VARIABLE = "TILEWRIGHT_CACHE_DIR"

Key = Mapping[str, str]

_warned: set[str] = set()
_warned_lock = threading.Lock()


def root() -> Path:
    """TILEWRIGHT_CACHE_DIR, or the user's cache folder; asked anew on each call."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    try:
        import platformdirs
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser().absolute() / "tilewright"
    return Path(platformdirs.user_cache_dir("tilewright"))


def folder() -> Path:
    return root() / "cubin"


def file_name(key: Key) -> str:
    """The SHA-256 of every field of the key."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest() + ".cubin"


def load(key: Key) -> tuple[dict[str, Any], bytes] | None:
    """(facts, cubin) as they were stored, or None."""
    try:
        path = _own_folder() / file_name(key)
    except CacheError:
        raise
    except OSError as error:
        _warn_once(folder(), f"is not usable ({error}); compiling without it")
        return None
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(path, f"cannot be read ({error}); compiling again")
        return None
    try:
        return _parse(blob, key)
    except (ValueError, KeyError, TypeError) as error:
        _warn_once(path, f"is damaged ({error}); compiling again")
        return None


def store(key: Key, facts: Mapping[str, Any], cubin: bytes) -> None:
    """Write an entry whole or not at all: readers and other writers never see half of one."""
    header = {"key": dict(key), "sha256": _checksum(facts, cubin), "facts": dict(facts)}
    try:
        home = _own_folder()
        handle, temporary = tempfile.mkstemp(dir=home, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + cubin)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, home / file_name(key))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except CacheError:
        raise
    except OSError as error:
        _warn_once(folder(), f"is not usable ({error}); compiling without it")


def _parse(blob: bytes, key: Key) -> tuple[dict[str, Any], bytes]:
    head, newline, cubin = blob.partition(b"\n")
    if not newline:
        raise ValueError("it has no header line")
    header = json.loads(head)
    if header["key"] != dict(key):
        raise ValueError("it holds another kernel's key")
    facts = header["facts"]
    if header["sha256"] != _checksum(facts, cubin):
        raise ValueError("its checksum does not match")
    return facts, cubin


def _checksum(facts: Mapping[str, Any], cubin: bytes) -> str:
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode() + cubin).hexdigest()


def _own_folder() -> Path:
    """The cache folder, made if need be; raises CacheError unless it is ours alone."""
    home = folder()
    for path in (home.parent, home):
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            with suppress(FileExistsError):  # another process was faster, or a dangling symlink
                os.mkdir(missing, 0o700)
        check_ours(path)
    return home


def check_ours(path: Path) -> None:
    facts = os.lstat(path)
    if stat.S_ISLNK(facts.st_mode):
        raise CacheError(
            f"{path} is a symlink to {os.path.realpath(path)}; cached code is not loaded through "
            f"one. Set {VARIABLE} to the folder itself."
        )
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if not hasattr(os, "getuid"):
        return  # Windows: neither owners nor mode bits mean this there
    if facts.st_uid != os.getuid():
        raise CacheError(
            f"{path} belongs to uid {facts.st_uid}, and this process runs as uid {os.getuid()}; "
            f"cached code is loaded from your own folder only. Set {VARIABLE} to a folder you own."
        )
    mode = stat.S_IMODE(facts.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path} has mode {mode:o} and owner uid {facts.st_uid}: others can write to it, and "
            f"cached code is run. Fix it with `chmod 700 {path}`, or set {VARIABLE}."
        )


def _warn_once(path: Path, what: str) -> None:
    with _warned_lock:
        if str(path) in _warned:
            return
        _warned.add(str(path))
    warnings.warn(f"tilewright's cache {path} {what}", RuntimeWarning, stacklevel=4)
