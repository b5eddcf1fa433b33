"""The reference reduction against plain Python numbers."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from phalanx.collectives.reduction import (
    AVG,
    BAND,
    BOR,
    BXOR,
    MAX,
    MIN,
    PREMUL_SUM,
    PRODUCT,
    REDUCE_OPS,
    SUM,
    reduce_in_rank_order,
)
from phalanx.types import REDUCE_OP_NAMES, REDUCIBLE

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
]
FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
FACTORS = [3.0, -2.0, 0.5, 7.0]


def limits(dtype: torch.dtype) -> tuple[int, int]:
    bits = 8 * dtype.itemsize
    return (0, (1 << bits) - 1) if str(dtype).startswith("torch.u") else (-1 << (bits - 1), (1 << (bits - 1)) - 1)


def wrap(value: int, dtype: torch.dtype) -> int:
    low, high = limits(dtype)
    return (value - low) % (high - low + 1) + low


def expected_integer(values: list[int], op: int, factors: list[float], dtype: torch.dtype) -> int:
    if op == PREMUL_SUM:
        return wrap(sum(value * int(factor) for value, factor in zip(values, factors, strict=True)), dtype)
    if op == AVG:
        total = wrap(sum(values), dtype)
        quotient = abs(total) // len(values)
        return quotient if total >= 0 else -quotient
    acc = values[0]
    for value in values[1:]:
        acc = {
            SUM: acc + value,
            PRODUCT: acc * value,
            MIN: min(acc, value),
            MAX: max(acc, value),
            BAND: acc & value,
            BOR: acc | value,
            BXOR: acc ^ value,
        }[op]
    return wrap(acc, dtype)


@pytest.mark.parametrize("op", range(9), ids=REDUCE_OP_NAMES)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_integers_wrap_and_truncate(dtype: torch.dtype, op: int, num: int) -> None:
    low, high = limits(dtype)
    base = [low, high, 0, 1, high // 2, low + 1, 77, low // 2 + 5, high - 2]
    rows = [base[shift:] + base[:shift] for shift in (0, 1, 4, 7)][:num]
    factors = [3.0, -2.0, 5.0, 1e12][:num]
    result = reduce_in_rank_order([torch.tensor(row, dtype=dtype) for row in rows], op, factors)
    assert result.dtype is dtype
    assert result.tolist() == [expected_integer(list(column), op, factors, dtype) for column in zip(*rows, strict=True)]


def rounded(value: float, dtype: torch.dtype) -> float:
    """One rounding of a double to the accumulator's dtype: the double result of one operation on floats is exact
    enough that rounding it again gives the float operation's own result."""
    if dtype is torch.float64:
        return value
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
        return float(rounded)
    except OverflowError:
        return math.copysign(math.inf, value)


