"""Arguments of calls, checked and described by the native front (`_core/front_forms.hpp`).

What the front does not know of a tensor is found here. What is wrong with a call becomes an `InvalidCall`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from phalanx import _native
from phalanx.collectives import problems
from phalanx.collectives.problems import Asked
from phalanx.collectives.reduction import REDUCE_OPS
from phalanx.errors import InvalidCall
from phalanx.memory import find_shared
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT, GroupInfo

__all__ = [
    "LEARNED_LAZY_BITS",
    "PLAIN_CLASSES",
    "HasOwnDispatch",
    "check_reduction",
    "check_tensor",
    "check_tensors",
    "describe",
    "fail",
    "learn_lazy_bits",
    "look_closer",
]

Form = _native.Form
Seen = tuple[int, int, int, int, Sequence[int], Sequence[int]]

# Other classes may carry out calls themselves.
PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
# Several elements share a byte, so that numel and itemsize do not give the number of bytes.
_PACKED = frozenset({torch.quint4x2, torch.quint2x4})


class HasOwnDispatch(Exception):  # noqa: N818  # no error: the call takes another way
    """A tensor's class carries out calls itself (`__torch_dispatch__`): it has no memory, or not only memory."""


class _Unfit(Exception):  # noqa: N818  # becomes an InvalidCall
    """A tensor that no call can take. `{op}` in the next step stands for the call."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.refusal = problems.Refusal(code, message, hint)


def fail(info: GroupInfo, op: str, code: str, message: str, hint: str) -> NoReturn:
    raise InvalidCall(message, code=f"INVALID:{code}", group=info.name, rank=info.rank, op=op, hint=hint)


def describe(
    info: GroupInfo,
    op: str,
    form: Form,
    output: Any = None,
    source: Any = None,
    *,
    root: Any = None,
    reduce_op: Any = NO_REDUCE_OP,
    factor: Any = 1.0,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> _native.Description:
    """The description of a call; an `InvalidCall` where this rank's arguments are wrong."""
    if not isinstance(factor, (int, float)):
        message = f"expected a number as the factor of PREMUL_SUM, got {type(factor).__name__}"
        fail(info, op, "REDUCE_OP", message, "pass the factor as a float")
    try:
        found = _native.describe_call(
            form,
            info.rank,
            info.size,
            output=output,
            source=source,
            reduce_op=reduce_op if isinstance(reduce_op, int) and abs(reduce_op) < 2**31 else NO_REDUCE_OP,
            factor=factor,
            root=root if type(root) is int and 0 <= root < info.size else NO_ROOT,
            output_splits=_in_64_bits(output_splits),
            input_splits=_in_64_bits(input_splits),
        )
    except _Unfit as unfit:
        raise _invalid(info, op, unfit.refusal) from None
    if isinstance(found, _native.Problem):
        asked = Asked(root, reduce_op, factor, output_splits, input_splits)
        raise _invalid(info, op, problems.explain(found, info, asked))
    return found


def _in_64_bits(numbers: Sequence[int]) -> list[int]:
    """Numbers that the core can take: those that are too large for it are too large for a tensor, too."""
    return [max(-1, min(number, 2**63 - 1)) for number in numbers]


def check_tensor(info: GroupInfo, op: str, name: str, tensor: Any, *, written: bool = False) -> int:
    """A dense CPU tensor of any shape and stride; where it is written, no two of its elements share memory.

    Returns the number of elements.
    """
    try:
        found = _native.check_tensor(name, tensor, written)
    except _Unfit as unfit:
        raise _invalid(info, op, unfit.refusal) from None
    if isinstance(found, _native.Problem):
        raise _invalid(info, op, problems.explain(found, info, Asked()))
    return found


def check_tensors(info: GroupInfo, op: str, name: str, tensors: Any, num: int | None = None) -> None:
    """A list of `num` tensors, or of at least one."""
    try:
        found = _native.check_tensors(name, tensors, -1 if num is None else num)
    except _Unfit as unfit:
        raise _invalid(info, op, unfit.refusal) from None
    if found is not None:
        raise _invalid(info, op, problems.explain(found, info, Asked()))


def check_reduction(info: GroupInfo, op: str, dtype: torch.dtype, reduce_op: int) -> None:
    """The dtype has the reduce op."""
    if reduce_op not in REDUCE_OPS.get(dtype, ()):
        raise _invalid(info, op, problems.explain_reduction(dtype, reduce_op, 1.0))


