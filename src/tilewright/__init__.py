"""tilewright: GPU kernels for transformer models, checked against float64, measured honestly."""

from tilewright import functional
from tilewright.dispatch import use_backend
from tilewright.errors import DTypeError, InputError, TilewrightError, UnsupportedError
from tilewright.explain import explain
from tilewright.ops.relu.op import relu
from tilewright.ops.rms_norm.op import rms_norm
from tilewright.ops.softmax.op import softmax

__version__ = "0.1.0"

__all__ = [
    "DTypeError",
    "InputError",
    "TilewrightError",
    "UnsupportedError",
    "__version__",
    "explain",
    "functional",
    "relu",
    "rms_norm",
    "softmax",
    "use_backend",
]
