"""Results of earlier compilations, kept in the repository, keyed by a hash of what was compiled.

One file per compiler version. An entry whose hash matches need not be compiled again. A run
compiles what changed first, then a draw of the rest, so that a stale or doctored ledger shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tilewright.errors import InputError
from tilewright.lab import journal
from tilewright.matrix.build import Built


class Ledger:
    """The files of one folder; a missing folder is an empty ledger."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.known: dict[str, Built] = {}
        for path in sorted(folder.glob("*.jsonl")) if folder and folder.is_dir() else ():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    built = Built(**json.loads(line))
                except (ValueError, TypeError) as e:
                    raise InputError(
                        f"compile: {path}, line {number} is no result of a compilation ({e}). "
                        "Restore the file, or delete it and run with --update."
                    ) from None
                self.known[built.key] = built

    def write(self, results: Iterable[Built]) -> None:
        """Replace what was known of the ops and SMs that ran; what nothing reaches now goes."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = list(results)
        ran = {(b.compiler, b.op, b.sm) for b in fresh}
        others = [b for b in self.known.values() if (b.compiler, b.op, b.sm) not in ran]
        by_compiler: dict[str, dict[str, Built]] = {}
        for built in (*others, *fresh):
            by_compiler.setdefault(built.compiler, {})[built.key] = built
        for compiler, entries in by_compiler.items():
            rows = sorted(entries.values(), key=lambda b: (b.op, b.backend, b.sm, b.dtype, b.key))
            text = "".join(json.dumps(asdict(b), sort_keys=True) + "\n" for b in rows)
            journal.replace(self.folder / f"{compiler.replace(' ', '-')}.jsonl", text, "--ledger")
