"""Regions of memory in use, against a look at all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.memory import Region, region_of, regions_meet
from phalanx.transports import regions
from phalanx.transports.regions import Entry, Regions

_LENGTH = 400


@st.composite
def _regions(draw: st.DrawFn) -> Region:
    """Of a view of a buffer; often with the strides of a matrix, so that regions interleave."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    stride = [draw(st.sampled_from([0, 1, 1, 2, 3, 6, 12, 12, 24, 40])) for _ in shape]
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    offset = draw(st.integers(0, _LENGTH))
    buffer = torch.empty(reach + 1, dtype=torch.int16)
    start, end, run, steps = region_of(buffer.as_strided(shape, stride))
    return 2 * offset, 2 * offset + end - start, run, steps


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(_regions(), st.booleans()), min_size=1, max_size=30))
def test_all_that_meet_are_found_and_no_others(steps: list[tuple[Region, bool]]) -> None:
    """Each step looks for a region and adds it, or removes the oldest one."""
    known: Regions[int] = Regions()
    entries: list[Entry[int]] = []
    for number, (region, adds) in enumerate(steps):
        expected = [entry.item for entry in entries if regions_meet(region, entry.region)]
        assert sorted(known.find(region)) == expected
        if adds or not entries:
            entries.append(known.add(region, number))
        else:
            known.remove(entries.pop(0))
    for entry in entries:
        known.remove(entry)
    assert known.find((0, 4 * _LENGTH, 4 * _LENGTH, [])) == []


def test_few_regions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: Region, other: Region) -> bool:
        compared.append(one)
        return regions_meet(one, other)

    monkeypatch.setattr(regions, "regions_meet", compare)
    matrix = torch.ones(50, 600)
    known: Regions[int] = Regions()
    for place in range(0, 600, 2):
        region = region_of(matrix[:, place])
        assert known.find(region) == []
        known.add(region, place)
    assert compared == []
    assert known.find(region_of(matrix[:, 300])) == [300]
    # All that have a byte of the row.
    assert len(known.find(region_of(matrix[7]))) == 300
    assert len(compared) == 301
