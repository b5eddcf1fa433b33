"""Futures of ranks that are threads of one process: whoever waits for one lets the other ranks go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

__all__ = ["SharedTurnFuture"]


class SharedTurnFuture(Future[Any]):
    """`wait_for_call` waits for the call whose end completes it, `let_others` lets other ranks go on for a moment."""

    def __init__(self, wait_for_call: Callable[[], Any], let_others: Callable[[], None]) -> None:
        super().__init__()
        self._wait_for_call = wait_for_call
        self._let_others = let_others

    def wait(self) -> Any:
        if not super().done():
            self._wait_for_call()
        # What follows a call's end is called at the rank's next turn.
        while not super().done():
            self._let_others()
        return super().wait()

    def done(self) -> bool:
        if not super().done():
            self._let_others()
        return super().done()

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        following = SharedTurnFuture(self._wait_for_call, self._let_others)

        def follow(_: Future[Any]) -> None:
            try:
                value = callback(self)
            except Exception as error:
                following.set_exception(error)
            else:
                following.set_result(value)

        super().then(follow)
        return following
