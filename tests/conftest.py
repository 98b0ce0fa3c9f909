"""Neither a developer's own choice of backend or table nor luck decides what the tests see."""

import os

import pytest

# Workers have a core each; torch's threads, of which each would have one per core, wait for one
# another. OpenMP asks when torch is imported, here and in the commands that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

for variable in ("TILEWRIGHT_BACKEND", "TILEWRIGHT_TUNED"):
    os.environ.pop(variable, None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that at the end no core waits for another.

    xdist's `worksteal` cuts the list into a piece for each worker. The long ones are dealt like
    cards, for each to begin with some; the others stay together, for the sake of their fixtures.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.path.name == "test_verify.py"]
    short = [item for item in items if item.path.name != "test_verify.py"]
    cuts = [len(short) * k // workers for k in range(workers + 1)]
    items[:] = [
        item for k in range(workers) for item in [*long[k::workers], *short[cuts[k] : cuts[k + 1]]]
    ]
