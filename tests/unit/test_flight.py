"""Traces of black boxes, in the hands of torch's own analyzer."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from boxes import EPOCH, SECOND, Call, box_of, collective, make_box, message
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.types import Database

from phalanx import _native
from phalanx.commands import main
from phalanx.debug import flight
from phalanx.types import REDUCIBLE


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """The analyzer stops the collection of garbage."""
    yield
    gc.enable()


class Analysis:
    """What the analyzer says of ranks that made these calls."""

    def __init__(
        self, folder: Path, caplog: pytest.LogCaptureFixture, ranks: Sequence[Sequence[Call]], capacity: int = 16
    ) -> None:
        traces = folder / "traces"
        for rank, calls in enumerate(ranks):
            box = make_box(*calls, rank=rank, world_size=len(ranks), capacity=capacity)
            (folder / f"{rank}.box").write_bytes(box)
        assert main(["dump", str(folder), "--out", str(traces)]) == 0
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            fr_trace.main([str(traces), "-o", str(folder / "database")])
        _, database = pickle.loads((folder / "database").read_bytes())
        assert isinstance(database, Database)
        self.database = database
        self.lines = [record.getMessage() for record in caplog.records if record.name == "Flight Recorder"]

    @property
    def names(self) -> list[str]:
        return [call.collective_name for call in self.database.collectives]

    def says_all_is_well(self) -> bool:
        return all(call.pass_check for call in self.database.collectives) and not self.lines


def _every_op(rank: int, size: int) -> list[Call]:
    """In order, with the sizes that a rank's tensors of 4 elements of float32 for each rank have."""
    part, whole = 16, 16 * size
    calls = [
        collective("barrier", count=0, dtype=None),
        collective("all_reduce"),
        collective("reduce", peer=1, bytes_out=part if rank == 1 else 0),
        collective("broadcast", peer=1, bytes_in=part if rank == 1 else 0, bytes_out=0 if rank == 1 else part),
        collective("all_gather", count=4 * size, bytes_in=part),
        collective("gather", peer=1, bytes_out=whole if rank == 1 else 0),
        collective("scatter", peer=1, bytes_in=whole if rank == 1 else 0),
        collective("reduce_scatter", count=4 * size, bytes_out=part),
        collective("all_to_all", count=-1, bytes_in=4 * (rank + 1), bytes_out=4 * (size - rank)),
        # Blocks of 1, 2 and 4 elements.
        collective("all_gather", count=7, bytes_in=4 << rank, bytes_out=28),
        collective("reduce_scatter", count=7, bytes_in=28, bytes_out=4 << rank),
        collective("all_reduce", dtype=None, reduce_op="MAX"),
    ]
    for seq, call in enumerate(calls, 1):
        call.seq = seq
    return calls


