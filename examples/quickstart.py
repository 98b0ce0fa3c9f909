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

# A gated layer, and the same with the norm before it.
torch.testing.assert_close(tilewright.swiglu(x, norm), F.silu(x) * norm, rtol=2e-3, atol=1e-3)
gated = tilewright.rms_norm_swiglu(x, norm, weight, 1e-6)
wanted = F.rms_norm(x.float(), (1024,), weight.float(), 1e-6) * F.silu(norm.float())
torch.testing.assert_close(gated, wanted.half())

# Positions, turned into q and k in one launch: 4 tokens, 8 and 2 heads of 128.
q, k = x.view(4, 8, 128), x[:, :256].reshape(4, 2, 128)
angles = torch.outer(torch.arange(4.0), 10_000 ** -torch.linspace(0, 1, 64)).to(device)
turned, _ = tilewright.rope(q, k, angles.cos(), angles.sin(), layout="thd")
torch.testing.assert_close(turned.float().norm(dim=-1), q.float().norm(dim=-1), rtol=1e-3, atol=0)

print(tilewright.explain("rms_norm", x, (1024,), weight, 1e-6))  # here
print(tilewright.explain("rms_norm", x, (1024,), weight, 1e-6, gpu="h200"))  # on that GPU
