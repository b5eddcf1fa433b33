"""Futures of ranks that are threads of one process: whoever waits for one lets the other ranks go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

__all__ = ["SharedTurnFuture"]


class SharedTurnFuture(Future[Any]):
    """`wait_for_call` waits for the call whose end completes it, `let_others` lets other ranks go on for a moment.

    `interrupt` has the rank go on with an exception where it communicates next.
    """

    def __init__(
        self,
        wait_for_call: Callable[[], Any],
        let_others: Callable[[], None],
        interrupt: Callable[[BaseException], None],
    ) -> None:
        super().__init__()
        self._wait_for_call = wait_for_call
        self._let_others = let_others
        self._interrupt = interrupt

    def wait(self) -> Any:
        if not super().done():
            self._wait_for_call()
        # What follows a call's end is called at the rank's next turn, and torch's own wait lets others go on, too.
        return super().wait()

    def done(self) -> bool:
        if not super().done():
            self._let_others()
        return super().done()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        following = SharedTurnFuture(self._wait_for_call, self._let_others, self._interrupt)

        def follow(_: Future[Any]) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                following.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                # torch drops what a callback raises, and this is to end the rank.
                if not isinstance(error, Exception):
                    self._interrupt(error)
            else:
                following.set_result(value)

        super().then(follow)
        return following
