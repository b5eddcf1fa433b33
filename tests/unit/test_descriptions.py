"""What the native module says of calls and failures: every fact under its own name."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import pytest
import torch

from phalanx import _native
from phalanx.transports.failures import _tags
from phalanx.transports.signatures import describe_dtype, dtype_code, dtype_width, unlisted_dtype
from phalanx.types import DTYPE_CODES, REDUCIBLE, Blocks

# Several elements share a byte: calls refuse them.
PACKED = {torch.quint4x2, torch.quint2x4}
BARRIER = _native.Description("barrier")


def _ops(trait: str) -> set[str]:
    return {op.name for op in _native.OPS if getattr(op, trait)}


def test_the_traits_of_ops() -> None:
    assert _ops("is_message") == _native.MESSAGE_OPS == {"send", "recv"}
    assert _ops("rooted") == {"broadcast", "reduce", "gather", "scatter"}
    assert _ops("reduces") == {"all_reduce", "reduce", "reduce_scatter"}
    assert _ops("in_place") == {"all_reduce", "reduce"}
    assert _ops("shared_result") == {"all_reduce", "broadcast", "all_gather", "split_group", "merge_remote_group"}
    assert _ops("exchanges_sizes") == {"all_to_all"}
    assert _ops("shape_of_outputs") == {"scatter", "reduce_scatter"}


def test_who_waits_for_whom() -> None:
    waits = {op.name: (op.others_wait_for, op.root_waits_for) for op in _native.OPS}
    none, root, everybody, peer = _native.Peers.none, _native.Peers.root, _native.Peers.all, _native.Peers.peer
    assert {op for op, whom in waits.items() if whom == (root, none)} == {"broadcast", "scatter"}
    assert {op for op, whom in waits.items() if whom == (none, everybody)} == {"reduce", "gather"}
    assert {op for op, whom in waits.items() if whom == (peer, peer)} == _ops("is_message")
    rest = {op.name for op in _native.OPS if not op.rooted and not op.is_message}
    assert {op for op, whom in waits.items() if whom == (everybody, everybody)} == rest


def test_every_dtype_of_torch_is_in_the_table() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert dtypes - PACKED == set(DTYPE_CODES)
    assert {dtype: _native.DTYPES[code].width for dtype, code in DTYPE_CODES.items()} == {
        dtype: dtype.itemsize for dtype in DTYPE_CODES
    }
    assert set(REDUCIBLE.values()) == set(range(1, _native.NUM_REDUCIBLE))
    assert all(_native.reduces(code, 0) == (code < _native.NUM_REDUCIBLE) for code in DTYPE_CODES.values())


def test_a_dtype_that_is_not_in_the_table_has_a_name() -> None:
    assert (dtype_code(None), unlisted_dtype(None)) == (0, 0)
    assert (dtype_code(torch.bits8), unlisted_dtype(torch.bits8)) == (DTYPE_CODES[torch.bits8], 0)
    for dtype in PACKED:
        assert dtype_code(dtype) == _native.OTHER_DTYPE
        call = _native.Description("broadcast", dtype=dtype_code(dtype), unlisted_dtype=unlisted_dtype(dtype))
        assert call.unlisted_dtype == zlib.crc32(str(dtype).encode())
        assert f"torch.{describe_dtype(call)}" == str(dtype)
        assert dtype_width(call) == 0
    assert describe_dtype(_native.Description("broadcast", dtype=_native.OTHER_DTYPE, unlisted_dtype=1)) == "bytes"


CALL: dict[str, Any] = {
    "reduce_op": 4,
    "dtype": 12,
    "unlisted_dtype": 13,
    "root": 5,
    "count": 6,
    "layout": 7,
    "peer": 8,
    "tag": 9,
    "flags": 10,
}


def test_a_description_keeps_what_it_is_made_of() -> None:
    call = _native.Description("reduce", sizes=(2, 3), **CALL)
    assert {name: getattr(call, name) for name in CALL} == CALL
    assert (call.op, call.shape.sizes, call.shape.num, call.shape.listed) == ("reduce", (2, 3), 2, False)
    for name in (*CALL, "op", "shape"):
        with pytest.raises(AttributeError):
            setattr(call, name, getattr(call, name))
    defaults = {"reduce_op": -1, "root": -1, "peer": -1}
    assert {name: getattr(BARRIER, name) for name in CALL} == {name: defaults.get(name, 0) for name in CALL}
    with pytest.raises(ValueError, match="unknown op"):
        _native.Description("all_reduces")
    with pytest.raises(ValueError, match="unknown dtype"):
        _native.Description("broadcast", dtype=256)


def test_what_makes_two_calls_the_same() -> None:
    call = _native.Description("reduce", sizes=(2, 3), **CALL)
    assert call.agrees_with(_native.Description("reduce", sizes=(3, 2), **CALL | {"peer": 0, "tag": 0, "flags": 0}))
    assert not call.agrees_with(_native.Description("broadcast", sizes=(2, 3), **CALL))
    for name in ("reduce_op", "dtype", "unlisted_dtype", "root", "count", "layout"):
        assert not call.agrees_with(_native.Description("reduce", sizes=(2, 3), **CALL | {name: 1})), name


def test_shapes() -> None:
    one, other = _native.Shape((2, 3), 6), _native.Shape((3, 2), 6)
    assert one != other
    assert one == _native.Shape((2, 3), 6)
    assert len({one, other, _native.Shape((2, 3), 6)}) == 2
    many = _native.Shape(tuple(range(1, 11)), 1)
    assert (many.num, many.sizes) == (10, tuple(range(1, 9)))
    # Of those that are not kept, too.
    assert many != _native.Shape((*range(1, 10), 11), 1)
    assert (one.may_differ, _native.Shape([2, 3], 5).may_differ, _native.Shape((2, 3), -1).may_differ) == (
        False,
        True,
        True,
    )
    assert _native.Shape([2, 3]).listed


def test_a_testimony_keeps_what_it_is_made_of() -> None:
    made = _native.MadeCall(_native.Description("reduce", root=3), seq=4, result=2**63, where="train.py:5")
    assert (made.description.root, made.seq, made.result, made.where) == (3, 4, 2**63, "train.py:5")
    completed = _native.MadeCall(BARRIER, seq=3)
    seen = _native.Testimony(call=made, completed=completed, refused="a note")
    assert seen.call is not None
    assert seen.completed is not None
    assert (seen.call.seq, seen.completed.seq, seen.refused) == (4, 3, "a note")
    nothing = _native.Testimony()
    assert (nothing.call, nothing.completed, nothing.refused) == (None, None, "")


def test_a_note_keeps_what_it_is_made_of() -> None:
    one = _native.ShapeSide(rank=1, shape=_native.Shape((2, 3), 6), where="here")
    other = _native.ShapeSide(rank=4, shape=_native.Shape((6,), 6), where="there")
    note = _native.ShapeNote(op="gather", seq=9, one=one, other=other)
    assert (note.op, note.seq) == ("gather", 9)
    assert [(side.rank, side.shape.sizes, side.where) for side in note.sides] == [
        (1, (2, 3), "here"),
        (4, (6,), "there"),
    ]


def test_a_failure_keeps_what_it_is_made_of() -> None:
    call = _native.Description("recv", tag=7)
    facts: dict[str, Any] = {
        "kind": _native.FAILURE_MESSAGE,
        "rank": 1,
        "seq": 2,
        "where": "train.py:5",
        "peer": 3,
        "missing": [0, 64, 1023],
        "other_tags": [4, 5],
        "leaving": _native.LEAVING_EXITING,
        "status": 256,
        "reason": "no",
    }
    misfit = _native.Misfit(sent=_native.Description("send", count=11), where="there")
    splits = _native.Splits(sender=0, receiver=2, bytes_sent=8, bytes_expected=2**40)
    failure = _native.Failure(call=call, misfit=misfit, splits=splits, **facts)
    assert {name: getattr(failure, name) for name in facts} == facts
    assert failure.misfit is not None
    assert failure.splits is not None
    assert (failure.call.tag, failure.misfit.sent.count, failure.misfit.where) == (7, 11, "there")
    found = failure.splits
    assert (found.sender, found.receiver, found.bytes_sent, found.bytes_expected) == (0, 2, 8, 2**40)
    plain = _native.Failure(kind=_native.FAILURE_ABORTED, rank=0, call=BARRIER, seq=1)
    assert (plain.misfit, plain.splits, plain.asked, plain.command_line) == (None, None, False, "")
    assert (plain.peer, plain.status, plain.missing, plain.other_tags) == (-1, _native.UNKNOWN_STATUS, [], [])
    with pytest.raises(ValueError, match="not a rank"):
        _native.Failure(kind=_native.FAILURE_TIMEOUT, rank=0, call=BARRIER, seq=1, missing=[1024])


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ([3], "3"),
        ([3, 50], "3, 50"),
        # More than a list may have characters.
        (list(range(10**8, 10**8 + 20)), ", ".join(str(10**8 + i) for i in range(6)) + " and others"),
        (list(range(30)), ", ".join(map(str, range(19))) + " and others"),
    ],
)
def test_the_tags_of_other_messages(tags: list[int], text: str) -> None:
    failure = _native.Failure(kind=_native.FAILURE_TIMEOUT, rank=0, call=BARRIER, seq=1, other_tags=tags)
    assert _tags(failure) == text


def _run_two(*calls: _native.Description) -> tuple[_native.GroupEnd, list[int]]:
    """Two ranks of one segment make a call each. The group, as the first sees it, and what became of the calls."""
    tuning = _native.tuning_for(2, 2)
    tuning.level = _native.CHECK_ON
    segment = _native.Segment.create_memfd(2, tuning, bytes(16))
    groups = [_native.GroupEnd(segment, rank) for rank in range(2)]
    ends = [_native.PENDING, _native.PENDING]

    def make(rank: int) -> None:
        sent, received = torch.zeros(8, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
        ends[rank] = _native.run_call(groups[rank], calls[rank], Blocks([sent]), Blocks([received], 2), 60.0).result

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    return groups[0], ends


def test_the_core_tells_what_it_was_given() -> None:
    calls = [
        _native.Description("all_gather", dtype=255, unlisted_dtype=31 + rank, count=8, layout=21) for rank in range(2)
    ]
    group, ends = _run_two(*calls)
    assert ends == [_native.FAILED] * 2
    failure = group.failure()
    assert (failure.kind, failure.seq, failure.call.op) == (_native.FAILURE_MISMATCH, 1, "all_gather")
    assert {failure.rank, failure.peer} == {0, 1}
    assert (failure.misfit, failure.splits, failure.missing) == (None, None, [])
    for rank, seen in enumerate(group.testimonies()):
        assert seen.call is not None
        made, call = seen.call, seen.call.description
        assert (made.seq, made.result, seen.completed, seen.refused) == (1, 0, None, "")
        assert (call.op, call.reduce_op, call.root, call.dtype, call.count) == ("all_gather", -1, -1, 255, 8)
        assert (call.layout, call.unlisted_dtype) == (21, 31 + rank)


def test_sizes_that_ranks_exchange() -> None:
    sizes = [[4, 8], [12, 16]]
    assert _native.Splits.find(sizes, [[4, 12], [8, 16]]) is None
    found = _native.Splits.find(sizes, [[4, 12], [9, 16]])
    assert found is not None
    assert (found.sender, found.receiver, found.bytes_sent, found.bytes_expected) == (0, 1, 8, 9)
    with pytest.raises(ValueError, match="a size per rank and peer"):
        _native.Splits.find(sizes, [[4, 12]])


def test_the_hash_of_a_result() -> None:
    def memory(*tensors: torch.Tensor) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

    whole, parts, other = torch.arange(6.0), (torch.arange(4.0), torch.arange(4.0, 6.0)), torch.zeros(6)
    expected = _native.hash_of_result("all_reduce", [], memory(whole))
    assert expected == _native.hash_of_result("all_reduce", memory(other), memory(*parts))
    assert expected != _native.hash_of_result("all_reduce", [], memory(other))
    # The root of a broadcast writes nothing.
    assert expected == _native.hash_of_result("broadcast", memory(whole), [])
    assert _native.hash_of_result("gather", memory(whole), memory(whole)) == 0


def test_messages_that_fit() -> None:
    sent = _native.Description("send", dtype=DTYPE_CODES[torch.float32], count=4, tag=1, peer=1)
    for dtype, count, fits in [(torch.float32, 4, True), (torch.float32, 5, False), (torch.int32, 4, False)]:
        received = _native.Description("recv", dtype=DTYPE_CODES[dtype], count=count, tag=1, peer=0)
        assert sent.fits(received) == fits
