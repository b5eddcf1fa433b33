"""How a guarded call is made: described, posted for the other ranks to compare, handed to the engine, waited for.

Posting never waits, and nothing here touches the data of a tensor or waits for a device. Where the ranks disagree, or
one of them is gone, the engine's pending calls are ended, and whoever waits for them gets our error instead of the
engine's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_native_id
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from torch.futures import Future

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.group.torch_compat.autograd import at_end_of_backward, in_backward, in_final_callback
from phalanx.group.torch_compat.dispatcher import fakes_tensors, num_dispatch_modes
from phalanx.group.torch_compat.standing_in import end_coalescing, start_coalescing
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.guards.describing import METHODS, describe_elsewhere, describe_roughly
from phalanx.guards.engines import Engine
from phalanx.guards.work import GuardedWork
from phalanx.log import logger
from phalanx.transports import failures
from phalanx.transports.advisers import ask
from phalanx.transports.observers import tell
from phalanx.transports.posting import PostedCalls
from phalanx.types import GroupInfo

__all__ = ["GuardedCalls", "UnderWay"]

_Description = _native.Description
_ASYNC = _native.ASYNC
_MESSAGES = ("send", "recv", "recv_anysource")
# Devices whose calls end where the host waits for them; 0: a call without tensors.
_HOST = (0, _native.DEVICES.index("cpu"))
# Seconds that an error of the engine waits for news of its cause: a peer's end, or a report that is on its way.
_FOR_NEWS = 1.0
_BETWEEN_LOOKS = 0.01
# Seconds that a finder's own report may take.
_FOR_REPORT = 7.0
# Calls under way that are looked after; older ones are forgotten.
_MOST_KEPT = 4096


class UnderWay(NamedTuple):
    """A call that an engine carries out, as the thread that looks after calls sees it."""

    call: _native.Description
    seq: int
    engines: Any  # the engine's Work
    began: float

    @property
    def has_ended(self) -> bool:
        return bool(self.engines.is_completed())


class GuardedCalls:
    """One rank's calls in a guarded group. `group` is the plain one, which has the engine's backends."""

    def __init__(self, group: Any, info: GroupInfo, engine: Engine, timeout: float) -> None:
        self.group = group
        self.info = info
        self.engine = engine
        self.timeout = timeout
        # Set by `begin`, before the first call.
        self.posted: PostedCalls
        self._has_begun = threading.Event()
        # Newest last. A work that the program drops is the engine's own business.
        self.under_way: deque[weakref.ref[GuardedWork]] = deque(maxlen=_MOST_KEPT)
        # By the system's number of a thread: the fields of the `UnderWay` that the program waits for.
        self.waits: dict[int, tuple[_native.Description, int, Any, float]] = {}
        # Where only the ranks of this host compare their calls: who of the group they are there.
        self._near: dict[int, int] | None = None
        # Why calls could not be ended.
        self.problem = ""
        # The works of calls that are being coalesced.
        self._coalesced: list[GuardedWork] | None = None

    def begin(self, posted: PostedCalls, ranks: list[int]) -> dict[str, Callable[..., Any]]:
        """The ranks have met: those of the group, or those of them on this host. They are these ranks of the group.

        Returns torch's methods for calls, guarded. The group keeps them: they refer to this.
        """
        self.posted = posted
        self._near = None if len(ranks) == self.info.size else {rank: near for near, rank in enumerate(ranks)}
        self._finish = posted.native.finish
        self._has_begun.set()
        return {name: self._guarded(name, front) for name, front in METHODS.items() if hasattr(self.group, name)}

    # Making calls.

    def _guarded(self, name: str, front: str) -> Callable[..., Any]:
        """One of torch's methods. A call takes as few steps as it can."""
        read = _native.MethodReader(front, self.info.rank, self.info.size)
        carry_out = getattr(self.group, name)
        begin, finish = self.posted.native.begin, self.posted.native.finish
        expect_any_sender = self.posted.native.expect_any_sender
        # The sender of a receive from anybody is not known yet: the call is posted when it is.
        is_posted_late = front == "recv_anysource"
        # torch's options say which collectives it waits for at once; messages have none.
        is_message = front in _MESSAGES
        waits = self.waits

        def make(*args: Any, **kwargs: Any) -> Any:
            if num_dispatch_modes() and fakes_tensors():
                return carry_out(*args, **kwargs)
            call = read(*args, **kwargs)
            if not isinstance(call, _Description):
                call = describe_elsewhere(read, args, kwargs) or describe_roughly(name, args, kwargs)
            if self._near is not None and call.op in _native.MESSAGE_OPS and not is_posted_late:
                if call.peer not in self._near:
                    # On another host.
                    return carry_out(*args, **kwargs)
                call = call.with_peer(self._near[call.peer])
            if is_posted_late:
                # Its place among the messages of its sender is not known.
                expect_any_sender()
                seq = 0
            elif (seq := begin(call)) <= 0:
                # Where this rank was the last to come, it has found the difference: the engine must not begin the call.
                raise self.explain(call.op, -seq)
            engines = None
            try:
                engines = carry_out(*args, **kwargs)
                is_async = is_message or call.flags & _ASYNC or call.device not in _HOST
                if is_async or engines is None or self._coalesced is not None:
                    return self._hand_out(call, seq, engines)
                thread = get_native_id()
                waits[thread] = call, seq, engines, monotonic()
                try:
                    engines.wait()
                finally:
                    waits.pop(thread, None)
            except Exception as error:
                self.raise_cause(call, seq, error, was_made=engines is not None)
            if finish(call, seq) and self.is_broken_for(call, seq, has_ended=True):
                raise self.explain(call.op, seq)
            # torch waits for it once more, and drops it.
            return engines

        return not_traced(make)

    def _hand_out(self, call: _native.Description, seq: int, engines: Any) -> Any:
        if engines is None:
            return None
        work = GuardedWork(self, engines, call, seq)
        self.under_way.append(weakref.ref(work))
        if self._coalesced is not None:
            self._coalesced.append(work)
        if in_backward():
            self._deliver_in_backward(work)
        return work

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Gloo's own barrier, which waits by itself."""
        call = _Description("barrier")
        seq = self.posted.native.begin(call)
        if seq <= 0:
            raise self.explain(call.op, -seq)
        thread = get_native_id()
        self.waits[thread] = call, seq, _NeverKnown(), monotonic()
        try:
            self.group.monitored_barrier(*args, **kwargs)
        except Exception as error:
            try:
                self.raise_cause(call, seq, error)
            except PhalanxError as cause:
                # Gloo names the ranks that it has waited for.
                cause.add_evidence(*(f"  {self.engine.name}: {line}" for line in _without_stack(str(error))))
                raise
        finally:
            self.waits.pop(thread, None)
        self.posted.end(call, seq)

    def start_coalescing(self, device: Any) -> None:
        start_coalescing(self.group, device)
        self._coalesced = []

    def end_coalescing(self, device: Any) -> Any:
        engines = end_coalescing(self.group, device)
        works, self._coalesced = self._coalesced or [], None
        if engines is None or not works:
            return engines
        return GuardedWork(self, engines, works[-1].call, works[-1].seq)

    def _deliver_in_backward(self, work: GuardedWork) -> None:
        """DDP waits for the engine's future, and would lose the class of our error: it finds the call ended.

        In a final callback of the autograd engine DDP would wait before anything that is queued now.
        """

        def deliver() -> None:
            if self.waits_on_host(work.call):
                work.wait()
            elif self.posted.is_broken:
                raise self.explain(work.call.op, work.seq)

        deliver() if in_final_callback() else at_end_of_backward(deliver)

    # Waiting for calls.

    def future_of(self, work: GuardedWork) -> Future[Any]:
        future: Future[Any] = work.engines.get_future()
        # Chaining to the future of a device would change its streams.
        return future.then(lambda ended: self._outcome(work, ended)) if self.waits_on_host(work.call) else future

    def _outcome(self, work: GuardedWork, future: Future[Any]) -> Any:
        try:
            value = future.value()
        except Exception as error:
            self.raise_cause(work.call, work.seq, error)
        self.finish(work)
        return value

    def finish(self, work: GuardedWork) -> None:
        """The engine's wait is over. On a device the call may go on."""
        call, seq = work.call, work.seq
        if seq and not work.ended and call.device in _HOST:
            work.ended = True
            is_broken = self._finish(call, seq)
        else:
            if self.waits_on_host(work.call):
                self.note_end(work, well=True)
            is_broken = self.posted.is_broken
        if is_broken and self.is_broken_for(call, seq, has_ended=work.ended):
            raise self.explain(call.op, seq)

    def note_end(self, work: GuardedWork, *, well: bool) -> None:
        """The engine has ended the call."""
        if work.ended:
            return
        work.ended = True
        if work.seq:
            self.posted.end(work.call, work.seq, well=well)
        elif well:
            source = work.source_rank()
            if self._near is not None:
                source = self._near.get(source, -1)
            if source >= 0:
                call = work.call.with_peer(source)
                self.posted.end(call, self.posted.post(call))

    def waits_on_host(self, call: _native.Description) -> bool:
        """Whether a wait on the host ends with the call, and not before."""
        return call.device in _HOST

    # Failures.

    def is_broken_for(self, call: _native.Description, seq: int, *, has_ended: bool) -> bool:
        """Whether the group has failed, and not only after this call had ended well on all ranks."""
        if not self.posted.is_broken:
            return False
        if not has_ended or call.op in _native.MESSAGE_OPS or not seq or not self.posted.has_failed:
            return True
        failure = self.posted.failure()
        return failure.call.op in _native.MESSAGE_OPS or seq > failure.agreed

    def still_under_way(self, work: GuardedWork, seconds: float) -> PhalanxError:
        """The error of a wait that was given up, while the call goes on."""
        call, seq = work.call, work.seq
        return failures.still_under_way(None, self.posted.info, call.op, seq, seconds, self.find_missing(call, seq))

    def explain(self, op: str, seq: int) -> PhalanxError:
        self.posted.wait_for_failure(_FOR_REPORT)
        error = self.posted.explain(op, seq, self.timeout)
        if self.problem:
            error.add_note(f"calls under way could not be ended: {self.problem}")
        return error

    def on_failure(self) -> None:
        """In a thread of ours, on every rank, once the group has failed."""
        self.problem = self.engine.interrupt()
        # The others may fail while this rank is about to begin.
        if not self._has_begun.wait(_FOR_REPORT):
            return
        failure = self.posted.failure()
        error = self.posted.explain(failure.call.op, failure.seq, self.timeout)
        tell.failed(error)
        if self.problem:
            logger.error("%s\n  the calls that are under way could not be ended: %s", error, self.problem)

    def raise_cause(self, call: _native.Description, seq: int, error: Exception, was_made: bool = True) -> NoReturn:
        """Raises why the engine has failed, as far as the ranks can tell; else the engine's own error."""
        if isinstance(error, PhalanxError):
            raise error
        # Another rank may be reporting the same: the failure is not known at once.
        if self.posted.is_broken or self._find_cause(call, seq, error, was_made):
            raise self.explain(call.op, seq) from error
        if seq:
            self.posted.end(call, seq, well=False)
        raise error

    def _find_cause(self, call: _native.Description, seq: int, error: Exception, was_made: bool) -> bool:
        """Whether the group fails, for the reason for which the engine has failed.

        News may take longer than a connection that closes.
        """
        text = " ".join(_without_stack(str(error))).lower()
        # Not torch's list of the arguments that a method takes, of which a timeout may be one.
        is_late = isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)
        is_broken_link = not is_late and any(word in text for word in ("connection", "peer", "socket", "read error"))
        # What an engine, or a hook of torch's, says of the arguments is its own, even if a peer has left meanwhile.
        if not was_made and not is_late and not is_broken_link:
            return False
        until = time.monotonic() + (_FOR_NEWS if is_broken_link else 0.0)
        while not self.posted.is_broken:
            lost = self.find_lost(call, seq)
            if lost is not None:
                self.posted.fail_by_end(lost, call, seq)
                return True
            if time.monotonic() >= until:
                break
            time.sleep(_BETWEEN_LOOKS)
        missing = self.find_missing(call, seq)
        if is_late and missing and not self.posted.is_broken:
            self.posted.fail_by_timeout(missing, call, seq)
            return True
        return self.posted.is_broken

    def find_missing(self, call: _native.Description, seq: int) -> list[int]:
        """The ranks that have not posted the call. Of a message: as far as their numbers tell."""
        if call.op in _native.MESSAGE_OPS:
            is_behind = call.peer >= 0 and self.posted.messages_posted(call.peer, sends=call.op == "recv") < seq
            if call.peer < 0:
                # From anybody.
                return [rank for rank in range(self.posted.info.size) if rank != self.posted.info.rank]
            return [call.peer] if is_behind else []
        own = self.posted.info.rank
        return [rank for rank in range(self.posted.info.size) if rank != own and self.posted.posted(rank) < seq]

    def find_lost(self, call: _native.Description, seq: int) -> int | None:
        """A rank that is gone and without which the call can't end."""
        posted = self.posted
        others = [rank for rank in range(posted.info.size) if rank != posted.info.rank]
        if call.op in _native.MESSAGE_OPS:
            gone = [rank for rank in (others if call.peer < 0 else [call.peer]) if posted.is_gone(rank)]
            # From anybody: any other rank may still send.
            return gone[0] if gone and (call.peer >= 0 or len(gone) == len(others)) else None
        gone = [rank for rank in others if posted.is_gone(rank)]
        # One that has made the call and left in order has done its part. One that has not made it comes first.
        lost = [rank for rank in gone if posted.posted(rank) < seq or not posted.has_left_well(rank)]
        return min(lost, key=lambda rank: posted.posted(rank) >= seq, default=None)

    def describe_missing(self, call: _native.Description, seq: int) -> list[str]:
        """Lines that say where the ranks are that this call waits for."""
        return ask.absent(self.posted, self.posted.info, call.op, seq, self.find_missing(call, seq))


class _NeverKnown:
    """Stands for the Work of a call that waits by itself."""

    def is_completed(self) -> bool:
        return False


def _without_stack(text: str) -> Iterator[str]:
    """The lines of an error of the engine, without its stack in C++."""
    for line in text.splitlines():
        if line.startswith(("Exception raised from", "frame #")):
            return
        yield line.strip()
