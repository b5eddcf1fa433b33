"""torch's spellings belong to no class of torch's: whatever carries out calls may have them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as TorchProcessGroup

from phalanx.errors import InvalidCall
from phalanx.group.dispatching import Form
from phalanx.group.torch_compat.options import OPTION_CLASSES
from phalanx.group.torch_names import TorchNames
from phalanx.group.work import Work
from phalanx.types import GroupInfo, carry_out

ALL_GATHER_OPTIONS = next(kind for kind in OPTION_CLASSES if kind.__name__ == "AllgatherOptions")


class _Recorder(TorchNames):
    """Carries out calls as the only rank."""

    def __init__(self) -> None:
        self._info = GroupInfo("alone", 0, 1)
        self.calls: list[tuple[str, float | None]] = []
        self.refused: list[InvalidCall] = []

    def _run(
        self,
        form: Form,
        args: tuple[Any, ...],
        results: list[torch.Tensor],
        timeout: timedelta | None,
        opts: Any,
        async_op: bool = True,
    ) -> Work:
        call = form.build(self._info, *args)
        carry_out([call])
        self.calls.append((call.op, None if timeout is None else timeout.total_seconds()))
        work = Work(results)
        if self._coalesced is not None:
            self._coalesced.add(work)
        return work

    def _message(self, op: str, tensors: Any, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        self.calls.append((op, tag))
        return Work([])

    def _refuse_call(self, error: InvalidCall) -> None:
        self.refused.append(error)


@pytest.fixture
def recorder() -> _Recorder:
    made = _Recorder()
    assert not isinstance(made, TorchProcessGroup)
    return made


def test_old_and_new_names_make_the_same_call(recorder: _Recorder) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=7)
    recorder.allreduce([torch.ones(2)], options)
    recorder.all_reduce(torch.ones(2), timeout=timedelta(seconds=7))
    recorder.allreduce([torch.ones(2)], opts=options)
    assert recorder.calls == [("all_reduce", 7.0)] * 3


def test_outputs_come_where_torch_wants_them(recorder: _Recorder) -> None:
    old, new, single = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    recorder.allgather([[old]], [torch.ones(2)], ALL_GATHER_OPTIONS())
    recorder.all_gather([new], torch.ones(2))
    recorder._allgather_base(single, torch.ones(2), ALL_GATHER_OPTIONS())
    assert old.tolist() == new.tolist() == single.tolist() == [1.0, 1.0]


def test_works_are_coalesced(recorder: _Recorder) -> None:
    recorder._start_coalescing(torch.device("cpu"))
    tensor = torch.ones(2)
    recorder.allreduce([tensor])
    works = recorder._end_coalescing(torch.device("cpu"))
    assert works.result()[0] is tensor


def test_messages(recorder: _Recorder) -> None:
    recorder.send([torch.ones(1)], 0, 3)
    recorder.recv_anysource([torch.ones(1)], 4)
    assert recorder.calls == [("send", 3), ("recv", 4)]


def test_wrong_arguments_are_refused(recorder: _Recorder) -> None:
    with pytest.raises(InvalidCall):
        recorder.broadcast([torch.ones(1), torch.ones(1)], 0)
    assert len(recorder.refused) == 1
