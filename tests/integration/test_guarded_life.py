"""The life of guarded groups: made again, destroyed or not, forked, interrupted; and what torch attaches to groups.

What torch does on a guarded group is compared with what it does on the plain one: torch's versions differ.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, check_no_files_left, run, shared_files, values

import phalanx
from phalanx import _autoload
from phalanx.guards.guarded import GuardedGroup

# As torch's stubs have it where this version has it.
_c10d: Any = torch._C._distributed_c10d


def _init(here: Here, guarded: bool = True, name: str = "store", timeout: float = 30) -> None:
    if guarded:
        os.environ["PHALANX_GUARD"] = "1"
        _autoload.register()
    dist.init_process_group(
        "gloo",
        store=here.store(name),
        rank=here.rank,
        world_size=here.size,
        timeout=timedelta(seconds=timeout),
    )
    assert isinstance(dist.group.WORLD, GuardedGroup) == guarded


def _sum(group: Any = None) -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx"))


def _again(here: Here) -> tuple[list[float], list[list[str]], list[str]]:
    sums, threads = [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(3):
            _init(here, name=f"store{number}")
            sub = dist.new_group([0, 1])
            sums += [_sum(), _sum(sub)]
            dist.destroy_process_group(sub)
            sums.append(_sum())
            dist.barrier()
            dist.destroy_process_group()
            threads.append(_threads())
    ours = [str(one.message) for one in warned if "phalanx" in str(one.filename)]
    return sums, threads, ours


def test_groups_are_made_and_destroyed_again(tmp_path: Path) -> None:
    before = shared_files()
    assert values(_again, 2, tmp_path) == [([2.0] * 9, [[]] * 3, [])] * 2
    check_no_files_left(before)


def _twice(here: Here) -> tuple[str, float]:
    _init(here)
    with pytest.raises(ValueError, match="initialize") as caught:
        dist.init_process_group("gloo", store=here.store("other"), rank=here.rank, world_size=here.size)
    total = _sum()
    dist.destroy_process_group()
    return str(caught.value), total


def test_init_process_group_twice_leaves_the_group_as_it_is(tmp_path: Path) -> None:
    for text, total in values(_twice, 2, tmp_path):
        assert "twice" in text
        assert total == 2.0


def _fork(here: Here) -> tuple[str, int, float]:
    _init(here)
    _sum()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _sum()
        except phalanx.PhalanxError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(len(_threads()))
    os.close(writes)
    with open(reads) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    total = _sum()
    dist.destroy_process_group()
    return told, os.waitstatus_to_exitcode(status), total


def test_a_forked_child_makes_no_calls_of_the_group(tmp_path: Path) -> None:
    for told, code, total in values(_fork, 2, tmp_path):
        assert "fork" in told
        assert "Next: " in told
        assert code == 0
        assert total == 2.0


def _exit_without_destroy(here: Here) -> None:
    _init(here)
    _sum()
    dist.new_group()
    dist.barrier()


@pytest.mark.parametrize("way", ["child", "program"])
def test_a_program_that_ends_without_destroying_its_groups(way: str, tmp_path: Path) -> None:
    before = shared_files()
    world = World(_exit_without_destroy, 2, tmp_path, way=way)
    assert [end.exitcode for end in world.ends()] == [0, 0]
    for rank in range(2):
        output = world.output(rank)
        assert "phalanx" not in output, output
        assert "Traceback" not in output, output
    check_no_files_left(before)


def _raise_before_the_end(here: Here) -> None:
    _init(here)
    _sum()
    if here.rank == 1:
        raise LookupError("no more data")
    _sum()


def test_the_exception_that_ends_a_rank_is_told_to_the_others(tmp_path: Path) -> None:
    world = World(_raise_before_the_end, 2, tmp_path, way="short program")
    assert [end.exitcode for end in world.ends()] == [1, 1]
    assert "PeerLost" in world.output(0)
    assert "LookupError: no more data" in world.output(0)


def _interrupted(here: Here) -> tuple[str, list[str]]:
    """Gloo looks at no signals while it waits: the exception comes when the wait ends."""
    _init(here)
    _sum()
    if here.rank == 1:
        here.hear()
        dist.destroy_process_group()
        return "", _threads()
    here.tell()
    with pytest.raises((KeyboardInterrupt, phalanx.PeerLost)) as caught:
        _sum()
    dist.destroy_process_group()
    return caught.typename, _threads()


def test_ctrl_c_while_a_call_is_waited_for(tmp_path: Path) -> None:
    before = shared_files()
    world = World(_interrupted, 2, tmp_path)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGINT)
    world.tell(1)
    first, second = world.ends()
    assert first.trace == second.trace == ""
    assert first.value == ("KeyboardInterrupt", [])
    assert second.value == ("", [])
    check_no_files_left(before)


def _hooks(here: Here, guarded: bool) -> list[str]:
    """What torch's own hooks see of each call, where this version has them; once for each call."""
    _init(here, guarded)
    group: Any = dist.group.WORLD
    seen: list[str] = []
    if hasattr(group, "register_pre_hook"):
        group.register_pre_hook(1, lambda args: seen.append(f"before {args.name} of {len(args.input_tensors)}"))
        group.register_post_hook(2, lambda args: seen.append(f"after {args.name}"))
    _calls_of(group)
    if hasattr(group, "register_pre_hook"):
        group.unregister_pre_hook(1)
        group.unregister_post_hook(2)
    _sum()
    dist.destroy_process_group()
    return seen


