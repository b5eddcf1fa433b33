"""Which calls in flight a new call waits for, where its tensors share memory with their copies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.transports.copying import Copying


class _Call:
    """A collective in flight, or a message. Waiting for a collective ends those before it, too."""

    def __init__(self, copying: Copying, written: Tensor, is_message: bool = False) -> None:
        self.copies = [(written, written.clone())]
        self.is_message = is_message
        self.num_finished = 0
        self._ended = False
        self._copying = copying

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def is_over(self) -> bool:
        return self._ended

    def end(self) -> None:
        self._ended = True

    def wait_and_finish(self) -> None:
        self._ended = True
        self.finish()

    def finish(self) -> None:
        self.num_finished += 1
        self._copying.settle_before(self)
        self._copying.forget(self)


class _Calls:
    """Collectives in flight, which end in order."""

    def __init__(self) -> None:
        self.copying = Copying()
        self.made: list[_Call] = []

    def start(self, tensor: Tensor) -> _Call:
        copying, made = self.copying, self.made

        class InOrder(_Call):
            def wait_and_finish(self) -> None:
                for call in made[: made.index(self)]:
                    call.end()
                super().wait_and_finish()

        call = InOrder(copying, tensor)
        made.append(call)
        copying.add(call)
        return call


def test_a_call_that_needs_the_memory_of_more_copies_than_the_stack_is_deep() -> None:
    num = sys.getrecursionlimit() + 100
    matrix = torch.ones(2, num)
    calls = _Calls()
    for column in range(num):
        calls.start(matrix[:, column])
    assert not calls.copying.make_way([matrix])
    assert not calls.copying.calls
    assert all(call.ended and call.num_finished for call in calls.made)


def test_the_very_tensor_of_a_call_stands_for_its_copy() -> None:
    column = torch.ones(2, 3)[:, 0]
    calls = _Calls()
    call = calls.start(column)
    assert calls.copying.make_way([column]) == {id(column): call.copies[0][1]}
    assert not call.ended


def test_a_call_waits_for_the_last_one_that_has_a_copy_under_another_view() -> None:
    matrix = torch.ones(6, 8)
    calls = _Calls()
    first, second, third = calls.start(matrix[:, 0]), calls.start(matrix[:3, 2]), calls.start(matrix[:, 4])
    assert not calls.copying.make_way([matrix[2, 1:4]])
    assert [call.ended for call in (first, second, third)] == [True, True, False]


def test_the_copy_stays_as_long_as_one_of_its_calls_is_in_flight() -> None:
    column = torch.ones(2, 3)[:, 0]
    calls = _Calls()
    first, second = calls.start(column), calls.start(column)
    first.wait_and_finish()
    assert calls.copying.make_way([column]) == {id(column): second.copies[0][1]}
    second.wait_and_finish()
    assert not calls.copying.make_way([column])


def test_messages_that_share_memory_come_back_in_order_and_others_stay() -> None:
    matrix = torch.ones(4, 6)
    copying = Copying()
    column, apart, same = (_Call(copying, matrix[:, place], is_message=True) for place in (0, 1, 0))
    for message in (column, apart, same):
        copying.add(message)
        message.end()
    same.finish()
    assert [message.num_finished for message in (column, apart, same)] == [1, 0, 1]
    copying.settle()
    assert apart.num_finished == 1


def _apart(num: int) -> list[Tensor]:
    return [torch.ones(4, 2)[:, 0] for _ in range(num)]


def _columns(num: int) -> list[Tensor]:
    return list(torch.ones(4, num).unbind(1))


def _one_tensor(num: int) -> list[Tensor]:
    return [torch.ones(4, 2)[:, 0]] * num


def _blocks(num: int) -> list[Tensor]:
    """Groups of columns of many matrices with different strides."""
    matrices = [torch.ones(4, 8 + place) for place in range(num // 2)]
    return [part for matrix in matrices for part in (matrix[:, :3], matrix[:, 3:7])]


def _num_function_calls(work: Callable[[], None]) -> int:
    num = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return num


def _issue_and_end(tensors: list[Tensor], backwards: bool) -> None:
    """As the transport does for calls that copy their tensors, all of which are in flight before the first one ends."""
    copying = Copying()
    calls = []
    for tensor in tensors:
        if not copying.make_way([tensor]):
            copying.catch_up([tensor])
        call = _Call(copying, tensor)
        start = call.copies[0][1].data_ptr()
        copying.add(call)
        copying.add_writing(call, [(start, start + tensor.nbytes)])
        calls.append(call)
    assert not any(call.ended for call in calls)
    for call in calls:
        call.end()
    for call in calls[:: -1 if backwards else 1]:
        call.finish()
    assert not copying.calls


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("make", [_apart, _columns, _one_tensor, _blocks])
def test_work_grows_with_the_number_of_calls_in_flight_and_not_with_its_square(
    make: Callable[[int], list[Tensor]], backwards: bool
) -> None:
    few, many = make(100), make(400)
    num_few = _num_function_calls(lambda: _issue_and_end(few, backwards))
    num_many = _num_function_calls(lambda: _issue_and_end(many, backwards))
    # Four times as many, and bisection that takes two steps more.
    assert num_many < 6 * num_few


@pytest.mark.parametrize("backwards", [False, True])
def test_work_grows_with_the_number_of_messages_in_flight_and_not_with_its_square(backwards: bool) -> None:
    def receive(num: int) -> None:
        copying = Copying()
        messages = [_Call(copying, tensor, is_message=True) for tensor in tensors[num]]
        for message in messages:
            copying.add(message)
        for message in messages[:: -1 if backwards else 1]:
            message.end()
            message.finish()

    tensors = {num: _apart(num) for num in (100, 400)}
    num_few, num_many = (_num_function_calls(lambda num=num: receive(num)) for num in tensors)  # type: ignore[misc]
    assert num_many < 6 * num_few
