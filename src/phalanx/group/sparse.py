"""all_reduce of sparse COO tensors, composed of dense calls: every rank gathers all entries and adds them up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.collectives import all_gather
from phalanx.errors import InvalidCall, Mismatch
from phalanx.types import REDUCE_OP_NAMES, Call, GroupInfo

_SUM, _AVG = 0, 1


def all_reduce_sparse(info: GroupInfo, run: Callable[[Call], None], tensor: torch.Tensor, reduce_op: int) -> None:
    """Replaces the tensor by the sum, or average, over all ranks; the result is coalesced and the same everywhere."""
    if tensor.layout is not torch.sparse_coo:
        raise _invalid(info, "INVALID:LAYOUT", f"expected a dense or sparse COO tensor, got {tensor.layout}")
    if reduce_op not in (_SUM, _AVG):
        name = REDUCE_OP_NAMES[reduce_op]
        raise _invalid(info, "INVALID:REDUCE_OP", f"expected SUM or AVG for a sparse tensor, got {name}")
    if not tensor.is_cpu:
        raise _invalid(info, "INVALID:DEVICE", f"expected a CPU tensor, got one on {tensor.device}")
    with torch.no_grad():
        own = tensor.detach().coalesce()
        counts = _gather_counts(info, run, own)
        indices = [own.indices().new_empty((own.sparse_dim(), n)) for n in counts]
        values = [own.values().new_empty((n, *own.shape[own.sparse_dim() :])) for n in counts]
        run(all_gather.build(info, indices, own.indices()))
        run(all_gather.build(info, values, own.values()))
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), own.shape, check_invariants=False)
        total = total.coalesce()
        tensor.copy_(total / info.size if reduce_op == _AVG else total)


def _gather_counts(info: GroupInfo, run: Callable[[Call], None], own: torch.Tensor) -> list[int]:
    """The number of entries on each rank, once all ranks agree on the shape."""
    header = torch.tensor([own._nnz(), own.sparse_dim(), *own.shape])
    lengths = torch.empty(info.size, dtype=torch.int64)
    run(all_gather.build_single(info, lengths, torch.tensor([header.numel()])))
    headers = [torch.empty(int(n), dtype=torch.int64) for n in lengths]
    run(all_gather.build(info, headers, header))
    for rank, theirs in enumerate(headers):
        if theirs[1:].tolist() != header[1:].tolist():
            raise Mismatch(
                f"ranks disagree about the shape of a sparse tensor: {tuple(own.shape)} with {own.sparse_dim()} sparse "
                f"dimensions here, {tuple(theirs[2:].tolist())} with {int(theirs[1])} on rank {rank}",
                code="MISMATCH:SHAPE",
                group=info.name,
                rank=info.rank,
                op="all_reduce",
                hint="give tensors of the same shape and the same number of sparse dimensions on all ranks",
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