def _calls_of(group: Any) -> None:
    _sum()
    dist.broadcast(torch.ones(2), 0)
    dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2))
    dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
    dist.barrier()
    if group.rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_reduce(torch.ones(2), "sum", group.group_name))


def test_hooks_see_each_call_once(tmp_path: Path) -> None:
    plain = _on(tmp_path, "plain", _hooks, False)
    assert _on(tmp_path, "guarded", _hooks, True) == plain


def _on(folder: Path, name: str, function: Any, *args: object) -> list[Any]:
    (folder / name).mkdir()
    return values(function, 2, folder / name, *args)


def _recorded(here: Here, guarded: bool) -> list[tuple[Any, ...]]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    _init(here, guarded)
    _calls_of(dist.group.WORLD)
    dump = getattr(_c10d, "_dump_fr_trace", None)
    entries = pickle.loads(dump())["entries"] if dump is not None else []
    dist.destroy_process_group()
    return [(entry["profiling_name"], entry["input_sizes"], entry["process_group"]) for entry in entries]


def test_the_flight_recorder_of_torch_sees_each_call_once(tmp_path: Path) -> None:
    plain = _on(tmp_path, "plain", _recorded, False)
    assert _on(tmp_path, "guarded", _recorded, True) == plain


def _not_a_number(here: Here, guarded: bool) -> list[str]:
    """torch's check for NaN, of a group and of one that was split off, where this version has it."""
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    _init(here, guarded)
    groups = [dist.group.WORLD]
    hook = getattr(_c10d, "NanCheckHook", None)
    if hook is not None:
        groups.append(dist.split_group(split_ranks=[[0, 1]]))
        hook.attach(groups[1])
    told = []
    for group in groups:
        try:
            dist.all_reduce(torch.tensor([torch.nan]), group=group)
            told.append("")
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    dist.destroy_process_group()
    return told


def test_the_check_for_nan_of_torch(tmp_path: Path) -> None:
    plain = _on(tmp_path, "plain", _not_a_number, False)
    assert _on(tmp_path, "guarded", _not_a_number, True) == plain


def _split(here: Here) -> tuple[str, str, float]:
    """A group that was split off is guarded, and a mismatch ends its pending calls; where this version splits Gloo."""
    _init(here)
    try:
        group = dist.split_group(split_ranks=[[0, 1]])
    except RuntimeError:
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
        group = dist.new_group([0, 1])
    assert isinstance(group, GuardedGroup)
    total = _sum(group)
    with pytest.raises(phalanx.Mismatch) as caught:
        dist.all_reduce(torch.ones(3 + here.rank), group=group)
    notes = "".join(getattr(caught.value, "__notes__", []))
    after = _sum()
    dist.destroy_process_group()
    assert total == after == 2.0
    return caught.value.code, ("could not be ended" in notes and notes) or "", after


def test_a_mismatch_in_a_group_that_was_split_off(tmp_path: Path) -> None:
    assert values(_split, 2, tmp_path) == [("MISMATCH:COUNT", "", 2.0)] * 2


def _destroy_after_a_failure(here: Here) -> list[str]:
    _init(here)
    for make in (lambda: dist.all_reduce(torch.ones(2 + here.rank)), dist.barrier):
        with pytest.raises(phalanx.Mismatch):
            make()
    dist.destroy_process_group()
    _init(here, name="again")
    assert _sum() == 2.0
    dist.destroy_process_group()
    return _threads()


def test_a_group_is_made_again_after_a_failure(tmp_path: Path) -> None:
    before = shared_files()
    assert values(_destroy_after_a_failure, 2, tmp_path) == [[], []]
    check_no_files_left(before)


def _killed(here: Here) -> str:
    _init(here)
    _sum()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:
        _sum()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    before = shared_files()
    first, second = run(_killed, 2, tmp_path)
    assert first.error is None, first.trace
    assert "rank 1 died (killed by SIGKILL)" in first.value
    assert second.exitcode == -signal.SIGKILL
    check_no_files_left(before)
