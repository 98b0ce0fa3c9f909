"""What runs draw: the same for a key, another for the next commit, and every piece in its turn."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import InputError
from tilewright.lab import costs
from tilewright.lab.budget import WHOLES
from tilewright.lab.draw import Piece, draw, key
from tilewright.ops import registry
from tilewright.verify import plan
from tilewright.verify.runner import pieces

COMMITS = [f"{number:012x}" for number in range(0x5EED, 0x5EED + 200)]
ROOT = Path(__file__).parents[2]


def some(shares: int = 5, each: int = 40, seconds: float = 1.0) -> list[Piece[int]]:
    return [
        Piece(number, f"op {share}", f"op {share} piece {number}", seconds * (1 + share))
        for share, number in itertools.product(range(shares), range(each))
    ]


def names(taken: Any) -> list[str]:
    return [piece.name for piece in taken]


# --- what a draw is ------------------------------------------------------------------------------


def test_a_key_draws_the_same_and_another_key_another() -> None:
    first, again, other = (names(draw(some(), 60, k, "verify")) for k in ("a", "a", "b"))
    assert first == again != other
    assert names(draw(reversed(some()), 60, "a", "verify")) == first[::-1]


def test_a_whole_is_used_up_and_overdrawn_by_one_piece_at_most() -> None:
    for commit in COMMITS:
        taken = draw(some(), 100, commit, "verify")
        seconds = sum(piece.seconds for piece in taken)
        assert 100 <= seconds <= 100 + 5


def test_a_larger_budget_draws_more_of_the_same() -> None:
    small, large = (set(names(draw(some(), whole, "a", "verify"))) for whole in (60, 120))
    assert small < large


def test_all_is_taken_where_the_whole_is_enough() -> None:
    assert draw(some(), 10_000, "a", "verify") == some()


def test_every_share_has_its_turn_and_a_long_one_a_longer_turn() -> None:
    taken = Counter(piece.share for piece in draw(some(), 120, "a", "verify"))
    assert set(taken) == {f"op {share}" for share in range(5)}
    seconds = {share: count * (1 + int(str(share)[-1])) for share, count in taken.items()}
    assert seconds["op 4"] > 1.5 * seconds["op 0"]


def test_a_budget_below_one_case_of_each_op_is_one_clear_error() -> None:
    with pytest.raises(InputError, match=r"verify: the budget is 3 s; .* at least 15.0 s.*5 ops"):
        draw(some(), 3, "a", "verify")
    assert draw(some(), 3, "a", "compile", least=False)  # a ledger knows the rest


# --- one more op ---------------------------------------------------------------------------------


def plus_one(given: list[Piece[Any]], like: str, measured: bool) -> list[Piece[Any]]:
    """The pieces, and those of a new op that is like another one; `item` is what they take."""
    new = []
    for piece in given:
        if piece.share == like:
            check, _ = piece.item
            guess = costs.estimate("verify on cpu", f"new triton {check}").seconds
            seconds = piece.seconds if measured else guess
            new.append(Piece(piece.seconds, "new", f"new {piece.name}", seconds, measured))
    return [*given, *new]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("like", ["relu", "softmax", "rms_norm", "attention"])
def test_one_more_op_makes_no_run_longer(like: str, measured: bool) -> None:
    """By the seconds that its pieces really take, which a new op's table does not know yet."""
    given = pieces(plan(device="cpu"))
    whole = WHOLES["verify", "cpu"]

    def seconds(taken: Any) -> float:
        return sum(p.item if p.share == "new" else p.seconds for p in taken)

    changes = []
    for commit in COMMITS[:9]:
        before = seconds(draw(given, whole, commit, "verify"))
        after = seconds(draw(plus_one(given, like, measured), whole, commit, "verify"))
        changes.append(after / before - 1)
    assert abs(sorted(changes)[len(changes) // 2]) <= 0.05, changes


def test_a_kind_that_was_never_measured_counts_as_the_slowest_of_its_like() -> None:
    known = costs.estimate("verify on cpu", "attention triton random")
    new = costs.estimate("verify on cpu", "a new op triton random")
    assert known.measured and not new.measured
    assert new.seconds >= known.seconds
    assert costs.estimate("verify on cpu", "a new op triton new").seconds == costs.UNKNOWN


def test_every_op_is_measured() -> None:
    """scripts/measure_costs.py measures a new one."""
    for device in ("cpu", "cuda"):
        ours = [p for p in pieces(plan(device=device)) if not p.measured]
        left = {p.name.split(",")[0] for p in ours if p.share in registry()}
        assert not left, (device, sorted(left))


# --- every case has its turn ---------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_within_200_commits_verify_draws_every_step(device: str) -> None:
    given = pieces(plan(device=device))
    assert len({piece.name for piece in given}) == len(given)
    left = {piece.name for piece in given}
    for commit in COMMITS:
        left -= set(names(draw(given, WHOLES["verify", device], commit, "verify")))
    assert not left, (len(left), sorted(left)[:10])


# --- the key -------------------------------------------------------------------------------------


def test_the_key_is_the_commit_or_without_git_the_version(tmp_path: Path) -> None:
    import tilewright

    assert key(tmp_path) == tilewright.__version__
    if (ROOT / ".git").exists():
        assert len(key(ROOT)) == 12 and int(key(ROOT), 16)
        assert key() == key(ROOT)