def test_a_healthy_run_of_every_op(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    analysis = Analysis(tmp_path, caplog, [_every_op(rank, 3) for rank in range(3)])
    assert analysis.says_all_is_well(), analysis.lines
    ops = [*(op.name for op in _native.OPS[:9]), "all_gather_v", "reduce_scatter_v", "all_reduce"]
    assert analysis.names == [f"gloo:{op}" for op in ops]
    assert [group.size for group in analysis.database.groups] == [3]


def _ring(rank: int, size: int) -> list[Call]:
    """Twice around, with a collective in between, and groups of two."""
    after, before = (rank + 1) % size, (rank - 1) % size
    pair = (rank - rank % 2, rank - rank % 2 + 1)
    return [
        message("send", after, tag=3),
        message("recv", before, tag=3),
        collective("all_reduce"),
        collective("all_reduce", group="pair", desc="mesh_tp", rank=rank % 2, ranks=pair),
        message("recv", before, seq=2, count=5),
        message("send", after, seq=2, count=5),
        message("send", 1 - rank % 2, group="pair", rank=rank % 2, ranks=pair),
        message("recv", 1 - rank % 2, group="pair", rank=rank % 2, ranks=pair),
    ]


def test_a_healthy_run_of_messages_and_several_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    analysis = Analysis(tmp_path, caplog, [_ring(rank, 4) for rank in range(4)])
    assert analysis.says_all_is_well(), analysis.lines
    assert sorted(call.pg_desc for call in analysis.database.collectives if "all_reduce" in call.collective_name) == [
        "default_pg",
        "pair:mesh_tp",
        "pair:mesh_tp",
    ]
    messages = [call for call in analysis.database.collectives if "all_reduce" not in call.collective_name]
    assert len(messages) == 12
    assert {tuple(sorted(call.expected_ranks)) for call in messages} == {(0, 1), (1, 2), (2, 3), (0, 3)}


def test_a_mismatch_of_ops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [[Call(seq=1), collective("all_reduce", 2, state="failed")] for _ in range(3)]
    ranks[1][1] = collective("broadcast", 2, state="failed", peer=0)
    analysis = Analysis(tmp_path, caplog, ranks)
    assert [call.pass_check for call in analysis.database.collectives] == [True, False]
    assert analysis.lines[0] == "Collective sequence number: 2 has errors"
    assert "group info: default_pg" in analysis.lines
    assert "collective: gloo:all_reduce" in analysis.lines
    assert any(
        "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce' does not match "
        "found collective type: 'broadcast'" in line
        for line in analysis.lines
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Call(count=5, state="failed"), "SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[4]]' does not match"),
        (Call(dtype="float16", state="failed"), "COLLECTIVE_DTYPE_MISMATCH, Expected dtypes: '{'Float'}' does not"),
    ],
)
def test_a_mismatch_of_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Call, said: str) -> None:
    analysis = Analysis(tmp_path, caplog, [[Call(state="failed")], [other]])
    assert any(f"Culprit rank 1; Error type: {said}" in line for line in analysis.lines), analysis.lines


def test_a_missing_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [[Call(seq=seq) for seq in range(1, 7)] for _ in range(4)]
    for rank in (0, 1, 3):
        ranks[rank].append(Call(seq=7, state="started", at=2.0))
    analysis = Analysis(tmp_path, caplog, ranks)
    assert analysis.lines[0] == "Not all ranks joining collective, sequence number: 7"
    assert "missing ranks: {2}" in analysis.lines
    assert "collective state: started" in analysis.lines
    assert any("step at" in line and "train.py:20" in line for line in analysis.lines)
    assert [call.missing_ranks for call in analysis.database.collectives] == [None] * 6 + [{2}]


def test_a_message_that_nobody_receives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [[message("send", 2, state="started", count=9)], [message("send", 2)], [message("recv", 1)]]
    analysis = Analysis(tmp_path, caplog, ranks)
    assert analysis.lines[0] == "Not all ranks joining collective, sequence number: 1"
    assert "group info: default_pg 0->2:messages" in analysis.lines
    assert "missing ranks: {2}" in analysis.lines


