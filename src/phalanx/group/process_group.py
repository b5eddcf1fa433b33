"""The adapter to torch.distributed: turns torch's many spellings of a call into one Call and hands it to the group.

torch reaches these methods from Python (`dist.all_reduce`) with lists and an options object, from C++ (DDP, functional
collectives) likewise, and users call them directly with single tensors and keyword arguments. The names are torch's
own, old ones and new ones: a name that were missing would fall to C++ and fail there with an unclear message.
"""

# torch's stubs give every spelling of a method as an overload; one method here takes them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

from phalanx.collectives import all_reduce, message
from phalanx.collectives.checks import HasOwnDispatch, fail
from phalanx.collectives.numbers import whole, whole_list
from phalanx.errors import InvalidCall
from phalanx.group import dispatching
from phalanx.group.derived import DerivableGroup
from phalanx.group.dispatching import Form
from phalanx.group.group import Group
from phalanx.group.profiling import ProfiledWork, call_range
from phalanx.group.refusing import collective
from phalanx.group.spellings import (
    check_root_tensor,
    given,
    only,
    only_list,
    reduction_of,
    root_of,
    timeout_of,
)
from phalanx.group.timeouts import seconds_of
from phalanx.group.torch_compat import (
    at_end_of_backward,
    can_dispatch,
    in_backward,
    in_final_callback,
    not_traced,
    num_dispatch_modes,
    profiler,
)
from phalanx.group.work import Work, Works
from phalanx.types import Call, Store

Tensor = torch.Tensor
_DONE = Work([])
_SYNCHRONOUS = SimpleNamespace(asyncOp=False)
_NUM_REMEMBERED = 16


