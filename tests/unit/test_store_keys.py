"""What ranks do about values in the store that no rank of this version has written.

Ranks are threads of this process that meet as processes do, through one HashStore.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.errors import GroupError, PhalanxError
from phalanx.transports import shm
from phalanx.transports.hello import (
    PROTOCOL,
    GivenUp,
    Hello,
    Note,
    Offer,
    Opening,
    UnreadableError,
    count_of,
    key_of_ranks,
)
from phalanx.types import GroupInfo

_ME = ((1, 2, 3), "here")
_TOLD: dict[str, Any] = {
    "hello/1": Hello("host", [0, 1], 0, *_ME, 1, ""),
    "memfd/where": Offer("/proc/1/fd/3", "0" * 32),
    "memfd/opened/1": Opening(""),
    "given up": GivenUp(1, 1, "OSError", "", "message", "", -1, "", "", *_ME),
    "last/1": Note("g", [0, 1], 1, *_ME),
}
# Keys by the part of the exchange that reads them, and whose they are said to be.
_KEYS = {
    "g/0-1/comings/0": "rank 0",
    "g/0-1/comings/1": "rank 1",
    "g/0-1/1/hello/0": "rank 0",
    "g/0-1/1/hello/1": "rank 1",
    "g/0-1/1/memfd/where": "rank 0",
    "g/0-1/1/memfd/opened/0": "rank 0",
    "g/0-1/1/memfd/opened/1": "rank 1",
    "g/0-1/1/given up": "",
    "g/last/1": "rank 1",
}

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def _changed(draw: st.DrawFn, told: Any) -> bytes:
    """What a rank tells, with one field that is missing or something else."""
    fields = json.loads(told.text())
    name = draw(st.sampled_from(sorted(fields)))
    if draw(st.booleans()):
        del fields[name]
    else:
        fields[name] = draw(_json_values)
    return json.dumps(fields).encode()


def _garbage(name: str) -> st.SearchStrategy[bytes]:
    told = next((told for key, told in _TOLD.items() if key.split("/")[0] in name), None)
    random = st.binary(max_size=64) | _json_values.map(lambda value: json.dumps(value).encode())
    return random if told is None else random | _changed(told)


class _Holding(dist.Store):
    """A store in which one key holds what it holds, whoever sets it."""

    def __init__(self, key: str, value: bytes) -> None:
        super().__init__()
        self._kept = dist.HashStore()
        self._key, self._value = key, value
        self._kept.set(key, value)  # type: ignore[arg-type]

    def set(self, key: str, value: str) -> None:
        self._kept.set(key, self._value if key == self._key else value)  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        return self._kept.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._kept.multi_get(keys)

    def add(self, key: str, amount: int) -> int:
        return self._kept.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._kept.delete_key(key)


def _join_both(store: Any, timeout: float = 20) -> list[BaseException | None]:
    """What each of two ranks got that made a group."""
    ends: list[BaseException | None] = [None, None]

    def join(rank: int) -> None:
        try:
            shm.join(store, GroupInfo("g", rank, 2), timeout).close()
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return ends


@pytest.mark.parametrize("key", _KEYS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_whatever_is_under_a_key_ranks_meet_or_are_told(key: str, data: st.DataObject) -> None:
    value = data.draw(_garbage(key))
    # Nobody can tell a wrong number from a right one: ranks that count differently wait for the timeout.
    assume("comings" not in key or not value.isdigit())
    for error in _join_both(_Holding(key, value)):
        # A timeout would be a hang for a program that sets none.
        assert error is None or (isinstance(error, PhalanxError) and error.code != "MISSING"), error


@pytest.mark.parametrize("value", [b"\xff\x00", b"{}", b"[" * 100_000, b"null", b'{"protocol": 1, "version": "0.1"}'])
@pytest.mark.parametrize("key", [key for key in _KEYS if key != "g/last/1"])
def test_an_error_names_the_key_and_its_rank(key: str, value: bytes) -> None:
    ends = _join_both(_Holding(key, value))
    assert all(isinstance(error, GroupError) and error.code == "GROUP:STORE_KEY" for error in ends), ends
    whose = f" of {_KEYS[key]}" if _KEYS[key] else ""
    for error in ends:
        assert f"did not understand the key {key!r}{whose} in the store: expected " in str(error)
        assert "another job or program on the same MASTER_ADDR and MASTER_PORT" in str(error)


def test_a_note_of_a_rank_that_has_not_come_is_read_by_those_who_wait() -> None:
    store = _Holding("g/last/1", b"?")
    with pytest.raises(GroupError, match="did not understand the key 'g/last/1' of rank 1"):
        shm.join(store, GroupInfo("g", 0, 2), 20)


def test_another_version_says_which() -> None:
    other = json.loads(_TOLD["hello/1"].text()) | {"protocol": PROTOCOL + 1}
    ends = _join_both(_Holding("g/0-1/1/hello/1", json.dumps(other).encode()))
    expected = f"expected version {PROTOCOL} of the protocol, which this version of Phalanx speaks"
    for error in ends:
        assert f"{expected}, got version {PROTOCOL + 1}" in str(error)


@pytest.mark.parametrize("name", _TOLD)
@given(data=st.data())
@settings(deadline=None)
def test_what_is_told_is_read_or_refused(name: str, data: st.DataObject) -> None:
    told = _TOLD[name]
    assert type(told).read(told.text().encode()) == told
    value = data.draw(_garbage(name))
    try:
        read = type(told).read(value)
    except UnreadableError:
        return
    assert type(told).read(read.text().encode()) == read


@given(st.binary(max_size=40).filter(lambda value: not value.isdigit()) | st.just(b"9" * 16))
def test_a_count_is_a_number(value: bytes) -> None:
    with pytest.raises(UnreadableError, match="expected a number"):
        count_of(value)


def _stores() -> list[Callable[[], Any]]:
    return [
        dist.HashStore,
        lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False),
    ]


@pytest.mark.parametrize("make", _stores(), ids=["hash", "tcp"])
def test_a_counter_that_is_no_number_ends_no_connection(make: Callable[[], Any]) -> None:
    """A TCPStore ends the connection of whoever adds to it."""
    store = make()
    store.set("g/0-1/1/left", "x")
    assert _join_both(store) == [None, None]
    store.set("g/0-1/comings/1", "x")
    for error in _join_both(store):
        assert isinstance(error, GroupError)
        assert error.code == "GROUP:STORE_KEY"
    assert store.check(["g/0-1/1/left"])


@pytest.mark.parametrize(
    ("members", "key"),
    [
        (range(1), "0"),
        (range(2), "0-1"),
        (range(300), "0-299"),
        ([3], "3"),
        ([0, 1, 2, 3, 7], "0-3,7"),
        ([2, 1, 0], "2,1,0"),
        ([4, 5, 0, 1], "4-5,0-1"),
        (range(0, 6, 2), "0,2,4"),
    ],
)
def test_ranks_have_one_key_in_each_spelling(members: Sequence[int], key: str) -> None:
    assert key_of_ranks(members) == key_of_ranks(list(members)) == key


def test_the_key_of_many_ranks_is_short() -> None:
    even, odd = key_of_ranks(range(0, 400, 2)), key_of_ranks(range(1, 400, 2))
    assert len(even) == len(odd) == 32
    assert even != odd
