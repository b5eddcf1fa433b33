"""Small types that cross layers: a group's identity, a call, and the blocks of tensors that it moves.

Everything here is made on the hot path, so the classes use slots and do no work that a caller did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import PrefixStore, Store

from phalanx import _native
from phalanx.phrases import describe_ranks

__all__ = [
    "DTYPE_CODES",
    "NO_REDUCE_OP",
    "NO_ROOT",
    "REDUCE_OP_NAMES",
    "REDUCIBLE",
    "Blocks",
    "Call",
    "GroupInfo",
    "PrefixStore",
    "Store",
    "carry_out",
    "describe_ranks",
]

# The numbers of dtypes in the native table, of those that this torch has.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, dtype.name): code for code, dtype in enumerate(_native.DTYPES) if hasattr(torch, dtype.name)
}
# Those that have arithmetic. Torch can copy and compare them, which it can't with all the others.
REDUCIBLE: dict[torch.dtype, int] = {dtype: code for dtype, code in DTYPE_CODES.items() if code < _native.NUM_REDUCIBLE}

# torch's numbering of ReduceOp.RedOpType, which the native core shares.
REDUCE_OP_NAMES = _native.REDUCE_OPS
NO_REDUCE_OP = _native.NO_REDUCE_OP
NO_ROOT = _native.NO_RANK


class GroupInfo:
    """Who a rank is within its group: what checks and errors need to know."""

    __slots__ = ("__weakref__", "_job_ranks", "desc", "engine", "global_ranks", "name", "rank", "size")

    def __init__(self, name: str, rank: int, size: int, global_ranks: Sequence[int] = ()) -> None:
        self.name = name
        # What torch calls a group's description; empty: it has none.
        self.desc = ""
        # The backend that carries out the calls of a guarded group; empty: they are Phalanx' own.
        self.engine = ""
        self.rank = rank
        self.size = size
        # Those of the group's ranks in the default group, as far as torch knows them.
        self.global_ranks = global_ranks
        self._job_ranks: Sequence[int] = ()

    @property
    def job_ranks(self) -> Sequence[int]:
        """The group's ranks as black boxes number the processes of the job."""
        return self._job_ranks or self.members

    @job_ranks.setter
    def job_ranks(self, ranks: Sequence[int]) -> None:
        self._job_ranks = ranks

    @property
    def members(self) -> Sequence[int]:
        """The group's ranks among all ranks, as far as this rank knows."""
        return self.global_ranks or range(self.size)

    def describe(self, *ranks: int, others: int = 0) -> str:
        """Ranks of the group as people know them."""
        listed = ", ".join(map(self._number, ranks)) + (f" and {others} more" if others else "")
        return f"rank {listed}" if len(ranks) + others == 1 else f"ranks {listed}"

    def ranks_text(self) -> str:
        return f"ranks {list(self.members)}"

    def _number(self, rank: int) -> str:
        global_rank = self.global_ranks[rank] if 0 <= rank < len(self.global_ranks) else rank
        return str(rank) if global_rank == rank else f"{rank} (global rank {global_rank})"


class Blocks:
    """Tensors seen as a sequence of blocks, one a rank or one for all.

    Three forms, so that no view is made where the native core only needs addresses:

    - cut evenly (`sizes is None`, `listed` false): each tensor is cut into `num` equal parts; block b is part b of
      every tensor. `num == 1` is the plain case: one block that is all tensors, one after another.
    - cut by sizes (`sizes` given): the one tensor is cut, flat, into parts of these element counts.
    - listed (`listed` true): the tensors are the blocks, block-major: `len(tensors) // num` tensors a block.
    """

    __slots__ = ("listed", "num", "sizes", "tensors")

    def __init__(
        self, tensors: list[torch.Tensor], num: int = 1, *, sizes: list[int] | None = None, listed: bool = False
    ) -> None:
        self.tensors = tensors
        self.num = num
        self.sizes = sizes
        self.listed = listed

    def alias(self) -> Blocks:
        """The same memory in tensor objects of its own."""
        tensors = [tensor.detach() for tensor in self.tensors]
        return Blocks(tensors, self.num, sizes=self.sizes, listed=self.listed)

    def views(self) -> list[list[torch.Tensor]]:
        """The tensors of each block: flat views where the tensor is cut, the tensors themselves where they are listed.

        A tensor that is cut must be contiguous.
        """
        if self.listed:
            each = len(self.tensors) // self.num
            return [self.tensors[b * each : (b + 1) * each] for b in range(self.num)]
        if self.sizes is not None:
            return [[part] for part in torch.split(self.tensors[0].view(-1), self.sizes)]
        if self.num == 1:
            return [self.tensors]
        cut = [tensor.view(self.num, tensor.numel() // self.num) for tensor in self.tensors]
        return [[tensor[b] for tensor in cut] for b in range(self.num)]


class Call:
    """One rank's side of one op.

    `inputs` and `outputs` hold what the op reads and writes on this rank (None where it does neither). In place is
    the same tensor in both. `meaning` is the op's reference semantics: given the calls of all ranks in rank order it
    writes every output.

    The description says what must agree across ranks: op, reduce op, root, dtype, count and layout.
    """

    __slots__ = ("description", "inputs", "meaning", "op", "outputs")

    def __init__(
        self,
        description: _native.Description,
        meaning: Callable[[Sequence[Call]], None],
        inputs: Blocks | None = None,
        outputs: Blocks | None = None,
    ) -> None:
        self.description = description
        self.op = description.op
        self.meaning = meaning
        self.inputs = inputs
        self.outputs = outputs

    def tensors(self) -> list[torch.Tensor]:
        """All that the call reads and writes."""
        both = (self.inputs,) if self.inputs is self.outputs else (self.inputs, self.outputs)
        return [tensor for blocks in both if blocks is not None for tensor in blocks.tensors]

    def with_aliases(self) -> Call:
        """This call, with tensors that keep their memory even where a program gives its own tensor objects other."""
        inputs, outputs = self.inputs, self.outputs
        self.inputs = None if inputs is None else inputs.alias()
        self.outputs = self.inputs if inputs is outputs else None if outputs is None else outputs.alias()
        return self


def carry_out(calls: Sequence[Call]) -> None:
    """The meaning of the calls of all ranks, in rank order. Writes also to tensors that require gradients."""
    with torch.inference_mode():
        calls[0].meaning(calls)
