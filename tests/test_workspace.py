"""Memory that calls share: by stream, apart inside of graphs, and flags that are as they were."""

from __future__ import annotations

import itertools
from threading import get_ident

import pytest
import torch

from tilewright.toolkit import memory, workspace

SINGLE = torch.float32


class Stream:
    """The current one, and whether it captures."""

    number = 1
    captures = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A pretended CUDA device, whose memory lies on the CPU."""
    cpu, current = torch.device("cpu"), Stream()
    cleared, sums = workspace._cleared, workspace._sums
    monkeypatch.setattr(workspace, "_rooms", {})
    monkeypatch.setattr(workspace, "_spare", {})
    monkeypatch.setattr(workspace, "SPARE", 16)
    monkeypatch.setattr(workspace, "_current_stream", lambda index: current.number)
    monkeypatch.setattr(workspace, "_is_capturing", lambda: current.captures)
    monkeypatch.setattr(workspace, "_cleared", lambda count, device: cleared(count, cpu))
    monkeypatch.setattr(workspace, "_sums", lambda count, device: sums(count, cpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return current


CUDA = torch.device("cuda", 0)


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (x, y)]
    return max(ends[0][0], ends[1][0]) < min(ends[0][1], ends[1][1])


def apart_from(*rooms: workspace.Room) -> bool:
    return not any(
        overlap(x, y)
        for one, other in itertools.combinations(rooms, 2)
        for x, y in zip(one, other, strict=True)
    )


def is_room(room: workspace.Room, sums: int, flags: int) -> bool:
    floats, ints = room
    fits = len(floats) >= sums and len(ints) >= flags
    return fits and (floats.dtype, ints.dtype) == (SINGLE, torch.int32) and not ints.any()


def test_calls_of_one_stream_share_a_room_and_others_have_their_own(stream: Stream) -> None:
    first, second = (workspace.per_stream(sums, 4, CUDA) for sums in (100, 50))
    room = first()
    assert is_room(room, 100, 4)
    assert second() is room is first()
    stream.number = 2
    other = first()
    assert is_room(other, 100, 4)
    assert apart_from(room, other)
    stream.number = 1
    assert first() is room


def test_a_room_grows_and_never_shrinks(stream: Stream) -> None:
    wide, flagged, small = (
        workspace.per_stream(*size, CUDA) for size in ((1000, 2), (10, 50), (10, 2))
    )
    assert is_room(small(), 10, 2)
    assert is_room(wide(), 1000, 2)
    assert is_room(flagged(), 1000, 50)  # as large as both want it
    assert small() is wide() is flagged()


def test_captured_calls_have_rooms_of_their_own(stream: Stream) -> None:
    call_of = workspace.per_stream(100, 3, CUDA)
    outside = call_of()
    stream.captures = True
    rooms = [call_of() for _ in range(4)]
    assert all(is_room(room, 100, 3) for room in rooms)
    assert apart_from(outside, *rooms)
    assert all(room[1].data_ptr() % 16 == 0 for room in rooms)
    spare = workspace._spare[0]
    late = call_of()  # of 16 spare flags there is none left: the graph clears its own
    assert len(spare) == 0
    assert is_room(late, 100, 3)
    assert apart_from(outside, late, *rooms)
    stream.captures = False
    assert call_of() is outside


def test_flags_that_a_graph_clears_are_spared_for_no_other(stream: Stream) -> None:
    """Of a first call inside a capture, clearing would be a node of that graph alone."""
    stream.captures = True
    inside = workspace.per_stream(100, 3, CUDA)
    first, second = inside(), inside()
    assert is_room(first, 100, 3) and is_room(second, 100, 3)
    assert apart_from(first, second)
    assert not workspace._spare
    stream.captures = False
    outside = workspace.per_stream(100, 3, CUDA)
    stream.captures = True
    assert len(workspace._spare[0]) == 16
    assert apart_from(first, outside(), inside())
    assert len(workspace._spare[0]) == 8


def test_elsewhere_and_under_guard_every_call_has_a_new_room(stream: Stream) -> None:
    on_cpu = workspace.per_stream(10, 2, torch.device("cpu"))
    assert apart_from(on_cpu(), on_cpu())
    assert is_room(on_cpu(), 10, 2)
    with memory.guarded():
        guarded = workspace.per_stream(10, 2, CUDA)
        rooms = guarded(), guarded()
    assert all(room[0].isnan().all() for room in rooms)  # sums that nobody wrote would show
    assert apart_from(*rooms)
    assert not workspace._rooms


def test_what_lives_on_is_made_in_another_thread(stream: Stream) -> None:
    """torch.compile may send this thread's allocations to the pool of a graph."""
    makers = []
    workspace._apart(lambda: makers.append(get_ident()))
    assert makers != [get_ident()]
    with pytest.raises(ZeroDivisionError):  # such as memory that is not there
        workspace._apart(lambda: 1 // 0)
