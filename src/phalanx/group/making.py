"""Groups as objects: made from the environment, from a URL or from a store, and registered nowhere."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.rendezvous import rendezvous

from phalanx.errors import GroupError, PhalanxError
from phalanx.group import names
from phalanx.group.process_group import ProcessGroup
from phalanx.group.timeouts import DEFAULT_TIMEOUT, check_timeout
from phalanx.transports import threads
from phalanx.types import Store

__all__ = ["new_group"]

_NAME = "phalanx"


def new_group(
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str | None = None,
) -> ProcessGroup:
    """Makes a group with the ranks that call this with the same store and name. Returns when all of them have come.

    The ranks meet in `store`, or at the URL `init_method` (`tcp://host:port`, `file:///path`, `env://`), or, with
    neither, as the environment says (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun sets them).
    With a store, `rank` and `world_size` must be given. `timeout` limits this call, and is that of every call of the
    group that has no timeout of its own.

    Nothing is registered: torch.distributed's functions do not know the group. It lives until `shutdown()`, or as long
    as the program refers to it. Groups of the same ranks and name meet in the order in which they are made.
    """
    label = _NAME if name is None else name
    if problem := names.problem_of(label):
        raise _wrong(problem, _NAME, "pass a name, or leave it out")
    check_timeout(timeout, label)
    if name is not None:
        names.check_free(name, "new_group")
    if store is not None and init_method is not None:
        raise _wrong("expected a store or an init_method, got both", label, "pass one of them")
    if store is None:
        store, rank, world_size = _find_store(init_method, rank, world_size, timeout, label)
    if rank is None or world_size is None:
        missing = "rank and world_size" if rank is world_size else "rank" if rank is None else "world_size"
        raise _wrong(f"expected rank and world_size with a store, got no {missing}", label, f"pass {missing}, too")
    group = ProcessGroup(store, rank, world_size, timeout, name=label)
    if name is not None:
        group._taken = names.take(name, group)
    return group


def _find_store(
    url: str | None, rank: int | None, world_size: int | None, timeout: timedelta, name: str
) -> tuple[Store, int, int]:
    """Where to meet, as torch finds it."""
    run = threads.this_thread.run
    if url is None and run is not None:
        own = run.environment()
        return own[0], own[1] if rank is None else rank, own[2] if world_size is None else world_size
    url = "env://" if url is None else url
    try:
        given = -1 if rank is None else rank, -1 if world_size is None else world_size
        found: tuple[Store, int, int] = next(iter(rendezvous(url, *given, timeout=timeout)))
    except PhalanxError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        hint = "start the program with torchrun, or pass store, rank and world_size; or look at the URL and its host"
        raise _wrong(f"torch found no store at {url!r}: {error}", name, hint) from error
    found[0].set_timeout(timeout)
    return found


def _wrong(message: str, name: str, hint: str) -> GroupError:
    return GroupError(message, group=name, op="new_group", hint=hint)
