"""Black boxes of earlier versions are read as they were: real ones of version 2, made ones of version 1.

`data/version2` has the boxes of a job of three ranks, of which rank 1 was killed, and what `phalanx report` and
`phalanx dump --json` of that version made of them.
"""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from boxes import Call, box_of, collective, make_box, making, message

from phalanx.commands import main
from phalanx.debug.box_layout import FORMATS, NEWEST
from phalanx.debug.box_reader import read_box, read_header
from phalanx.debug.records import MAKING

_DATA = Path(__file__).parent / "data" / "version2"
_JOB = "job-20261117-210336-2767-9cf7"
_NEW_KEYS = {"root", "sender", "last_arriver", "device", "engine"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / _JOB
    folder.mkdir(mode=0o700)
    for path in _DATA.glob("*.box.xz"):
        (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    for number, name in enumerate(["rank2-1.txt", "rank0-1.txt"]):
        (folder / name).write_bytes((_DATA / name).read_bytes())
        os.utime(folder / name, (number, number))
    return folder


def test_a_report_says_the_same(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(job)]) == 0
    assert capsys.readouterr().out == (_DATA / "report.txt").read_text()


def test_a_trace_says_the_same(job: Path, tmp_path: Path) -> None:
    assert main(["dump", str(job), "--json", "--out", str(tmp_path / "out")]) == 0
    for rank in range(3):
        before = json.loads(lzma.decompress((_DATA / f"trace-{rank}.json.xz").read_bytes()))
        after = json.loads((tmp_path / "out" / f"rank-{rank}.json").read_text())
        assert after["phalanx"].pop("host") == ""
        for entry in after["entries"]:
            for key in _NEW_KEYS:
                del entry[key]
        assert after == before


def test_what_an_old_record_does_not_know(job: Path) -> None:
    box = read_box(job / "2767.box")
    assert (box.version, box.host, box.num_begun) == (2, "", len(box.records) + len(box.makings))
    assert {(record.device, record.engine, record.sender, record.last_arriver) for record in box.records} == {
        (None, None, -1, -1)
    }
    broadcast = next(record for record in box.records if record.op == "broadcast")
    assert (broadcast.root, broadcast.peer, broadcast.dtype) == (1, -1, "bfloat16")
    received = next(record for record in box.records if record.op == "recv" and record.tag == 6)
    assert (received.root, received.peer) == (-1, 2)
    gathered = next(record for record in box.records if record.op == "all_to_all")
    assert (gathered.is_list, gathered.sizes) == (True, (1, 1, 1))


def test_the_ending_of_an_old_box_can_be_marked(job: Path) -> None:
    """Also by a process of another version that shares the folder."""
    places = {each.header.places["ending"] for each in FORMATS.values()}
    assert len(places) == 1
    assert read_header(job / "2767.box").ending == "failed"


_CALLS = [
    collective("broadcast", 3, peer=1, sizes=(2, 2), flags=2, timeout_ms=7, identity="ab"),
    collective("all_to_all", 4, count=-1, listed=True, sizes=(1, 3), state="started", identity="ab"),
    message("recv", -1, tag=4, state="failed", failure="lost", blamed=1, identity="ab"),
    message("send", 1, seq=5, tag=9, desc="pair", ranks=(3, 5), identity="cd"),
    Call(seq=5, state="scheduled", line=0, identity="ab"),
]


@pytest.mark.parametrize("version", [2, NEWEST.version])
def test_all_versions_tell_the_same(version: int) -> None:
    header: dict[str, Any] = {"ended_at": 9.0, "how": 2, "exception": "Boom", "deaths": [(3.0, 77, 1, 9, 1)]}
    calls = [*_CALLS, making(2, state="failed", failure="timeout")]
    old, new = box_of(*calls, version=version, **header), box_of(*calls, **header)
    assert (old.records, old.makings, old.deaths) == (new.records, new.makings, new.deaths)
    assert (old.exception, old.ended_ns, old.num_begun) == (new.exception, new.ended_ns, new.num_begun)
    assert [record.op for record in old.makings] == [MAKING]
    assert (old.makings[0].group.venue, old.makings[0].group.identity) == ("groups/all", "")


def test_version_1() -> None:
    calls = [Call(seq=2), collective("reduce", 3, peer=1), message("send", 1)]
    box = box_of(*calls, version=1, exception="Boom", how=2, deaths=[(3.0, 77, 1, 9, 1)])
    assert box.records == box_of(*calls).records
    # What its header had no room for.
    assert (box.version, box.exception, box.deaths, box.ended_ns, box.num_hidden) == (1, "", [], None, 0)


def test_fields_of_the_newest_version_keep_their_places() -> None:
    """Files have them. A field that moves needs a new version, and the old layout goes to box_layout.py."""
    assert NEWEST.version == 3
    fixed = {
        "header": "magic@0 version@8 capacity@12 arena_bytes@16 record_bytes@20 pid@24 start@32 clock_offset@40 "
        "rank@48 world_size@52 next@56 arena_used@64 ending@68 program@72 ended@328 how@336 exit_status@340 "
        "num_hidden@344 num_deaths@352 exception@872 host@1896",
        "record": "id@0 state@8 kind@9 failure@10 group@12 seq@16 created@24 started@32 ended@40 sender@48 "
        "last_arriver@52 blamed@56 location@60 bytes_in@64 bytes_out@72 timeout_ms@80 op@88 reduce_op@89 dtype@90 "
        "device@91 root@92 count@96 layout@104 unlisted_dtype@108 shape.num@112 shape.listed@113 shape.hash@114 "
        "shape.sizes@116 peer@148 factor@152 tag@160 flags@164 engine@165",
        "group": "name@0 description@4 identity@8 venue@12 ranks@16 rank@20",
        "death": "seen@0 pid@8 start@16 status@24 replaced@28 rank@30",
    }
    for name, places in fixed.items():
        layout = getattr(NEWEST, name)
        found = {f"{field}@{layout.places[field][0]}" for field in layout.names}
        assert set(places.split()) <= found
    assert NEWEST.record.size == 192


def test_bytes_of_no_version_are_refused() -> None:
    data = make_box(Call(), version=2)
    data[8] = NEWEST.version
    with pytest.raises(ValueError, match="damaged: record_bytes is 128"):
        read_box(data)
