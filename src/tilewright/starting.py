"""Say that a command has begun: torch may take seconds to load, in which a log would be silent.

A terminal and a program that imports the package see nothing of it.
"""

from __future__ import annotations

import sys


def is_command_line(words: list[str]) -> bool:
    """Whether these words after the interpreter's name run `tilewright`, or `-m tilewright`."""
    if "-m" in words:
        return words[words.index("-m") + 1 :][:1] == ["tilewright"]
    return bool(words) and words[0].replace("\\", "/").rpartition("/")[2] == "tilewright"


if is_command_line(sys.orig_argv[1:]) and sys.stderr is not None and not sys.stderr.isatty():
    print("tilewright: loading torch", file=sys.stderr, flush=True)
