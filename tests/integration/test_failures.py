"""What ends a wait: a timeout, a peer that left, an abort, Ctrl-C. And groups that can't be used any more."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, check_no_files_left, gave_up_on, place, run, shared_files, values

import phalanx


def _missing(here: Here, per_call: bool) -> tuple[str, str]:
    here.init()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    group = dist.group.WORLD
    assert group is not None
    if not per_call:
        group.set_timeout(timedelta(seconds=0.3))
    if here.rank == 2:
        # Comes when the others have given up.
        here.tell()
        assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
    timeout = timedelta(seconds=0.3) if per_call else None
    with pytest.raises(phalanx.CallTimeout) as caught:
        group.allreduce(torch.ones(1), timeout=timeout).wait()
    with pytest.raises(phalanx.CallTimeout, match="the group is broken"):
        dist.barrier()
    dist.destroy_process_group()
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize("per_call", [False, True])
def test_a_missing_rank_is_named(per_call: bool, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    world = World(_missing, 3, tmp_path, per_call)
    world.told(2)
    for rank in (0, 1):
        world.processes[rank].join(30)
    with fifo.open("w") as pipe:
        pipe.write("x")
    ends = world.ends()
    assert [(end.error, end.value[0]) for end in ends] == [(None, "MISSING")] * 3, ends[0].trace
    texts = [end.value[1] for end in ends]
    gave_up = [text for text in texts if "gave up after a timeout of 0.3 s: rank 2 did not come" in text]
    expected = gave_up_on("all_reduce, seq 2", place(_missing, "group.allreduce")) + "rank 2 did not come"
    told = [text for text in texts if expected in text]
    assert len(gave_up) >= 1
    assert len(gave_up) + len(told) == 3


def _leave(here: Here) -> str:
    here.init()
    dist.barrier()
    if here.rank == 0:
        dist.destroy_process_group()
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_rank_that_left_is_named(tmp_path: Path) -> None:
    _, text = values(_leave, 2, tmp_path)
    assert text.startswith("[PEER_LOST] all_reduce, seq 2, group 'default_pg', rank 1: rank 0 left the group ")


def _leave_early_but_in_order(here: Here) -> float:
    """A rank whose part is done may go while the others still read what it sent."""
    here.init()
    tensor = torch.full((100_000,), float(here.rank))
    dist.broadcast(tensor, 0)
    if here.rank == 0:
        dist.destroy_process_group()
    return tensor.sum().item()


def test_leaving_after_the_last_call_disturbs_nobody(tmp_path: Path) -> None:
    assert values(_leave_early_but_in_order, 3, tmp_path) == [0.0] * 3


def _abort(here: Here) -> str:
    here.init()
    group = dist.group.WORLD
    assert group is not None
    if here.rank == 0:

        def abort_when_told() -> None:
            assert os.read(os.open(here.folder / "abort", os.O_RDONLY), 1) == b"x"
            group.abort()

        threading.Thread(target=abort_when_told).start()
    here.tell()
    if here.rank < 2:
        with pytest.raises(phalanx.Aborted) as caught:
            dist.all_reduce(torch.ones(1))
        return str(caught.value)
    assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
    return ""


def test_abort_ends_the_waits_of_all_ranks(tmp_path: Path) -> None:
    fifo, abort = tmp_path / "fifo", tmp_path / "abort"
    os.mkfifo(fifo)
    os.mkfifo(abort)
    world = World(_abort, 3, tmp_path)
    world.all_told(0, 1)
    for rank in (0, 1):
        world.wait_asleep(rank)
    with abort.open("w") as pipe:
        pipe.write("x")
    for rank in (0, 1):
        world.processes[rank].join(30)
    with fifo.open("w") as pipe:
        pipe.write("x")
    ends = world.ends()
    assert "this rank aborted the group: abort() was called" in ends[0].value
    assert "rank 0 aborted the group: abort() was called" in ends[1].value


def _wait_for_ctrl_c(here: Here, count: int) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here.init()
    dist.barrier()
    if here.rank == 0:
        here.tell()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(count))
        dist.destroy_process_group()
        return "interrupted"
    assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
    with pytest.raises(phalanx.Aborted) as caught:
        dist.all_reduce(torch.ones(count))
    return str(caught.value)


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_ctrl_c_ends_a_wait_and_the_peers_are_told(count: int, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    world = World(_wait_for_ctrl_c, 2, tmp_path, count)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGINT)
    world.processes[0].join(10)
    assert not world.processes[0].is_alive()
    with fifo.open("w") as pipe:
        pipe.write("x")
    first, second = world.ends()
    assert first.value == "interrupted", first.trace
    assert "rank 0 aborted the group: interrupted in the middle of a call" in second.value, second.trace


def _fork(here: Here) -> str:
    here.init()
    dist.all_reduce(torch.ones(1))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            text = "nothing"
        except phalanx.GroupError as error:
            text = f"{error.code} {error}"
        dist.destroy_process_group()
        os.write(writing, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    # The group of the parent has not noticed.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == here.size
    return os.read(reading, 10000).decode()


def test_a_forked_child_is_told_that_the_group_is_not_its_own(tmp_path: Path) -> None:
    for text in values(_fork, 2, tmp_path):
        assert text.startswith("GROUP:FORKED")
        assert "Next: make the group in the child" in text


def _destroyed(here: Here) -> list[str]:
    here.init()
    group = dist.new_group(list(range(here.size)), group_desc="pair")
    dist.all_reduce(torch.ones(1), group=group)
    group.shutdown()
    group.shutdown()
    texts = []
    for call in (lambda: group.allreduce(torch.ones(1)), group.barrier):
        with pytest.raises(phalanx.GroupError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[0])
    dist.destroy_process_group()
    return texts


def test_a_destroyed_group_says_so(tmp_path: Path) -> None:
    text = "the group was destroyed on this rank"
    assert values(_destroyed, 2, tmp_path)[0] == [
        f"[GROUP:CLOSED] all_reduce, group 'pair', rank 0: {text}",
        f"[GROUP:CLOSED] barrier, group 'pair', rank 0: {text}",
    ]


def _kill(here: Here) -> None:
    here.init()
    here.tell()
    while True:
        dist.all_reduce(torch.ones(300_000))


def test_sigkill_leaves_nothing_behind(tmp_path: Path) -> None:
    before = shared_files()
    world = World(_kill, 2, tmp_path)
    world.all_told(0, 1)
    for rank in (0, 1):
        world.signal(rank, signal.SIGKILL)
    assert [end.exitcode for end in world.ends()] == [-signal.SIGKILL] * 2
    check_no_files_left(before)


def test_a_rank_that_never_comes_is_named_when_the_group_is_made(tmp_path: Path) -> None:
    end = run(_alone, 2, tmp_path)[0]
    assert (end.error, end.code) == ("CallTimeout", "MISSING")
    assert "gave up after a timeout of 0.3 s: rank 1 did not come to make the group" in end.text


def _alone(here: Here) -> None:
    if here.rank == 0:
        store = here.store()
        # The store's timeout is the shorter one, and is obeyed.
        store.set_timeout(timedelta(seconds=0.3))
        phalanx.ProcessGroup(store, 0, 2, timeout=timedelta(seconds=30))


def _call_in_handler(here: Here) -> str:
    """A signal handler that communicates on the group whose call it interrupts."""
    here.init()
    dist.barrier()
    texts = []

    def handler(number: int, frame: object) -> None:
        with pytest.raises(phalanx.InvalidCall) as caught:
            dist.all_reduce(torch.ones(1))
        texts.append(str(caught.value))
        here.tell()

    signal.signal(signal.SIGUSR1, handler)
    if here.rank == 0:
        here.tell()
    else:
        assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2
    return "".join(texts)


def test_a_call_inside_of_an_interrupted_call_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    world = World(_call_in_handler, 2, tmp_path)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGUSR1)
    world.told(0)
    with fifo.open("w") as pipe:
        pipe.write("x")
    ends = world.ends()
    assert [end.error for end in ends] == [None, None], ends[0].trace + ends[1].trace
    assert "[INVALID:NESTED]" in ends[0].value


def _exit_with_a_thread_in_a_call(here: Here) -> None:
    here.init()
    dist.barrier()
    if here.rank == 0:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)), daemon=True).start()
    here.tell()
    assert os.read(os.open(here.folder / f"fifo{here.rank}", os.O_RDONLY), 1) == b"x"


def test_a_daemon_thread_in_a_call_does_not_disturb_the_exit(tmp_path: Path) -> None:
    fifos = [tmp_path / f"fifo{rank}" for rank in (0, 1)]
    for fifo in fifos:
        os.mkfifo(fifo)
    world = World(_exit_with_a_thread_in_a_call, 2, tmp_path)
    world.all_told(0, 1)
    with fifos[0].open("w") as pipe:
        pipe.write("x")
    world.processes[0].join(30)
    with fifos[1].open("w") as pipe:
        pipe.write("x")
    assert [end.exitcode for end in world.ends()] == [0, 0]


def _new_group_in_a_child(here: Here) -> tuple[str, float]:
    """The child of rank 0 must not take its parent's place in a group with rank 1."""
    here.init()
    text = ""
    if here.rank == 0:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                dist.new_group([0, 1])
            except phalanx.GroupError as error:
                os.write(writer, error.code.encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        text = os.read(reader, 100).decode()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group([0, 1]))
    return text, tensor.item()


def test_a_forked_child_makes_no_group_within_its_parents_world(tmp_path: Path) -> None:
    assert values(_new_group_in_a_child, 2, tmp_path) == [("GROUP:FORKED", 2.0), ("", 2.0)]
