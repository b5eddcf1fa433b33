"""The native front: plain calls never reach the Python method, others do, and both give the same."""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import until
from torch import Tensor

from phalanx import ProcessGroup, _native
from phalanx.collectives.checks import LEARNED_LAZY_BITS, learn_lazy_bits
from phalanx.errors import InvalidCall
from phalanx.group.calling import CallingGroup
from phalanx.group.torch_compat.options import LEARNED_OPTIONS, OPTION_CLASSES, sample_options

Call = Callable[[], Any]


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    made = dist.group.WORLD
    assert isinstance(made, ProcessGroup)
    yield made
    dist.destroy_process_group()


@pytest.fixture
def python_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that Python methods carry out."""
    seen: list[str] = []
    run, message = CallingGroup._run, CallingGroup._message

    def seen_run(self: CallingGroup, form: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(form.op)
        return run(self, form, *args, **kwargs)

    def seen_message(self: CallingGroup, op: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(op)
        return message(self, op, *args, **kwargs)

    monkeypatch.setattr(CallingGroup, "_run", seen_run)
    monkeypatch.setattr(CallingGroup, "_message", seen_message)
    return seen


def _calls(one: Tensor, other: Tensor, **options: Any) -> dict[str, Call]:
    """Calls of torch's functions. `other` gets what `one` has, where the op does not work in place."""
    return {
        "all_reduce": lambda: dist.all_reduce(one, **options),
        "all_reduce MAX": lambda: dist.all_reduce(one, dist.ReduceOp.MAX, **options),
        "reduce": lambda: dist.reduce(one, 0, **options),
        "broadcast": lambda: dist.broadcast(one, 0, **options),
        "all_gather": lambda: dist.all_gather([other], one, **options),
        "all_gather_single": lambda: dist.all_gather_single(other, one, **options),
        "gather": lambda: dist.gather(one, [other], 0, **options),
        "scatter": lambda: dist.scatter(other, [one], 0, **options),
        "reduce_scatter": lambda: dist.reduce_scatter(other, [one], **options),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(other, one, **options),
        "all_to_all": lambda: dist.all_to_all([other], [one], **options),
        "all_to_all_single": lambda: dist.all_to_all_single(other, one, **options),
        "all_to_all_single with splits": lambda: dist.all_to_all_single(other, one, [len(one)], [len(one)], **options),
        "barrier": lambda: dist.barrier(**options),
    }


_IN_PLACE = {"all_reduce", "all_reduce MAX", "reduce", "broadcast", "barrier"}


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", _calls(torch.zeros(1), torch.zeros(1)))
def test_plain_calls_have_no_python_frame(
    group: ProcessGroup, python_calls: list[str], name: str, async_op: bool
) -> None:
    one, other = torch.arange(6.0), torch.zeros(6)
    work = _calls(one, other, async_op=async_op)[name]()
    if async_op:
        work.wait()
    assert python_calls == []
    assert torch.equal(one, torch.arange(6.0))
    assert name in _IN_PLACE or torch.equal(other, one)


@pytest.mark.parametrize("name", [name for name in _calls(torch.zeros(1), torch.zeros(1)) if name != "barrier"])
def test_strided_tensors_take_the_other_way(group: ProcessGroup, python_calls: list[str], name: str) -> None:
    one, other = torch.arange(12.0)[::2], torch.zeros(12)[::2]
    _calls(one, other)[name]()
    assert len(python_calls) == 1
    assert name in _IN_PLACE or torch.equal(other, one)


def test_messages(group: ProcessGroup, python_calls: list[str]) -> None:
    one, other = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    received = group.recv([other], 0, 7)
    group.send([one], 0, 7).wait()
    received.wait()
    assert torch.equal(one, other)
    assert python_calls == []


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.bits8], ids=str)  # type: ignore[attr-defined]
def test_dtypes_that_dlpack_does_not_tell_apart(
    group: ProcessGroup, python_calls: list[str], dtype: torch.dtype
) -> None:
    """torch shows uint4 as uint8 there: the front must not take the one for the other."""
    one, other = torch.empty(4, dtype=dtype), torch.empty(4, dtype=torch.uint8)
    with pytest.raises(InvalidCall, match="INVALID:DTYPE"):
        group.all_gather_into_tensor(other, one)
    assert len(python_calls) == 1


@pytest.mark.parametrize(
    "tensor", [torch.empty(4, dtype=torch.bits16), torch.eye(4).to_sparse()], ids=["dtype", "layout"]
)
def test_dlpack_is_not_asked_again_about_what_it_has_refused(group: ProcessGroup, tensor: Tensor) -> None:
    """To refuse a tensor takes torch milliseconds."""
    call = group.all_reduce if tensor.is_sparse else lambda tensor: group.broadcast(tensor, 0)
    call(tensor).wait()
    num_refused = _native.num_refused_by_dlpack()
    assert num_refused > 0
    for _ in range(3):
        call(tensor).wait()
    assert _native.num_refused_by_dlpack() == num_refused


