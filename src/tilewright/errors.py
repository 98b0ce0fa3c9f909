"""Every exception tilewright raises, and the one sentence shape they all share.

A message names the op, the argument, what it got, what it wants and how to fix it:

    rms_norm: weight has shape (4096,); it must have shape (1024,), the normalized_shape. Pass ...

The classes inherit twice on purpose: torch raises RuntimeError for shape mistakes, Python users
expect ValueError or TypeError; one class satisfies both `except` styles.
"""

from __future__ import annotations


class TilewrightError(Exception):
    """The root of everything tilewright raises on purpose."""


class InputError(TilewrightError, ValueError, RuntimeError):
    """A shape, stride, device or value that the op cannot take."""


class DTypeError(TilewrightError, TypeError, RuntimeError):
    """A dtype, or a Python type, that the op cannot take."""


class UnsupportedError(TilewrightError, NotImplementedError):
    """The backend asked for cannot serve this call; the message lists what would work."""


class CaptureError(TilewrightError, RuntimeError):
    """A first call for a new layout inside CUDA-graph capture, where nothing may compile."""


class CacheError(TilewrightError, PermissionError):
    """The cache folder could be written by somebody else: code from it must not be run."""


class BuildError(TilewrightError, RuntimeError):
    """A CUDA C++ source did not compile; carries the compiler's log."""


class LaunchError(TilewrightError, RuntimeError):
    """The driver refused a launch; carries the kernel, the grid and the shared memory asked for."""


def sentence(op: str, argument: str, got: str, wants: str, fix: str) -> str:
    """The one shape of a message about a bad argument."""
    return f"{op}: {argument} {got}; it must {wants}. {fix}"
