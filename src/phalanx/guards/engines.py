"""What each backend needs of a guard: above all, how its pending calls are ended when the ranks disagree."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import ProcessGroup

from phalanx.group.torch_compat.standing_in import backends_of, devices_of
from phalanx.guards.gloo_links import GlooLinks
from phalanx.types import Store

__all__ = ["Engine", "engine_of", "needs_guard"]

# Seconds that a backend gets to abort its calls.
_FOR_ABORT = 5.0
# torch's own for tests: ranks that are not there, and ranks that are threads.
_NO_PROCESSES = {"fake", "local", "threaded"}


class Engine:
    """A backend that carries out the calls of one group."""

    # Whether it matches messages by their tags, so that messages of different tags may overtake each other.
    matches_tags = True

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group = group
        self.name = name

    def interrupt(self) -> str:
        """Ends the calls that are under way on this rank. Returns why that did not work; empty: it did."""
        problems = [self._abort(backend) for backend in backends_of(self._group)]
        return next((problem for problem in problems if problem), "")

    def _abort(self, backend: Any) -> str:
        abort = getattr(backend, "abort", None)
        # A backend that is written in Python has torch's own abort(), which does nothing, unless it has another one.
        if abort is None or (isinstance(backend, ProcessGroup) and type(backend).abort is ProcessGroup.abort):
            return f"the backend {self.name} has no abort()"
        problems: list[str] = []

        def abort_it() -> None:
            try:
                abort()
            except Exception as error:
                problems.append(f"abort() of the backend {self.name} raised: {error}")

        # It may wait for the device.
        thread = threading.Thread(target=abort_it, name="phalanx-abort", daemon=True)
        thread.start()
        thread.join(_FOR_ABORT)
        if thread.is_alive():
            problems.append(f"abort() of the backend {self.name} has not returned after {_FOR_ABORT:g} s")
        return next(iter(problems), "")


class _Nccl(Engine):
    """NCCL and its relatives: `abort()` ends the kernels that wait. Messages match by their order."""

    matches_tags = False


class _Gloo(Engine):
    """Gloo: pending calls end when their connections do."""

    def __init__(self, group: ProcessGroup, name: str, store: Store) -> None:
        super().__init__(group, name)
        self._links: GlooLinks | None = None
        self._problem = ""
        try:
            self._links = GlooLinks(store, group.size(), devices_of(group))
        except (ValueError, RuntimeError, OSError) as error:
            self._problem = f"the connections of Gloo are not known: {error}"

    def interrupt(self) -> str:
        if self._links is None:
            return self._problem
        try:
            self._links.cut()
        except OSError as error:
            return f"the connections of Gloo could not be shut down: {error}"
        return ""


def needs_guard(group: ProcessGroup) -> bool:
    """Whether ranks that are processes carry out the calls."""
    return not _names_of(group) & _NO_PROCESSES


def engine_of(group: ProcessGroup, store: Store) -> Engine:
    """`store` is the group's own."""
    names = _names_of(group)
    name = ", ".join(sorted(names)) or group.name()
    if names == {"gloo"} and group.size() > 1:
        return _Gloo(group, name, store)
    if names & {"nccl", "xccl"}:
        return _Nccl(group, name)
    return Engine(group, name)


def _names_of(group: ProcessGroup) -> set[str]:
    return {backend.name() for backend in backends_of(group)}
