"""Which dtype has which reduce op, and the reference reduction.

The rules are those of the native kernels (_core/kernels.hpp):

- element i is ((s0[i] op s1[i]) op s2[i]) ..., sources in rank order;
- 16- and 8-bit floats are widened to float32, accumulated there and rounded once;
- AVG is the sum and then one division, PREMUL_SUM multiplies each source by its rank's factor and then sums;
- MIN and MAX propagate NaN and keep the earlier of two equal values (so 0.0 and -0.0 stay apart);
- integers wrap around; their AVG truncates toward zero. Booleans add as `or` and multiply as `and`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MIN",
    "PREMUL_SUM",
    "PRODUCT",
    "REDUCE_OPS",
    "SUM",
    "reduce_in_rank_order",
]

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)

_BOOL = (torch.bool,)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_SMALL_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
_FLOATS = (*_SMALL_FLOATS, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)

# A dtype that is not here moves and can't be reduced.
REDUCE_OPS: dict[torch.dtype, frozenset[int]] = {
    **dict.fromkeys(_BOOL, frozenset({SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR})),
    **dict.fromkeys(_SIGNED + _UNSIGNED, frozenset(range(9))),
    **dict.fromkeys(_FLOATS, frozenset({SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM})),
    **dict.fromkeys(_COMPLEX, frozenset({SUM, AVG, PRODUCT, PREMUL_SUM})),
}

# torch has little arithmetic for the wider unsigned integers; modulo 2**bits it is that of the signed ones.
_SIGNED_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduce_in_rank_order(tensors: Sequence[Tensor], reduce_op: int, factors: Sequence[float]) -> Tensor:
    """The reduction of tensors of one dtype and shape, one a rank. The result may be `tensors[0]` itself.

    `factors` are the ranks' own; PREMUL_SUM alone reads them.
    """
    dtype = tensors[0].dtype
    if reduce_op not in REDUCE_OPS.get(dtype, ()):
        raise ValueError(f"{dtype} has no reduce op {reduce_op}")
    if dtype in _BOOL:
        return _fold(tensors, _BOOLEAN_STEPS[reduce_op])
    if dtype in _COMPLEX:
        parts = [torch.view_as_real(tensor) for tensor in tensors]
        return torch.view_as_complex(_reduce_floats(parts, reduce_op, factors, product=_complex_product))
    if dtype in _FLOATS:
        return _reduce_floats(tensors, reduce_op, factors)
    return _reduce_integers(tensors, reduce_op, factors)


def _fold(tensors: Sequence[Tensor], step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    acc = tensors[0]
    for tensor in tensors[1:]:
        acc = step(acc, tensor)
    return acc


def _min(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((b < a) | (b != b), b, a)


def _max(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((b > a) | (b != b), b, a)


def _complex_product(a: Tensor, b: Tensor) -> Tensor:
    (a_re, a_im), (b_re, b_im) = a.unbind(-1), b.unbind(-1)
    return torch.stack((a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re), dim=-1)


_STEPS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    PRODUCT: torch.mul,
    MIN: _min,
    MAX: _max,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
    PREMUL_SUM: torch.add,
}
_BOOLEAN_STEPS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    SUM: torch.logical_or,
    PRODUCT: torch.logical_and,
    MIN: torch.logical_and,
    MAX: torch.logical_or,
    BAND: torch.logical_and,
    BOR: torch.logical_or,
    BXOR: torch.logical_xor,
}


def _reduce_floats(
    tensors: Sequence[Tensor],
    reduce_op: int,
    factors: Sequence[float],
    product: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    dtype = tensors[0].dtype
    if dtype in _SMALL_FLOATS:
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    if reduce_op == PREMUL_SUM:
        tensors = [
            tensor * torch.tensor(factor, dtype=tensor.dtype) for tensor, factor in zip(tensors, factors, strict=True)
        ]
    acc = _fold(tensors, product if reduce_op == PRODUCT else _STEPS[reduce_op])
    if reduce_op == AVG:
        acc = acc / len(tensors)
    return acc if acc.dtype == dtype else acc.to(dtype)


def _reduce_integers(tensors: Sequence[Tensor], reduce_op: int, factors: Sequence[float]) -> Tensor:
    dtype = tensors[0].dtype
    bits = 8 * dtype.itemsize
    lowest = -1 << (bits - 1)
    tensors = [tensor.view(_SIGNED_OF_SIZE[dtype.itemsize]) for tensor in tensors]
    unsigned = dtype in _UNSIGNED
    if reduce_op == PREMUL_SUM:
        wrapped = [(int(factor) - lowest) % (1 << bits) + lowest for factor in factors]
        tensors = [tensor * factor for tensor, factor in zip(tensors, wrapped, strict=True)]
    if unsigned and reduce_op in (MIN, MAX):
        # Flipping the highest bit turns the unsigned order into the signed one.
        acc = _fold([tensor ^ lowest for tensor in tensors], _STEPS[reduce_op]) ^ lowest
    else:
        acc = _fold(tensors, _STEPS[reduce_op])
    if reduce_op == AVG:
        acc = _divide_unsigned(acc, len(tensors)) if unsigned else acc.div(len(tensors), rounding_mode="trunc")
    return acc.view(dtype)


def _divide_unsigned(dividend: Tensor, divisor: int) -> Tensor:
    """Divides signed integers as if their bits were unsigned ones."""
    bits = 8 * dividend.dtype.itemsize
    wide = dividend.to(torch.int64)
    if bits < 64:
        return (wide & ((1 << bits) - 1)).div(divisor, rounding_mode="trunc").to(dividend.dtype)
    # Half of the dividend fits; twice its quotient is short by 0 or 1.
    quotient = ((wide >> 1) & ~(-1 << 63)).div(divisor, rounding_mode="trunc") * 2
    remainder = wide - quotient * divisor
    return quotient + (remainder >= divisor)
