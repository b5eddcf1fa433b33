"""The argument checks that the ops share. Each raises `InvalidCall` and returns what it has read on the way.

Reading an attribute of a tensor costs about 0.1 us, so the plain case is recognised with as few of them as possible
and the diagnosis starts over in a function of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from phalanx.collectives.reduction import PREMUL_SUM, REDUCE_OPS
from phalanx.errors import InvalidCall
from phalanx.memory import find_shared
from phalanx.types import REDUCE_OP_NAMES, GroupInfo

__all__ = [
    "PLAIN_CLASSES",
    "PLAIN_REDUCTIONS",
    "HasOwnDispatch",
    "check_apart",
    "check_list",
    "check_reduction",
    "check_root",
    "check_same_dtype",
    "check_size",
    "check_tensor",
    "fail",
    "hash_layout",
]

_STRIDED = torch.strided
# Other classes may carry out calls themselves.
PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
# Several elements share a byte, so that numel and itemsize do not give the number of bytes.
_PACKED = frozenset({torch.quint4x2, torch.quint2x4})
# (dtype, reduce op) where no factor has to be looked at.
PLAIN_REDUCTIONS = frozenset((dtype, op) for dtype, ops in REDUCE_OPS.items() for op in ops if op != PREMUL_SUM)


class HasOwnDispatch(Exception):  # noqa: N818  # no error: the call takes another way
    """A tensor's class carries out calls itself (`__torch_dispatch__`): it has no memory, or not only memory."""


def fail(info: GroupInfo, op: str, code: str, message: str, hint: str) -> NoReturn:
    raise InvalidCall(message, code=f"INVALID:{code}", group=info.name, rank=info.rank, op=op, hint=hint)


def check_tensor(info: GroupInfo, op: str, name: str, tensor: Tensor, *, written: bool = False) -> int:
    """A dense CPU tensor of any shape and stride; where it is written, no two of its elements share memory.

    Returns the number of elements.
    """
    numel = _plain_numel(tensor)
    return numel if numel >= 0 else _diagnose(info, op, name, tensor, written)


def check_list(
    info: GroupInfo, op: str, name: str, tensors: Any, num: int | None = None, *, written: bool = False
) -> list[int]:
    """A list of `num` tensors, or of at least one. Returns their numbers of elements."""
    if not isinstance(tensors, (list, tuple)):
        fail(
            info,
            op,
            "LIST",
            f"expected {name} to be a list of tensors, got {type(tensors).__name__}",
            f"pass {name} as a list",
        )
    if num is not None and len(tensors) != num:
        fail(
            info,
            op,
            "LIST",
            f"expected {num} tensors in {name}, one a rank, got {len(tensors)}",
            f"give {name} one entry for each of the {num} ranks of the group",
        )
    if not tensors:
        fail(info, op, "LIST", f"expected at least one tensor in {name}, got none", "leave out calls without tensors")
    numels = [_plain_numel(tensor) for tensor in tensors]
    if min(numels) < 0:
        numels = [_diagnose(info, op, f"{name}[{i}]", tensor, written) for i, tensor in enumerate(tensors)]
    return numels


