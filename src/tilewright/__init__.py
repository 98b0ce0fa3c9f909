"""tilewright: GPU kernels for transformer models, checked against float64, measured honestly."""

from tilewright import starting  # noqa: F401 (first: what follows loads torch)

# isort: split
from tilewright import compat, functional
from tilewright.compat import flash_attention_backend, flash_attention_bhsd
from tilewright.debugging import debug
from tilewright.dispatch import use_backend
from tilewright.errors import DTypeError, InputError, TilewrightError, UnsupportedError
from tilewright.explain import explain
from tilewright.ops.attention.op import attention
from tilewright.ops.geglu.op import geglu, geglu_packed
from tilewright.ops.layer_norm.op import layer_norm
from tilewright.ops.layer_norm_fp8.op import layer_norm_fp8
from tilewright.ops.matmul.op import matmul
from tilewright.ops.relu.op import relu
from tilewright.ops.rms_norm.op import rms_norm
from tilewright.ops.rms_norm_fp8.op import rms_norm_fp8
from tilewright.ops.rms_norm_swiglu.op import rms_norm_swiglu
from tilewright.ops.rope.op import rope
from tilewright.ops.softmax.op import softmax
from tilewright.ops.swiglu.op import swiglu, swiglu_packed

__version__ = "0.1.0"

__all__ = [
    "DTypeError",
    "InputError",
    "TilewrightError",
    "UnsupportedError",
    "__version__",
    "attention",
    "compat",
    "debug",
    "explain",
    "flash_attention_backend",
    "flash_attention_bhsd",
    "functional",
    "geglu",
    "geglu_packed",
    "layer_norm",
    "layer_norm_fp8",
    "matmul",
    "relu",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_swiglu",
    "rope",
    "softmax",
    "swiglu",
    "swiglu_packed",
    "use_backend",
]