def look_closer(name: str, tensor: Any) -> Seen:
    """What the front could not read: address, number of the dtype, hash of its name where it has none, bytes of an
    element, shape and strides."""
    if not isinstance(tensor, Tensor):
        raise _Unfit(
            "TENSOR",
            f"expected {name} to be a torch.Tensor, got {type(tensor).__name__}",
            f"convert {name} with torch.as_tensor",
        )
    if is_lazy(tensor):
        raise _Unfit(
            "TENSOR",
            f"expected {name} to have a shape, got a parameter that is not initialized yet",
            "run the module once with an example batch first",
        )
    if tensor.is_nested:
        raise _Unfit(
            "LAYOUT",
            f"expected {name} to be dense, got a nested tensor ({tensor.layout})",
            f"pass {name}.values() if the tensors in it have the same sizes on every rank, or a dense tensor such as "
            f"torch.nested.to_padded_tensor({name}, 0)",
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise HasOwnDispatch(type(tensor).__name__)
    if tensor.layout is not torch.strided:
        raise _Unfit("LAYOUT", f"expected {name} to be dense, got {tensor.layout}", f"pass {name}.to_dense()")
    if not tensor.is_cpu:
        raise _Unfit(
            "DEVICE",
            f"expected {name} on the CPU, got {tensor.device}",
            f"pass {name}.cpu() and copy the result back",
        )
    if tensor.dtype in _PACKED:
        raise _Unfit(
            "DTYPE",
            f"expected {name} of whole bytes an element, got {tensor.dtype}",
            f"move {name}.int_repr() instead",
        )
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        raise _Unfit(
            "TENSOR",
            "expected tensors that have memory, got one without, as torch.func and vmap pass them to functions",
            "call {op} outside of torch.func's transforms and of vmap",
        ) from None
    code = DTYPE_CODES.get(tensor.dtype, _native.OTHER_DTYPE)
    unlisted = zlib.crc32(str(tensor.dtype).encode()) if code == _native.OTHER_DTYPE else 0
    return address, code, unlisted, tensor.element_size(), tensor.shape, tensor.stride()


def _invalid(info: GroupInfo, op: str, refusal: problems.Refusal) -> InvalidCall:
    code, message, hint = refusal
    return InvalidCall(
        message, code=f"INVALID:{code}", group=info.name, rank=info.rank, op=op, hint=hint.replace("{op}", op)
    )


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.numel() <= 1 or tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride == 0:
            return True
        if stride <= reach:
            # Dimensions that interleave: rare, and only counting tells.
            return _num_addresses(tensor) < tensor.numel()
        reach += stride * (size - 1)
    return False


def _num_addresses(tensor: Tensor) -> int:
    addresses = torch.zeros(1, dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        addresses = (addresses[:, None] + torch.arange(size) * stride).flatten()
    return len(set(addresses.tolist()))


_native.set_torch(
    api=Tensor.__dlpack_c_exchange_api__,
    plain_classes=list(PLAIN_CLASSES),
    is_neg=Tensor.is_neg,
    is_conj=Tensor.is_conj,
    untyped_storage=Tensor.untyped_storage,
    resizable=torch.UntypedStorage.resizable,
    uint8=torch.uint8,
    int8=torch.int8,
    strided=torch.strided,
    look_closer=look_closer,
)


def _lazy_samples(number: int) -> list[tuple[Tensor, bool, bool]]:
    """Tensors, whether each is lazily negated, and whether it is lazily conjugated."""
    dtype = (torch.complex64, torch.complex128)[number % 2]
    plain = torch.full((number % 3, 2 + number), 1.0 + 2.0j, dtype=dtype, device="cpu")
    real = torch.zeros(number, dtype=(torch.float32, torch.int64, torch.bool)[number % 3], device="cpu")
    conjugated = plain.conj()
    # Some are viewed by others and some are not, so that no count of references tells the same.
    views = (conjugated.imag, conjugated.real, conjugated.conj(), plain[1:].conj(), plain[1:].conj().imag, real[1:])
    return [(tensor, tensor.is_neg(), tensor.is_conj()) for tensor in (plain, real, conjugated, *views)]


def learn_lazy_bits() -> bool:
    """Whether the front can tell from memory which tensors are lazy; if not, it asks torch's methods."""
    return _native.learn_lazy_bits([sample for number in range(8) for sample in _lazy_samples(number)])


LEARNED_LAZY_BITS = learn_lazy_bits()
_native.set_memory_look(overlaps_itself=_overlaps_itself, find_shared=find_shared)
