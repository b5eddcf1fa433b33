"""Errors carry their facts and read well."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

import phalanx


def test_all_facts_are_in_the_text_and_on_the_error() -> None:
    error = phalanx.CallTimeout(
        "rank 2 did not come", group="tp", rank=1, op="all_reduce", seq=7, hint="look at rank 2"
    )
    assert str(error).splitlines() == [
        "[MISSING] all_reduce, seq 7, group 'tp', rank 1: rank 2 did not come",
        "  Next: look at rank 2",
    ]
    assert (error.code, error.group, error.rank, error.op, error.seq) == ("MISSING", "tp", 1, "all_reduce", 7)


def test_facts_that_are_not_known_are_left_out() -> None:
    assert str(phalanx.GroupError("it can't be made")) == "[GROUP] it can't be made"


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (phalanx.InvalidCall, ValueError),
        (phalanx.CallTimeout, TimeoutError),
        (phalanx.Mismatch, dist.DistBackendError),
        (phalanx.PeerLost, dist.DistError),
        (phalanx.Aborted, RuntimeError),
        (phalanx.GroupError, phalanx.PhalanxError),
    ],
)
def test_todays_except_clauses_keep_working(kind: type[Exception], also: type[Exception]) -> None:
    assert issubclass(kind, also)
    assert issubclass(kind, dist.DistBackendError)


def test_errors_go_from_process_to_process() -> None:
    error = phalanx.PeerLost("rank 1 died", group="g", rank=0, op="barrier", seq=3, hint="look at it")
    error.peer = 1
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is phalanx.PeerLost
    assert str(again) == str(error)
    assert (again.code, again.group, again.rank, again.op, again.seq, again.peer) == (
        "PEER_LOST",
        "g",
        0,
        "barrier",
        3,
        1,
    )
