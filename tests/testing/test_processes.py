"""The same function as ranks that are processes."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt
from phalanx.testing import run_folders
from users import can_be_another, give_away


def _sum(rank: int, world: pt.World) -> tuple[float, int]:
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    (world.tmp_path / str(rank)).touch()
    world.barrier()
    assert len(list(world.tmp_path.glob("[0-9]"))) == world.size
    return tensor[0].item(), os.getpid()


def test_results_by_rank_and_workers_that_stay() -> None:
    first = pt.run(_sum, 3, processes=True)
    assert [value for value, _ in first] == [3.0] * 3
    pids = {pid for _, pid in first}
    assert len(pids) == 3
    assert os.getpid() not in pids
    again = pt.run(_sum, 2, processes=True)
    assert {pid for _, pid in again} < pids


def _fail(rank: int, world: pt.World) -> None:
    if rank == 1:
        raise LookupError("no shard")
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.barrier()
    raise caught.value


def test_a_worker_is_the_same_rank_in_every_run() -> None:
    # torch computes what a rank holds of a DTensor once for a process.
    runs = [[pid for _, pid in pt.run(_sum, size, processes=True)] for size in (2, 4, 2, 3)]
    assert all(pids == runs[1][: len(pids)] for pids in runs)


def test_the_first_failure_is_raised() -> None:
    with pytest.raises(LookupError, match="no shard") as caught:
        pt.run(_fail, 3, processes=True)
    assert "on rank 1" in caught.value.__notes__
    assert "because of it:\n  ranks 0, 2: PeerLost in barrier, seq 1" in caught.value.__notes__
    entry = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (entry.filename, entry.name, entry.line) == (__file__, "_fail", 'raise LookupError("no shard")')


class _ChangedArgumentsError(Exception):
    """Can't be made anew of what it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def _fail_in_a_chain(rank: int, world: pt.World) -> None:
    try:
        try:
            raise _ChangedArgumentsError("bread", "butter")
        except _ChangedArgumentsError as error:
            raise KeyError("lunch") from error
    except KeyError:
        raise LookupError("no shard", threading.Lock()) from None


def test_what_a_failure_came_from_is_kept() -> None:
    with pytest.raises(RuntimeError, match=r"LookupError: .'no shard', <unlocked") as caught:
        pt.run(_fail_in_a_chain, 1, processes=True)
    assert caught.value.__suppress_context__
    middle = caught.value.__context__
    assert isinstance(middle, KeyError)
    first = middle.__cause__
    assert isinstance(first, _ChangedArgumentsError)
    assert str(first) == "bread and butter"
    assert [entry.name for entry in traceback.extract_tb(first.__traceback__)] == ["_fail_in_a_chain"]


def _die(rank: int, world: pt.World) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_worker_that_was_killed_is_replaced() -> None:
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        pt.run(_die, 2, processes=True)
    assert [value for value, _ in pt.run(_sum, 2, processes=True)] == [1.0] * 2


def _leave_a_thread(rank: int, world: pt.World) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_worker_that_was_left_dirty_is_replaced() -> None:
    dirty = set(pt.run(_leave_a_thread, 2, processes=True))
    assert not dirty & {pid for _, pid in pt.run(_sum, 4, processes=True)}


def _lambda(rank: int, world: pt.World) -> object:
    return lambda: None


def test_what_processes_can_not_be_sent() -> None:
    with pytest.raises(ValueError, match="expected a function that another process can be sent"):
        pt.run(lambda rank, world: None, 2, processes=True)
    with pytest.raises(RuntimeError, match="a result of <class 'function'> can't be sent"):
        pt.run(_lambda, 1, processes=True)
    with pytest.raises(ValueError, match="they run freely"):
        pt.run(_sum, 2, processes=True, seed=1)


def _outcome(rank: int, world: pt.World) -> str:
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    except phalanx.PeerLost as error:
        return str(error)
    return "done"


def test_a_rank_that_is_killed_at_a_call() -> None:
    first, killed, third = pt.run(_outcome, 3, processes=True, faults=[pt.kill(1, at_call=2)])
    assert killed is None
    for text in (first, third):
        assert "rank 1 died (killed by SIGKILL) while rank" in text
        assert "waited for it in all_reduce, seq 2" in text


def test_a_rank_that_fails_at_a_call() -> None:
    with pytest.raises(OSError, match="disk full") as caught:
        pt.run(_outcome, 2, processes=True, faults=[pt.fail(0, at_call=3, error=OSError("disk full"))])
    assert "on rank 0" in caught.value.__notes__


def _seconds(rank: int, world: pt.World) -> float:
    start = time.monotonic()
    dist.barrier()
    return time.monotonic() - start


def test_a_rank_that_is_late_at_a_call() -> None:
    assert min(pt.run(_seconds, 2, processes=True, faults=[pt.delay(0, at_call=1, seconds=0.3)])) >= 0.25