def test_a_box_that_does_not_reach_back_is_not_taken_for_a_missing_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 sends messages, too, so that its box of eight calls has lost more collectives than the others."""
    ranks = [[Call(seq=seq) for seq in range(1, 11)] for _ in range(3)]
    ranks[1] += [message("send", 2, seq=seq) for seq in (1, 2, 3)]
    ranks[2] += [message("recv", 1, seq=seq) for seq in (1, 2, 3)]
    ranks[0].append(Call(seq=11, state="started"))
    analysis = Analysis(tmp_path, caplog, ranks, capacity=8)
    assert analysis.lines[0] == "Not all ranks joining collective, sequence number: 11"
    assert sum("Not all ranks" in line for line in analysis.lines) == 1
    # What rank 1 has lost is left out of all traces.
    assert min(call.collective_seq_id for call in analysis.database.collectives if call.pg_desc == "default_pg") == 6


def test_a_rank_that_has_no_call_of_a_group_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [[Call(), Call(seq=2, state="started")], [Call()]]
    ranks[1] += [collective("barrier", seq, group="own", rank=0, ranks=(1,)) for seq in range(1, 9)]
    analysis = Analysis(tmp_path, caplog, ranks, capacity=8)
    assert [line for line in analysis.lines if "Not all" in line] == [
        "Not all ranks joining collective, sequence number: 2"
    ]


def test_receives_from_any_rank_raise_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [
        [message("send", 2), Call()],
        [message("send", 2), Call()],
        [message("recv", -1), message("recv", -1, seq=2), Call()],
    ]
    assert Analysis(tmp_path, caplog, ranks).says_all_is_well()


def test_groups_that_came_one_after_another_under_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def calls(rank: int) -> list[Call]:
        first = [Call(), message("send" if rank == 0 else "recv", 1 - rank)] if rank < 2 else []
        for call in first:
            call.ranks = (0, 1)
        second = [Call(), Call(seq=2), message("send", (rank + 1) % 3), message("recv", (rank - 1) % 3)]
        return [*first, Call(), *second]

    analysis = Analysis(tmp_path, caplog, [calls(rank) for rank in range(3)])
    assert analysis.says_all_is_well(), analysis.lines
    assert [call.collective_seq_id for call in analysis.database.collectives if "reduce" in call.collective_name] == [
        1,
        2,
    ]


def test_the_command_that_people_run(tmp_path: Path) -> None:
    for rank in range(2):
        flight.dump(box_of(Call(), rank=rank), tmp_path / flight.file_name(rank))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", flight.PREFIX, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Not all ranks" not in done.stderr


def test_ranks_of_a_group_in_another_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The analyzer takes a group's ranks in ascending order."""
    ranks = [[message("recv", 0, rank=1, ranks=(1, 0))], [message("send", 1, rank=0, ranks=(1, 0))]]
    analysis = Analysis(tmp_path, caplog, ranks)
    assert analysis.says_all_is_well(), analysis.lines
    assert analysis.names == ["gloo:recv 0<-1"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental:UserWarning")
def test_every_dtype_has_the_name_that_torch_gives_it() -> None:
    for dtype in REDUCIBLE:
        name = str(dtype).removeprefix("torch.")
        entry = flight.trace_of(box_of(Call(dtype=name)))["entries"][0]
        torchs = torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
        torchs = torchs.removeprefix("quantized.")
        assert entry["input_dtypes"] == [torchs]


def _entries(*calls: Call, short: bool = False) -> list[dict[str, Any]]:
    return flight.trace_of(box_of(*calls), short)["entries"]  # type: ignore[no-any-return]


def test_a_long_entry_has_everything() -> None:
    call = collective(
        "all_reduce", 3, state="failed", at=2.0, took=0.25, flags=1 | 4, sizes=(2, 2), filename="/opt/train.py"
    )
    (entry,) = _entries(call)
    created = EPOCH + 2 * SECOND
    assert entry == {
        "record_id": 1,
        "process_group": ("default_pg", "undefined"),
        "collective_seq_id": 3,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "state": "started",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "time_created_ns": created,
        "op_id": 1,
        "frames": [{"name": "step", "filename": "/opt/train.py", "line": 20}],
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": None,
        "duration_ms": 250.0,
        "timeout_ms": 30000,
        "retired": True,
        "failed": True,
        "reduce_op": "SUM",
        "root": -1,
        "peer": -1,
        "sender": -1,
        "last_arriver": -1,
        "tag": 0,
        "device": None,
        "engine": None,
        "bytes_in": 16,
        "bytes_out": 16,
        "sizes": [2, 2],
        "is_list": False,
        "is_async": True,
        "in_backward": False,
        "by_reducer": True,
    }


def test_a_short_trace_has_what_the_analyzer_needs() -> None:
    trace = flight.trace_of(box_of(Call()), short=True)
    assert set(trace) == {"version", "pg_config", "entries"}
    assert trace["pg_config"] == {"default_pg": {"desc": "undefined", "ranks": "[0, 1]"}}
    assert set(_entries(Call())[0]) - set(trace["entries"][0]) >= {"frames", "duration_ms", "sizes"}
    assert len(trace["entries"][0]) == 12


def test_a_call_that_failed_before_it_began() -> None:
    (entry,) = _entries(Call(state="failed", began=False))
    assert (entry["state"], entry["failed"], entry["duration_ms"]) == ("scheduled", True, None)


def test_a_dump_is_its_owners_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank_0"
    flight.dump(box_of(Call()), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        flight.dump(box_of(Call(), Call(seq=2)), path)
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["rank_0"]


def test_the_same_as_json(tmp_path: Path) -> None:
    box = box_of(Call(), rank=1)
    flight.dump(box, tmp_path / "as_json", "json")
    flight.dump(box, tmp_path / "as_pickle")
    read = json.loads((tmp_path / "as_json").read_text())
    assert read == json.loads(json.dumps(pickle.loads((tmp_path / "as_pickle").read_bytes())))
    assert read["phalanx"]["rank"] == 1
    assert read["version"] == "2.10"


def test_both_kinds_may_lie_in_one_folder(tmp_path: Path) -> None:
    boxes, out = tmp_path / "boxes", tmp_path / "out"
    boxes.mkdir()
    (boxes / "1.box").write_bytes(make_box(Call(), world_size=1))
    for options in ([], ["--json", "--short"]):
        assert main(["dump", str(boxes), "--out", str(out), *options]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["rank-0.json", "rank_0"]
    fr_trace.main([str(out), "--prefix", flight.PREFIX])


def test_groups_of_one_name_that_live_at_the_same_time() -> None:
    calls = [
        collective("all_reduce", 1, group="dp", identity="1"),
        collective("barrier", 1, group="dp", identity="2"),
        collective("all_reduce", 2, group="dp", identity="1"),
    ]
    trace = flight.trace_of(box_of(*calls))
    names = [(entry["process_group"][0], entry["collective_seq_id"]) for entry in trace["entries"]]
    assert names == [("dp", 1), ("dp (2)", 1), ("dp", 2)]
    assert list(trace["pg_config"]) == ["dp", "dp (2)"]


def test_of_groups_of_one_name_that_come_one_after_another_the_last_is_kept() -> None:
    calls = [collective("all_reduce", 5, group="dp", identity="1"), collective("barrier", 6, group="dp", identity="2")]
    entries = flight.trace_of(box_of(*calls))["entries"]
    assert [(entry["process_group"][0], entry["collective_seq_id"]) for entry in entries] == [("dp", 6)]


def test_a_dump_looks_at_each_entry_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups there are, and although the box has lost records."""
    looks = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(key)

    real = flight._entry
    monkeypatch.setattr(flight, "_entry", lambda *args: Counted(real(*args)))
    num = 400
    calls = [Call(group=f"g{number}", at=1.0 + number) for number in range(num + 1)]
    (tmp_path / "0.box").write_bytes(make_box(*calls, world_size=1, capacity=num))
    assert main(["dump", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert looks < 10 * num
    assert len(pickle.loads((tmp_path / "out" / "rank_0").read_bytes())["entries"]) == num


def test_roots_make_no_groups() -> None:
    """A list of a group's ranks is kept once, not once for each root."""
    calls = [collective("broadcast", seq, peer=seq % 2) for seq in range(1, 7)]
    made: list[Any] = []
    real = flight._group_of

    def group_of(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight, "_group_of", group_of)
        trace = flight.trace_of(box_of(*calls))
    assert len(made) == 1
    assert [entry["collective_seq_id"] for entry in trace["entries"]] == [1, 2, 3, 4, 5, 6]
