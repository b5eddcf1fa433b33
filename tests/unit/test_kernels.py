"""The native reduction kernels against an oracle in torch, bit for bit, and the kernel variants against each other.

A NaN equals any NaN. The kernels of this CPU are tested here; the baseline kernels run the same data in a child that
prints a digest of every result (this file as a program).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import _native
from phalanx.types import REDUCE_OP_NAMES, REDUCIBLE

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
INTEGERS = [dtype for dtype in REDUCIBLE if not dtype.is_floating_point and not dtype.is_complex][1:]
FLOATS = [dtype for dtype in REDUCIBLE if dtype.is_floating_point]
SMALL_FLOATS = [dtype for dtype in FLOATS if dtype.itemsize <= 2]
PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

KERNELS = [(torch.bool, op) for op in (SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR)]
KERNELS += [(dtype, op) for dtype in INTEGERS for op in range(9)]
KERNELS += [(dtype, op) for dtype in FLOATS for op in (SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM)]
KERNELS += [(dtype, op) for dtype in PARTS for op in (SUM, AVG, PRODUCT, PREMUL_SUM)]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SEED = 20
MAX_SRCS = 10
# More than two blocks of every dtype, and an odd rest.
MAX_COUNT = 9001
FLOAT_FACTORS = [0.1, -3.0, 1.0, 1 / 3, 1e3, -0.5, 7.0, 2.5, -1.25, 0.75]
INTEGER_FACTORS = [3.0, -2.0, 1.0, 2.0**40 + 1, 255.0, -(2.0**33) - 5, 7.0, 0.0, -1.0, 11.0]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The oracle's tensors are too small to share out; on a busy machine threads make it ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def factors_of(dtype: torch.dtype, num: int) -> list[float]:
    return (INTEGER_FACTORS if dtype in INTEGERS else FLOAT_FACTORS)[:num]


@functools.cache
def sources(dtype: torch.dtype) -> list[torch.Tensor]:
    """Any bits, ordinary numbers and special ones, mixed."""
    if dtype in PARTS:
        return [torch.stack([s, s.flip(0)], 1).view(dtype).squeeze(1) for s in sources(PARTS[dtype])]
    generator = torch.Generator().manual_seed(SEED)
    shape = (MAX_SRCS, MAX_COUNT)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return list((data & 1).view(dtype).squeeze(2))
    mixed = data.view(dtype).squeeze(2)
    if dtype in FLOATS:
        ordinary = torch.randn(shape, generator=generator).to(dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 448.0, 2e-45])
        special = special[torch.randint(0, len(special), shape, generator=generator)].to(dtype)
        kind = torch.randint(0, 8, shape, generator=generator)
        mixed, ordinary, special = (t.view(BITS[dtype.itemsize]) for t in (mixed, ordinary, special))
        mixed = torch.where(kind < 2, mixed, torch.where(kind < 7, ordinary, special)).view(dtype)
    return list(mixed)


def reduce(
    dtype: torch.dtype, op: int, srcs: list[torch.Tensor], factors: list[float], dst: torch.Tensor | None = None
) -> torch.Tensor:
    dst = torch.empty_like(srcs[0]) if dst is None else dst
    addresses = [src.data_ptr() for src in srcs]
    _native.reduce_buffers(REDUCIBLE[dtype], op, dst.data_ptr(), addresses, dst.numel(), factors)
    return dst


def fold(op: int, acc: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    match op:
        case 0 | 1 | 8:
            return acc + value
        case 2:
            return acc * value
        case 3:
            return torch.where((value < acc) | (value != value), value, acc)
        case 4:
            return torch.where((value > acc) | (value != value), value, acc)
        case 5:
            return acc & value
        case 6:
            return acc | value
        case _:
            return acc ^ value


def expected(dtype: torch.dtype, op: int, srcs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    if dtype in PARTS:
        return expected_complex(dtype, op, srcs, factors)
    if dtype in INTEGERS:
        return expected_integer(dtype, op, srcs, factors)
    if dtype is torch.bool:
        op = {SUM: BOR, MAX: BOR, PRODUCT: BAND, MIN: BAND}.get(op, op)
        return functools.reduce(functools.partial(fold, op), srcs)
    values = [src.to(torch.float64 if dtype is torch.float64 else torch.float32) for src in srcs]
    if op == PREMUL_SUM:
        values = [torch.full_like(value, factor) * value for value, factor in zip(values, factors, strict=True)]
    acc = functools.reduce(functools.partial(fold, op), values)
    return (acc / torch.full_like(acc, len(srcs)) if op == AVG else acc).to(dtype)


def expected_integer(dtype: torch.dtype, op: int, srcs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    unsigned64 = dtype is torch.uint64
    values = [src.view(torch.int64) if unsigned64 else src.to(torch.int64) for src in srcs]
    if op == PREMUL_SUM:
        values = [value * int(factor) for value, factor in zip(values, factors, strict=True)]
    # The order of unsigned numbers is that of signed ones with the upper bit flipped.
    flip = -(2**63) if unsigned64 and op in (MIN, MAX) else 0
    acc = functools.reduce(functools.partial(fold, op), [value ^ flip for value in values]) ^ flip
    if op == AVG and unsigned64:
        acc = torch.tensor([value % 2**64 // len(srcs) for value in acc.tolist()], dtype=torch.uint64)
    elif op == AVG:
        acc = torch.div(acc.to(dtype).to(torch.int64), len(srcs), rounding_mode="trunc")
    return acc.view(dtype) if unsigned64 else acc.to(dtype)


def expected_complex(dtype: torch.dtype, op: int, srcs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    part = PARTS[dtype]
    if op != PRODUCT:
        return expected(part, op, [src.view(part) for src in srcs], factors).view(dtype)
    wide = torch.float64 if part is torch.float64 else torch.float32
    re, im = srcs[0].view(part).to(wide).view(-1, 2).unbind(1)
    for src in srcs[1:]:
        c, d = src.view(part).to(wide).view(-1, 2).unbind(1)
        re, im = re * c - im * d, re * d + im * c
    return torch.stack([re, im], 1).to(part).view(dtype).squeeze(1)


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all."""
    tensor = tensor.view(PARTS.get(tensor.dtype, tensor.dtype))
    if tensor.dtype in SMALL_FLOATS:
        tensor = tensor.to(torch.float32)
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(BITS[tensor.dtype.itemsize])


