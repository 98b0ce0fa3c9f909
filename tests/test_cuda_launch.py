"""What a launch hands to the driver: the addresses of its tensors, in order."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.toolkit import cuda_launch

SHAPE = cuda_launch.Shape("kernel", (1, 1, 1), 32, 0, 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[int | None]]:
    """The pointers of every launch, read as the driver reads them."""
    seen: list[list[int | None]] = []

    def launch(config: int, function: int, arguments: int, extra: None) -> int:
        words = ctypes.cast(arguments, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))
        seen.append([words[i].contents.value for i in range(launch.count)])  # type: ignore[attr-defined]
        return 0

    launch.count = 0  # type: ignore[attr-defined]
    results = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)
    monkeypatch.setattr(cuda_launch, "_driver", lambda: SimpleNamespace(CUresult=results))
    monkeypatch.setattr(cuda_launch, "_load", lambda *_: None)
    monkeypatch.setattr(cuda_launch, "_launch_function", lambda: launch)
    monkeypatch.setattr(cuda_launch, "_config", lambda *_: SimpleNamespace(getPtr=lambda: 1))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    return seen


@pytest.mark.parametrize("inputs", [1, 2, 3])
@pytest.mark.parametrize("missing", [(), (1,), (2,), (1, 2)])
def test_a_run_that_makes_its_output(
    inputs: int, missing: tuple[int, ...], launched: list[list[int | None]]
) -> None:
    made: list[torch.Tensor] = []

    def makes() -> torch.Tensor:
        made.append(torch.empty(4))
        return made[-1]

    given: list[Any] = [None if i in missing else torch.empty(4) for i in range(inputs)]
    cuda_launch._launch_function().count = 1 + inputs  # type: ignore[attr-defined]
    run = cuda_launch.make_run(
        SimpleNamespace(handle=5), SHAPE, [torch.float32, *given], [], 0, 0, makes
    )
    for _ in range(2):
        assert run(*given, "what follows the tensors", 1e-5) is made[-1]
    addresses = [None if t is None else t.data_ptr() for t in given]
    assert launched == [[y.data_ptr(), *addresses] for y in made] and len(made) == 2


def test_a_run_that_is_given_all(launched: list[list[int | None]]) -> None:
    given = [torch.empty(4), None, torch.empty(4), torch.empty(4), None]
    cuda_launch._launch_function().count = len(given)  # type: ignore[attr-defined]
    run = cuda_launch.make_run(SimpleNamespace(handle=5), SHAPE, given, [], 0, 0, None)
    assert run(*given) is None
    assert launched == [[None if t is None else t.data_ptr() for t in given]]
