"""Neither a developer's own choice of backend nor luck decides what the tests see."""

import os

import pytest
import torch

os.environ.pop("TILEWRIGHT_BACKEND", None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that at the end no core waits for another.

    xdist cuts the list into a piece for each worker; dealt like cards, each begins with long ones.
    """
    items.sort(key=lambda item: item.path.name != "test_verify.py")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [item for first in range(workers) for item in items[first::workers]]