def _spin(rank: int, world: pt.World) -> None:
    while rank == 1:
        pass
    dist.barrier()


def _hold(rank: int, world: pt.World) -> None:
    while rank == 1:
        with contextlib.suppress(BaseException):
            time.sleep(100)
    dist.barrier()


def test_a_rank_that_is_stuck() -> None:
    with pytest.raises(pt.Stuck, match=r"(?s)rank 1 did not communicate for 2 s; it was here:.*in _spin"):
        pt.run(_spin, 2, processes=True, stuck_after=2.0)
    with pytest.raises(
        pt.Stuck,
        match=r"(?s)rank 1 did not .* 2 s, did not end when it was interrupted, and was killed; it was here:.*in _hold",
    ):
        pt.run(_hold, 2, processes=True, stuck_after=2.0)


def _leave_things(rank: int, world: pt.World) -> int:
    os.environ["PHALANX_TEST_LEFT"] = "1"
    os.chdir("/")
    torch.manual_seed(rank)
    random.seed(rank)
    return os.getpid()


def _see_things(rank: int, world: pt.World) -> tuple[Any, ...]:
    seen = os.environ.get("PHALANX_TEST_LEFT"), os.environ.get("PHALANX_TEST_SET"), os.getcwd()
    return *seen, torch.rand(1).item(), random.random(), torch.get_default_dtype(), os.getpid()


def _set_dtype(rank: int, world: pt.World) -> int:
    torch.set_default_dtype(torch.float64)
    return os.getpid()


def test_nothing_is_left_for_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = pt.run(_see_things, 2, processes=True)
    assert set(pt.run(_leave_things, 2, processes=True)) == {seen[-1] for seen in before}
    monkeypatch.setenv("PHALANX_TEST_SET", "2")
    monkeypatch.chdir(tmp_path)
    after = pt.run(_see_things, 2, processes=True)
    assert {seen[:3] for seen in after} == {(None, "2", str(tmp_path))}
    assert [seen[3:] for seen in after] == [seen[3:] for seen in before]
    dirty = pt.run(_set_dtype, 2, processes=True)
    replaced = pt.run(_see_things, 2, processes=True)
    assert not set(dirty) & {seen[-1] for seen in replaced}
    assert {seen[-2] for seen in replaced} == {torch.float32}


def _load(rank: int, world: pt.World) -> float:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
    return sum(float(batch.sum()) for (batch,) in loader)


def test_ranks_may_have_children() -> None:
    assert pt.run(_load, 2, processes=True) == [6.0, 6.0]


def _speak(rank: int, world: pt.World) -> None:
    print("I am", rank)
    os.system(f"echo my child speaks >&2; test {rank} = 0")


def test_what_ranks_print(capfd: pytest.CaptureFixture[str]) -> None:
    pt.run(_speak, 2, processes=True)
    captured = capfd.readouterr()
    assert captured.out == "I am 0\nI am 1\n"
    assert captured.err == "my child speaks\n" * 2


def _exit(rank: int, world: pt.World) -> None:
    sys.exit(rank)


def test_a_rank_that_exits() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 called sys.exit\(1\)"):
        pt.run(_exit, 2, processes=True)


_BUSY = """
    import os, time
    import phalanx.testing as pt

    def work(rank, world):
        (world.tmp_path / str(rank)).write_text(str(os.getpid()))
        world.barrier()
        if rank == 0:
            with open(TOLD, "w") as out:
                print(*[path.read_text() for path in world.tmp_path.iterdir()], file=out)
        time.sleep(1000)

    if __name__ == "__main__":
        pt.run(work, 2, processes=True)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_busy_workers_end_with_the_process_that_runs_tests(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    source = textwrap.dedent(_BUSY).replace("TOLD", repr(str(told)))
    program = tmp_path / "busy.py"
    program.write_text(source)
    process = subprocess.Popen([sys.executable, str(program)], env=os.environ | {"TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 50
        while not told.exists() or len(told.read_text().split()) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    pids = [int(pid) for pid in told.read_text().split()]
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_folders_that_are_left_over_are_removed(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time, pathlib
        import phalanx.testing as pt

        def work(rank, world):
            (world.tmp_path / "file").touch()
            if sys.argv[1] == "die":
                os.utime(world.tmp_path, (0, 0))
                os.kill(os.getpid(), signal.SIGKILL)

        pt.run(work, 1)
    """
    source = textwrap.dedent(program)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    for argument, left in (("die", 1), ("live", 0)):
        subprocess.run([sys.executable, "-c", source, argument], env=environment, timeout=50)
        assert len(list(tmp_path.glob("phalanx-run-*"))) == left