def assert_same(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == wanted.dtype
    different = (canonical(actual) != canonical(wanted)).nonzero()
    if len(different):
        per_element = 2 if actual.dtype in PARTS else 1
        i = int(different[0]) // per_element
        pytest.fail(f"{len(different)} of {actual.numel()} differ; [{i}] is {actual[i]}, not {wanted[i]}")


def each_kernel(test: Callable[..., None]) -> Callable[..., None]:
    ids = [f"{str(dtype).removeprefix('torch.')}-{REDUCE_OP_NAMES[op]}" for dtype, op in KERNELS]
    decorated: Callable[..., None] = pytest.mark.parametrize(("dtype", "op"), KERNELS, ids=ids)(test)
    return decorated


def test_kernels_exist_where_dtype_has_op() -> None:
    wanted = {(REDUCIBLE[dtype], op) for dtype, op in KERNELS}
    assert {(code, op) for code in range(256) for op in range(256) if _native.reduces(code, op)} == wanted


@each_kernel
def test_equals_oracle(dtype: torch.dtype, op: int) -> None:
    for num_srcs in (1, 2, 3, 4, 5, 8):
        for count in (0, 1, 37, MAX_COUNT):
            srcs = [src[:count] for src in sources(dtype)[:num_srcs]]
            factors = factors_of(dtype, num_srcs)
            assert_same(reduce(dtype, op, srcs, factors), expected(dtype, op, srcs, factors))


@each_kernel
def test_dst_may_be_any_source(dtype: torch.dtype, op: int) -> None:
    for num_srcs in (1, 2, 3, 4, 6):
        factors = factors_of(dtype, num_srcs)
        wanted = reduce(dtype, op, sources(dtype)[:num_srcs], factors)
        for k in range(num_srcs):
            srcs = sources(dtype)[:num_srcs]
            srcs[k] = srcs[k].clone()
            assert_same(reduce(dtype, op, srcs, factors, dst=srcs[k]), wanted)


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a reduction of the dtype accumulates in."""
    if dtype in SMALL_FLOATS:
        return torch.float32
    return torch.complex64 if dtype is torch.complex32 else dtype


def carry_on(
    dtype: torch.dtype, op: int, srcs: list[torch.Tensor], factors: list[float], cuts: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of a reduction in parts, which begin at 0 and at these sources, and what each part carried on."""
    count = srcs[0].numel()
    dst = torch.empty_like(srcs[0])
    carried: list[torch.Tensor] = []
    for begin, end in itertools.pairwise([0, *cuts, len(srcs)]):
        carry_in = carried[-1].data_ptr() if carried else 0
        is_last = end == len(srcs) and len(carried) == len(cuts)
        if not is_last:
            carried.append(torch.empty(count, dtype=running_dtype(dtype)))
        _native.reduce_buffers(
            REDUCIBLE[dtype],
            op,
            dst.data_ptr() if is_last else 0,
            [src.data_ptr() for src in srcs[begin:end]],
            count,
            factors[begin:end],
            carry_in=carry_in,
            carry_out=0 if is_last else carried[-1].data_ptr(),
            num_srcs=len(srcs),
        )
    return dst, carried


def test_accumulators_have_the_size_of_what_is_accumulated_in() -> None:
    for dtype, code in REDUCIBLE.items():
        assert _native.accumulator_size(code) == running_dtype(dtype).itemsize


@each_kernel
def test_parts_give_the_bits_of_the_whole(dtype: torch.dtype, op: int) -> None:
    for num_srcs in (2, 3, 5, 9):
        factors = factors_of(dtype, num_srcs)
        for count in (1, 37, MAX_COUNT):
            srcs = [src[:count] for src in sources(dtype)[:num_srcs]]
            wanted = reduce(dtype, op, srcs, factors)
            for k in range(1, num_srcs):
                assert_same(carry_on(dtype, op, srcs, factors, [k])[0], wanted)


@each_kernel
def test_any_number_of_parts_gives_the_bits_of_the_whole(dtype: torch.dtype, op: int) -> None:
    srcs = [src[:300] for src in sources(dtype)[:7]]
    factors = factors_of(dtype, 7)
    wanted = expected(dtype, op, srcs, factors)
    # The last part may have no source of its own: it only rounds, and divides.
    for cuts in ([1, 2, 3, 4, 5, 6], [2, 6], [5, 6], [7], [1, 7]):
        assert_same(carry_on(dtype, op, srcs, factors, cuts)[0], wanted)
    nothing = [src[:0] for src in srcs]
    assert carry_on(dtype, op, nothing, factors, [3])[0].numel() == 0


@each_kernel
def test_running_values_are_not_rounded(dtype: torch.dtype, op: int) -> None:
    """They are what the oracle has before its last step, and a part may replace those of the part before."""
    srcs = [src[:300] for src in sources(dtype)[:5]]
    factors = factors_of(dtype, 5)
    wide = running_dtype(dtype)
    before = [src.to(wide) for src in srcs]
    # The sum, which AVG divides when it is complete.
    wanted = expected(wide, SUM if op == AVG else op, before[:3], factors[:3])
    _, carried = carry_on(dtype, op, srcs, factors, [2, 3])
    assert_same(carried[1], wanted)
    in_place = carried[0].clone()
    address = in_place.data_ptr()
    _native.reduce_buffers(
        REDUCIBLE[dtype],
        op,
        0,
        [srcs[2].data_ptr()],
        300,
        factors[2:3],
        carry_in=address,
        carry_out=address,
        num_srcs=5,
    )
    assert_same(in_place, wanted)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_writes_only_dst(data: st.DataObject) -> None:
    """Any count and any placement that is aligned to the element; nothing around dst changes."""
    dtype, op = data.draw(st.sampled_from(KERNELS))
    num_srcs = data.draw(st.integers(1, MAX_SRCS))
    count = data.draw(st.integers(0, 150))
    begins = data.draw(st.lists(st.integers(0, 70), min_size=num_srcs, max_size=num_srcs))
    srcs = [src[begin : begin + count] for src, begin in zip(sources(dtype), begins, strict=False)]
    begin = data.draw(st.integers(0, 70))
    room = sources(dtype)[0][:300].clone()
    before = room.clone()
    dst = room[begin : begin + count]
    in_place = data.draw(st.integers(0, num_srcs))
    if in_place < num_srcs:
        srcs[in_place] = dst
    factors = factors_of(dtype, num_srcs)
    wanted = expected(dtype, op, [src.clone() for src in srcs], factors)
    assert_same(reduce(dtype, op, srcs, factors, dst=dst), wanted)
    around = torch.ones(300, dtype=torch.bool)
    around[begin : begin + count] = False
    as_bytes = (300, dtype.itemsize)
    changed = (room.view(torch.uint8).view(as_bytes) != before.view(torch.uint8).view(as_bytes)).any(1)
    assert not (changed & around).any()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_average_truncates_exactly(dtype: torch.dtype) -> None:
    """Every 8- and 16-bit number; of the others those near 0 and near the ends, and any."""
    generator = torch.Generator().manual_seed(SEED)
    near = torch.arange(-300, 300)
    anything = torch.randint(-(2**63), 2**63 - 1, (5000,), generator=generator)
    bits = torch.cat([near, near + 2**31, near + 2**63 - 1, anything])
    bits = torch.arange(2 ** (8 * dtype.itemsize)) if dtype.itemsize <= 2 else bits
    values = bits.view(dtype) if dtype.itemsize == 8 else bits.to(dtype)
    nothing = torch.zeros_like(values)
    for num_srcs in (1, 2, 3, 7, 10, 127, 129, 255, 257):
        srcs = [values] + [nothing] * (num_srcs - 1)
        factors = [1.0] * num_srcs
        assert_same(reduce(dtype, AVG, srcs, factors), expected(dtype, AVG, srcs, factors))


def all_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(2 ** (8 * dtype.itemsize)).to(BITS[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_every_small_float_survives_widening_and_narrowing(dtype: torch.dtype) -> None:
    values = all_values(dtype)
    assert_same(reduce(dtype, SUM, [values], [1.0]), values)
    largest = torch.full_like(values.to(torch.float32), torch.finfo(dtype).max).to(dtype)
    factors = [1.0, 0.25]
    assert_same(
        reduce(dtype, PREMUL_SUM, [values, largest], factors), expected(dtype, PREMUL_SUM, [values, largest], factors)
    )


def narrowed(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 to `dtype` by a kernel: each number is the exact sum of 8 pieces of its mantissa, scaled by factors.

    A piece has 3 bits, which every format holds. Numbers with the same exponent go through one PREMUL_SUM.
    """
    result = torch.empty(len(wide), dtype=dtype).view(BITS[dtype.itemsize])
    magnitude = wide.view(torch.int32) & 0x7FFFFFFF
    exponents = magnitude >> 23
    mantissas = torch.where(exponents == 0, magnitude, (magnitude & 0x7FFFFF) | 0x800000)
    order = exponents.argsort()
    for chosen in order.split(exponents.bincount().tolist()):
        if len(chosen) == 0:
            continue
        exponent = int(exponents[chosen[0]])
        # Keeps the largest factor within float32.
        scale = 4 if exponent > 200 else 1
        signs = torch.where(wide[chosen].signbit(), -scale, scale)
        places = range(21, -1, -3)
        pieces = [(((mantissas[chosen] >> place) & 7) * signs).to(torch.float32).to(dtype) for place in places]
        factors = [2.0 ** (max(exponent, 1) - 150 + place) / scale for place in places]
        result[chosen] = reduce(dtype, PREMUL_SUM, pieces, factors).view(result.dtype)
    return result.view(dtype)


def borders(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Where rounding changes: values, midpoints, and what would be the next values above the largest."""
    finite = all_values(dtype).to(torch.float32)
    finite = finite[finite.isfinite()].unique()
    yield finite
    yield ((finite[1:].to(torch.float64) + finite[:-1]) / 2).to(torch.float32)
    largest, step = float(finite[-1]), float(finite[-1] - finite[-2])
    above = torch.tensor([largest + step * quarters / 4 for quarters in range(17)], dtype=torch.float64)
    yield from (above.to(torch.float32), -above.to(torch.float32))
    yield torch.tensor([1e-45, -1e-45, 1e-40, 3.4028234e38, -3.4028234e38])


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_narrowing_is_that_of_torch(dtype: torch.dtype) -> None:
    points = torch.cat(list(borders(dtype)))
    infinity = torch.tensor(float("inf"))
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(SEED))
    wide = torch.cat(
        [points, points.nextafter(infinity), points.nextafter(-infinity), random.to(torch.int32).view(torch.float32)]
    )
    # A sum has no -0 here: the pieces of -0 are +0 where a format has no -0.
    wide = wide[wide.isfinite() & (wide != 0)]
    assert_same(narrowed(wide, dtype), wide.to(dtype))


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_narrowing_of_infinity_and_nan_is_that_of_torch(dtype: torch.dtype) -> None:
    ones = torch.tensor([1.0, -1.0, 0.0]).repeat(11).to(dtype)
    wanted = (ones.to(torch.float32) * float("inf")).to(dtype)
    assert_same(reduce(dtype, PREMUL_SUM, [ones], [float("inf")]), wanted)


def digests() -> dict[str, str]:
    found = {}
    for dtype, op in KERNELS:
        digest = hashlib.sha256()
        for num_srcs in (1, 2, 3, 4, 6, MAX_SRCS):
            result = reduce(dtype, op, sources(dtype)[:num_srcs], factors_of(dtype, num_srcs))
            digest.update(canonical(result).numpy().tobytes())
        result, carried = carry_on(dtype, op, sources(dtype), factors_of(dtype, MAX_SRCS), [1, 3, 8])
        for tensor in (result, *carried):
            digest.update(canonical(tensor).numpy().tobytes())
        found[f"{dtype} {REDUCE_OP_NAMES[op]}"] = digest.hexdigest()
    return found


def test_variants_agree() -> None:
    if _native.kernel_variant() == "baseline":
        pytest.skip("only the baseline kernels run here")
    environment = os.environ | {"PHALANX_KERNELS": "baseline"}
    child = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    variant, of_baseline = json.loads(child.stdout)
    assert variant == "baseline"
    assert of_baseline == digests()


if __name__ == "__main__":
    json.dump((_native.kernel_variant(), digests()), sys.stdout)