@pytest.mark.parametrize(
    "lazy", [torch._neg_view, lambda tensor: tensor.to(torch.complex64).conj()], ids=["negative", "conjugate"]
)
def test_lazy_views_are_what_they_show(group: ProcessGroup, lazy: Callable[[Tensor], Tensor]) -> None:
    view = lazy(torch.tensor([1.0, 2.0]))
    gathered = torch.zeros(2, dtype=view.dtype)
    group.all_gather_single(gathered, view).wait()
    assert torch.equal(gathered, view.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "options",
    [{"opts": None}, {"async_op": 1}, {"timeout": timedelta(seconds=5)}, {"op": dist.ReduceOp.AVG}],
    ids=["opts", "number", "timeout", "op"],
)
def test_other_spellings_give_the_same(group: ProcessGroup, options: dict[str, Any]) -> None:
    tensor = torch.arange(3.0)
    work = group.all_reduce(tensor, **options)
    work.wait()
    assert work.result()[0] is tensor


def test_a_work_has_its_result_where_the_program_asks_for_it(group: ProcessGroup) -> None:
    tensor = torch.arange(3.0)
    assert group.all_reduce(tensor, async_op=False).result()[0] is tensor
    assert group.all_reduce(tensor).result()[0] is tensor
    assert group.all_gather([tensor], torch.zeros(3)).result()[0] is tensor


def test_a_timeout_of_zero_is_refused(group: ProcessGroup) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(0)
    with pytest.raises(InvalidCall, match="INVALID:TIMEOUT"):
        group.allreduce([torch.zeros(1)], options)


def test_methods_show_their_signature(group: ProcessGroup) -> None:
    assert "async_op" in inspect.signature(ProcessGroup.all_reduce).parameters
    assert ProcessGroup.all_reduce.__name__ == "all_reduce"
    assert "in place" in (ProcessGroup.all_reduce.__doc__ or "")


def test_a_group_that_was_left_says_so() -> None:
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="GROUP:CLOSED"):
        group.all_reduce(torch.zeros(1))


# The options.


@pytest.mark.parametrize("kind", OPTION_CLASSES)
def test_options_are_read_as_their_attributes(kind: type) -> None:
    for number in range(64):
        options = sample_options(kind, number * 31 + 7)
        wanted = [hasattr(options, name) for name in ("reduceOp", "rootRank", "rootTensor")]
        found = _native.read_options(options, *wanted)
        assert found is not None
        timeout, is_async, reduce_op, root, root_tensor = found
        assert timedelta(milliseconds=timeout) == options.timeout
        assert is_async == options.asyncOp
        assert not wanted[0] or reduce_op == hash(options.reduceOp)
        assert not wanted[1] or root == options.rootRank
        assert not wanted[2] or root_tensor == options.rootTensor
    fresh = _native.read_options(kind(), *wanted)
    assert fresh is not None
    assert fresh[:2] == (-1, True)


def test_every_reduce_op_is_read() -> None:
    options = dist.AllreduceOptions()
    for op, async_op in itertools.product(
        (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BAND, dist.ReduceOp.BOR),
        (True, False),
    ):
        options.reduceOp = op  # type: ignore[assignment]
        options.asyncOp = async_op
        found = _native.read_options(options, True, False, False)
        assert found is not None
        assert found[1:3] == (async_op, hash(options.reduceOp))


def test_the_layout_of_all_options_is_known() -> None:
    """Where torch lays them out in a way that is not found, calls are slower, and right all the same."""
    assert {name for fields in LEARNED_OPTIONS.values() for name, learned in fields.items() if not learned} == set()


def test_objects_of_other_classes_are_not_options() -> None:
    assert _native.read_options(object(), False, False, False) is None
    assert _native.read_options(timedelta(seconds=1), False, False, False) is None
    assert _native.read_options(dist.BarrierOptions(), True, False, False) is None


# Tensors that are negated or conjugated, but not in memory.


def _lazy_and_not() -> Iterator[Tensor]:
    for dtype in (torch.complex64, torch.complex128):
        whole = torch.zeros(3, 4, dtype=dtype)
        for each in (whole, whole[1:], whole.t(), whole[:, :0], whole[0, 0], whole.clone().detach(), whole.to_sparse()):
            yield each
            if each.layout is torch.strided:
                yield from (each.conj(), each.conj().conj(), each.real, each.imag, each.conj().real, each.conj().imag)
                yield from (torch._neg_view(each), torch._neg_view(each).conj(), each.conj().imag.resolve_neg())
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        plain = torch.empty(5, dtype=dtype)
        yield from (plain, plain[2:], torch.nn.Parameter(plain, requires_grad=False))
    yield torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64).conj(), requires_grad=False)
    leaf = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    yield from (leaf, leaf.conj(), leaf.conj().imag, leaf * 2, (leaf * 2).conj(), torch.empty(2, device="meta"))
    with torch.inference_mode():
        yield from (torch.zeros(2), torch.zeros(2, dtype=torch.complex64).conj().imag)
    yield torch.zeros(2, dtype=torch.complex64).as_subclass(_OtherClass).conj()


