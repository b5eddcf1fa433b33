"""The adapter to torch.distributed: turns torch's many spellings of a call into one Call and hands it to the group.

torch reaches these methods from Python (`dist.all_reduce`) with lists and an options object, from C++ (DDP, functional
collectives) likewise, and users call them directly with single tensors and keyword arguments. The names are torch's
own, old ones and new ones: a name that were missing would fall to C++ and fail there with an unclear message.
"""

# torch's stubs give every spelling of a method as an overload; one method here takes them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ReduceOp

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from phalanx.errors import GroupError, InvalidCall
from phalanx.group.group import DEFAULT_TIMEOUT, Group
from phalanx.group.torch_compat import GroupName, reduce_op_of, seconds_of
from phalanx.group.work import Work
from phalanx.types import Call, GroupInfo, Store

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_DONE = Work([])


class ProcessGroup(TorchProcessGroup):
    """A process group on one host.

    Made by `init_process_group("phalanx")` and `new_group`, or directly from any torch Store that all ranks reach. The
    constructor returns when all ranks have come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        name: str = "phalanx",
    ) -> None:
        if not 0 <= rank < world_size:
            raise GroupError(
                f"expected a rank in 0..{world_size - 1}, got {rank}",
                group=name,
                hint="give every process its own rank below world_size",
            )
        if timeout <= timedelta(0):
            raise GroupError(
                f"expected a timeout above zero, got {timeout}", group=name, hint="pass a positive timedelta"
            )
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._store = store
        self._info = GroupInfo(name, rank, world_size)
        self._group = Group.join(store, self._info, timeout.total_seconds())
        self._name = name
        self._desc = "undefined"

    # What the group is and how it ends.

    def getBackendName(self) -> str:
        return "phalanx"

    def name(self) -> str:
        return "phalanx"

    def _get_backend_name(self) -> str:
        return "phalanx"

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """The group is its own backend: torch looks here for what a backend supports and for its options."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def get_group_store(self) -> Store:
        return self._store

    # torch keeps a group's name in its C++ backends, of which this group has none.

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: GroupName) -> None:
        self._name = str(name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        # Errors name groups as people do; torch's names are numbers.
        if desc and desc != "undefined":
            self._info.name = desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.timeout = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers need no agreement: all ranks count from 1."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.seq

    def abort(self) -> None:
        """Ends all calls of the group, on every rank, with Aborted."""
        self._group.abort("abort() was called")

    def shutdown(self) -> None:
        """Leaves the group. Idempotent; never waits."""
        self._group.close()

    # Collectives.

    def _run(self, call: Call, timeout: timedelta | None, opts: Any, results: list[Tensor]) -> Work:
        self._group.run(call, seconds_of(timeout))
        # A caller whose options say that it does not look at the work gets one that is ready made.
        return Work(results) if getattr(opts, "asyncOp", True) else _DONE

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        reduce_op, factor, timeout = _reduction(opts, op, timeout)
        tensor = self._only(tensors, "all_reduce")
        try:
            call = all_reduce.build(self._info, tensor, reduce_op, factor)
        except InvalidCall as error:
            if error.code != "INVALID:LAYOUT":
                raise
            self._group.all_reduce_sparse(tensor, reduce_op, seconds_of(timeout))
            return Work([tensor])
        return self._run(call, timeout, opts, [tensor])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        reduce_op, factor, timeout = _reduction(opts, None, None)
        return self._run(all_reduce.build_coalesced(self._info, tensors, reduce_op, factor), timeout, opts, tensors)

    def reduce(
        self,
        tensors: list[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        root, timeout, opts = _rooted(opts, root, timeout)
        reduce_op, factor, timeout = _reduction(opts, op, timeout)
        tensor = self._only(tensors, "reduce")
        return self._run(reduce.build(self._info, tensor, root, reduce_op, factor), timeout, opts, [tensor])

    def broadcast(
        self,
        tensors: list[Tensor] | Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        root, timeout, opts = _rooted(opts, root, timeout)
        tensor = self._only(tensors, "broadcast")
        return self._run(broadcast.build(self._info, tensor, root), timeout, opts, [tensor])

    def allgather(
        self,
        output_tensors: list[list[Tensor]] | list[Tensor],
        input_tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: Tensor | None = None,
    ) -> Work:
        tensor = self._only(input_tensors if input_tensor is None else input_tensor, "all_gather")
        outputs = self._only_list(output_tensors, "all_gather", "output_tensors")
        return self._run(all_gather.build(self._info, outputs, tensor), _timeout(opts, timeout), opts, outputs)

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return self._run(all_gather.build_single(self._info, output, input), _timeout(opts, timeout), opts, [output])

    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Work:
        call = all_gather.build_coalesced(self._info, output_lists, input_list)
        return self._run(call, _timeout(opts, None), opts, [tensor for outputs in output_lists for tensor in outputs])

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> Work:
        call = all_gather.build_single_coalesced(self._info, output_lists, input_list)
        return self._run(call, _timeout(opts, None), opts, output_lists)

    def gather(
        self,
        output_tensors: list[list[Tensor]] | list[Tensor],
        input_tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: Tensor | None = None,
        root: int | None = None,
    ) -> Work:
        root, timeout, opts = _rooted(opts, root, timeout)
        tensor = self._only(input_tensors if input_tensor is None else input_tensor, "gather")
        outputs = self._only_list(output_tensors, "gather", "output_tensors") if output_tensors else None
        return self._run(gather.build(self._info, outputs, tensor, root), timeout, opts, outputs or [])

    def scatter(
        self,
        output_tensors: list[Tensor] | Tensor | None = None,
        input_tensors: list[list[Tensor]] | list[Tensor] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensor: Tensor | None = None,
        root: int | None = None,
    ) -> Work:
        root, timeout, opts = _rooted(opts, root, timeout)
        output = self._only(output_tensors if output_tensor is None else output_tensor, "scatter")
        inputs = self._only_list(input_tensors, "scatter", "input_tensors") if input_tensors else None
        return self._run(scatter.build(self._info, output, inputs, root), timeout, opts, [output])

    def reduce_scatter(
        self,
        output_tensors: list[Tensor] | Tensor,
        input_tensors: list[list[Tensor]] | list[Tensor] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        input_tensor: list[Tensor] | None = None,
    ) -> Work:
        reduce_op, factor, timeout = _reduction(opts, op, timeout)
        output = self._only(output_tensors, "reduce_scatter")
        inputs = self._only_list(
            input_tensors if input_tensor is None else input_tensor, "reduce_scatter", "input_tensors"
        )
        return self._run(reduce_scatter.build(self._info, output, inputs, reduce_op, factor), timeout, opts, [output])

    def reduce_scatter_single(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        reduce_op, factor, timeout = _reduction(opts, op, timeout)
        call = reduce_scatter.build_single(self._info, outputTensor, inputTensor, reduce_op, factor)
        return self._run(call, timeout, opts, [outputTensor])

    def reduce_scatter_single_coalesced(
        self,
        outputTensors: list[Tensor],
        inputTensors: list[Tensor],
        opts: Any = None,
    ) -> Work:
        reduce_op, factor, timeout = _reduction(opts, None, None)
        call = reduce_scatter.build_single_coalesced(self._info, outputTensors, inputTensors, reduce_op, factor)
        return self._run(call, timeout, opts, outputTensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        call = all_to_all.build_single(self._info, output, input, output_split_sizes or [], input_split_sizes or [])
        return self._run(call, _timeout(opts, timeout), opts, [output])

    def alltoall(
        self,
        output: list[Tensor],
        input: list[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return self._run(all_to_all.build(self._info, output, input), _timeout(opts, timeout), opts, output)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._run(barrier.build(self._info), _timeout(opts, timeout), opts, [])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are carried out as they come; there is nothing to collect."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return Work([])

    # Point to point.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
        raise self._no_point_to_point("send")

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
        raise self._no_point_to_point("recv")

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        raise self._no_point_to_point("recv")

    def _no_point_to_point(self, op: str) -> InvalidCall:
        return InvalidCall(
            "this version has no point to point communication",
            code="INVALID:OP",
            group=self._info.name,
            rank=self._info.rank,
            op=op,
            hint="use a group of the backend 'gloo' for send and recv",
        )

    # Torch's lists of lists.

    def _only(self, tensors: Any, op: str) -> Tensor:
        """The one tensor of a call: torch passes it in a list, users often as it is."""
        if isinstance(tensors, (list, tuple)):
            if len(tensors) == 1:
                return tensors[0]  # type: ignore[no-any-return]
            raise self._bad_list(op, "a list of one tensor", f"one of {len(tensors)}")
        return tensors  # type: ignore[no-any-return]

    def _only_list(self, lists: Any, op: str, argument: str) -> list[Tensor]:
        """The one list of tensors of a call: torch wraps it in another list."""
        if not isinstance(lists, (list, tuple)):
            raise self._bad_list(op, f"{argument} to be a list of tensors", type(lists).__name__)
        if lists and isinstance(lists[0], (list, tuple)):
            if len(lists) != 1:
                raise self._bad_list(op, f"{argument} to hold one list of tensors", str(len(lists)))
            return list(lists[0])
        return list(lists)

    def _bad_list(self, op: str, expected: str, actual: str) -> InvalidCall:
        return InvalidCall(
            f"expected {expected}, got {actual}",
            code="INVALID:LIST",
            group=self._info.name,
            rank=self._info.rank,
            op=op,
            hint="pass one tensor a rank; several at once go through the coalesced calls",
        )


def _timeout(opts: Any, timeout: timedelta | None) -> timedelta | None:
    """The timeout of a call: its own, or that of its options. Users may pass a timeout in the place of the options."""
    if timeout is not None or opts is None:
        return timeout
    return opts if isinstance(opts, timedelta) else opts.timeout


def _rooted(opts: Any, root: int | None, timeout: timedelta | None) -> tuple[int, timedelta | None, Any]:
    """Root and timeout; what is left of `opts` may still hold a reduce op. Users may pass a root in its place."""
    if opts is None:
        return (0 if root is None else root), timeout, None
    if isinstance(opts, int):
        return opts, timeout, None
    return (opts.rootRank if root is None else root), _timeout(opts, timeout), opts


def _reduction(opts: Any, op: Any, timeout: timedelta | None) -> tuple[int, float, timedelta | None]:
    """Reduce op, factor and timeout. Users may pass a reduce op in the place of the options."""
    chosen = getattr(opts, "reduceOp", None)
    if chosen is not None:
        timeout = opts.timeout if timeout is None else timeout
    elif opts is not None:
        chosen = opts
    reduce_op, factor = reduce_op_of(op if op is not None else chosen if chosen is not None else ReduceOp.SUM)
    return reduce_op, factor, timeout
