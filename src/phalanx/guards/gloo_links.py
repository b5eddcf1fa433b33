"""The connections of a Gloo group.

Gloo has no way to end a pending call: its `abort()` and `shutdown()` do not touch it. A connection that is shut down
ends it at once, on both sides. So a guard finds out which of the process' sockets connect the ranks of one group.

Every rank of a Gloo group listens at an address of its own and leaves it in the group's store, so that others connect.
A connection of the group has such an address at one end. The sockets that listen are left alone: Gloo ends the process
when one of them fails.

Groups that were split off another one listen where that one does. So a group keeps in mind which connections were made
when it was, and leaves those of the others alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence

from phalanx.types import PrefixStore, Store

__all__ = ["GlooLinks"]

_Address = tuple[str, int]
_Connection = tuple[_Address, _Address]
# The length of the address families' structures that Gloo writes, up to the end of the address.
_FAMILIES = {socket.AF_INET: 8, socket.AF_INET6: 24}


class GlooLinks:
    """Where the ranks of one group listen, as the group's store says."""

    def __init__(self, store: Store, size: int, devices: Sequence[str]) -> None:
        """`store` is the group's own. Raises ValueError where it does not say what is needed here."""
        keys = [str(rank) for rank in range(size)]
        # As torch and Gloo prefix the keys. torch names the first device that the backend was registered for; in a
        # group that was split off, none.
        prefixed = [*(PrefixStore(f"{device}/", store) for device in devices), store]
        stores = [PrefixStore("0", one) for one in prefixed]
        rendezvous = next((one for one in stores if one.check(keys)), None)
        if rendezvous is None:
            raise ValueError("Gloo has left no addresses in the store")
        found = [_addresses_in(rendezvous.get(key)) for key in keys]
        own = {_name_of(one) for one in _sockets(listening=True)}
        self.addresses: set[_Address] = set()
        # All ranks write their address at the same place; this rank knows its own.
        places = {place for addresses in found for place, address in addresses.items() if address in own}
        for addresses in found:
            mine = {address for place, address in addresses.items() if place in places}
            if not mine:
                raise ValueError("Gloo's keys in the store have an unknown form")
            self.addresses |= mine
        # Those that were made with the group. Gloo may make others later.
        self._own = {connection for connection, _ in self._connections()}
        _all.add(self)

    def cut(self) -> int:
        """Shuts down the connections between this rank and the others. Returns how many there were."""
        num = 0
        for _, one in self._connections():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                num += 1
        return num

    def _connections(self) -> Iterator[tuple[_Connection, socket.socket]]:
        """Each with its socket, which is valid until the next one is asked for."""
        others = set().union(*(links._own for links in list(_all) if links is not self))
        for one in _sockets(listening=False):
            with contextlib.suppress(OSError):
                connection = _name_of(one), _plain(one.getpeername())
                if connection not in others and not self.addresses.isdisjoint(connection):
                    yield connection, one


# Of the groups that are guarded.
_all: weakref.WeakSet[GlooLinks] = weakref.WeakSet()


def _addresses_in(text: bytes) -> dict[int, _Address]:
    """What may be an address, by its place."""
    found: dict[int, _Address] = {}
    for place in range(len(text) - 8):
        (family,) = struct.unpack_from("=H", text, place)
        length = _FAMILIES.get(family, 0)
        if not length or place + length > len(text):
            continue
        (port,) = struct.unpack_from("!H", text, place + 2)
        at = place + (4 if family == socket.AF_INET else 8)
        packed = text[at : place + length]
        found[place] = (socket.inet_ntop(family, packed), port)
    return found


def _sockets(listening: bool) -> Iterator[socket.socket]:
    """This process' sockets of TCP, each as another descriptor, closed when the next one is asked for."""
    for name in _descriptors():
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                one = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with one:
                is_tcp = one.family in _FAMILIES and one.type == socket.SOCK_STREAM
                if is_tcp and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                    yield one


def _descriptors() -> Sequence[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(name)
    return found


def _name_of(one: socket.socket) -> _Address:
    return _plain(one.getsockname())


def _plain(address: tuple[str, int]) -> _Address:
    return address[0].removeprefix("::ffff:"), address[1]
