"""The native module's own surface: names, refusals, and what it says of the machine."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import phalanx
from phalanx import _native


def test_the_stub_has_the_names_of_the_module() -> None:
    from phalanx import _core_ext

    tree = ast.parse((Path(phalanx.__file__).parent / "_core_ext.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            members |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
            members |= {target.id for item in node.body if isinstance(item, ast.Assign) for target in item.targets}  # type: ignore[attr-defined]
            actual = {name for name in vars(getattr(_core_ext, node.name)) if not name.startswith("_")}
            assert members - {"__init__"} == actual, node.name
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert functions | constants | classes == {name for name in dir(_core_ext) if not name.startswith("_")}


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
    group = _native.Group(segment, 0)
    with pytest.raises(ValueError, match="unknown op"):
        _native.Description("all_to_none")
    for call, told in (
        (_native.Description("send"), "not a collective"),
        (_native.Description("all_reduce", reduce_op=0), "no kernel"),
        (_native.Description("broadcast", dtype=12, root=7), "root is not a rank"),
    ):
        with pytest.raises(ValueError, match=told):
            _native.run_call(group, call, None, None, 1.0)
