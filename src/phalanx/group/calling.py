"""How a group carries out calls: hands them to the transport, or shows them to modes and the profiler first."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch

from phalanx.collectives import message
from phalanx.collectives.checks import HasOwnDispatch
from phalanx.errors import InvalidCall
from phalanx.group import dispatching
from phalanx.group.dispatching import Form
from phalanx.group.group import Group
from phalanx.group.joined import JoinedGroup
from phalanx.group.profiling import ProfiledWork, call_range
from phalanx.group.refusing import explain_missing_memory
from phalanx.group.spellings import only
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
from phalanx.group.work import DONE, Work, Works
from phalanx.types import Call, Store

__all__ = ["CallingGroup"]

Tensor = torch.Tensor
_NUM_REMEMBERED = 16


@not_traced
class CallingGroup(JoinedGroup):
    """A group that can carry out calls whose arguments were read.

    A call waits before it returns where its `async_op` is False, or the `asyncOp` of its options. torch's functions set
    the latter and drop the Work: they get one that is shared.
    """

    def _prepare(self, group: Group, store: Store) -> None:
        super()._prepare(group, store)
        # The works of the coalescing manager that is open, if one is.
        self._coalesced: Works | None = None
        # C++ calls the methods of a Work as long as its Python object lives, which DDP's Join drops too early: that of
        # an all_reduce of one number.
        self._recent: deque[Work] = deque(maxlen=_NUM_REMEMBERED)

    def _run(
        self,
        form: Form,
        args: tuple[Any, ...],
        results: list[Tensor],
        timeout: timedelta | None,
        opts: Any,
        async_op: bool = True,
    ) -> Work:
        try:
            call = form.build(self._info, *args)
        except HasOwnDispatch:
            return self._present(form, args, results, timeout, opts, async_op)
        if num_dispatch_modes() and can_dispatch():
            return self._present(form, args, results, timeout, opts, async_op)
        if profiler._is_profiler_enabled:
            return self._run_profiled(call, results, timeout, opts, async_op)
        seconds = seconds_of(timeout, self._info, call.op)
        if async_op and getattr(opts, "asyncOp", True):
            return self._hand_out(Work(results, self._group.start(call, seconds)))
        self._group.run(call, seconds)
        return DONE if async_op else Work(results)

    def _run_profiled(
        self, call: Call, results: list[Tensor], timeout: timedelta | None, opts: Any, async_op: bool
    ) -> Work:
        seconds = seconds_of(timeout, self._info, call.op)
        with call_range(call.op, [] if call.inputs is None else call.inputs.tensors):
            if not (async_op and getattr(opts, "asyncOp", True)):
                self._group.run(call, seconds)
                return DONE if async_op else Work(results)
            pending = self._group.start(call, seconds)
        return self._hand_out(ProfiledWork(results, pending))

    def _present(
        self,
        form: Form,
        args: tuple[Any, ...],
        results: list[Tensor],
        timeout: timedelta | None,
        opts: Any,
        async_op: bool,
    ) -> Work:
        """Modes and classes may return other works than ours."""

        def run(args: tuple[Any, ...], results: list[Tensor]) -> Work:
            return self._run(form, args, results, timeout, opts, async_op)

        runs_async = async_op and getattr(opts, "asyncOp", True)
        work: Work = dispatching.present(self, form, args, results, runs_async, run)
        return work

    def _hand_out(self, work: Work) -> Work:
        if work.pending is not None and in_backward():
            # DDP waits for futures without looking at signals, and would lose the class of an exception: it is to find
            # them completed. In a final callback of the engine it would do so before anything queued now.
            work.wait() if in_final_callback() else at_end_of_backward(work.keep())
        if self._coalesced is not None:
            self._coalesced.add(work)
        return work

    def _remember(self, work: Work, tensor: Tensor) -> Work:
        if (
            tensor.numel() == 1
            and isinstance(work, Work)
            and work is not DONE
            and tensor.untyped_storage().nbytes() == tensor.itemsize
        ):
            self._recent.append(work)
        return work

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
                # Most sends are done at once, and torch, which passes a list, does not ask a send for its result.
                is_shared = sends and pending is None and tensor is not tensors
                work = DONE if is_shared else Work([tensor], pending, peer)
            if self._coalesced is not None:
                self._coalesced.add(work)
            return work
        except InvalidCall as error:
            self._group.refuse_message(error, op, *message.known_ends(self._info, op, peer, tag))
            raise
        except RuntimeError as error:
            refused = explain_missing_memory(self._info, op, (tensors,), error)
            if refused is None:
                raise
            self._group.refuse_message(refused, op, *message.known_ends(self._info, op, peer, tag))
            raise refused from error

    def _present_message(self, op: str, tensor: Tensor, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        def run(tensor: Tensor) -> Work:
            return self._message(op, tensor, peer, tag, timeout)

        source = None if op == "recv" and peer == message.ANY_SOURCE else peer
        work: Work = dispatching.present_message(self, op, tensor, source, tag, run)
        return work