def check_apart(info: GroupInfo, op: str, tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
    """No two of the tensors, which the call writes, share memory. `name` gives the name of each by its place."""
    shared = find_shared(tensors) if len(tensors) > 1 else None
    if shared is not None:
        one, other = map(name, shared)
        fail(
            info,
            op,
            "OVERLAP",
            f"expected outputs that share no memory, got {one} and {other}, which do",
            f"pass {other}.clone() and copy the result back, or give each output memory of its own",
        )


def check_same_dtype(info: GroupInfo, op: str, name: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            where = f"{name}[{i}]" if len(tensors) > 1 else name
            fail(
                info,
                op,
                "DTYPE",
                f"expected {where} of {dtype}, got {tensor.dtype}",
                f"make all tensors of the call {dtype}, for example with {where}.to({dtype})",
            )


def check_size(info: GroupInfo, op: str, name: str, numel: int, expected: int, because: str) -> None:
    if numel != expected:
        fail(
            info,
            op,
            "SIZE",
            f"expected {expected} elements in {name} ({because}), got {numel}",
            f"pass {name} with {expected} elements",
        )


def check_root(info: GroupInfo, op: str, root: int) -> None:
    if type(root) is int and 0 <= root < info.size:
        return
    fail(
        info,
        op,
        "ROOT",
        f"expected a root between 0 and {info.size - 1}, got {root!r}",
        "give the root as a rank within this group (dist.get_group_rank turns a global rank into one)",
    )


def check_reduction(info: GroupInfo, op: str, dtype: torch.dtype, reduce_op: int, factor: float) -> None:
    """The dtype has the reduce op, and PREMUL_SUM has a factor that it can use."""
    if (dtype, reduce_op) in PLAIN_REDUCTIONS:
        return
    if not isinstance(reduce_op, int) or not 0 <= reduce_op < len(REDUCE_OP_NAMES):
        fail(
            info,
            op,
            "REDUCE_OP",
            f"expected a reduce op between 0 and {len(REDUCE_OP_NAMES) - 1}, got {reduce_op!r}",
            f"use one of {', '.join(REDUCE_OP_NAMES)}",
        )
    allowed = REDUCE_OPS.get(dtype)
    if allowed is None:
        fail(
            info,
            op,
            "DTYPE",
            f"expected a dtype that can be reduced, got {dtype}",
            "convert the tensor, for example to torch.float32, or move it with a call that does not reduce",
        )
    if reduce_op not in allowed:
        names = ", ".join(REDUCE_OP_NAMES[i] for i in sorted(allowed))
        fail(
            info,
            op,
            "REDUCE_OP",
            f"expected a reduce op that {dtype} has, got {REDUCE_OP_NAMES[reduce_op]}",
            f"use one of {names}, or convert the tensor",
        )
    if reduce_op == PREMUL_SUM:
        _check_factor(info, op, dtype, factor)


def hash_layout(blocks: Sequence[Sequence[int]], tensors: Sequence[Tensor] = ()) -> int:
    """How the elements of a call are divided: `blocks` has the numels of each block.

    `tensors` are those of one block, where their dtypes may differ. 0 for equal blocks of one tensor each, so that the
    spellings of an op agree with each other. The same in every process.
    """
    first = blocks[0]
    even = len(blocks) == 1 or all(block == first for block in blocks)
    if even and len(first) == 1:
        return 0
    text = repr(first if even else blocks)
    dtypes = [tensor.dtype for tensor in tensors]
    if len(set(dtypes)) > 1:
        text += repr(dtypes)
    return zlib.crc32(text.encode())


def _plain_numel(tensor: Any) -> int:
    """The number of elements, or -1 where a closer look is due."""
    try:
        if (
            type(tensor) in PLAIN_CLASSES
            and tensor.layout is _STRIDED
            and tensor.is_cpu
            and not tensor.is_nested
            and tensor.is_contiguous()
            and tensor.dtype not in _PACKED
        ):
            numel: int = tensor.numel()
            return numel
    except AttributeError:
        pass
    return -1


def _check_factor(info: GroupInfo, op: str, dtype: torch.dtype, factor: float) -> None:
    if not isinstance(factor, (int, float)):
        fail(
            info,
            op,
            "REDUCE_OP",
            f"expected a number as the factor of PREMUL_SUM, got {type(factor).__name__}",
            "pass the factor as a float",
        )
    if dtype.is_floating_point or dtype.is_complex:
        return
    if not (float(factor).is_integer() and -(2**63) <= factor < 2**64):
        fail(
            info,
            op,
            "REDUCE_OP",
            f"expected an integral factor of at most 64 bits for PREMUL_SUM of {dtype}, got {factor}",
            "use an integral factor, or convert the tensor to a float dtype",
        )


def _diagnose(info: GroupInfo, op: str, name: str, tensor: Any, written: bool) -> int:
    if not isinstance(tensor, Tensor):
        fail(
            info,
            op,
            "TENSOR",
            f"expected {name} to be a torch.Tensor, got {type(tensor).__name__}",
            f"convert {name} with torch.as_tensor",
        )
    if is_lazy(tensor):
        fail(
            info,
            op,
            "TENSOR",
            f"expected {name} to have a shape, got a parameter that is not initialized yet",
            "run the module once with an example batch first",
        )
    if tensor.is_nested:
        fail(
            info,
            op,
            "LAYOUT",
            f"expected {name} to be dense, got a nested tensor ({tensor.layout})",
            f"pass {name}.values() if the tensors in it have the same sizes on every rank, or a dense tensor such as "
            f"torch.nested.to_padded_tensor({name}, 0)",
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise HasOwnDispatch(type(tensor).__name__)
    if tensor.layout is not _STRIDED:
        fail(
            info,
            op,
            "LAYOUT",
            f"expected {name} to be dense, got {tensor.layout}",
            f"pass {name}.to_dense()",
        )
    if not tensor.is_cpu:
        fail(
            info,
            op,
            "DEVICE",
            f"expected {name} on the CPU, got {tensor.device}",
            f"pass {name}.cpu() and copy the result back",
        )
    if tensor.dtype in _PACKED:
        fail(
            info,
            op,
            "DTYPE",
            f"expected {name} of whole bytes an element, got {tensor.dtype}",
            f"move {name}.int_repr() instead",
        )
    if written and _overlaps_itself(tensor):
        fail(
            info,
            op,
            "OVERLAP",
            f"expected {name} to have memory for each element, got size {tuple(tensor.shape)} with stride "
            f"{tensor.stride()}",
            f"pass {name}.contiguous() and copy the result back",
        )
    return tensor.numel()


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