def expected_float(values: list[float], op: int, factors: list[float], acc_dtype: torch.dtype) -> float:
    if op == PREMUL_SUM:
        values = [rounded(value * rounded(f, acc_dtype), acc_dtype) for value, f in zip(values, factors, strict=True)]
    acc = values[0]
    for value in values[1:]:
        if op in (SUM, AVG, PREMUL_SUM):
            acc = rounded(acc + value, acc_dtype)
        elif op == PRODUCT:
            acc = rounded(acc * value, acc_dtype)
        elif math.isnan(acc) or math.isnan(value):
            acc = math.nan
        elif op == MIN:
            acc = value if value < acc else acc
        else:
            acc = value if value > acc else acc
    return rounded(acc / len(values), acc_dtype) if op == AVG else acc


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; a NaN equals a NaN."""
    a, b = a.double(), b.double()
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


def float_rows(dtype: torch.dtype, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, 3.0, -7.0, 1e-3, 300.0], dtype=torch.float64)
    rows = []
    for rank in range(num):
        values = torch.randn(40, generator=generator, dtype=torch.float64) * 8
        rows.append(torch.cat([special.roll(3 * rank), values, special[:2].roll(rank)]).to(dtype))
    return rows


@pytest.mark.parametrize("op", [SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM], ids=lambda op: REDUCE_OP_NAMES[op])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_floats_accumulate_wide_and_round_once(dtype: torch.dtype, op: int, num: int) -> None:
    rows = float_rows(dtype, num)
    acc_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    result = reduce_in_rank_order(rows, op, FACTORS[:num])
    columns = zip(*(row.double().tolist() for row in rows), strict=True)
    expected = [expected_float(list(column), op, FACTORS[:num], acc_dtype) for column in columns]
    assert result.dtype is dtype
    assert same(result, torch.tensor(expected, dtype=torch.float64).to(acc_dtype).to(dtype))


def test_sums_of_halves_do_not_round_in_between() -> None:
    one, tiny = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-9, dtype=torch.bfloat16)
    assert reduce_in_rank_order([one, tiny, tiny, tiny], SUM, []).item() == 1.0078125
    assert (one + tiny + tiny + tiny).item() == 1.0


@pytest.mark.parametrize("op", [SUM, AVG, PRODUCT, PREMUL_SUM], ids=lambda op: REDUCE_OP_NAMES[op])
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_complex_numbers_reduce_by_parts(dtype: torch.dtype, op: int, num: int) -> None:
    part = COMPLEX[dtype]
    acc_dtype = torch.float64 if part is torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randn(20, 2, generator=generator, dtype=torch.float64).to(part) for _ in range(num)]
    result = torch.view_as_real(
        reduce_in_rank_order([torch.view_as_complex(row) for row in rows], op, FACTORS[:num])
    ).flatten()
    if op == PRODUCT:
        expected = []
        for column in zip(*(row.double().tolist() for row in rows), strict=True):
            re, im = column[0]
            for c, d in column[1:]:
                products = [rounded(x * y, acc_dtype) for x, y in ((re, c), (im, d), (re, d), (im, c))]
                re = rounded(products[0] - products[1], acc_dtype)
                im = rounded(products[2] + products[3], acc_dtype)
            expected += [re, im]
    else:
        columns = zip(*(row.flatten().double().tolist() for row in rows), strict=True)
        expected = [expected_float(list(column), op, FACTORS[:num], acc_dtype) for column in columns]
    assert same(result, torch.tensor(expected, dtype=torch.float64).to(acc_dtype).to(part))


def test_booleans_add_as_or_and_multiply_as_and() -> None:
    a = torch.tensor([False, False, True, True])
    b = torch.tensor([False, True, False, True])
    for op in (SUM, MAX, BOR):
        assert reduce_in_rank_order([a, b], op, []).tolist() == [False, True, True, True]
    for op in (PRODUCT, MIN, BAND):
        assert reduce_in_rank_order([a, b], op, []).tolist() == [False, False, False, True]
    assert reduce_in_rank_order([a, b], BXOR, []).tolist() == [False, True, True, False]


def test_min_and_max_keep_the_first_zero() -> None:
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    for op in (MIN, MAX):
        assert not reduce_in_rank_order([zero, minus], op, []).signbit().item()
        assert reduce_in_rank_order([minus, zero], op, []).signbit().item()


def test_order_of_ranks_matters() -> None:
    big, one = torch.tensor([2.0**53], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert reduce_in_rank_order([big, one, one, -big], SUM, []).item() == 0.0
    assert reduce_in_rank_order([one, one, big, -big], SUM, []).item() == 2.0


def test_every_reducible_dtype_has_a_code() -> None:
    assert set(REDUCE_OPS) == set(REDUCIBLE)


@pytest.mark.parametrize("op", [BAND, BOR, BXOR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_other_pairs_are_refused(dtype: torch.dtype, op: int) -> None:
    with pytest.raises(ValueError, match="has no reduce op"):
        reduce_in_rank_order([torch.zeros(1, dtype=dtype)], op, [])
