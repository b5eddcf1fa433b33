"""The ops under all names that torch calls on its own groups, for any class that can carry out calls.

torch reaches these methods from Python (`dist.all_reduce`) with lists and an options object, from C++ (DDP, functional
collectives) as well. The names are old ones and new ones: a missing name falls through to C++ and fails there with an
unclear message.
"""

# An argument may come in several forms, of which one becomes the usual one.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from datetime import timedelta

import torch

from phalanx.collectives import message
from phalanx.group import dispatching
from phalanx.group.ops import SUM, GroupOps
from phalanx.group.refusing import collective, quick
from phalanx.group.spellings import OneTensor, Options, Reduction, given, reduction_of, timing_of
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.group.work import Work, Works

__all__ = ["TorchNames"]

Tensor = torch.Tensor


@not_traced
class TorchNames(GroupOps):
    """`GroupOps`, and what torch's own groups have beside these names."""

    allreduce = GroupOps.all_reduce
    allreduce_coalesced = GroupOps.all_reduce_coalesced
    allgather = GroupOps.all_gather
    _allgather_base = GroupOps.all_gather_single
    allgather_coalesced = GroupOps.all_gather_coalesced
    _reduce_scatter_base = GroupOps.reduce_scatter_single
    alltoall = GroupOps.all_to_all
    alltoall_base = GroupOps.all_to_all_single

    # What torch.distributed's functions reach through the coalescing manager only.

    @quick
    @collective
    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor] | None = None,
        inputs: list[Tensor] | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output_lists: list[Tensor] | None = None,
        input_list: list[Tensor] | None = None,
        opts: Options | None = None,
    ) -> Work:
        """`all_gather_single` of several tensors in one call."""
        timeout, opts = timing_of(timeout, opts)
        results = given(outputs, output_lists)
        args = results, given(inputs, input_list)
        return self._run(dispatching.ALL_GATHER_SINGLE_COALESCED, args, results, timeout, opts, async_op)

    @quick
    @collective
    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor] | None = None,
        inputs: list[Tensor] | None = None,
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        outputTensors: list[Tensor] | None = None,
        inputTensors: list[Tensor] | None = None,
        opts: Options | None = None,
    ) -> Work:
        """`reduce_scatter_single` of several tensors in one call."""
        opts = op if opts is None else opts
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, timeout)
        results = given(outputs, outputTensors)
        args = results, given(inputs, inputTensors), reduce_op, factor
        return self._run(dispatching.REDUCE_SCATTER_SINGLE_COALESCED, args, results, timeout, opts, async_op)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are begun as they come; what is collected is their works, for one wait."""
        self._coalesced = Works()
        if self._front is not None:
            self._front.coalescing = True

    def _end_coalescing(self, device: torch.device) -> Works:
        works, self._coalesced = self._coalesced, None
        if self._front is not None:
            self._front.coalescing = False
        return works or Works()

    @quick
    def recv_anysource(self, tensors: OneTensor, tag: int = 0, timeout: timedelta | None = None) -> Work:
        return self._message("recv", tensors, message.ANY_SOURCE, tag, timeout)

    def _wait_for_pending_works(self) -> None:
        """Every call keeps its own memory until it has ended: there is nothing to wait for."""
