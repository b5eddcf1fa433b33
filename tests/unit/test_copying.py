"""Which calls in flight a new call waits for, where its tensors share memory with their copies, and the order in which
copies come back, also if threads, signal handlers, the garbage collector or forks come in between."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx import _native
from phalanx.transports.copying import CallCopies, CopiesInFlight


class _Call:
    """The native side of a collective in flight, or of a message. Waiting for a collective ends those before it."""

    def __init__(self, before: list[_Call] | None = None) -> None:
        self._before = [] if before is None else before
        self.result = _native.PENDING
        if before is not None:
            before.append(self)

    @property
    def is_over(self) -> bool:
        return self.result != _native.PENDING

    def end(self, result: int = _native.FINISHED) -> None:
        if not self.is_over:
            self.result = result

    def wait(self, timeout: float) -> int:
        for call in self._before:
            call.end()
            if call is self:
                break
        self.end()
        return self.result


class _Calls:
    """Collectives in flight, which end in order."""

    def __init__(self) -> None:
        self.owner = CopiesInFlight()
        self.made: list[_Call] = []
        self.copies: list[CallCopies] = []

    def start(self, tensor: Tensor, value: float = 0.0) -> CallCopies:
        copies = self.owner.add(_Call(self.made), [(tensor, torch.full_like(tensor, value))])
        self.copies.append(copies)
        return copies

    def end(self) -> None:
        for call in self.made:
            call.end()


def test_a_call_that_needs_the_memory_of_more_copies_than_the_stack_is_deep() -> None:
    num = sys.getrecursionlimit() + 100
    matrix = torch.ones(2, num)
    calls = _Calls()
    for column in range(num):
        calls.start(matrix[:, column], column)
    assert not calls.owner.make_way([matrix])
    assert not calls.owner.has_collectives
    assert all(copies.are_back for copies in calls.copies)
    assert torch.equal(matrix[0], torch.arange(float(num)))


def test_the_very_tensor_of_a_call_stands_for_its_copy() -> None:
    column = torch.ones(2, 3)[:, 0]
    calls = _Calls()
    copies = calls.start(column)
    assert calls.owner.make_way([column]) == {id(column): copies.pairs[0][1]}
    assert not copies.is_over


def test_a_call_waits_for_the_last_one_that_has_a_copy_under_another_view() -> None:
    matrix = torch.ones(6, 8)
    calls = _Calls()
    started = [calls.start(matrix[:, 0]), calls.start(matrix[:3, 2]), calls.start(matrix[:, 4])]
    assert not calls.owner.make_way([matrix[2, 1:4]])
    assert [copies.are_back for copies in started] == [True, True, False]


def test_the_copy_stays_as_long_as_one_of_its_calls_is_in_flight() -> None:
    column = torch.ones(2, 3)[:, 0]
    calls = _Calls()
    first, second = calls.start(column), calls.start(column)
    calls.made[0].end()
    calls.owner.bring_back(first)
    assert calls.owner.make_way([column]) == {id(column): second.pairs[0][1]}
    calls.made[1].end()
    calls.owner.bring_back(second)
    assert not calls.owner.make_way([column])


def test_copies_of_a_call_that_failed_do_not_come_back() -> None:
    column = torch.ones(2, 3)[:, 0]
    calls = _Calls()
    copies = calls.start(column, 5.0)
    calls.made[0].end(_native.WAS_BROKEN)
    calls.owner.bring_back(copies)
    assert copies.are_back
    assert column.unique().item() == 1


def _receive(owner: CopiesInFlight, tensor: Tensor, value: float) -> CallCopies:
    return owner.add(_Call(), [(tensor, torch.full_like(tensor, value))], is_message=True)


def _end(*messages: CallCopies) -> None:
    for message in messages:
        assert isinstance(message.call, _Call)
        message.call.end()


def test_messages_that_share_memory_come_back_in_order_and_others_stay() -> None:
    matrix = torch.ones(4, 6)
    owner = CopiesInFlight()
    column, apart, same = (_receive(owner, matrix[:, place], value) for place, value in ((0, 5), (1, 6), (0, 7)))
    _end(column, apart, same)
    owner.bring_back(same)
    assert [message.are_back for message in (column, apart, same)] == [True, False, True]
    owner.bring_back_ended()
    assert apart.are_back
    assert matrix[0].tolist() == [7, 6, 1, 1, 1, 1]


def test_a_message_behind_one_that_is_back_still_comes_after_an_earlier_one() -> None:
    """The second is back before the first has ended; the third comes after the first all the same."""
    column = torch.ones(4, 6)[:, 0]
    owner = CopiesInFlight()
    first, second, third = (_receive(owner, column, value) for value in (5, 6, 7))
    _end(second)
    owner.bring_back(second)
    assert not first.are_back
    _end(first, third)
    owner.bring_back(third)
    assert first.are_back
    assert column.unique().item() == 7


def _interrupt_with(work: Callable[[], None]) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        work()

    signal.signal(signal.SIGUSR1, handle)
    os.kill(os.getpid(), signal.SIGUSR1)


class _Interrupted(_Call):
    """Does something when its result is asked for: while its copies are about to come back."""

    def __init__(self, before: list[_Call], work: Callable[[], None]) -> None:
        super().__init__(before)
        self._work: Callable[[], None] | None = work
        self._ended = False

    @property
    def result(self) -> int:
        work, self._work = (self._work, None) if self._ended else (None, self._work)
        if work is not None:
            work()
        return _native.FINISHED if self._ended else _native.PENDING

    @result.setter
    def result(self, value: int) -> None:
        pass

    @property
    def is_over(self) -> bool:
        return self._ended

    def end(self, result: int = _native.FINISHED) -> None:
        self._ended = True


@pytest.mark.parametrize("dropped", [False, True])
def test_copies_that_come_back_while_earlier_ones_do(dropped: bool) -> None:
    """As a signal handler, or the garbage collector, may want it, in the thread that has the lock."""
    column = torch.ones(4, 6)[:, 0]
    calls = _Calls()
    owner = calls.owner
    seen: list[bool] = []

    def come_in_between() -> None:
        (owner.bring_back_dropped if dropped else owner.bring_back)(second)
        seen.append(second.are_back)

    first = owner.add(_Interrupted(calls.made, come_in_between), [(column, torch.full_like(column, 5.0))])
    second = calls.start(column, 6.0)
    calls.end()
    owner.bring_back(first)
    # Nobody waits for the copies of a dropped call: they come back when the first ones are back.
    assert seen == [not dropped]
    assert first.are_back
    assert second.are_back
    assert column.unique().item() == 6


def test_copies_of_a_dropped_call_do_not_wait_for_a_thread_that_brings_back_others() -> None:
    matrix = torch.ones(4, 6)
    calls = _Calls()
    owner, entered, leave = calls.owner, threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert leave.wait(30)

    first = owner.add(_Interrupted(calls.made, stay), [(matrix[:, 0], torch.full((4,), 5.0))])
    second = calls.start(matrix[:, 1], 6.0)
    calls.end()
    thread = threading.Thread(target=owner.bring_back, args=(first,))
    thread.start()
    assert entered.wait(30)
    # Would not return if it waited for the lock.
    owner.bring_back_dropped(second)
    assert not second.are_back
    leave.set()
    thread.join()
    assert second.are_back
    assert matrix[0].tolist() == [5, 6, 1, 1, 1, 1]


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    column = torch.ones(4, 6)[:, 0]
    calls = _Calls()
    owner, entered, leave = calls.owner, threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert leave.wait(30)

    first = owner.add(_Interrupted(calls.made, stay), [(column, torch.full((4,), 5.0))])
    second = calls.start(column, 6.0)
    calls.end()
    thread = threading.Thread(target=owner.bring_back, args=(first,))
    thread.start()
    assert entered.wait(30)
    child = os.fork()
    if child == 0:
        calls.made[1].result = _native.FORKED
        signal.alarm(20)
        owner.bring_back(second)
        owner.bring_back_ended()
        os._exit(0 if second.are_back and column.unique().item() == 1 else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0


def test_a_signal_handler_that_makes_a_call_while_another_is_made() -> None:
    """The index is in use then: the handler's call finds those in flight all the same."""
    matrix = torch.ones(4, 6)
    calls = _Calls()
    calls.start(matrix[:, 0], 5.0)
    found: list[Any] = []

    def make_another() -> None:
        assert not calls.owner.make_way([matrix])
        found.append(matrix[0, 0].item())

    calls.owner._collectives.look(lambda index: _interrupt_with(make_another))
    assert found == [5]
    assert not calls.owner.has_collectives