class _OtherClass(Tensor):
    """A class that the front knows nothing of."""


def test_lazy_tensors_are_known_as_torch_knows_them() -> None:
    tensors = list(_lazy_and_not())
    assert [_native.is_lazy(each) for each in tensors] == [each.is_neg() or each.is_conj() for each in tensors]
    assert {_native.is_lazy(each) for each in tensors} == {False, True}


def test_the_bits_of_lazy_tensors_are_known() -> None:
    """Where they are not found, calls are slower, and right all the same."""
    assert LEARNED_LAZY_BITS


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="none"),
        pytest.param([(torch.zeros(1), False, False)] * 3, id="nothing lazy"),
        pytest.param([(torch.zeros(1), True, False), (torch.zeros(1), False, True)], id="wrong"),
        pytest.param([(torch.zeros(1).as_subclass(_OtherClass), False, False)], id="another class"),
    ],
)
def test_nothing_is_learned_from_samples_that_do_not_tell(samples: list[tuple[Tensor, bool, bool]]) -> None:
    try:
        assert not _native.learn_lazy_bits(samples)
        assert _native.is_lazy(torch.zeros(1, dtype=torch.complex64).conj())
        assert not _native.is_lazy(torch.zeros(1))
    finally:
        assert learn_lazy_bits()


# Lists and modes that change what a call is made of while it is made.


class _Interferes(torch.overrides.TorchFunctionMode):
    """Runs code where the front asks torch for something."""

    def __init__(self, name: str, act: Callable[[], Any]) -> None:
        super().__init__()
        self.name, self.act = name, act

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self.name:
            instead = self.act()
            if instead is not None:
                return instead
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_are_kept_where_their_list_is_emptied(group: ProcessGroup, async_op: bool) -> None:
    outputs = [torch.zeros(3)]
    with _Interferes("untyped_storage", outputs.clear):
        work = group.all_gather(outputs, torch.ones(3), async_op=async_op)
    work.wait()
    assert outputs == []
    assert torch.equal(work.result()[0], torch.ones(3))


def test_a_list_of_lists_that_shrinks_is_refused() -> None:
    class Shrinks(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            lists.clear()
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    lists: list[list[Tensor]] = []
    tensor = torch.zeros(2).as_subclass(Shrinks)
    lists += [[tensor], [torch.zeros(2)]]
    found = _native.describe_call(_native.Form.all_gather_coalesced, 0, 2, output=lists, source=[torch.zeros(2)])
    assert isinstance(found, _native.Problem)
    assert found.kind is _native.ProblemKind.no_lists


def test_a_storage_of_another_class_is_not_taken_for_one(group: ProcessGroup) -> None:
    with _Interferes("untyped_storage", object), pytest.raises(TypeError, match="resizable"):
        group.all_reduce(torch.ones(3), async_op=False)


def test_a_signal_handler_is_not_in_the_call(group: ProcessGroup) -> None:
    """Peers ask where this rank is: its main thread waits in a call, or is in its own code."""
    tensor, in_handler = torch.zeros(1), []

    def handle(*_: object) -> None:
        in_handler.append(_native.main_thread_in_call())

    def look_and_send() -> None:
        until(_native.main_thread_in_call, "the main thread waits")
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: in_handler != [], "the handler runs")
        group.send([torch.ones(1)], 0, 0)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=look_and_send)
    try:
        work = group.recv([tensor], 0, 0)
        thread.start()
        work.wait()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert in_handler == [False]
    assert tensor.item() == 1
    assert not _native.main_thread_in_call()


def test_methods_are_pickled_by_name_and_can_be_referred_to_weakly(group: ProcessGroup) -> None:
    assert pickle.loads(pickle.dumps(ProcessGroup.all_reduce)) is ProcessGroup.all_reduce
    assert weakref.WeakMethod(group.all_reduce)() == group.all_reduce


def test_a_send_that_has_ended_is_shared_in_both_spellings(group: ProcessGroup, python_calls: list[str]) -> None:
    tensor = torch.ones(1)
    spellings: list[Any] = [[tensor], (tensor,)]
    works = [group.send(tensors, 0, 0) for tensors in spellings]
    assert python_calls == ["send"]
    assert works[0] is works[1]
    assert group.send(tensor, 0, 0).result()[0] is tensor
    for _ in range(3):
        group.recv([tensor], 0, 0).wait()
