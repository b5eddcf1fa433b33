"""A rank gives up making a group: the others hear its reason, also those that come late."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World, is_gone, run, until, values

import phalanx
from phalanx.transports import identities, rendezvous


def _make(here: Here) -> None:
    timeout = timedelta(seconds=20)
    phalanx.ProcessGroup(here.store(), here.rank, here.size, timeout=timeout, name="g")


def _give_up_before_a_late_rank(here: Here) -> str:
    gate = Gate(here)
    if here.rank == 2:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendezvous._Meeting, "open_segment", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                _make(here)
        gate.wait("0")
        return ""
    if here.rank == 0:
        gate.wait("1")
    with pytest.raises(phalanx.PeerLost) as caught:
        _make(here)
    gate.open(str(here.rank))
    gate.wait("0")
    return str(caught.value).splitlines()[0]


def _interrupted(meeting: object, only_posts: bool) -> None:
    raise KeyboardInterrupt("stopped by hand")


def test_a_late_rank_hears_the_first_reason(tmp_path: Path) -> None:
    """Not that of a rank that was told itself, and it does not wait for those who will not come again."""
    for rank, text in enumerate(values(_give_up_before_a_late_rank, 3, tmp_path)[:2]):
        assert text == (
            f"[PEER_LOST] new_group, group 'g', rank {rank}: rank 2 gave up making the group: "
            "KeyboardInterrupt: stopped by hand"
        )


def _fail_early(here: Here) -> None:
    if here.rank == 1:
        tell = rendezvous._Meeting._tell_what_is_made

        def fail_once(meeting: rendezvous._Meeting, gave_up: bool = False) -> None:
            if not gave_up:
                raise MemoryError("no room")
            tell(meeting, gave_up)

        rendezvous._Meeting._tell_what_is_made = fail_once  # type: ignore[assignment, method-assign]
    _make(here)


def test_an_error_before_the_first_word_is_told(tmp_path: Path) -> None:
    waiting, failing = run(_fail_early, 2, tmp_path)
    assert waiting.error == "PeerLost"
    assert "rank 1 gave up making the group: " in waiting.text
    assert "no room" in waiting.text
    assert failing.error in ("MemoryError", "GroupError")


@pytest.mark.parametrize("module", [rendezvous, identities])
def test_a_forked_child_does_not_inherit_a_held_lock(module: object) -> None:
    name = "_counting" if module is rendezvous else "_lock"
    with getattr(module, name):
        child = os.fork()
        if child == 0:
            os._exit(0 if getattr(module, name).acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_message_from_minus_one() -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(phalanx.InvalidCall, match=r"expected the peer as a rank, got -1\n.*call recv_anysource"):
        group.recv([torch.ones(1)], -1)
    group.shutdown()


def _come_as(here: Here) -> str:
    """Processes 0 and 1 are rank 0, one after the other; process 2 is rank 1."""
    gate = Gate(here)
    store = dist.FileStore(os.fspath(here.folder / "group"), 2)
    if here.rank == 0:
        with pytest.raises(phalanx.CallTimeout):
            phalanx.ProcessGroup(store, 0, 2, timeout=timedelta(seconds=0.3), name="g")
        gate.open("gave up")
        os._exit(0)
    gate.wait("gave up")
    if here.rank == 1:
        _tell_when_it_has_come(here)
    else:
        here.hear()
    group = phalanx.ProcessGroup(store, here.rank - 1, 2, timeout=timedelta(seconds=30), name="g")
    tensor = torch.ones(1)
    group.allreduce(tensor).wait()
    group.shutdown()
    return str(tensor.item())


def _tell_when_it_has_come(here: Here) -> None:
    """The other ranks can see that this one has come before it opens the segment."""
    open_segment = rendezvous._Meeting.open_segment

    def tell_first(meeting: rendezvous._Meeting, only_posts: bool) -> object:
        here.tell()
        return open_segment(meeting, only_posts)

    rendezvous._Meeting.open_segment = tell_first  # type: ignore[method-assign, assignment]


def test_a_late_rank_meets_the_successor_of_a_rank_that_gave_up(tmp_path: Path) -> None:
    world = World(_come_as, 3, tmp_path)
    first = world.processes[0].pid
    assert first is not None
    until(lambda: is_gone(first), "the first rank 0 lives")
    world.told(1)
    world.tell(2)
    assert [end.value or end.trace for end in world.ends()[1:]] == ["2.0", "2.0"]


def _told_by_one_that_was_told(here: Here) -> str:
    """Rank 0 gives up and ends; rank 1 comes late and is told; a second process comes as rank 0."""
    here.hear()
    rank, timeout = here.rank % 2, 0.3 if here.rank == 0 else 1000.0
    with pytest.raises(phalanx.CallTimeout) as caught:
        phalanx.ProcessGroup(here.store(), rank, 2, timeout=timedelta(seconds=timeout), name="g")
    return caught.value.message.splitlines()[0]


def test_a_reason_that_is_told_on_stays_as_it_is(tmp_path: Path) -> None:
    world = World(_told_by_one_that_was_told, 3, tmp_path)
    for rank in range(3):
        world.tell(rank)
        world.processes[rank].join(30)
    first, second, third = (end.value for end in world.ends())
    assert first == "gave up after a timeout of 0.3 s: rank 1 did not come to make the group"
    assert second == f"rank 0 gave up making the group: {first}"
    assert third == f"this rank gave up making the group before: {first}"
