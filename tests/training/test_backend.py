"""What torch's code expects of a backend beside the calls: options, kernels, other ways to make a group."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch._C._distributed_c10d import BroadcastOptions, ReduceOptions

import phalanx
import phalanx.testing as pt

_HOUR = timedelta(hours=1)


def _timeouts(rank: int, world: pt.World) -> None:
    group = dist.new_group(timeout=timedelta(minutes=3), group_desc="short")
    assert isinstance(group, phalanx.ProcessGroup)
    options = group._get_backend(torch.device("cpu")).options
    assert group.timeout == options._timeout == timedelta(minutes=3)
    assert options.backend == "phalanx"
    assert options.group_name == group.group_name
    assert options.global_ranks_in_group == [0, 1]
    group.set_timeout(_HOUR)
    assert group.timeout == options._timeout == _HOUR
    options._timeout = timedelta.max
    assert group.timeout == timedelta.max
    with pytest.raises(phalanx.GroupError, match="above zero"):
        options._timeout = timedelta(0)


def test_timeout_can_be_read_and_set(run_ranks: RunRanks) -> None:
    run_ranks(_timeouts, 2)


def _root_tensor(rank: int, world: pt.World) -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    texts = []
    for method, options in ((group.broadcast, BroadcastOptions()), (group.reduce, ReduceOptions())):
        options.rootRank, options.rootTensor = 1, 1
        with pytest.raises(phalanx.InvalidCall) as error:
            method([torch.ones(1)], options)
        assert error.value.code == "INVALID:ROOT"
        texts.append(str(error.value).splitlines()[0].split(": ", 1)[1])
        options.rootTensor = 0
        method([torch.ones(1)], options).wait()
    return texts


def test_root_tensor_is_checked(run_ranks: RunRanks) -> None:
    text = "expected 0 as the root tensor of a call of one tensor, got 1"
    assert run_ranks(_root_tensor, 2) == [[text, text]] * 2


def _gather_into(rank: int, world: pt.World) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    gathered = torch.empty(4)
    own = torch.full((2,), float(rank))
    op = torch.ops._c10d_functional.all_gather_into_tensor_out
    assert op(own, 2, group.group_name, out=gathered).data_ptr() == gathered.data_ptr()
    waited = torch.ops._c10d_functional.wait_tensor(gathered)
    return waited.tolist()  # type: ignore[no-any-return]


def test_all_gather_into_tensor_out(run_ranks: RunRanks) -> None:
    assert run_ranks(_gather_into, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def _gather_on_gloo(rank: int, world: pt.World) -> list[float]:
    dist.all_reduce(torch.ones(1))
    gathered = torch.empty(4)
    name = dist.new_group(backend="gloo").group_name
    torch.ops._c10d_functional.all_gather_into_tensor_out(torch.full((2,), float(rank)), 2, name, out=gathered)
    return torch.ops._c10d_functional.wait_tensor(gathered).tolist()  # type: ignore[no-any-return]


def test_all_gather_into_tensor_out_of_another_backend() -> None:
    assert pt.run(_gather_on_gloo, 2, processes=True) == [[0.0, 0.0, 1.0, 1.0]] * 2


_DIST2 = """
import torch, torch.distributed._dist2 as dist2
from datetime import timedelta
for _ in range(2):
    group = dist2.new_group("phalanx", timedelta(seconds=60), "cpu")
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    with dist2.process_group(group):
        assert dist2.current_process_group() is group
    print(tensor.tolist(), group.name(), group.timeout)
try:
    dist2.new_group("phalanx", timedelta(seconds=60), "cpu", nonsense=1)
except Exception as error:
    print(error)
"""
_NO_DIST2 = 'import torch, torch.distributed as dist; print(dist.Backend("phalanx"))'


def test_dist2_knows_the_backend() -> None:
    has_dist2 = importlib.util.find_spec("torch.distributed._dist2") is not None
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _DIST2 if has_dist2 else _NO_DIST2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    )
    assert done.returncode == 0, done.stderr
    if has_dist2:
        *lines, error, hint = done.stdout.splitlines()
        assert lines == ["[1.0, 1.0, 1.0] phalanx 0:01:00"] * 2
        assert error.endswith("expected the device cpu and no options but name, got the options ['nonsense']")
        assert hint == '  Next: call new_group("phalanx", timeout, "cpu"), or with name="..." as well'
    else:
        assert done.stdout == "phalanx\n"
