"""How a group carries out calls: hands them to the transport, or shows them to modes and the profiler first.

Plain calls do not come here: the native front carries them out, and `_native.set_hooks` says what it needs of Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from phalanx import _native
from phalanx.collectives import message
from phalanx.collectives.checks import HasOwnDispatch
from phalanx.errors import InvalidCall, PhalanxError
from phalanx.group import dispatching
from phalanx.group.carrying import Carrier
from phalanx.group.dispatching import Form
from phalanx.group.group import Group
from phalanx.group.profiling import call_range, work_of
from phalanx.group.spellings import only
from phalanx.group.timeouts import seconds_of
from phalanx.group.torch_compat.autograd import at_end_of_backward, in_backward, in_final_callback
from phalanx.group.torch_compat.dispatcher import can_dispatch, num_dispatch_modes
from phalanx.group.torch_compat.tracing import PROFILER_STATE, not_traced
from phalanx.group.work import DONE, Work
from phalanx.transports import failures
from phalanx.transports.base import Pending

__all__ = ["CallingGroup"]

Tensor = torch.Tensor
_NUM_REMEMBERED = 16


@not_traced
class CallingGroup(Carrier):
    """Carries out calls in a group.

    A call waits before it returns where its `async_op` is False, or the `asyncOp` of its options. torch's functions set
    the latter and drop the Work: they get one that is shared.
    """

    _group: Group

    def _prepare_calls(self, group: Group) -> None:
        """What a group needs before its first call."""
        self._front = None if group.quick is None else group.quick.front
        self._coalesced = None
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
        seconds = seconds_of(timeout, self._info, call.op)
        with call_range(call.op, [] if call.inputs is None else call.inputs.tensors):
            if not (async_op and getattr(opts, "asyncOp", True)):
                self._group.run(call, seconds)
                return DONE if async_op else Work(results)
            pending = self._group.start(call, seconds)
        return self._hand_out(work_of(results, pending), call.op)

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

    def _run_sparse(self, tensor: Tensor, reduce_op: int, timeout: timedelta | None) -> Work:
        self._group.all_reduce_sparse(tensor, reduce_op, seconds_of(timeout, self._info, "all_reduce"))
        return Work([tensor])

    def _refuse_call(self, error: InvalidCall) -> None:
        self._group.refuse_call(error)

    def _hand_out(self, work: Work, op: str) -> Work:
        if work.pending is not None and in_backward():
            # DDP waits for futures without looking at signals, and would lose the class of an exception: it is to find
            # them completed. In a final callback of the engine it would do so before anything queued now.
            work.wait() if in_final_callback() else at_end_of_backward(work.keep())
        if self._coalesced is not None:
            self._coalesced.add(work)
        if op == "all_reduce" and work.is_of_one_number():
            self._recent.append(work)
        return work

    def _message(self, op: str, tensors: Any, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        try:
            tensor = only(self._info, op, tensors)
            seconds = seconds_of(timeout, self._info, op)
            try:
                peer, tag = message.check(self._info, op, tensor, peer, tag)
            except HasOwnDispatch:
                return self._present_message(op, tensor, peer, tag, timeout)
            if num_dispatch_modes() and can_dispatch():
                return self._present_message(op, tensor, peer, tag, timeout)
            with call_range("recvAnySource" if peer == message.ANY_SOURCE else op, [tensor]):
                pending = self._group.start_message(op == "send", tensor, peer, tag, seconds)
        except InvalidCall as error:
            self._group.refuse_message(error, op, *message.known_ends(self._info, op, peer, tag))
            raise
        # The work of a send that has ended, from a list as torch passes it, is shared and has no result.
        is_shared = op == "send" and pending is None and tensor is not tensors
        work = DONE if is_shared else work_of([tensor], pending, peer)
        if self._coalesced is not None:
            self._coalesced.add(work)
        return work

    def _present_message(self, op: str, tensor: Tensor, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        def run(tensor: Tensor) -> Work:
            return self._message(op, tensor, peer, tag, timeout)

        source = None if op == "recv" and peer == message.ANY_SOURCE else peer
        work: Work = dispatching.present_message(self, op, tensor, source, tag, run)
        return work


# What the native front has Python do for plain calls.


def _started(
    group: CallingGroup,
    native: _native.GroupEnd,
    op: str,
    results: list[Tensor],
    pending: _native.CallHandle | None,
    written: Sequence[tuple[int, int]],
    timeout: float,
) -> Work:
    return group._hand_out(Work(results, _adopt(group, native, pending, op, timeout, written)), op)


def _messaged(
    group: CallingGroup,
    native: _native.GroupEnd,
    op: str,
    tensor: Tensor,
    pending: _native.CallHandle | None,
    peer: int,
    timeout: float,
) -> Work:
    return Work([tensor], _adopt(group, native, pending, op, timeout, ()), peer)


def _adopt(
    group: CallingGroup,
    native: _native.GroupEnd,
    pending: _native.CallHandle | None,
    op: str,
    timeout: float,
    written: Sequence[tuple[int, int]],
) -> Pending | None:
    """A call that the front has begun; None: it has finished."""
    transport = group._group.quick
    if pending is None or transport is None:
        return None
    return transport.adopt(native, pending, op, timeout, written)


def _explain(
    group: CallingGroup, native: _native.GroupEnd, op: str, status: int, seq: int, timeout: float
) -> PhalanxError:
    return failures.explain(native, group._info, op, status, timeout, seq)


_native.set_hooks(
    num_modes=num_dispatch_modes,
    profiler=PROFILER_STATE,
    done=DONE,
    finished=Work,
    started=_started,
    messaged=_messaged,
    explain=_explain,
)
