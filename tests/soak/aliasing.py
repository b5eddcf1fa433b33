"""Random programs whose tensors share memory: views, strides, overlaps, lists, and calls in flight.

Every rank draws the same program from the seed: collectives on views of a few buffers. The views differ from rank to
rank; only their sizes must agree. A rank keeps a mirror of all ranks' buffers and carries out each call there at once,
with the reference semantics, in the order of the calls. Whenever nothing is in flight its own buffers must equal its
mirror. Outputs of one call never share an element; everything else may share memory with everything else.

Messages have a buffer of their own: a tensor of a message in flight belongs to the message (docs/design.md).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    message,
    reduce,
    reduce_scatter,
    scatter,
)
from phalanx.types import Call, GroupInfo, carry_out

_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float64)
_NUM_BUFFERS = 2
# Elements of a tensor; the long ones are in flight for a while.
_COUNTS = (1, 6, 24, 240, 12_000, 48_000)
_STEPS = 40
_MOST_IN_FLIGHT = 12
_ATTEMPTS = 20
_MOST_REMEMBERED = 40
_SUM, _MAX = 0, 4
_REDUCE_OPS = {_SUM: dist.ReduceOp.SUM, _MAX: dist.ReduceOp.MAX}


@dataclass(frozen=True)
class View:
    """A tensor as a part of a buffer."""

    buffer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    negated: bool = False

    def of(self, buffers: Sequence[Tensor]) -> Tensor:
        view = buffers[self.buffer].as_strided(self.shape, self.stride, self.offset)
        return torch._neg_view(view) if self.negated else view


@dataclass
class Step:
    """One call on all ranks: `inputs[rank]` and `outputs[rank]` are views of that rank's buffers."""

    op: str
    inputs: list[list[View]]
    outputs: list[list[View]]
    root: int = 0
    reduce_op: int = _SUM
    splits: list[list[int]] = field(default_factory=list)  # splits[from][to]

    def describe(self, rank: int) -> str:
        return f"{self.op}({self.inputs[rank]} -> {self.outputs[rank]}, root {self.root})"


class _Memory:
    """Draws views of a rank's buffers, often ones that were used before, or that lie beside or across those."""

    def __init__(self, chance: random.Random, length: int, is_float: bool) -> None:
        self._chance = chance
        self._length = length
        self._float = is_float
        self._used: deque[View] = deque(maxlen=_MOST_REMEMBERED)
        self._places = torch.arange(length)

    def draw(self, numel: int, *, flat: bool = False, written: bool = True) -> View:
        chance = self._chance
        alike = [view for view in self._used if torch.Size(view.shape).numel() == numel and (not flat or _flat(view))]
        if alike and chance.random() < 0.35:
            return chance.choice(alike)
        view = self._new(numel, flat, written)
        if written:
            self._used.append(view)
        return view

    def draw_apart(self, numels: Sequence[int], *, flat: bool = False) -> list[View]:
        """Views to write to: none shares an element with another one."""
        views: list[View] = []
        taken = torch.zeros(_NUM_BUFFERS * self._length, dtype=torch.bool)
        for numel in numels:
            for _ in range(_ATTEMPTS):
                view = self.draw(numel, flat=flat)
                places = self._elements(view)
                if not taken[places].any():
                    break
            else:
                return self._side_by_side(numels)
            taken[places] = True
            views.append(view)
        return views

    def _side_by_side(self, numels: Sequence[int]) -> list[View]:
        views: list[View] = []
        buffer = offset = 0
        for numel in numels:
            if offset + numel > self._length:
                buffer, offset = buffer + 1, 0
            views.append(View(buffer, (numel,), (1,), offset))
            offset += numel
        return views

    def _elements(self, view: View) -> Tensor:
        inside = self._places.as_strided(view.shape, view.stride, view.offset).flatten()
        return inside + view.buffer * self._length

    def _new(self, numel: int, flat: bool, written: bool) -> View:
        chance = self._chance
        shape, stride = _form(chance, numel, flat, written)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        latest = self._length - reach - 1
        if latest < 0:
            return self._new(numel, True, written)
        offset = chance.randrange(latest + 1)
        if self._used and chance.random() < 0.5:
            # Near one that was used.
            offset = min(latest, max(0, chance.choice(self._used).offset + chance.randint(-2, 2)))
        negated = self._float and not flat and chance.random() < 0.2
        return View(chance.randrange(_NUM_BUFFERS), shape, stride, offset, negated)


def _flat(view: View) -> bool:
    return view.stride == (1,) and not view.negated


