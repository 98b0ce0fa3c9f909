"""Neither a developer's own choice of backend nor luck decides what the tests see."""

import os

import pytest
import torch

os.environ.pop("TILEWRIGHT_BACKEND", None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that at the end no core waits for another."""
    items.sort(key=lambda item: item.path.name != "test_verify.py")
