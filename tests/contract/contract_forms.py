"""Every spelling of every op: how its arguments are made, how torch.distributed is called, which Call it stands for.

A form has three functions. `make` gives a rank's arguments, nested lists of tensors that are the same in every process;
`call` starts the op on them and returns what has to be waited for, or None; `build` makes the call whose meaning is the
oracle. All tensors of the arguments are compared afterwards, so that inputs are seen to stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from contract_data import arrange, values
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx import collectives
from phalanx.types import REDUCE_OP_NAMES, REDUCIBLE, GroupInfo

__all__ = ["FORMS", "AllToAllSplit", "Case", "Form"]

# Forms pass their arguments on as lists, whose length no type tells.
dist: Any = torch.distributed
ops: Any = collectives
PREMUL_SUM = 8
_OPS = [getattr(dist.ReduceOp, name) for name in REDUCE_OP_NAMES[:PREMUL_SUM]]


@dataclass(frozen=True)
class Case:
    form: str
    dtype: torch.dtype
    count: int
    reduce_op: int = -1
    root: int = -1
    into: str = "flat"  # arrangement of outputs
    of: str = "flat"  # arrangement of inputs
    in_place: bool = False
    async_op: bool = False
    by_method: bool = False
    inference: bool = False
    grad: bool = False
    seed: int = 0

    def meaning_key(self, size: int) -> str:
        """A file name, the same for cases of the same meaning: how a case is called does not change what it means."""
        return (
            f"{self.form} {self.dtype} {self.count} {self.reduce_op} {self.root} {self.into} {self.of} "
            f"{self.in_place:d}{self.inference:d}{self.grad:d} {self.seed} of {size}"
        )

    def tensor(self, count: int, rank: int, slot: int, arrangement: str) -> Tensor:
        tensor = arrange(values(self.dtype, count, lane=rank, seed=self.seed + 31 * slot), arrangement)
        return tensor.requires_grad_() if self.grad else tensor

    def input(self, rank: int, count: int, slot: int = 0) -> Tensor:
        return self.tensor(count, rank, slot, self.of)

    def output(self, rank: int, count: int, slot: int = 0) -> Tensor:
        return self.tensor(count, rank, 100 + slot, self.into)

    def factor(self, rank: int) -> float:
        whole = not (self.dtype.is_floating_point or self.dtype.is_complex)
        return float(3 - 2 * rank) if whole else 0.3 + 1.7 * rank

    def op(self, rank: int) -> Any:
        if self.reduce_op == PREMUL_SUM:
            return dist._make_nccl_premul_sum(self.factor(rank))
        return _OPS[self.reduce_op]


@dataclass(frozen=True)
class Target:
    """Where `call` goes. `group` is None for the default group."""

    group: ProcessGroup | None
    rank: int
    size: int

    def root(self, name: str, root: int) -> dict[str, int]:
        return {name: root} if self.group is None else {f"group_{name}": root}


def _uneven(count: int, size: int) -> list[int]:
    return [count, 0, count // 2, count + 3][:size]


def _several(count: int) -> list[int]:
    return [count, count // 3, min(count, 1)]


class Form:
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        raise NotImplementedError

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        raise NotImplementedError

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        raise NotImplementedError


class AllReduce(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        return [case.input(rank, case.count)]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_reduce(*args, op=case.op(to.rank), group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_reduce.build(info, *args, case.reduce_op, case.factor(info.rank))


class AllReduceCoalesced(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        return [[case.input(rank, count, slot) for slot, count in enumerate(_several(case.count))]]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_reduce_coalesced(*args, op=case.op(to.rank), group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_reduce.build_coalesced(info, *args, case.reduce_op, case.factor(info.rank))


class AllReduceManaged(AllReduceCoalesced):
    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        with dist._coalescing_manager(group=to.group, async_ops=case.async_op) as manager:
            for tensor in args[0]:
                dist.all_reduce(tensor, op=case.op(to.rank), group=to.group)
        return manager if case.async_op else None


class Reduce(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        return [case.input(rank, case.count)]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        root = to.root("dst", case.root)
        return dist.reduce(*args, op=case.op(to.rank), group=to.group, async_op=case.async_op, **root)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.reduce.build(info, *args, case.root, case.reduce_op, case.factor(info.rank))


class Broadcast(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        return [case.input(rank, case.count) if rank == case.root else case.output(rank, case.count)]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.broadcast(*args, group=to.group, async_op=case.async_op, **to.root("src", case.root))

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.broadcast.build(info, *args, case.root)


class AllGather(Form):
    def sizes(self, case: Case, size: int) -> list[int]:
        return [case.count] * size

    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        outputs = [case.output(rank, count, slot) for slot, count in enumerate(self.sizes(case, size))]
        return [outputs, outputs[rank] if case.in_place else case.input(rank, outputs[rank].numel())]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_gather(*args, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_gather.build(info, *args)


class AllGatherUneven(AllGather):
    def sizes(self, case: Case, size: int) -> list[int]:
        return _uneven(case.count, size)


class AllGatherSingle(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        if case.in_place:
            output = values(case.dtype, size * case.count, rank, case.seed)
            return [output, output[rank * case.count : (rank + 1) * case.count]]
        return [case.output(rank, size * case.count), case.input(rank, case.count)]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        function = dist.all_gather_single if case.seed % 2 else dist.all_gather_into_tensor
        return function(*args, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_gather.build_single(info, *args)


class AllGatherStacked(AllGatherSingle):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        tensor = case.input(rank, case.count)
        return [case.tensor(size * case.count, rank, 100, "flat").view(size, *tensor.shape), tensor]


class AllGatherCoalesced(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        counts = list(enumerate(_several(case.count)))
        outputs = [[case.output(rank, count, 10 * p + slot) for slot, count in counts] for p in range(size)]
        return [outputs, [case.input(rank, count, slot) for slot, count in counts]]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_gather_coalesced(*args, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_gather.build_coalesced(info, *args)


class AllGatherManaged(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        counts = list(enumerate(_several(case.count)))
        outputs = [case.output(rank, size * count, slot) for slot, count in counts]
        return [outputs, [case.input(rank, count, slot) for slot, count in counts]]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        with dist._coalescing_manager(group=to.group, async_ops=case.async_op) as manager:
            for output, tensor in zip(*args, strict=True):
                dist.all_gather_single(output, tensor, group=to.group)
        return manager if case.async_op else None

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_gather.build_single_coalesced(info, *args)


class Gather(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        tensor = case.input(rank, case.count)
        if rank != case.root:
            return [tensor, None]
        outputs = [case.output(rank, case.count, slot) for slot in range(size)]
        return [outputs[rank] if case.in_place else tensor, outputs]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.gather(*args, group=to.group, async_op=case.async_op, **to.root("dst", case.root))

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.gather.build(info, args[1], args[0], case.root)


class Scatter(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        output = case.output(rank, case.count)
        if rank != case.root:
            return [output, None]
        inputs = [case.input(rank, case.count, slot) for slot in range(size)]
        return [inputs[rank] if case.in_place else output, inputs]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.scatter(*args, group=to.group, async_op=case.async_op, **to.root("src", case.root))

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.scatter.build(info, *args, case.root)


class ReduceScatter(Form):
    def sizes(self, case: Case, size: int) -> list[int]:
        return [case.count] * size

    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        inputs = [case.input(rank, count, slot) for slot, count in enumerate(self.sizes(case, size))]
        return [inputs[rank] if case.in_place else case.output(rank, inputs[rank].numel()), inputs]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.reduce_scatter(*args, op=case.op(to.rank), group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.reduce_scatter.build(info, *args, case.reduce_op, case.factor(info.rank))


class ReduceScatterUneven(ReduceScatter):
    def sizes(self, case: Case, size: int) -> list[int]:
        return _uneven(case.count, size)


class ReduceScatterSingle(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        if case.in_place:
            tensor = values(case.dtype, size * case.count, rank, case.seed)
            return [tensor[rank * case.count : (rank + 1) * case.count], tensor]
        return [case.output(rank, case.count), case.input(rank, size * case.count)]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        function = dist.reduce_scatter_single if case.seed % 2 else dist.reduce_scatter_tensor
        return function(*args, op=case.op(to.rank), group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.reduce_scatter.build_single(info, *args, case.reduce_op, case.factor(info.rank))


class ReduceScatterManaged(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        counts = list(enumerate(_several(case.count)))
        outputs = [case.output(rank, count, slot) for slot, count in counts]
        return [outputs, [case.input(rank, size * count, slot) for slot, count in counts]]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        with dist._coalescing_manager(group=to.group, async_ops=case.async_op) as manager:
            for output, tensor in zip(*args, strict=True):
                dist.reduce_scatter_single(output, tensor, op=case.op(to.rank), group=to.group)
        return manager if case.async_op else None

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.reduce_scatter.build_single_coalesced(info, *args, case.reduce_op, case.factor(info.rank))


def _exchanged(count: int, source: int, target: int) -> int:
    """Elements from source to target: different for each pair and direction, none for some."""
    return max(0, count + 5 * source - 3 * target) if (source + 2 * target) % 3 else 0


class AllToAll(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        return [
            [case.output(rank, _exchanged(case.count, p, rank), p) for p in range(size)],
            [case.input(rank, _exchanged(case.count, rank, p), p) for p in range(size)],
        ]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_to_all(*args, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_to_all.build(info, *args)


def _rows(flat: Any, length: int) -> Tensor:
    rows: Tensor = flat.unflatten(0, (-1, length))
    return rows


class AllToAllSingle(Form):
    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        # The rows of a matrix would not be those that the ranks can share.
        flat_only = {"matrix": "flat", "transposed": "strided"}
        of, into = flat_only.get(case.of, case.of), flat_only.get(case.into, case.into)
        count = size * case.count
        output, tensor = case.tensor(count, rank, 100, into), case.tensor(count, rank, 0, of)
        return [output, tensor] if case.seed % 2 else [_rows(output, case.count or 1), tensor]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        return dist.all_to_all_single(*args, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_to_all.build_single(info, *args, [], [])


class AllToAllSplit(Form):
    def splits(self, case: Case, rank: int, size: int) -> tuple[list[int], list[int]]:
        """Rows that come and rows that go."""
        return (
            [_exchanged(case.count, p, rank) for p in range(size)],
            [_exchanged(case.count, rank, p) for p in range(size)],
        )

    def make(self, case: Case, rank: int, size: int) -> list[Any]:
        come, go = (sum(splits) for splits in self.splits(case, rank, size))
        output, tensor = case.tensor(2 * come, rank, 100, "flat"), case.tensor(2 * go, rank, 0, "flat")
        if case.of == "transposed" and case.dtype in REDUCIBLE:
            tensor = tensor.detach().view(2, go).t()
        else:
            tensor = tensor.view(go, 2)
        return [output.view(come, 2), tensor]

    def call(self, case: Case, to: Target, args: list[Any]) -> Any:
        splits = self.splits(case, to.rank, to.size)
        return dist.all_to_all_single(*args, *splits, group=to.group, async_op=case.async_op)

    def build(self, case: Case, info: GroupInfo, args: list[Any]) -> Any:
        return ops.all_to_all.build_single(info, *args, *self.splits(case, info.rank, info.size))


FORMS: dict[str, Form] = {
    "all_reduce": AllReduce(),
    "all_reduce coalesced": AllReduceCoalesced(),
    "all_reduce managed": AllReduceManaged(),
    "reduce": Reduce(),
    "broadcast": Broadcast(),
    "all_gather": AllGather(),
    "all_gather uneven": AllGatherUneven(),
    "all_gather single": AllGatherSingle(),
    "all_gather stacked": AllGatherStacked(),
    "all_gather coalesced": AllGatherCoalesced(),
    "all_gather managed": AllGatherManaged(),
    "gather": Gather(),
    "scatter": Scatter(),
    "reduce_scatter": ReduceScatter(),
    "reduce_scatter uneven": ReduceScatterUneven(),
    "reduce_scatter single": ReduceScatterSingle(),
    "reduce_scatter managed": ReduceScatterManaged(),
    "all_to_all": AllToAll(),
    "all_to_all single": AllToAllSingle(),
    "all_to_all split": AllToAllSplit(),
}