@not_traced
class ProcessGroup(DerivableGroup):
    """A process group on one host.

    Made by `init_process_group("phalanx")` and `new_group`, or directly from any torch Store that all ranks reach. The
    constructor returns when all ranks have come.
    """

    def _prepare(self, group: Group, store: Store) -> None:
        super()._prepare(group, store)
        # The works of the coalescing manager that is open, if one is.
        self._coalesced: Works | None = None
        # C++ calls the methods of a Work as long as its Python object lives, which DDP's Join drops too early: that of
        # an all_reduce of one number.
        self._recent: deque[Work] = deque(maxlen=_NUM_REMEMBERED)

    # Collectives.

    def _run(
        self, form: Form, args: tuple[Any, ...], timeout: timedelta | None, opts: Any, results: list[Tensor]
    ) -> Work:
        try:
            call = form.build(self._info, *args)
        except HasOwnDispatch:
            return self._present(form, args, timeout, opts, results)
        if num_dispatch_modes() and can_dispatch():
            return self._present(form, args, timeout, opts, results)
        if profiler._is_profiler_enabled:
            return self._run_profiled(call, timeout, opts, results)
        # A caller whose options say that it does not look at the work gets one that is ready made.
        if not getattr(opts, "asyncOp", True):
            self._group.run(call, seconds_of(timeout, self._info, call.op))
            return _DONE
        return self._hand_out(Work(results, self._group.start(call, seconds_of(timeout, self._info, call.op))))

    def _present(
        self, form: Form, args: tuple[Any, ...], timeout: timedelta | None, opts: Any, results: list[Tensor]
    ) -> Work:
        """Modes and classes may return other works than ours."""

        def run(args: tuple[Any, ...], results: list[Tensor]) -> Work:
            return self._run(form, args, timeout, opts, results)

        work: Work = dispatching.present(self, form, args, results, getattr(opts, "asyncOp", True), run)
        return work

    def _run_profiled(self, call: Call, timeout: timedelta | None, opts: Any, results: list[Tensor]) -> Work:
        with call_range(call.op, [] if call.inputs is None else call.inputs.tensors):
            if not getattr(opts, "asyncOp", True):
                self._group.run(call, seconds_of(timeout, self._info, call.op))
                return _DONE
            pending = self._group.start(call, seconds_of(timeout, self._info, call.op))
        return self._hand_out(ProfiledWork(results, pending))

    def _hand_out(self, work: Work) -> Work:
        if work.pending is not None and in_backward():
            # DDP waits for futures without looking at signals, and would lose the class of an exception: it is to find
            # them completed. In a final callback of the engine it would do so before anything queued now.
            work.wait() if in_final_callback() else at_end_of_backward(work.keep())
        if self._coalesced is not None:
            self._coalesced.add(work)
        return work

    def allreduce(
        self,
        tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        tensor: Tensor | None = None,
    ) -> Work:
        try:
            reduce_op, factor, timeout = reduction_of(self._info, "all_reduce", opts, op, timeout)
            tensors = tensors if tensor is None else tensor
            tensor = (
                tensors[0] if type(tensors) is list and len(tensors) == 1 else only(self._info, "all_reduce", tensors)
            )
            code = all_reduce.plain(tensor, reduce_op)
            if code and not profiler._is_profiler_enabled and not num_dispatch_modes():
                seconds = None if timeout is None else seconds_of(timeout, self._info, "all_reduce")
                if not getattr(opts, "asyncOp", True):
                    self._group.all_reduce_plain(tensor, code, reduce_op, seconds)
                    return _DONE
                pending = self._group.start_all_reduce_plain(tensor, code, reduce_op, seconds)
                return self._remember(self._hand_out(Work([tensor], pending)), tensor)
            try:
                work = self._run(dispatching.ALL_REDUCE, (tensor, reduce_op, factor), timeout, opts, [tensor])
            except InvalidCall as error:
                if error.code != "INVALID:LAYOUT" or tensor.is_nested:
                    raise
                self._group.all_reduce_sparse(tensor, reduce_op, seconds_of(timeout, self._info, "all_reduce"))
                return Work([tensor])
            return self._remember(work, tensor)
        except InvalidCall as error:
            self._group.refuse_call(error)
            raise

    def _remember(self, work: Work, tensor: Tensor) -> Work:
        if (
            tensor.numel() == 1
            and isinstance(work, Work)
            and work is not _DONE
            and tensor.untyped_storage().nbytes() == tensor.itemsize
        ):
            self._recent.append(work)
        return work

    @collective
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        reduce_op, factor, timeout = reduction_of(self._info, "all_reduce", opts, None, None)
        return self._run(dispatching.ALL_REDUCE_COALESCED, (tensors, reduce_op, factor), timeout, opts, tensors)

    @collective
    def reduce(
        self,
        tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Tensor | None = None,
    ) -> Work:
        root, timeout, opts = root_of(self._info, "reduce", opts, root, timeout)
        reduce_op, factor, timeout = reduction_of(self._info, "reduce", opts, op, timeout)
        check_root_tensor(self._info, "reduce", opts)
        tensor = only(self._info, "reduce", tensors if tensor is None else tensor)
        return self._run(dispatching.REDUCE, (tensor, root, reduce_op, factor), timeout, opts, [tensor])

    @collective
    def broadcast(
        self,
        tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        tensor: Tensor | None = None,
    ) -> Work:
        root, timeout, opts = root_of(self._info, "broadcast", opts, root, timeout)
        check_root_tensor(self._info, "broadcast", opts)
        tensor = only(self._info, "broadcast", tensors if tensor is None else tensor)
        return self._run(dispatching.BROADCAST, (tensor, root), timeout, opts, [tensor])

    @collective
    def allgather(
        self,
        output_tensors: list[list[Tensor]] | list[Tensor],
        input_tensors: list[Tensor] | Tensor | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        input_tensor: Tensor | None = None,
    ) -> Work:
        tensor = only(self._info, "all_gather", input_tensors if input_tensor is None else input_tensor)
        outputs = only_list(self._info, "all_gather", "output_tensors", output_tensors)
        return self._run(dispatching.ALL_GATHER, (outputs, tensor), timeout_of(opts, timeout), opts, outputs)

    @collective
    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return self._run(dispatching.ALL_GATHER_SINGLE, (output, input), timeout_of(opts, timeout), opts, [output])

    @collective
    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Work:
        args, results = (output_lists, input_list), dispatching.tensors_of(output_lists)
        return self._run(dispatching.ALL_GATHER_COALESCED, args, timeout_of(opts, None), opts, results)

    @collective
    def all_gather_single_coalesced(
        self,
        output_lists: list[Tensor] | None = None,
        input_list: list[Tensor] | None = None,
        opts: Any = None,
        *,
        outputs: list[Tensor] | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Work:
        results = given(output_lists, outputs)
        args = results, given(input_list, inputs)
        return self._run(dispatching.ALL_GATHER_SINGLE_COALESCED, args, timeout_of(opts, None), opts, results)

    @collective
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
        root, timeout, opts = root_of(self._info, "gather", opts, root, timeout)
        tensor = only(self._info, "gather", input_tensors if input_tensor is None else input_tensor)
        outputs = only_list(self._info, "gather", "output_tensors", output_tensors)
        args = outputs if outputs or root == self._info.rank else None, tensor, root
        return self._run(dispatching.GATHER, args, timeout, opts, outputs)

    @collective
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
        root, timeout, opts = root_of(self._info, "scatter", opts, root, timeout)
        output = only(self._info, "scatter", output_tensors if output_tensor is None else output_tensor)
        inputs = only_list(self._info, "scatter", "input_tensors", [] if input_tensors is None else input_tensors)
        args = output, inputs if inputs or root == self._info.rank else None, root
        return self._run(dispatching.SCATTER, args, timeout, opts, [output])

    @collective
    def reduce_scatter(
        self,
        output_tensors: list[Tensor] | Tensor | None = None,
        input_tensors: list[list[Tensor]] | list[Tensor] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        input_tensor: list[Tensor] | None = None,
        output: Tensor | None = None,
        input: list[Tensor] | None = None,
    ) -> Work:
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, op, timeout)
        output = only(self._info, "reduce_scatter", given(output_tensors, output))
        inputs = only_list(self._info, "reduce_scatter", "input_tensors", given(input_tensors, input_tensor, input))
        return self._run(dispatching.REDUCE_SCATTER, (output, inputs, reduce_op, factor), timeout, opts, [output])

    @collective
    def reduce_scatter_single(
        self,
        outputTensor: Tensor,
        inputTensor: Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, op, timeout)
        args = outputTensor, inputTensor, reduce_op, factor
        return self._run(dispatching.REDUCE_SCATTER_SINGLE, args, timeout, opts, [outputTensor])

    @collective
    def reduce_scatter_single_coalesced(
        self,
        outputTensors: list[Tensor] | None = None,
        inputTensors: list[Tensor] | None = None,
        opts: Any = None,
        *,
        outputs: list[Tensor] | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Work:
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, None, None)
        outputs, inputs = given(outputTensors, outputs), given(inputTensors, inputs)
        args = outputs, inputs, reduce_op, factor
        results = [] if outputs is None else outputs
        return self._run(dispatching.REDUCE_SCATTER_SINGLE_COALESCED, args, timeout, opts, results)

    @collective
    def all_to_all_single(
        self,
        output: Tensor | None = None,
        input: Tensor | None = None,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensor: Tensor | None = None,
        input_tensor: Tensor | None = None,
    ) -> Work:
        output, tensor = given(output, output_tensor), given(input, input_tensor)
        received = whole_list(self._info, "all_to_all", "output_split_sizes", output_split_sizes)
        sent = whole_list(self._info, "all_to_all", "input_split_sizes", input_split_sizes)
        args = output, tensor, received, sent
        return self._run(dispatching.ALL_TO_ALL_SINGLE, args, timeout_of(opts, timeout), opts, [output])

    @collective
    def alltoall(
        self,
        output: list[Tensor] | None = None,
        input: list[Tensor] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        output_tensors: list[Tensor] | None = None,
        input_tensors: list[Tensor] | None = None,
        output_tensor: list[Tensor] | None = None,
        input_tensor: list[Tensor] | None = None,
    ) -> Work:
        outputs = given(output, output_tensors, output_tensor)
        inputs = given(input, input_tensors, input_tensor)
        return self._run(dispatching.ALL_TO_ALL, (outputs, inputs), timeout_of(opts, timeout), opts, outputs)

    @collective
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        return self._run(dispatching.BARRIER, (), timeout_of(opts, timeout), opts, [])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point.

    def send(
        self,
        tensors: list[Tensor] | Tensor | None = None,
        dstRank: int | None = None,
        tag: int = 0,
        timeout: timedelta | None = None,
        *,
        tensor: Tensor | None = None,
        dst: int | None = None,
    ) -> Work:
        tensors = tensors if tensor is None else tensor
        return self._message("send", tensors, dstRank if dst is None else dst, tag, timeout)

    def recv(
        self,
        tensors: list[Tensor] | Tensor | None = None,
        srcRank: int | None = None,
        tag: int = 0,
        timeout: timedelta | None = None,
        *,
        tensor: Tensor | None = None,
        src: int | None = None,
    ) -> Work:
        tensors, src = tensors if tensor is None else tensor, srcRank if src is None else src
        if type(src) is not int:
            src = whole(self._info, "recv", "PEER", "the peer", src)
        if src == message.ANY_SOURCE:
            fail(self._info, "recv", "PEER", "expected the peer as a rank, got -1", "call recv_anysource instead")
        return self._message("recv", tensors, src, tag, timeout)

    def recv_anysource(self, tensors: list[Tensor] | Tensor, tag: int = 0, timeout: timedelta | None = None) -> Work:
        return self._message("recv", tensors, message.ANY_SOURCE, tag, timeout)

    def _message(self, op: str, tensors: Any, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        try:
            sends = op == "send"
            tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else only(self._info, op, tensors)
            group = self._group
            seconds = group.timeout if timeout is None else seconds_of(timeout, self._info, op)
            code = message.plain(self._info, tensor, peer, tag)
            if not code:
                try:
                    peer, tag = message.check(self._info, op, tensor, peer, tag)
                except HasOwnDispatch:
                    return self._present_message(op, tensor, peer, tag, timeout)
            if num_dispatch_modes() and can_dispatch():
                return self._present_message(op, tensor, peer, tag, timeout)
            if profiler._is_profiler_enabled:
                with call_range("recvAnySource" if peer == message.ANY_SOURCE else op, [tensor]):
                    pending = group.start_message(sends, tensor, peer, tag, seconds, code)
                work: Work = ProfiledWork([tensor], pending, peer)
            else:
                pending = group.start_message(sends, tensor, peer, tag, seconds, code)
                # Most sends are done at once, and nobody asks a send for its result.
                work = _DONE if sends and pending is None else Work([tensor], pending, peer)
            if self._coalesced is not None:
                self._coalesced.add(work)
            return work
        except InvalidCall as error:
            self._group.refuse_message(error, op, *message.known_ends(self._info, op, peer, tag))
            raise

    def _present_message(self, op: str, tensor: Tensor, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        def run(tensor: Tensor) -> Work:
            return self._message(op, tensor, peer, tag, timeout)

        source = None if op == "recv" and peer == message.ANY_SOURCE else peer
        work: Work = dispatching.present_message(self, op, tensor, source, tag, run)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are begun as they come; what is collected is their works, for one wait."""
        self._coalesced = Works()

    def _end_coalescing(self, device: torch.device) -> Works:
        works, self._coalesced = self._coalesced, None
        return works or Works()

    @collective
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names all ranks that did not come, on every rank that did.

        `wait_all_ranks` is torch's: whether to name more than one, which this always does.
        torch.distributed.monitored_barrier refuses backends of any name but gloo.
        """
        seconds_of(timeout, self._info, "monitored_barrier")
        self._run(dispatching.BARRIER, (), timeout, _SYNCHRONOUS, [])

    def _wait_for_pending_works(self) -> None:
        """Every call keeps its own memory until it has ended: there is nothing to wait for."""
