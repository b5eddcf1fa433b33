"""Calls that another engine carries out: this rank posts them, and hears where the ranks disagree.

Posting never waits (`_core/agreement.hpp`). A call is posted just before it is handed to the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from phalanx import _native
from phalanx.errors import PhalanxError

# `places` tells the core which code is the program's own.
from phalanx.transports import failures, keeper, levels, limits, places, rendezvous  # noqa: F401
from phalanx.transports.observers import tell
from phalanx.transports.rendezvous import Known, Met
from phalanx.types import GroupInfo, Store

__all__ = ["PostedCalls", "join"]


def join(
    store: Store,
    info: GroupInfo,
    timeout: float,
    on_failure: Callable[[], None],
    scope: str = "",
    known: Known | None = None,
) -> PostedCalls:
    """Meets the other ranks, as `rendezvous.join` does.

    `on_failure` is called once the group has failed: in a thread of ours, also where this process waits for nothing.
    """

    def make(met: Met) -> PostedCalls:
        posted = PostedCalls(met, on_failure)
        tell.joined(posted, info, met.folder)
        return posted

    return rendezvous.join(store, info, timeout, make, scope=scope, known=known, only_posts=True)


class PostedCalls:
    """One rank's end of a group that only posts. Calls are posted by one thread at a time."""

    def __init__(self, met: Met, on_failure: Callable[[], None]) -> None:
        self._info = met.info
        self._token = keeper.expect(on_failure)
        try:
            self._agreement = _native.Agreement(met.segment, met.info.rank, met.identities, self._token)
        except BaseException:
            keeper.forget(self._token)
            raise
        if number := _native.progress_error():
            limits.warn(
                "starting the progress thread",
                RuntimeError(os.strerror(number)),
                f"rank {met.info.rank} of group {met.info.name!r} does not hear of ranks that disagree",
            )

    def post(self, call: _native.Description) -> int:
        """The number of the call: among this rank's collectives, or of a message among those to or from its peer."""
        return self._agreement.post(call)

    @property
    def has_failed(self) -> bool:
        return self._agreement.failure() is not None

    def explain(self, op: str, seq: int) -> PhalanxError:
        """The error of a call that can't end because the group has failed."""
        return failures.explain(self, self._info, op, _native.FAILED, seq=seq)

    def close(self) -> None:
        """This rank posts no further call. Idempotent."""
        keeper.forget(self._token)
        self._agreement.leave()

    # For observers: there is no native group that moves bytes.
    native = None

    # What `failures` asks of a group.

    level = levels.ON

    @property
    def seq(self) -> int:
        return self._agreement.seq

    def failure(self) -> _native.Failure:
        failure = self._agreement.failure()
        assert failure is not None
        return failure

    def testimonies(self) -> Sequence[_native.Testimony]:
        return self._agreement.testimonies()

    def last_words(self, rank: int, /) -> str:
        return ""

    def refusals(self, rank: int, /) -> Sequence[str]:
        return ()
