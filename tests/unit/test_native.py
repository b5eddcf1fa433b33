"""The native module's own surface: names, refusals, and what it says of the machine."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx import _native


def test_affinity_is_the_systems() -> None:
    assert set(_native.affinity()) == os.sched_getaffinity(0)


def test_crowded_groups_use_long_chunks() -> None:
    roomy, crowded = _native.tuning_for(2, 2), _native.tuning_for(4, 2)
    assert (roomy.crowded, crowded.crowded) == (0, 1)
    assert crowded.chunk_bytes > roomy.chunk_bytes


@pytest.mark.parametrize("ranks", [1, 2, 100, 1024])
def test_a_slot_has_room_for_every_rank(ranks: int) -> None:
    assert _native.tuning_for(ranks, 4).slot_bytes >= 64 * ranks


def test_a_segment_is_known_by_its_nonce() -> None:
    segment = _native.Segment.create_memfd(2, _native.tuning_for(2, 2), b"a" * 16)
    path = f"/proc/{os.getpid()}/fd/{segment.fd}"
    assert _native.Segment.open(path, b"a" * 16, 2).tuning.slot_bytes == segment.tuning.slot_bytes
    with pytest.raises(RuntimeError, match="is not the segment of this group"):
        _native.Segment.open(path, b"b" * 16, 2)


def test_a_segment_is_sparse_and_private_to_its_user() -> None:
    segment = _native.Segment.create_memfd(64, _native.tuning_for(64, 2), b"a" * 16)
    status = os.fstat(segment.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size > 64 << 20
    assert status.st_blocks * 512 < 1 << 20


def test_requests_that_make_no_sense_are_refused() -> None:
    segment = _native.Segment.create_memfd(1, _native.tuning_for(1, 2), bytes(16))
    group = _native.GroupEnd(segment, 0)
    with pytest.raises(ValueError, match="unknown op"):
        _native.Description("all_to_none")
    for call, told in (
        (_native.Description("send"), "not a collective"),
        (_native.Description("all_reduce", reduce_op=0), "no kernel"),
        (_native.Description("broadcast", dtype=12, root=7), "root is not a rank"),
    ):
        with pytest.raises(ValueError, match=told):
            _native.run_call(group, call, None, None, 1.0)
    for sends, peer, tag in ((True, 1, 0), (True, _native.ANY_SOURCE, 0), (False, -2, 0), (False, 0, -1)):
        with pytest.raises(ValueError, match="not a peer"):
            _native.start_message(group, sends, torch.zeros(1), peer, tag, 1.0)
