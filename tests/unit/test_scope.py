"""The current process group: scoped, nested, of a thread and of an asyncio task."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import phalanx
from phalanx import current_process_group as current


@pytest.fixture
def groups() -> Iterator[list[phalanx.ProcessGroup]]:
    """Three, of one rank each."""
    made = [phalanx.ProcessGroup(dist.HashStore(), 0, 1, name=name) for name in ("first", "second", "third")]
    yield made
    assert current() is None
    for group in made:
        group.shutdown()


def in_thread(function: Callable[[], Any]) -> Any:
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_nested(groups: list[phalanx.ProcessGroup]) -> None:
    first, second, _ = groups
    assert current() is None
    with phalanx.process_group(first) as given:
        assert given is current() is first
        with phalanx.process_group(second):
            assert current() is second
        assert current() is first
    assert current() is None


def _fail_in(group: phalanx.ProcessGroup) -> None:
    with phalanx.process_group(group):
        raise OSError("disk")


def test_an_exception_passes_and_ends_the_scope(groups: list[phalanx.ProcessGroup]) -> None:
    with phalanx.process_group(groups[0]):
        with pytest.raises(OSError, match="disk"):
            _fail_in(groups[1])
        assert current() is groups[0]


def test_one_object_can_be_entered_again_and_within_itself(groups: list[phalanx.ProcessGroup]) -> None:
    first, second, _ = groups
    scope = phalanx.process_group(first)
    for _ in range(2):
        with scope:
            assert current() is first
        assert current() is None
    with scope, phalanx.process_group(second):
        with scope:
            assert current() is first
        assert current() is second


def test_scopes_that_end_in_the_wrong_order(groups: list[phalanx.ProcessGroup]) -> None:
    """Each exit ends its own scope: an ended one never comes back."""
    scopes = [phalanx.process_group(group) for group in groups]
    for scope in scopes:
        scope.__enter__()
    for ended, left in ((1, groups[2]), (2, groups[0]), (0, None)):
        scopes[ended].__exit__(None, None, None)
        assert current() is left


def test_an_exit_without_its_enter(groups: list[phalanx.ProcessGroup]) -> None:
    scope = phalanx.process_group(groups[0])
    with phalanx.process_group(groups[1]):
        with pytest.raises(phalanx.InvalidCall) as caught:
            scope.__exit__(None, None, None)
        assert current() is groups[1]
    assert caught.value.code == "INVALID:SCOPE"
    assert str(caught.value).startswith(
        "[INVALID:SCOPE] process_group, group 'first', rank 0: this scope is not open in this thread or task\n"
    )


def test_an_exit_in_another_thread_changes_neither(groups: list[phalanx.ProcessGroup]) -> None:
    scope = phalanx.process_group(groups[0])

    def leave() -> Any:
        with phalanx.process_group(groups[1]):
            with pytest.raises(phalanx.InvalidCall, match="not open in this thread"):
                scope.__exit__(None, None, None)
            return current()

    with scope:
        assert in_thread(leave) is groups[1]
        assert current() is groups[0]


def test_a_new_thread_has_none_and_keeps_its_own(groups: list[phalanx.ProcessGroup]) -> None:
    def enter() -> list[Any]:
        seen = [current()]
        with phalanx.process_group(groups[1]):
            return [*seen, current()]

    with phalanx.process_group(groups[0]):
        assert in_thread(enter) == [None, groups[1]]
        assert current() is groups[0]


def test_tasks_have_their_own(groups: list[phalanx.ProcessGroup]) -> None:
    """Both tasks are in their scopes at the same time."""

    async def enter(group: phalanx.ProcessGroup, here: asyncio.Event, there: asyncio.Event) -> list[Any]:
        seen = [current()]
        with phalanx.process_group(group):
            here.set()
            await there.wait()
            seen.append(current())
        return [*seen, current()]

    async def main() -> list[Any]:
        one, other = asyncio.Event(), asyncio.Event()
        with phalanx.process_group(groups[2]):
            return list(await asyncio.gather(enter(groups[0], one, other), enter(groups[1], other, one)))

    assert asyncio.run(main()) == [[groups[2], groups[0], groups[2]], [groups[2], groups[1], groups[2]]]


def test_a_task_keeps_the_group_it_was_created_with(groups: list[phalanx.ProcessGroup]) -> None:
    async def main() -> tuple[Any, Any, Any]:
        left = asyncio.Event()

        async def look() -> Any:
            await left.wait()
            return current()

        with phalanx.process_group(groups[0]):
            task = asyncio.create_task(look())
            seen = await asyncio.to_thread(current)
            await asyncio.sleep(0)
        left.set()
        return seen, current(), await task

    assert asyncio.run(main()) == (groups[0], None, groups[0])


def test_a_scope_that_a_copied_context_inherits_can_be_left_there(groups: list[phalanx.ProcessGroup]) -> None:
    scope = phalanx.process_group(groups[0])

    def leave() -> Any:
        scope.__exit__(None, None, None)
        return current()

    with scope:
        assert contextvars.copy_context().run(leave) is None
        assert current() is groups[0]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "an object of class NoneType"),
        ("group", "an object of class str"),
        (dist.GroupMember.NON_GROUP_MEMBER, "torch's mark for a group that this rank is not in"),
        (dist.ProcessGroup(0, 1), "a group of the backend 'undefined'"),  # type: ignore[call-arg]
        (dist.HashStore(), "an object of class HashStore"),
    ],
)
def test_what_is_no_process_group(value: Any, what: str) -> None:
    with pytest.raises(phalanx.InvalidCall) as caught:
        phalanx.process_group(value)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).splitlines() == [
        f"[INVALID:GROUP] process_group: expected a Phalanx process group, got {what}",
        '  Next: pass a phalanx.ProcessGroup, or a group that torch.distributed made with the backend "phalanx"',
    ]


def test_a_scope_of_ranks_that_are_threads() -> None:
    import phalanx.testing as pt

    def look(rank: int, world: pt.World) -> bool:
        before = current()
        with phalanx.process_group(phalanx.ProcessGroup(world.store, rank, world.size, name="all")) as group:
            group.barrier().wait()
            return before is None and current() is group

    assert pt.run(look, 3, init=False, seed=1) == [True] * 3


def test_the_names_are_there_without_further_imports() -> None:
    code = (
        "import sys, phalanx\n"
        "assert not {'phalanx.functional', 'phalanx.group', 'phalanx.errors'} & set(sys.modules)\n"
        "assert phalanx.current_process_group() is None\n"
        "assert 'phalanx.functional' not in sys.modules\n"
        "print(phalanx.functional.__name__, phalanx.functional.all_reduce.__name__, phalanx.process_group.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["phalanx.functional", "all_reduce", "process_group"]