def test_an_index_that_was_interrupted_half_way_is_made_again() -> None:
    matrix = torch.ones(4, 6)
    calls = _Calls()
    first = calls.start(matrix[:, 0], 5.0)

    def fail(index: Any) -> None:
        index.remove(first)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls.owner._collectives.look(fail)
    calls.owner.make_way([matrix])
    assert matrix[0, 0].item() == 5


class _Garbage:
    """Drops a call when the garbage collector comes for it."""

    def __init__(self, owner: CopiesInFlight, copies: CallCopies) -> None:
        self._own = self
        self._drop = owner.bring_back_dropped, copies

    def __del__(self) -> None:
        drop, copies = self._drop
        drop(copies)


def test_threads_and_garbage_bring_back_everything_once_and_in_order() -> None:
    """Threads issue calls on columns of their own and on one that they share; half of the calls become garbage."""
    num_threads, num_calls = 4, 200
    matrix = torch.zeros(8, num_threads + 1)
    owner = CopiesInFlight()
    made: list[_Call] = []
    turn = threading.Lock()
    latest = [0.0]
    wrong: list[str] = []

    def work(own: int) -> None:
        for number in range(1, num_calls + 1):
            column = matrix[:, own]
            owner.make_way([column])
            with turn:
                # The order of the calls is that in which the core gets them.
                latest[0] += 1
                pairs = [
                    (matrix[:, num_threads], torch.full((8,), latest[0])),
                    (column, torch.full((8,), number * 1.0)),
                ]
                copies = owner.add(_Call(made), pairs)
                owner.add_writing(made[-1], [(pairs[1][1].data_ptr(), pairs[1][1].data_ptr() + 32)])
            assert copies.call is None or copies.call.wait(-1) == _native.FINISHED
            if number % 2:
                _Garbage(owner, copies)
                del copies
                if number % 16 == 1:
                    gc.collect()
                continue
            owner.bring_back(copies)
            if not copies.are_back or column.unique().tolist() != [number]:
                wrong.append(f"thread {own}: {column.unique().tolist()} after call {number}")

    threads = [threading.Thread(target=work, args=(own,)) for own in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    owner.bring_back_ended()
    assert not wrong
    assert not owner.has_collectives
    assert matrix[:, num_threads].unique().tolist() == [latest[0]]


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
    calls = _Calls()
    owner = calls.owner
    for tensor in tensors:
        if not owner.make_way([tensor]):
            owner.catch_up([tensor])
        copies = calls.start(tensor)
        start = copies.pairs[0][1].data_ptr()
        owner.add_writing(calls.made[-1], [(start, start + tensor.nbytes)])
    assert not any(call.is_over for call in calls.made)
    calls.end()
    for copies in calls.copies[:: -1 if backwards else 1]:
        owner.bring_back(copies)
    assert not owner.has_collectives


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
        owner = CopiesInFlight()
        messages = [_receive(owner, tensor, 0) for tensor in tensors[num]]
        for message in messages[:: -1 if backwards else 1]:
            _end(message)
            owner.bring_back(message)

    tensors = {num: _apart(num) for num in (100, 400)}
    num_few, num_many = (_num_function_calls(lambda num=num: receive(num)) for num in tensors)  # type: ignore[misc]
    assert num_many < 6 * num_few
