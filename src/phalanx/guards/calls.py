"""How a guarded call is made: described, posted for the other ranks to compare, handed to the engine, waited for.

Posting never waits, and nothing here touches the data of a tensor or waits for a device. Where the ranks disagree, or
one of them is gone, the engine's pending calls are ended, and whoever waits for them gets our error instead of the
engine's.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.futures import Future

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.group.torch_compat.autograd import at_end_of_backward, in_backward, in_final_callback
from phalanx.group.torch_compat.dispatcher import fakes_tensors, num_dispatch_modes
from phalanx.group.torch_compat.standing_in import end_coalescing, start_coalescing
from phalanx.group.work import NO_TIMEOUT
from phalanx.guards.describing import METHODS, describe_elsewhere, describe_roughly
from phalanx.guards.engines import Engine
from phalanx.guards.work import GuardedWork
from phalanx.log import logger
from phalanx.transports.advisers import ask
from phalanx.transports.observers import tell
from phalanx.transports.posting import PostedCalls
from phalanx.types import GroupInfo

__all__ = ["GuardedCalls"]

_Description = _native.Description
_CPU = _native.DEVICES.index("cpu")
# Seconds that an error of the engine waits for news of its cause: a peer's end, or a report that is on its way.
_FOR_NEWS = 1.0
_BETWEEN_LOOKS = 0.01
# Seconds that a finder's own report may take.
_FOR_REPORT = 5.0
# Calls under way that are looked after; older ones are forgotten.
_MOST_KEPT = 4096


class GuardedCalls:
    """One rank's calls in a guarded group. `group` is the plain one, which has the engine's backends."""

    def __init__(self, group: Any, info: GroupInfo, engine: Engine, timeout: float) -> None:
        self.group = group
        self.info = info
        self.engine = engine
        self.timeout = timeout
        # Set once the ranks have met, before the first call.
        self.posted: PostedCalls
        # Newest last. A work that the program drops is the engine's own business.
        self.under_way: deque[weakref.ref[GuardedWork]] = deque(maxlen=_MOST_KEPT)
        # By thread: the calls that the program waits for.
        self.waits: dict[int, GuardedWork] = {}
        # Why calls could not be ended.
        self.problem = ""
        readers = {name: _native.MethodReader(name, info.rank, info.size) for name in set(METHODS.values())}
        self._methods = {
            name: (readers[front], getattr(group, name)) for name, front in METHODS.items() if hasattr(group, name)
        }
        # The works of calls that are being coalesced.
        self._coalesced: list[GuardedWork] | None = None

    # Making calls.

    def make(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of one of torch's methods."""
        read, carry_out = self._methods[method]
        if num_dispatch_modes() and fakes_tensors():
            return carry_out(*args, **kwargs)
        call = read(*args, **kwargs)
        if type(call) is not _Description:
            call = describe_elsewhere(read, args, kwargs) or describe_roughly(method, args, kwargs)
        return self._make(call, lambda: carry_out(*args, **kwargs))

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Gloo's own barrier, which waits by itself."""
        seq = self._post(_Description("barrier"))
        call = _Description("barrier")
        try:
            self.group.monitored_barrier(*args, **kwargs)
        except Exception as error:
            self._raise_cause(call, seq, error)
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

    def _make(self, call: _native.Description, carry_out: Callable[[], Any]) -> Any:
        # The sender of a receive from anybody is not known yet: the call is posted when it is.
        seq = 0 if call.op == "recv" and call.peer < 0 else self._post(call)
        try:
            engines = carry_out()
        except Exception as error:
            self._raise_cause(call, seq, error)
        if engines is None:
            return None
        work = GuardedWork(self, engines, call, seq)
        self.under_way.append(weakref.ref(work))
        if self._coalesced is not None:
            self._coalesced.append(work)
        if in_backward():
            self._deliver_in_backward(work)
        return work

    def _post(self, call: _native.Description) -> int:
        posted = self.posted
        if posted.is_broken:
            raise self.explain(call.op, 0)
        seq = posted.post(call)
        # This rank was the last to come, and has found the difference: the engine is not to begin the call.
        if posted.is_broken:
            posted.end(call, seq, well=False)
            raise self.explain(call.op, seq)
        return seq

    def _deliver_in_backward(self, work: GuardedWork) -> None:
        """DDP waits for the engine's future, and would lose the class of our error: it finds the call ended."""

        def deliver() -> None:
            if self.waits_on_host(work):
                work.wait()
            elif self.posted.is_broken:
                raise self.explain(work.call.op, work.seq)

        if not in_final_callback():
            at_end_of_backward(deliver)

    # Waiting for calls.

    def wait(self, work: GuardedWork, timeout: timedelta = NO_TIMEOUT) -> bool:
        with self._waiting(work):
            try:
                done: bool = work.engines.wait() if timeout is NO_TIMEOUT else work.engines.wait(timeout)
            except Exception as error:
                self._raise_cause(work.call, work.seq, error)
        self._finish(work)
        return done

    def synchronize(self, work: GuardedWork) -> None:
        with self._waiting(work):
            try:
                work.engines.synchronize()
            except Exception as error:
                self._raise_cause(work.call, work.seq, error)
        self._finish(work)

    def future_of(self, work: GuardedWork) -> Future[Any]:
        future: Future[Any] = work.engines.get_future()
        # Chaining to the future of a device would change its streams.
        return future.then(lambda ended: self._outcome(work, ended)) if self.waits_on_host(work) else future

    def _outcome(self, work: GuardedWork, future: Future[Any]) -> Any:
        try:
            value = future.value()
        except Exception as error:
            self._raise_cause(work.call, work.seq, error)
        self._finish(work)
        return value

    @contextlib.contextmanager
    def _waiting(self, work: GuardedWork) -> Iterator[None]:
        thread = threading.get_ident()
        before = self.waits.get(thread)
        self.waits[thread] = work
        try:
            yield
        finally:
            if before is None:
                self.waits.pop(thread, None)
            else:
                self.waits[thread] = before

    def _finish(self, work: GuardedWork) -> None:
        """The engine's wait is over. On a device the call may go on."""
        if self.waits_on_host(work):
            self.note_end(work, well=True)
        if self.is_broken_for(work):
            raise self.explain(work.call.op, work.seq)

    def note_end(self, work: GuardedWork, *, well: bool) -> None:
        """The engine has ended the call."""
        if work.ended:
            return
        work.ended = True
        if work.seq == 0 and well:
            source = work.engines.source_rank() if hasattr(work.engines, "source_rank") else -1
            if source >= 0:
                call = work.call.with_peer(source)
                self.posted.end(call, self.posted.post(call))
        elif work.seq:
            self.posted.end(work.call, work.seq, well=well)

    def waits_on_host(self, work: GuardedWork) -> bool:
        return work.call.device in (0, _CPU)

    # Failures.

    def is_broken_for(self, work: GuardedWork) -> bool:
        """Whether the group has failed, and not only after this call had ended well on all ranks."""
        if not self.posted.is_broken:
            return False
        if work.call.op in _native.MESSAGE_OPS or not work.seq or not self.posted.has_failed:
            return True
        failure = self.posted.failure()
        return failure.call.op in _native.MESSAGE_OPS or work.seq > failure.agreed or not work.ended

    def explain(self, op: str, seq: int) -> PhalanxError:
        self.posted.wait_for_failure(_FOR_REPORT)
        error = self.posted.explain(op, seq)
        if self.problem:
            error.add_note(f"calls under way could not be ended: {self.problem}")
        return error

    def on_failure(self) -> None:
        """In a thread of ours, on every rank, once the group has failed."""
        self.problem = self.engine.interrupt()
        error = self.posted.explain(self.posted.failure().call.op, self.posted.failure().seq)
        tell.failed(error)
        if self.problem:
            logger.error("%s\n  the calls that are under way could not be ended: %s", error, self.problem)

    def _raise_cause(self, call: _native.Description, seq: int, error: Exception) -> None:
        """Raises why the engine has failed, as far as the ranks can tell; else the engine's own error."""
        if isinstance(error, PhalanxError):
            raise error
        if seq and not self.posted.is_broken:
            self._look_for_cause(call, seq, error)
        if self.posted.is_broken:
            raise self.explain(call.op, seq) from error
        if seq:
            self.posted.end(call, seq, well=False)
        raise error

    def _look_for_cause(self, call: _native.Description, seq: int, error: Exception) -> None:
        """News may take longer than a connection that closes."""
        text = str(error).lower()
        is_late = "timed out" in text or "timeout" in text
        # What an engine says at once of its arguments is its own.
        is_broken_link = not is_late and any(word in text for word in ("connection", "peer", "socket", "read error"))
        until = time.monotonic() + (_FOR_NEWS if is_broken_link else 0.0)
        while not self.posted.is_broken:
            lost = self.find_lost(call, seq)
            if lost is not None:
                self.posted.fail_by_end(lost, call, seq)
                return
            if time.monotonic() >= until:
                break
            time.sleep(_BETWEEN_LOOKS)
        missing = self.find_missing(call, seq)
        if is_late and missing and not self.posted.is_broken:
            self.posted.fail_by_timeout(missing, call, seq)

    def find_missing(self, call: _native.Description, seq: int) -> list[int]:
        """The ranks that have not posted the call."""
        if call.op in _native.MESSAGE_OPS:
            return [call.peer] if call.peer >= 0 else []
        own = self.info.rank
        return [rank for rank in range(self.info.size) if rank != own and self.posted.posted(rank) < seq]

    def find_lost(self, call: _native.Description, seq: int) -> int | None:
        """A rank of the call that is gone."""
        if call.op in _native.MESSAGE_OPS:
            ranks = [call.peer] if call.peer >= 0 else []
        else:
            ranks = [rank for rank in range(self.info.size) if rank != self.info.rank]
        return next((rank for rank in ranks if self.posted.is_gone(rank)), None)

    def describe_missing(self, call: _native.Description, seq: int) -> list[str]:
        """Lines that say where the ranks are that this call waits for."""
        return ask.absent(self.posted, self.info, call.op, seq, self.find_missing(call, seq))
