"""Neither a developer's own choice of backend nor luck decides what the tests see."""

import os

import pytest
import torch

os.environ.pop("TILEWRIGHT_BACKEND", None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
