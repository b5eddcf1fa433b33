"""Calls that another engine carries out: this rank posts them, and hears where the ranks disagree.

Posting never waits (`_core/agreement.hpp`). A call is posted just before it is handed to the engine. The engine's user
tells when the call has ended: reports and black boxes say which calls have.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import MethodType

from phalanx import _native
from phalanx.errors import Aborted, Mismatch, PhalanxError

# `places` tells the core which code is the program's own.
from phalanx.transports import failures, keeper, levels, limits, places, rendezvous  # noqa: F401
from phalanx.transports.identities import Identity
from phalanx.transports.observers import tell
from phalanx.transports.rendezvous import Known, Met
from phalanx.types import GroupInfo, Store

__all__ = ["PostedCalls", "join"]

# In records, an engine that has no number of its own.
_OTHER_ENGINE = 255


def join(
    store: Store,
    info: GroupInfo,
    timeout: float,
    on_failure: Callable[[], None],
    scope: str = "",
    known: Known | None = None,
    engine: str = "",
    matches_tags: bool = False,
) -> PostedCalls:
    """Meets the other ranks, as `rendezvous.join` does.

    `on_failure` is called once the group has failed: in a thread of ours, also where this process waits for nothing.
    `engine` is the backend that carries out the calls, for their records. With `matches_tags` it lets messages of
    different tags overtake each other.
    """

    def make(met: Met) -> PostedCalls:
        posted = PostedCalls(met, on_failure, engine, matches_tags)
        tell.joined(posted, info, met.folder)
        return posted

    return rendezvous.join(store, info, timeout, make, scope=scope, known=known, only_posts=True)


class PostedCalls:
    """One rank's end of a group that only posts. Calls are posted by one thread at a time.

    The process leaves it when it ends, as other groups, if `group.endings` was told of it.
    """

    spans_processes = True

    def __init__(self, met: Met, on_failure: Callable[[], None], engine: str = "", matches_tags: bool = False) -> None:
        self.info = met.info
        # When this rank began to make the group, on the monotonic clock.
        self.began_ns = met.began_ns
        # What was said of its failure.
        self.said: list[str] | None = None
        self.identities: Sequence[Identity] = met.identities
        keeper.begin()
        self._token = keeper.expect(_without_keeping(on_failure))
        # A group that no code refers to any more is left, and no news of it is expected.
        weakref.finalize(self, keeper.forget, self._token).atexit = False
        number = _native.ENGINES.index(engine) if engine in _native.ENGINES[1:] else _OTHER_ENGINE
        try:
            self._agreement = _native.Agreement(
                met.segment, met.info.rank, met.identities, self._token, number, matches_tags
            )
        except BaseException:
            keeper.forget(self._token)
            raise
        if number := _native.progress_error():
            limits.warn(
                "starting the progress thread",
                RuntimeError(os.strerror(number)),
                f"rank {met.info.rank} of group {met.info.name!r} does not hear of ranks that disagree",
            )

    def post(self, call: _native.Description, result: int = 0) -> int:
        """The number of the call: among this rank's collectives, or of a message among those to or from its peer.

        `result` is a hash of what the call before gave, where results are compared.
        """
        if self._agreement.forked or self._agreement.has_left:
            raise self._unusable(call.op)
        return self._agreement.post(call, result)

    @property
    def native(self) -> _native.Agreement:
        """For calls that are made through a native `begin` and `finish`."""
        return self._agreement

    def end(self, call: _native.Description, seq: int, *, well: bool = True) -> None:
        """The engine has ended the call with this number. From any thread."""
        self._agreement.end(call, seq, well)

    @property
    def is_broken(self) -> bool:
        """Whether ranks are known to disagree, or the group has failed otherwise. The report may be on its way."""
        return self._agreement.is_broken

    def wait_for_failure(self, seconds: float) -> bool:
        """Of a broken group: waits until the failure is known. Returns whether it is."""
        return self._agreement.wait_for_failure(seconds)

    def posted(self, rank: int) -> int:
        """The number of the last collective that the rank has posted."""
        return self._agreement.posted(rank)

    def place_of(self, call: _native.Description, seq: int) -> str:
        """Where in the program this rank has made a call; empty where that is not known any more."""
        return self._agreement.place_of(call, seq)

    def messages_posted(self, peer: int, *, sends: bool) -> int:
        """How many messages the peer has posted to this rank (it is the sender), or from it."""
        return self._agreement.messages_posted(peer, sends)

    def is_gone(self, rank: int) -> bool:
        """Whether the rank has left, or its process is gone."""
        return self._agreement.is_gone(rank)

    def has_left_well(self, rank: int) -> bool:
        """Whether the rank has left in order: it has made the calls that it was to make."""
        return self._agreement.has_left_well(rank)

    def fail_by_end(self, peer: int, call: _native.Description, seq: int) -> None:
        """This rank waits in a call for a rank that is gone."""
        self._agreement.fail_by_end(peer, call, seq)

    def fail_by_timeout(self, missing: Sequence[int], call: _native.Description, seq: int) -> None:
        """This rank gives up waiting in a call for these ranks."""
        self._agreement.fail_by_timeout(missing, call, seq)

    def abort(self, reason: str) -> None:
        self._agreement.abort(reason)

    @property
    def has_failed(self) -> bool:
        return self._agreement.failure() is not None

    def explain(self, op: str, seq: int, timeout: float = 0.0) -> PhalanxError:
        """The error of a call that can't end, because the group has failed or can't be used here.

        `timeout` is that of the call, in seconds.
        """
        if not self.has_failed:
            return self._unusable(op)
        return failures.explain(self, self.info, op, _native.FAILED, timeout, seq)

    def _unusable(self, op: str) -> PhalanxError:
        """The error of a call in a forked child, after this rank has left, or that the engine ended by itself."""
        if self._agreement.forked:
            return failures.explain(None, self.info, op, _native.FORKED)
        if self._agreement.has_left:
            return failures.explain(None, self.info, op, _native.LEFT)
        if self._agreement.is_broken:
            return Mismatch(
                "ranks disagree about their calls, and the rank that found it has not reported it yet",
                group=self.info.name,
                rank=self.info.rank,
                op=op,
                hint="look at the errors of the other ranks",
            )
        return Aborted(
            "the engine ended the call, and the ranks agree about their calls so far",
            group=self.info.name,
            rank=self.info.rank,
            op=op,
            hint="look at the engine's own error",
        )

    # For the end of the process.

    def say_last_words(self, text: str) -> None:
        self._agreement.say_last_words(text)

    def complete(self, patience: float) -> None:
        """Nothing of ours is in flight: calls are the engine's."""

    def close(self, exiting: bool = False) -> None:
        """This rank posts no further call. What it has found is reported first. Idempotent."""
        keeper.forget(self._token)
        self._agreement.leave(exiting)

    # For observers.

    @property
    def identity(self) -> str:
        """The same on all ranks of the group, and on those of no other group."""
        return self._agreement.identity

    def keep_records(self, box: _native.BlackBox, group: int, path: str) -> None:
        """From now on calls are recorded in the box. Peers find it at the path."""
        self._agreement.keep_records(box, group, path)

    def box_of(self, rank: int) -> str:
        """The path of a rank's black box; empty where it is not known."""
        return self._agreement.box_of(rank)

    def take_note(self) -> _native.ShapeNote | None:
        return self._agreement.take_note()

    # For those who look for an absent rank.

    def ask(self, rank: int) -> None:
        """Asks a rank where it is."""
        self._agreement.ask(rank)

    def answer_of(self, rank: int, seconds: float) -> str | None:
        return self._agreement.answer_of(rank, seconds)

    def has_left(self, rank: int) -> bool:
        return self._agreement.has_left_well(rank)

    # What `failures` asks of a group.

    @property
    def level(self) -> int:
        return max(self._agreement.level, levels.ON)

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
        return self._agreement.last_words(rank)

    def refusals(self, rank: int, /) -> Sequence[str]:
        return ()


def _without_keeping(on_failure: Callable[[], None]) -> Callable[[], None]:
    """Calls a method only as long as its object lives: the object may own the group whose failure it hears of."""
    if not isinstance(on_failure, MethodType):
        return on_failure
    reference = weakref.WeakMethod(on_failure)

    def call_if_alive() -> None:
        method = reference()
        if method is not None:
            method()

    return call_if_alive
