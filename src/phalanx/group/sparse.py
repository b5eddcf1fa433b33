"""all_reduce of sparse COO tensors, composed of dense calls: every rank gathers all entries and adds them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phalanx.collectives import all_gather
from phalanx.collectives.checks import check_reduction
from phalanx.collectives.reduction import AVG, SUM, reduce_in_rank_order
from phalanx.errors import InvalidCall, Mismatch
from phalanx.group.torch_compat.sparse import num_entries
from phalanx.types import REDUCE_OP_NAMES, Call, GroupInfo


def is_sparse(tensor: Any) -> bool:
    """Whether it is a tensor of torch's own that is not dense."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is not torch.strided
        and not tensor.is_nested
    )


def all_reduce_sparse(info: GroupInfo, run: Callable[[Call], None], tensor: torch.Tensor, reduce_op: int) -> None:
    """Replaces the tensor by the sum, or average, over all ranks; the result is coalesced and the same everywhere."""
    if tensor.layout is not torch.sparse_coo:
        raise _invalid(info, "INVALID:LAYOUT", f"expected a dense or sparse COO tensor, got {tensor.layout}")
    if reduce_op not in (SUM, AVG):
        name = REDUCE_OP_NAMES[reduce_op]
        raise _invalid(info, "INVALID:REDUCE_OP", f"expected SUM or AVG for a sparse tensor, got {name}")
    if not tensor.is_cpu:
        raise _invalid(info, "INVALID:DEVICE", f"expected a CPU tensor, got one on {tensor.device}")
    check_reduction(info, "all_reduce", tensor.dtype, reduce_op)
    with torch.no_grad():
        try:
            own = tensor.detach().coalesce()
        except NotImplementedError as error:
            message = f"expected a dtype that torch can coalesce, got {tensor.dtype}"
            raise _invalid(info, "INVALID:DTYPE", message) from error
        counts = _gather_counts(info, run, own)
        indices = [own.indices().new_empty((own.sparse_dim(), n)) for n in counts]
        values = [own.values().new_empty((n, *own.shape[own.sparse_dim() :])) for n in counts]
        run(all_gather.build(info, indices, own.indices()))
        run(all_gather.build(info, values, own.values()))
        tensor.copy_(_total(own.shape, indices, values, reduce_op))


def _total(shape: torch.Size, indices: list[torch.Tensor], values: list[torch.Tensor], reduce_op: int) -> torch.Tensor:
    """The reduction over the union of all entries, by the rules of the dense one; a missing entry is a zero."""
    union, places = torch.unique(torch.cat(indices, 1), dim=1, return_inverse=True)
    dense = []
    for rank_places, rank_values in zip(places.split([len(v) for v in values]), values, strict=True):
        full = rank_values.new_zeros((union.shape[1], *rank_values.shape[1:]))
        full[rank_places] = rank_values
        dense.append(full)
    total = reduce_in_rank_order(dense, reduce_op, [1.0] * len(dense))
    # torch.unique sorts columns as coalesce() does.
    return torch.sparse_coo_tensor(union, total, shape, check_invariants=False, is_coalesced=True)


def _gather_counts(info: GroupInfo, run: Callable[[Call], None], own: torch.Tensor) -> list[int]:
    """The number of entries on each rank, once all ranks agree on dtype and shape."""
    kind = f"{own.dtype} of shape {tuple(own.shape)} with {own.sparse_dim()} sparse dimensions"
    header = torch.tensor([num_entries(own), *kind.encode()])
    lengths = torch.empty(info.size, dtype=torch.int64)
    run(all_gather.build_single(info, lengths, torch.tensor([header.numel()])))
    headers = [torch.empty(int(n), dtype=torch.int64) for n in lengths]
    run(all_gather.build(info, headers, header))
    for rank, theirs in enumerate(headers):
        other = bytes(theirs[1:].tolist()).decode()
        if other != kind:
            raise Mismatch(
                f"ranks disagree about a sparse tensor\n  rank {info.rank}: {kind}\n  rank {rank}: {other}",
                code="MISMATCH:DTYPE" if other.split()[0] != kind.split()[0] else "MISMATCH:SHAPE",
                group=info.name,
                rank=info.rank,
                op="all_reduce",
                hint="give tensors of one dtype and shape, with as many sparse dimensions, on all ranks; this group "
                "can't be used any more",
            )
    return [int(theirs[0]) for theirs in headers]


def _invalid(info: GroupInfo, code: str, message: str) -> InvalidCall:
    return InvalidCall(
        message,
        code=code,
        group=info.name,
        rank=info.rank,
        op="all_reduce",
        hint="make the tensor dense with to_dense(), or change the call",
    )
