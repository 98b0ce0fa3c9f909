"""One call of each op, beside torch's own. Runs with a GPU and without one.

On a CPU the calls run in eager torch; set TRITON_INTERPRET=1 to run the Triton kernels there.
"""

import torch
import torch.nn.functional as F

import tilewright

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4, 1024, device=device, dtype=torch.float16)
weight = torch.randn(1024, device=device, dtype=torch.float16)

torch.testing.assert_close(tilewright.relu(x), F.relu(x))
torch.testing.assert_close(tilewright.softmax(x, -1), F.softmax(x, -1))
norm = tilewright.rms_norm(x, (1024,), weight, 1e-6)
torch.testing.assert_close(norm, F.rms_norm(x, (1024,), weight, 1e-6))

# A residual stream: the norm of the sum, and the sum itself, in one kernel.
norm, total = tilewright.rms_norm(norm, (1024,), weight, 1e-6, residual=x)
torch.testing.assert_close(norm, F.rms_norm(total, (1024,), weight, 1e-6))

print(tilewright.explain("rms_norm", x, (1024,), weight, 1e-6))  # here
print(tilewright.explain("rms_norm", x, (1024,), weight, 1e-6, gpu="h200"))  # on that GPU
