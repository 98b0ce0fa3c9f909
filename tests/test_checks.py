"""The argument checks that ops share, where no op's declaration asks enough of them."""

from __future__ import annotations

import pytest
import torch

from tilewright import checks
from tilewright.errors import InputError

Tensor = torch.Tensor


# --- two tensors that are written in place: apart ------------------------------------------------


def places_of(t: Tensor) -> set[int]:
    """The elements of the storage that a view reaches."""
    whole = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return set(whole.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def are_apart(a: Tensor, b: Tensor) -> bool:
    try:
        checks.apart("rope", "q", a, "k", b)
    except InputError:
        return False
    return True


R = torch.empty(2, 6, 8, 10)

APART = {
    "two tensors": (R, torch.empty(2, 6, 8, 10)),
    "one behind the other": (R[0], R[1]),
    "parts of a token": (R[..., :4], R[..., 4:8]),
    "parts of a token, transposed": (R[..., :4].transpose(1, 2), R[..., 4:8].transpose(1, 2)),
    "heads of a token": (R[:, :, :3], R[:, :, 3:5]),
    "every other": (R[..., 0::2], R[..., 1::2]),
    "a token each": (R[:, 0:1, :3], R[:, 0:1, 3:]),
    "one element each": (R[0, 0, 0, :1], R[0, 0, 0, 1:2]),
    "nothing": (R[:, :0], R),
}
TOGETHER = {
    "itself": (R, R),
    "a part": (R, R[0, 0]),
    "the last element": (R[0, 0, 0, :4], R[0, 0, 0, 3:]),
    "columns": (R[..., :5], R[..., 4:]),
    "heads": (R[:, :, :5], R[:, :, 4:]),
    "another order": (R.transpose(1, 2), R),
    "another dtype": (R[0], R[1].view(torch.float16)),
}


@pytest.mark.parametrize("name", APART)
def test_tensors_that_are_apart(name: str) -> None:
    for a, b in (APART[name], APART[name][::-1]):
        assert are_apart(a, b)


@pytest.mark.parametrize("name", TOGETHER)
def test_tensors_that_share_memory(name: str) -> None:
    for a, b in (TOGETHER[name], TOGETHER[name][::-1]):
        assert not are_apart(a, b)


def test_tensors_without_memory_are_apart() -> None:
    x = torch.empty(2, 3, device="meta")
    assert are_apart(x, x)


def test_what_is_called_apart_is_apart_whatever_the_strides() -> None:
    """The other way it may err: views that lie among each other in a way nobody slices."""
    rng = torch.Generator().manual_seed(0)
    room, found = torch.empty(400), {True: 0, False: 0}

    def view() -> Tensor:
        sizes, strides, start = (
            torch.randint(low, high, (n,), generator=rng).tolist()
            for low, high, n in ((1, 4, 3), (0, 25, 3), (0, 40, 1))
        )
        return room.as_strided(sizes, strides, start[0])

    for _ in range(2000):
        a, b = view(), view()
        verdict = are_apart(a, b)
        assert not (verdict and places_of(a) & places_of(b)), (a.shape, a.stride(), b.stride())
        found[verdict] += 1
    assert min(found.values()) > 100
