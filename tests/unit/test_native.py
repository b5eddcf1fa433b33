"""The native module's own surface: names, refusals, and what it says of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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


# Its main thread ends, as all threads of a process that is killed do; another one stays until it may end, too.
_HALF_ENDED = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (print(flush=True), sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""


def test_a_process_may_be_ending_before_it_is_dead() -> None:
    def stat(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    command = [sys.executable, "-Sc", _HALF_ENDED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        peer = _native.Peer.watch(child.pid, int(stat(child.pid)[19]))
        assert peer is not None
        assert child.stdout is not None
        child.stdout.readline()
        while stat(child.pid)[0] != "Z":
            os.sched_yield()
        assert peer.ending
        assert not peer.dead
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert peer.dead
        assert peer.ending


def test_a_process_that_runs_is_not_ending() -> None:
    peer = _native.Peer.watch(os.getppid(), 0)
    assert peer is not None
    assert not peer.ending
