"""The torch.nn.functional-compatible face: the same functions under torch's names and signatures.

    import tilewright.functional as F

Arguments that torch has deprecated are left out: softmax's implicit dim (here -1) and _stacklevel.
"""

from tilewright.ops.layer_norm.op import layer_norm
from tilewright.ops.relu.op import relu
from tilewright.ops.rms_norm.op import rms_norm
from tilewright.ops.softmax.op import softmax

__all__ = ["layer_norm", "relu", "rms_norm", "softmax"]