def test_code_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, value in enumerate(("old", "new")):
        file = tmp_path / "changing.py"
        file.write_text(f"def f(rank, world):\n    return {value!r}\n")
        os.utime(file, (number + 1, number + 1))
        sys.modules.pop("changing", None)
        module = __import__("changing")
        assert pt.run(module.f, 2, processes=True) == [value] * 2
    del sys.modules["changing"]


def _close_all(rank: int, world: pt.World) -> None:
    if rank == 1:
        os.closerange(3, 64)
        time.sleep(100)


def test_a_rank_that_closes_its_files() -> None:
    with pytest.raises(RuntimeError, match="rank 1 closed the pipe"):
        pt.run(_close_all, 2, init=False, processes=True)


def _leave_a_child(rank: int, world: pt.World) -> int:
    if rank == 0:
        # In a process of its own that knows nothing of this one's files; and one that shares them.
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        (world.tmp_path.parent.parent / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_rank_that_dies_and_leaves_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="rank 0 was killed by SIGKILL"):
        pt.run(_leave_a_child, 2, init=False, processes=True)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while _is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_folders_that_other_users_left_over_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders can't be given away, this process is another user than the owner of its own, for a moment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = tmp_path / "phalanx-run-left"
    old.mkdir()
    os.utime(old, (0, 0))
    if can_be_another():
        give_away(old)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    run_folders._remove_left_over.cache_clear()
    run_folders._remove_left_over()
    assert old.exists()
    if can_be_another():
        os.chown(old, os.getuid(), os.getgid())
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_folders._remove_left_over.cache_clear()
    run_folders._remove_left_over()
    assert not old.exists()


def _start_a_program(rank: int, world: pt.World) -> tuple[int, int]:
    return os.getpid(), subprocess.Popen(["sleep", "100"]).pid


def test_a_worker_that_left_a_program_behind_is_replaced() -> None:
    ((worker, program),) = pt.run(_start_a_program, 1, processes=True)
    assert worker not in {pid for _, pid in pt.run(_sum, 2, processes=True)}
    deadline = time.monotonic() + 20
    while _is_alive(program):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_is_late_is_not_stuck() -> None:
    faults = [pt.delay(1, at_call=1, seconds=3.0)]
    assert len(pt.run(_seconds, 2, processes=True, faults=faults, stuck_after=2.0)) == 2


def _compute_for_ever(rank: int, world: pt.World) -> None:
    while rank == 0:
        pass
    dist.recv(torch.ones(1), 0)


def test_who_waits_for_a_message_is_not_to_blame() -> None:
    with pytest.raises(pt.Stuck, match="rank 0 did not communicate"):
        pt.run(_compute_for_ever, 2, processes=True, stuck_after=2.0)


def _die_of_a_signal_without_a_name(rank: int, world: pt.World) -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def test_a_signal_without_a_name() -> None:
    with pytest.raises(RuntimeError, match=f"rank 0 was killed by signal {signal.SIGRTMIN + 3}"):
        pt.run(_die_of_a_signal_without_a_name, 1, processes=True)


def _replace_stdout(rank: int, world: pt.World) -> None:
    sys.stdout = io.StringIO()


def _close_stdout(rank: int, world: pt.World) -> None:
    sys.stdout.close()


@pytest.mark.parametrize("spoil", [_replace_stdout, _close_stdout])
def test_output_that_a_test_has_spoilt(spoil: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pt.run(spoil, 1, processes=True)
    pt.run(_speak, 1, processes=True)
    assert capfd.readouterr().out == "I am 0\n"


def _time_out(rank: int, world: pt.World) -> None:
    world.group.set_timeout(timedelta(seconds=0.3))
    dist.recv(torch.ones(1), 1 - rank)


class _OwnError(Exception):
    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"{text} of {rank}")
        self.rank = rank


def _raise_own(rank: int, world: pt.World) -> None:
    raise _OwnError(rank, "trouble")


def test_exceptions_come_as_they_are() -> None:
    with pytest.raises(phalanx.CallTimeout, match="no message with tag 0 came from rank"):
        pt.run(_time_out, 2, processes=True)
    with pytest.raises(_OwnError, match="trouble of 0") as caught:
        pt.run(_raise_own, 1, processes=True)
    assert caught.value.rank == 0


def test_modules_that_draw_when_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawing.py").write_text(
        "import torch\ntorch.manual_seed(1)\n\ndef f(rank, world):\n    return torch.rand(1).item()\n"
    )
    module = __import__("drawing")
    try:
        assert len({number for _ in range(2) for number in pt.run(module.f, 2, processes=True)}) == 1
    finally:
        del sys.modules["drawing"]


def test_a_fault_after_the_one_that_kills() -> None:
    faults = [pt.kill(1, at_call=1), pt.delay(1, at_call=2, seconds=0.1)]
    with pytest.raises(ValueError, match="expected rank 1 to come to its call 2"):
        pt.run(_outcome, 2, processes=True, faults=faults)
