"""Which tensors share memory, against a look at every byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import memory

_LENGTH = 96
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def _views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Width of an element, shape, stride and offset of a view that lies within the buffer."""
    width = draw(st.sampled_from(sorted(_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(draw(st.integers(0, 6)) for _ in shape)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    length = _LENGTH // width
    while reach >= length:
        stride = tuple(step // 2 for step in stride)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    return width, shape, stride, draw(st.integers(0, length - reach - 1))


def _bytes(view: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> set[int]:
    width, shape, stride, offset = view
    places = torch.arange(_LENGTH // width).as_strided(shape, stride, offset).flatten().tolist()
    return {place * width + i for place in places for i in range(width)}


def _tensor(buffer: torch.Tensor, view: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> torch.Tensor:
    width, shape, stride, offset = view
    return buffer.view(_DTYPES[width]).as_strided(shape, stride, offset)


@settings(max_examples=300, deadline=None)
@given(st.lists(_views(), min_size=1, max_size=5))
def test_shared_bytes_are_found_and_no_others(
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]],
) -> None:
    buffer = torch.zeros(_LENGTH, dtype=torch.uint8)
    tensors, taken = [_tensor(buffer, view) for view in views], [_bytes(view) for view in views]
    pairs = [(i, j) for j in range(len(views)) for i in range(j) if taken[i] & taken[j]]
    found = memory.find_shared(tensors)
    assert (found in pairs) if pairs else (found is None)
    for i, j in pairs:
        assert memory.meet(tensors[i], tensors[j])
    first, last = memory.extent(tensors[0])
    start = buffer.data_ptr()
    for place in range(_LENGTH):
        assert memory.touches(tensors[0], start + place, start + place + 1) or place not in taken[0]
    assert not taken[0] or (first, last) == (start + min(taken[0]), start + max(taken[0]) + 1)


@pytest.mark.parametrize("turned", [False, True])
def test_columns_of_a_matrix_share_nothing(turned: bool) -> None:
    matrix = torch.zeros(50, 256)
    columns = list((matrix if not turned else matrix.view(256, 50).t()).unbind(1))
    assert memory.find_shared(columns) is None
    assert memory.find_shared([*columns, columns[7][:1]]) == (7, 256)


def test_tensors_without_memory_share_nothing() -> None:
    freed = [torch.ones(4), torch.ones(4)]
    for tensor in freed:
        tensor.untyped_storage().resize_(0)
    assert memory.find_shared([*freed, torch.empty(0), torch.empty(0)]) is None
    assert memory.find_shared([]) is None
