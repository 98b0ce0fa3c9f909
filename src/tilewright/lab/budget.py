"""How long each command may take: fixed wholes, declared here and shared among the ops there are.

A whole is seconds of one core of the machine on which `seconds.json` was measured. What a run draws
from its whole depends on the key and on these numbers alone, never on how fast a machine is.
One more op makes the share of each op smaller, not the whole larger.
"""

from __future__ import annotations

# command, and the device it runs on: seconds
WHOLES: dict[tuple[str, str], float] = {
    ("verify", "cpu"): 80.0,
    ("verify in CI", "cpu"): 250.0,  # by the newest Triton, and as much by the oldest
    ("verify", "cuda"): 500.0,
    ("compile", "cpu"): 30.0,
    ("bench", "cpu"): 40.0,  # without a GPU: half to compile, half to check
    ("bench", "cuda"): 200.0,  # of the quick suite: with torch.compile's caches cold
    ("tests", "cpu"): 130.0,
}
