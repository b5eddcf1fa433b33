"""Descriptions of calls whose bytes another backend moves. Nothing of a tensor is read but what it is.

Calls in torch's own spellings are described natively. Python describes the rest as far as it can, and never refuses a
call: what a backend takes is its own business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx import _native
from phalanx.group.torch_compat.options import reduce_op_of
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT

__all__ = ["METHODS", "describe_elsewhere", "describe_roughly"]

# torch's methods for collectives and messages, by the names that the front has for them.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}
_OPS = {op.name for op in _native.OPS}
_DEVICES = {name: number for number, name in enumerate(_native.DEVICES) if name}
_OTHER_DEVICE = 255
_ANY_COUNT = -1


def describe_elsewhere(
    read: _native.MethodReader, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _native.Description | None:
    """A call with tensors or lists that the native front does not know: plain ones that look alike are read instead.

    None where that does not do.
    """
    tensors = list(_tensors((*args, *kwargs.values())))
    if not tensors or any(one.layout is not torch.strided for one in tensors):
        return None
    call = read(*(_alike(one) for one in args), **{name: _alike(value) for name, value in kwargs.items()})
    if not isinstance(call, _native.Description):
        return None
    return call.with_device(_kind(tensors[0])["device"])


def describe_roughly(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _native.Description:
    """What can be told of a call that the native front does not read: sparse tensors, unusual spellings."""
    op = _op_of(METHODS[method])
    traits = _native.TRAITS[op]
    # Who waits synchronously waits for the work.
    flags = _native.ASYNC
    options = next((one for one in (*args, *kwargs.values()) if hasattr(one, "asyncOp")), None)
    tensor = next(_tensors((*args, *kwargs.values())), None)
    if traits.is_message:
        given = [one for one in args[1:] if isinstance(one, int)]
        peer = -1
        if METHODS[method] != "recv_anysource":
            peer = kwargs.get("dstRank", kwargs.get("srcRank", given.pop(0) if given else -1))
        tag = kwargs.get("tag", given[0] if given else 0)
        count = 0 if tensor is None else tensor.numel()
        return _native.Description(op, peer=peer, tag=max(tag, 0), count=count, flags=flags, **_kind(tensor))
    reduce_op = NO_REDUCE_OP
    if traits.reduces:
        asked = getattr(options, "reduceOp", None)
        reduce_op = ReduceOp.SUM.value if asked is None else reduce_op_of(asked)[0]
    root = getattr(options, "rootRank", kwargs.get("root", NO_ROOT)) if traits.rooted else NO_ROOT
    # As torch has it where nobody says.
    flags = _native.ASYNC if getattr(options, "asyncOp", True) else 0
    return _native.Description(op, reduce_op=reduce_op, root=root, count=_ANY_COUNT, flags=flags, **_kind(tensor))


def _op_of(name: str) -> str:
    if name == "recv_anysource":
        return "recv"
    return next(op for op in sorted(_OPS, key=len, reverse=True) if name == op or name.startswith(f"{op}_"))


def _kind(tensor: torch.Tensor | None) -> dict[str, int]:
    if tensor is None:
        return {}
    return {
        "dtype": DTYPE_CODES.get(tensor.dtype, 0),
        "device": _DEVICES.get(tensor.device.type, _OTHER_DEVICE),
    }


def _alike(value: Any) -> Any:
    """Tensors without memory of their own in place of those in `value`."""
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape)
    if isinstance(value, (list, tuple)):
        return [_alike(one) for one in value]
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
