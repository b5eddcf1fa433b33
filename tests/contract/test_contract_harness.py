"""The contract suite must be able to fail: its pool and its comparison."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from contract_cases import cases
from contract_data import ARRANGEMENTS, UNCOMMON, arrange, difference, fingerprint, values
from contract_exchanges import misarrivals
from contract_forms import FORMS
from contract_messages import Message, Side, every_kind, in_own_order
from contract_oracle import Oracle, expected, flatten
from contract_pool import Member, Pool, PoolError

from phalanx.types import REDUCIBLE


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(2, None, tmp_path, tmp_path)
    yield pool
    pool.close()


def rank_of(member: Member) -> int:
    return member.rank


def die(member: Member) -> None:
    member.note("about to die")
    if member.rank == 1:
        os._exit(3)
    threading.Event().wait()


def hang(member: Member) -> None:
    member.note("about to hang")
    if member.rank == 0:
        threading.Event().wait()


def hang_or_complain(member: Member) -> str:
    if member.rank == 0:
        threading.Event().wait()
    return "a complaint"


def stumble(member: Member) -> None:
    if member.rank == 1:
        raise RuntimeError("a stone in the way")


def test_ranks_answer_in_order(pool: Pool) -> None:
    assert pool.run(rank_of, "world of 2") == [0, 1]
    assert pool.run(rank_of, "world of 2") == [0, 1]


def test_a_rank_that_dies_is_named(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"(?s)told to run die.*rank 1 died with exit code 3: notes: about to die"):
        pool.run(die, "world of 2")
    assert not pool.usable


def test_a_rank_that_hangs_is_named_and_shows_where(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"(?s)rank 0 did not answer: notes: about to hang.*in hang") as caught:
        pool.run(hang, "world of 2", answer_seconds=3.0)
    assert "rank 1" not in str(caught.value)
    assert not pool.usable


def test_an_answer_is_shown_beside_a_rank_that_hangs(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"(?s)rank 0 did not answer.*rank 1 had answered: a complaint"):
        pool.run(hang_or_complain, "world of 2", answer_seconds=1.0)


def test_a_rank_that_raises_is_named(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"(?s)rank 1 raised.*a stone in the way"):
        pool.run(stumble, "world of 2")
    assert not pool.usable


def test_closing_ends_the_processes(tmp_path: Path) -> None:
    pool = Pool(2, None, tmp_path, tmp_path)
    pids = pool.run(pid_of, "world of 2")
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def pid_of(member: Member) -> int:
    return os.getpid()


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", [*REDUCIBLE, *UNCOMMON], ids=str)
def test_arrangements_keep_the_values(dtype: torch.dtype) -> None:
    for count in (0, 1, 2, 1037):
        expected = values(dtype, count, lane=0, seed=5)
        assert expected.numel() == count
        for arrangement in ARRANGEMENTS:
            arranged = arrange(values(dtype, count, lane=0, seed=5), arrangement)
            assert difference(arranged, expected, nan_is_nan=False) is None
    others = [values(dtype, 1037, lane=1, seed=5), values(dtype, 1037, lane=0, seed=6)]
    assert all(difference(other, expected, nan_is_nan=False) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_lazy_arrangements_keep_the_values(dtype: torch.dtype) -> None:
    arranged = arrange(values(dtype, 1037, lane=0, seed=5), "lazy")
    assert arranged.is_conj() or arranged.is_neg()
    assert difference(arranged, values(dtype, 1037, lane=0, seed=5), nan_is_nan=False) is None


def test_one_bit_makes_a_difference() -> None:
    for dtype in (torch.bool, torch.int8, torch.float16, torch.float64, torch.complex128):
        flat = values(dtype, 1037, lane=0, seed=1)
        changed = flat.clone()
        changed.view(torch.uint8)[-1] ^= 1
        assert "1 of" in (difference(changed, flat, nan_is_nan=False) or "")


def test_zeros_differ_by_sign_and_nans_are_one() -> None:
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0]), nan_is_nan=True)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    one_nan, other_nan = nans[:1], nans[1:]
    assert difference(one_nan, other_nan, nan_is_nan=True) is None
    assert difference(one_nan, other_nan, nan_is_nan=False)
    assert difference(torch.tensor([complex(math.nan, 1.0)]), torch.tensor([complex(math.nan, 2.0)]), nan_is_nan=True)


@pytest.mark.parametrize("dtype", [each for each in REDUCIBLE if each.is_floating_point or each.is_complex], ids=str)
@pytest.mark.parametrize("nan_is_nan", [False, True])
def test_fingerprints_differ_where_values_do(dtype: torch.dtype, nan_is_nan: bool) -> None:
    whole = values(dtype, 1037, lane=0, seed=1)
    others = [whole.clone(), values(dtype, 1037, lane=1, seed=1), whole[:-1]]
    for i in range(0, whole.numel(), 61):
        changed = whole.clone()
        changed.view(torch.uint8)[i * dtype.itemsize] ^= 1
        others.append(changed)
    for other in others:
        same = other.numel() == whole.numel() and difference(other, whole, nan_is_nan=nan_is_nan) is None
        prints = [fingerprint(each, nan_is_nan=nan_is_nan) for each in (other, whole)]
        assert (prints[0] == prints[1]) == same
    assert fingerprint(arrange(whole, "strided"), nan_is_nan=nan_is_nan) == fingerprint(whole, nan_is_nan=nan_is_nan)


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_value_is_told_by_the_oracle(form: str, tmp_path: Path) -> None:
    case = next(case for case in cases(form, 3) if case.count == 1037 and case.dtype.itemsize == 4)
    for rank in range(3):
        args = expected(case, 3)[rank]
        oracle = Oracle(tmp_path)
        assert oracle.problem(case, rank, 3, args) is None
        assert oracle.num_computed == (rank == 0), "the answer is found in the folder"
        with torch.inference_mode(case.inference):
            tensor = max(flatten(args), key=torch.Tensor.numel).detach()
            tensor.fill_(41)
        assert "tensor" in (oracle.problem(case, rank, 3, args) or "")


def test_an_order_of_ones_own_keeps_that_of_the_same_key() -> None:
    items = [(key, number) for number in range(20) for key in "abc"]
    orders = [in_own_order(random.Random(rank), items, lambda item: item[0]) for rank in range(3)]
    for order in orders:
        assert sorted(order) == sorted(items)
        for key in "abc":
            assert [number for each, number in order if each == key] == list(range(20))
    assert orders[0] != orders[1] != orders[2]


def test_messages_lost_doubled_or_overtaken_are_seen() -> None:
    good = [(2, 0), (0, 0), (2, 1), (0, 1)]
    assert misarrivals(good, [0, 2], 2) == []
    assert misarrivals(good[:-1], [0, 2], 2) == ["from rank 0 came [0]"]
    assert misarrivals([*good, (2, 1)], [0, 2], 2) == ["from rank 2 came [0, 1, 1]"]
    assert misarrivals([good[2], good[1], good[0], good[3]], [0, 2], 2) == ["from rank 2 came [1, 0]"]
    assert misarrivals([*good, (1, 0)], [0, 2], 2) == ["from rank 1 came [0]"]


def neither_send_nor_receive(member: Member) -> list[str | None]:
    messages = [Message(0, 1, torch.float32, 1037, of=name, into=name) for name in ARRANGEMENTS]
    return [Side(member, message, ("isend", "irecv")[member.rank]).problem() for message in messages]


def test_a_message_that_did_not_come_is_seen(pool: Pool) -> None:
    sends, receives = pool.run(neither_send_nor_receive, "world of 2")
    assert sends == [None] * len(ARRANGEMENTS)
    assert all("of 1037 values" in problem for problem in receives)


def test_every_kind_of_message_has_every_spelling_between_all_pairs() -> None:
    messages = list(every_kind(4))
    assert {message.dtype for message in messages} == {*REDUCIBLE, *UNCOMMON}
    assert len({(message.source, message.target) for message in messages}) == 12
    assert len({message.send for message in messages}) == 3
    assert len({message.receive for message in messages}) == 6
    for dtype in (torch.complex64, torch.complex128):
        alike = [m.send.startswith("direct") == m.receive.startswith("direct") for m in messages if m.dtype is dtype]
        assert alike
        assert all(alike)