def _form(chance: random.Random, numel: int, flat: bool, written: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a tensor of so many elements."""
    kind = "flat" if flat or numel == 1 else chance.choice(("flat", "flat", "steps", "columns", "turned", "folded"))
    if not written and chance.random() < 0.1:
        return (numel,), (0,)
    if kind == "flat":
        return (numel,), (1,)
    if kind == "steps":
        return (numel,), (chance.randint(2, 3),)
    rows = chance.choice([n for n in (2, 3, 6) if numel % n == 0])
    width = numel // rows
    pitch = width + chance.choice((0, 1, width, 2 * width))
    if kind == "columns":
        return (rows, width), (pitch, 1)
    if kind == "turned":
        return (width, rows), (1, pitch)
    deep = next((n for n in (3, 2) if width % n == 0), 1)
    return (deep, width // deep, rows), (width // deep, 1, pitch)


class _Program:
    """Draws the steps, the same on every rank."""

    def __init__(self, seed: int, size: int) -> None:
        self.chance = random.Random(f"aliasing {seed} {size}")
        self.size = size
        self.dtype = self.chance.choice(_DTYPES)
        # Few, so that views meet again.
        self.counts = sorted([*self.chance.sample(_COUNTS[:-2], 2), self.chance.choice(_COUNTS[-2:])])
        self.length = max(4, size + 1) * self.counts[-1]
        is_float = self.dtype.is_floating_point
        self.memories = [_Memory(self.chance, self.length, is_float) for _ in range(size)]

    def buffers(self) -> list[list[Tensor]]:
        """Of each rank, with numbers that tell where they come from."""
        numbers = torch.arange(self.length)
        return [
            [(numbers % 97 + 7 * rank + 3 * buffer).to(self.dtype) for buffer in range(_NUM_BUFFERS)]
            for rank in range(self.size)
        ]

    def step(self) -> Step:
        chance, size = self.chance, self.size
        op = chance.choice(
            (
                "all_reduce",
                "all_reduce",
                "all_reduce_coalesced",
                "all_reduce_coalesced",
                "broadcast",
                "broadcast_coalesced",
                "reduce",
                "all_gather",
                "all_gather_single",
                "all_gather_coalesced",
                "gather",
                "scatter",
                "reduce_scatter",
                "reduce_scatter_single",
                "all_to_all",
                "all_to_all_single",
            )
        )
        numel = chance.choice(self.counts)
        root = chance.randrange(size)
        reduce_op = chance.choice((_SUM, _SUM, _MAX))
        ranks = range(size)
        if op == "all_reduce":
            views = [[memory.draw(numel)] for memory in self.memories]
            return Step(op, views, views, reduce_op=reduce_op)
        if op == "reduce":
            views = [[memory.draw(numel)] for memory in self.memories]
            return Step(op, views, [views[r] if r == root else [] for r in ranks], root, reduce_op)
        if op == "broadcast":
            views = [[memory.draw(numel)] for memory in self.memories]
            return Step(op, views, [[] if r == root else views[r] for r in ranks], root)
        if op in ("all_reduce_coalesced", "broadcast_coalesced"):
            numels = [chance.choice(self.counts) for _ in range(chance.randint(2, 3))]
            views = [memory.draw_apart(numels) for memory in self.memories]
            return Step(op, views, views, root, reduce_op)
        if op == "all_gather":
            numels = [numel] * size if chance.random() < 0.5 else [chance.choice(self.counts) for _ in ranks]
            inputs = [[memory.draw(numels[r], written=False)] for r, memory in enumerate(self.memories)]
            return Step(op, inputs, [memory.draw_apart(numels) for memory in self.memories])
        if op == "all_gather_coalesced":
            numels = [chance.choice(self.counts) for _ in range(2)]
            inputs = [[memory.draw(n, written=False) for n in numels] for memory in self.memories]
            return Step(op, inputs, [memory.draw_apart(numels * size) for memory in self.memories])
        if op == "all_gather_single":
            inputs = [[memory.draw(numel, written=False)] for memory in self.memories]
            return Step(op, inputs, [[memory.draw(numel * size)] for memory in self.memories])
        if op == "gather":
            inputs = [[memory.draw(numel, written=False)] for memory in self.memories]
            outputs = [self.memories[r].draw_apart([numel] * size) if r == root else [] for r in ranks]
            return Step(op, inputs, outputs, root)
        if op == "scatter":
            inputs = [self._drawn(r, [numel] * size) if r == root else [] for r in ranks]
            return Step(op, inputs, [[memory.draw(numel)] for memory in self.memories], root)
        if op == "reduce_scatter":
            inputs = [self._drawn(r, [numel] * size) for r in ranks]
            return Step(op, inputs, [[memory.draw(numel)] for memory in self.memories], reduce_op=reduce_op)
        if op == "reduce_scatter_single":
            inputs = [[memory.draw(numel * size, written=False)] for memory in self.memories]
            return Step(op, inputs, [[memory.draw(numel)] for memory in self.memories], reduce_op=reduce_op)
        splits = [[chance.choice(self.counts) for _ in ranks] for _ in ranks]
        if op == "all_to_all":
            inputs = [self._drawn(r, splits[r]) for r in ranks]
            return Step(op, inputs, [self.memories[r].draw_apart([row[r] for row in splits]) for r in ranks])
        # Cut along the first dimension: any form of one dimension will do.
        inputs = [[self.memories[r].draw(sum(splits[r]), flat=True)] for r in ranks]
        outputs = [[self.memories[r].draw(sum(row[r] for row in splits), flat=True)] for r in ranks]
        return Step(op, inputs, outputs, splits=splits)

    def _drawn(self, rank: int, numels: Sequence[int]) -> list[View]:
        return [self.memories[rank].draw(numel, written=False) for numel in numels]


def _meaning(step: Step, mirror: Sequence[Sequence[Tensor]]) -> None:
    """Carries out the step on the mirror."""
    size = len(mirror)
    calls: list[Call] = []
    for rank in range(size):
        info = GroupInfo("mirror", rank, size)
        inputs = [view.of(mirror[rank]) for view in step.inputs[rank]]
        outputs = [view.of(mirror[rank]) for view in step.outputs[rank]]
        calls.append(_BUILD[step.op](info, step, inputs, outputs))
    carry_out(calls)


_Built = Callable[[GroupInfo, Step, list[Tensor], list[Tensor]], Call]
_BUILD: dict[str, _Built] = {
    "all_reduce": lambda i, s, a, b: all_reduce.build(i, b[0], s.reduce_op),
    "all_reduce_coalesced": lambda i, s, a, b: all_reduce.build_coalesced(i, b, s.reduce_op),
    "broadcast": lambda i, s, a, b: broadcast.build(i, a[0], s.root),
    "broadcast_coalesced": lambda i, s, a, b: broadcast.build_coalesced(i, a, s.root),
    "reduce": lambda i, s, a, b: reduce.build(i, a[0], s.root, s.reduce_op),
    "all_gather": lambda i, s, a, b: all_gather.build(i, b, a[0]),
    "all_gather_single": lambda i, s, a, b: all_gather.build_single(i, b[0], a[0]),
    "all_gather_coalesced": lambda i, s, a, b: all_gather.build_coalesced(i, _rows(i, a, b), a),
    "gather": lambda i, s, a, b: gather.build(i, b or None, a[0], s.root),
    "scatter": lambda i, s, a, b: scatter.build(i, b[0], a or None, s.root),
    "reduce_scatter": lambda i, s, a, b: reduce_scatter.build(i, b[0], a, s.reduce_op),
    "reduce_scatter_single": lambda i, s, a, b: reduce_scatter.build_single(i, b[0], a[0], s.reduce_op),
    "all_to_all": lambda i, s, a, b: all_to_all.build(i, b, a),
    "all_to_all_single": lambda i, s, a, b: all_to_all.build_single(
        i, b[0], a[0], [row[i.rank] for row in s.splits], s.splits[i.rank]
    ),
}


def _rows(info: GroupInfo, inputs: Sequence[Tensor], outputs: list[Tensor]) -> list[list[Tensor]]:
    each = len(inputs)
    return [outputs[p * each : (p + 1) * each] for p in range(info.size)]


def _make(step: Step, group: Any, rank: int, buffers: Sequence[Tensor], is_async: bool) -> Any:
    """Makes the call; a Work where it may be in flight."""
    info = GroupInfo("", rank, dist.get_world_size())
    inputs = [view.of(buffers) for view in step.inputs[rank]]
    outputs = [view.of(buffers) for view in step.outputs[rank]]
    op: Any = _REDUCE_OPS[step.reduce_op]
    kwargs: dict[str, Any] = {"async_op": is_async}
    match step.op:
        case "all_reduce":
            return dist.all_reduce(outputs[0], op, **kwargs)
        case "all_reduce_coalesced":
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp, options.asyncOp = op, is_async
            return group.allreduce_coalesced(outputs, options)
        case "broadcast":
            return dist.broadcast(inputs[0], step.root, **kwargs)
        case "broadcast_coalesced":
            # One call a tensor; the spelling for several goes through torch's C++.
            works = [dist.broadcast(tensor, step.root, **kwargs) for tensor in inputs]
            return works[-1]
        case "reduce":
            return dist.reduce(inputs[0], step.root, op, **kwargs)
        case "all_gather":
            return dist.all_gather(outputs, inputs[0], **kwargs)
        case "all_gather_single":
            return dist.all_gather_single(outputs[0], inputs[0], **kwargs)
        case "all_gather_coalesced":
            return group.allgather_coalesced(_rows(info, inputs, outputs), inputs)
        case "gather":
            return dist.gather(inputs[0], outputs or None, step.root, **kwargs)
        case "scatter":
            return dist.scatter(outputs[0], inputs or None, step.root, **kwargs)
        case "reduce_scatter":
            return dist.reduce_scatter(outputs[0], inputs, op, **kwargs)
        case "reduce_scatter_single":
            return dist.reduce_scatter_single(outputs[0], inputs[0], op, **kwargs)
        case "all_to_all":
            return dist.all_to_all(outputs, inputs, **kwargs)
    splits = [row[rank] for row in step.splits], step.splits[rank]
    return dist.all_to_all_single(outputs[0], inputs[0], *splits, **kwargs)


class _Messages:
    """A message to the next rank and one from the rank before, through views of a buffer of their own."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._mirror = [torch.arange(200.0) + 1000 * r for r in range(size)]
        self._buffer = self._mirror[rank].clone()
        self._works: list[Any] = []

    def start(self, chance: random.Random) -> None:
        self.end()
        step, start = chance.randint(1, 3), chance.randrange(10)
        sent, received = slice(start, start + 30 * step, step), slice(100 + start, 100 + start + 30 * step, step)
        after = [mirror.clone() for mirror in self._mirror]
        for rank in range(self._size):
            message.meaning(self._mirror[rank][sent], after[(rank + 1) % self._size][received])
        self._mirror = after
        before = (self._rank - 1) % self._size
        self._works = [
            dist.irecv(self._buffer[received], before),
            dist.isend(self._buffer[sent], (self._rank + 1) % self._size),
        ]

    def end(self) -> bool:
        """Whether the buffer is right when all messages have ended."""
        while self._works:
            self._works.pop().wait()
        return torch.equal(self._buffer, self._mirror[self._rank])


def play(seed: int, steps: int = _STEPS) -> str:
    """Runs a program on the default group. Says what was wrong on this rank, or nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    program, group = _Program(seed, size), dist.group.WORLD
    chance, own = program.chance, random.Random(f"{seed} {rank}")
    mirror, buffers = program.buffers(), program.buffers()[rank]
    messages = _Messages(rank, size)
    works: list[Any] = []
    since: list[Step] = []
    wrong = ""
    for number in range(steps):
        step = program.step()
        since.append(step)
        _meaning(step, mirror)
        if own.random() < 0.2:
            # Late, so that the others' calls are in flight for a while.
            torch.rand(own.randint(10, 150), 150) @ torch.rand(150, 150)
        works.append(_make(step, group, rank, buffers, chance.random() < 0.8))
        works = [work for work in works if work is not None]
        if chance.random() < 0.1:
            messages.start(chance)
        if works and own.random() < 0.15:
            works.pop(own.randrange(len(works))).wait()
        drops = chance.random() < 0.1
        if drops:
            works.clear()
        if drops or chance.random() < 0.12 or len(since) > _MOST_IN_FLIGHT or number == steps - 1:
            own.shuffle(works)
            while works:
                works.pop().wait()
            # All that was dropped is back when a barrier is through.
            dist.barrier()
            for buffer, expected in zip(buffers, mirror[rank], strict=True):
                if not wrong and buffer.view(torch.uint8).ne(expected.view(torch.uint8)).any():
                    places = torch.nonzero(buffer != expected).flatten()
                    lines = [f"    {n}: {one.describe(rank)}" for n, one in enumerate(since, number + 1 - len(since))]
                    wrong = "\n".join(
                        [
                            f"seed {seed}, {size} ranks, {program.dtype}, after step {number}: rank {rank} has "
                            f"{len(places)} wrong elements, from {places[0].item()} to {places[-1].item()}, since:",
                            *lines,
                        ]
                    )
            since = []
    if not messages.end():
        wrong = wrong or f"seed {seed}, {size} ranks: rank {rank} received a wrong message"
    return wrong


def play_all(seeds: Sequence[int], on_end: Callable[[int], None] = lambda seed: None) -> list[str]:
    """What was wrong on this rank."""
    found = []
    for seed in seeds:
        found.append(play(seed))
        on_end(seed)
    return [text for text in found if text]
