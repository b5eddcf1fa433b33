"""The handles that guarded calls return to torch: the engine's own, with our errors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import get_native_id
from time import monotonic
from typing import TYPE_CHECKING, Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from phalanx import _native
from phalanx.group.torch_compat.standing_in import StandInWork
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.group.work import NO_TIMEOUT

if TYPE_CHECKING:
    from phalanx.guards.calls import GuardedCalls

__all__ = ["GuardedWork"]

# C++ passes no time at all.
_NOT_GIVEN = (NO_TIMEOUT, timedelta(0))


@not_traced
class GuardedWork(StandInWork):
    """A call that an engine carries out. `seq` is 0 of a receive whose sender is not known yet."""

    _future: Future[Any] | None = None
    # Whether the engine has ended it, as far as this rank has looked.
    ended = False

    def __init__(self, calls: GuardedCalls, engines: TorchWork, call: _native.Description, seq: int) -> None:
        # As the class above does, in fewer steps.
        TorchWork.__init__(self)
        self.engines = engines
        self.calls = calls
        self.call = call
        self.seq = seq
        self.began = monotonic()

    @property
    def _is_broken(self) -> bool:
        return self.calls.is_broken_for(self.call, self.seq, has_ended=self.ended)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        wait = self.engines.wait
        done: bool = self._wait(wait) if timeout in _NOT_GIVEN else self._wait(partial(wait, timeout), timeout)
        return done

    def synchronize(self) -> None:
        self._wait(self.engines.synchronize)

    def _wait(self, wait: Callable[[], Any], timeout: timedelta | None = None) -> Any:
        calls = self.calls
        thread = get_native_id()
        calls.waits[thread] = self.call, self.seq, self.engines, self.began
        try:
            result = wait()
        except Exception as error:
            # The wait has ended, and the call may go on.
            if timeout is not None and not calls.posted.is_broken and not self.engines.is_completed():
                raise calls.still_under_way(self, timeout.total_seconds()) from error
            calls.raise_cause(self.call, self.seq, error)
        finally:
            calls.waits.pop(thread, None)
        calls.finish(self)
        return result

    def is_completed(self) -> bool:
        if self._is_broken:
            return True
        return bool(self.engines.is_completed())

    def is_success(self) -> bool:
        return not self._is_broken and bool(self.engines.is_success())

    def exception(self) -> BaseException | None:
        if self._is_broken:
            return self.calls.explain(self.call.op, self.seq)
        error: BaseException | None = self.engines.exception()
        return error

    def result(self) -> Any:
        return self.engines.result()

    def source_rank(self) -> int:
        return self._source_rank()

    def get_future(self) -> Future[Any]:
        """The engine's future. Where the engine waits on the host, ours: it has our error."""
        if self._future is None:
            self._future = self.calls.future_of(self)
        return self._future
