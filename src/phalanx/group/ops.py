"""Every op as a method of the group, under the public name that it has in torch.distributed.

Positional arguments are those of torch's functions, without the group. torch's own groups take tensors in lists, and an
options object in place of a reduce op, a root or a timeout. The methods accept these forms, too, and the argument names
of torch's groups, which come last. Ranks are ranks of this group.

Every method makes one call and returns its Work. With `async_op=False` it waits for the call first.
"""

# An argument may come in several forms, of which one becomes the usual one.
# mypy: disable-error-code="assignment, list-item"

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import torch
from torch.distributed import ReduceOp

from phalanx.collectives import message
from phalanx.collectives.checks import fail
from phalanx.collectives.numbers import whole, whole_list
from phalanx.group import dispatching
from phalanx.group.carrying import Carrier
from phalanx.group.refusing import collective, quick
from phalanx.group.sparse import is_sparse
from phalanx.group.spellings import (
    OneList,
    OneTensor,
    Options,
    Reduction,
    check_root_tensor,
    gathering_of,
    given,
    only,
    only_list,
    reduction_of,
    root_of,
    timing_of,
)
from phalanx.group.timeouts import seconds_of
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.group.work import Work

__all__ = ["GroupOps"]

Tensor = torch.Tensor
SUM = ReduceOp.SUM
_SYNCHRONOUS = SimpleNamespace(asyncOp=False)


@not_traced
class GroupOps(Carrier):
    """A method for every op. The class that has it as a base carries out the calls."""

    # Reductions.

    @quick
    @collective
    def all_reduce(
        self,
        tensor: OneTensor | None = None,
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        tensors: OneTensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Reduces the tensor over all ranks, in place on every rank."""
        opts = op if opts is None else opts
        reduce_op, factor, timeout = reduction_of(self._info, "all_reduce", opts, timeout)
        tensor = only(self._info, "all_reduce", tensors if tensor is None else tensor)
        if is_sparse(tensor):
            return self._run_sparse(tensor, reduce_op, timeout)
        args = tensor, reduce_op, factor
        return self._run(dispatching.ALL_REDUCE, args, [tensor], timeout, opts, async_op)

    @quick
    @collective
    def all_reduce_coalesced(
        self,
        tensors: list[Tensor],
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        opts: Options | None = None,
    ) -> Work:
        """`all_reduce` of several tensors of one dtype in one call."""
        opts = op if opts is None else opts
        reduce_op, factor, timeout = reduction_of(self._info, "all_reduce", opts, timeout)
        args = tensors, reduce_op, factor
        return self._run(dispatching.ALL_REDUCE_COALESCED, args, tensors, timeout, opts, async_op)

    @quick
    @collective
    def reduce(
        self,
        tensor: OneTensor | None = None,
        dst: int | Options | None = None,
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        async_op: bool = True,
        tensors: OneTensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Reduces the tensor over all ranks, in place on the root, which is rank `dst` or `root`; by default 0."""
        root, timeout, opts = root_of(self._info, "reduce", dst, root, opts, timeout)
        reduce_op, factor, timeout = reduction_of(self._info, "reduce", op if opts is None else opts, timeout)
        check_root_tensor(self._info, "reduce", opts)
        tensor = only(self._info, "reduce", given(tensor, tensors))
        args = tensor, root, reduce_op, factor
        return self._run(dispatching.REDUCE, args, [tensor], timeout, opts, async_op)

    @quick
    @collective
    def reduce_scatter(
        self,
        output: OneTensor | None = None,
        input_list: OneList | None = None,
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        output_tensors: OneTensor | None = None,
        input_tensors: OneList | None = None,
        input_tensor: list[Tensor] | None = None,
        input: list[Tensor] | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Reduces `input_list`, one tensor for each rank, over all ranks: rank r gets tensor r, in `output`."""
        opts = op if opts is None else opts
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, timeout)
        output = only(self._info, "reduce_scatter", given(output, output_tensors))
        listed = given(input_list, input_tensors, input_tensor, input)
        inputs = only_list(self._info, "reduce_scatter", "input_tensors", listed)
        args = output, inputs, reduce_op, factor
        return self._run(dispatching.REDUCE_SCATTER, args, [output], timeout, opts, async_op)

    @quick
    @collective
    def reduce_scatter_single(
        self,
        output: Tensor | None = None,
        input: Tensor | None = None,
        op: Reduction = SUM,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        outputTensor: Tensor | None = None,
        inputTensor: Tensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Reduces `input` over all ranks and cuts the result into one part per rank: rank r gets part r."""
        opts = op if opts is None else opts
        reduce_op, factor, timeout = reduction_of(self._info, "reduce_scatter", opts, timeout)
        output = outputTensor if output is None else output
        args = output, inputTensor if input is None else input, reduce_op, factor
        return self._run(dispatching.REDUCE_SCATTER_SINGLE, args, [output], timeout, opts, async_op)

    # Moves.

    @quick
    @collective
    def broadcast(
        self,
        tensor: OneTensor | None = None,
        src: int | Options | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        async_op: bool = True,
        tensors: OneTensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Copies the tensor of the root, which is rank `src` or `root` (by default 0), to all ranks."""
        root, timeout, opts = root_of(self._info, "broadcast", src, root, opts, timeout)
        check_root_tensor(self._info, "broadcast", opts)
        tensor = only(self._info, "broadcast", given(tensor, tensors))
        return self._run(dispatching.BROADCAST, (tensor, root), [tensor], timeout, opts, async_op)

    @quick
    @collective
    def all_gather(
        self,
        tensor_list: OneList | None = None,
        tensor: OneTensor | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output_tensors: OneList | None = None,
        input_tensors: OneTensor | None = None,
        input_tensor: Tensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Copies the tensor of rank r to `tensor_list[r]`, on all ranks. The sizes of ranks may differ."""
        timeout, opts = timing_of(timeout, opts)
        tensor = only(self._info, "all_gather", given(tensor, input_tensors, input_tensor))
        outputs = only_list(self._info, "all_gather", "output_tensors", given(tensor_list, output_tensors))
        return self._run(dispatching.ALL_GATHER, (outputs, tensor), outputs, timeout, opts, async_op)

    @quick
    @collective
    def all_gather_single(
        self,
        output_tensor: Tensor | None = None,
        input_tensor: Tensor | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output: Tensor | None = None,
        input: Tensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Gathers the inputs of all ranks in every output, in rank order: concatenated, or stacked."""
        timeout, opts = timing_of(timeout, opts)
        output = output if output_tensor is None else output_tensor
        args = output, input if input_tensor is None else input_tensor
        return self._run(dispatching.ALL_GATHER_SINGLE, args, [output], timeout, opts, async_op)

    @quick
    @collective
    def all_gather_coalesced(
        self,
        output_tensor_lists: list[list[Tensor]] | None = None,
        input_tensor_list: list[Tensor] | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output_lists: list[list[Tensor]] | None = None,
        input_list: list[Tensor] | None = None,
        opts: Options | None = None,
    ) -> Work:
        """`all_gather` of several tensors in one call: those of rank r come to `output_tensor_lists[r]`."""
        timeout, opts = timing_of(timeout, opts)
        outputs = given(output_tensor_lists, output_lists)
        args, results = (outputs, given(input_tensor_list, input_list)), dispatching.tensors_of(outputs)
        return self._run(dispatching.ALL_GATHER_COALESCED, args, results, timeout, opts, async_op)

    @quick
    @collective
    def gather(
        self,
        tensor: Tensor | OneList | None = None,
        gather_list: list[Tensor] | OneTensor | None = None,
        dst: int | Options | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        async_op: bool = True,
        output_tensors: OneList | None = None,
        input_tensors: OneTensor | None = None,
        input_tensor: Tensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Copies the tensor of rank r to `gather_list[r]` of the root, which is rank `dst` or `root`; by default 0.

        Ranks that are not the root pass no list. torch's own groups take the list first, and the tensor second.
        """
        root, timeout, opts = root_of(self._info, "gather", dst, root, opts, timeout)
        tensor, outputs = gathering_of(tensor, gather_list, input_tensors, input_tensor, output_tensors)
        tensor = only(self._info, "gather", tensor)
        outputs = only_list(self._info, "gather", "output_tensors", outputs)
        args = outputs if outputs or root == self._info.rank else None, tensor, root
        return self._run(dispatching.GATHER, args, outputs, timeout, opts, async_op)

    @quick
    @collective
    def scatter(
        self,
        tensor: OneTensor | None = None,
        scatter_list: OneList | None = None,
        src: int | Options | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
        async_op: bool = True,
        output_tensors: OneTensor | None = None,
        output_tensor: Tensor | None = None,
        input_tensors: OneList | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Copies `scatter_list[r]` of the root, which is rank `src` or `root` (by default 0), to the tensor of rank r.

        Ranks that are not the root pass no list.
        """
        root, timeout, opts = root_of(self._info, "scatter", src, root, opts, timeout)
        output = only(self._info, "scatter", given(tensor, output_tensors, output_tensor))
        listed = given(scatter_list, input_tensors, [])
        inputs = only_list(self._info, "scatter", "input_tensors", listed)
        args = output, inputs if inputs or root == self._info.rank else None, root
        return self._run(dispatching.SCATTER, args, [output], timeout, opts, async_op)

    @quick
    @collective
    def all_to_all(
        self,
        output_tensor_list: list[Tensor] | None = None,
        input_tensor_list: list[Tensor] | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output: list[Tensor] | None = None,
        input: list[Tensor] | None = None,
        output_tensors: list[Tensor] | None = None,
        input_tensors: list[Tensor] | None = None,
        output_tensor: list[Tensor] | None = None,
        input_tensor: list[Tensor] | None = None,
        opts: Options | None = None,
    ) -> Work:
        """Sends `input_tensor_list[r]` to rank r, and receives what rank r sends here in `output_tensor_list[r]`."""
        timeout, opts = timing_of(timeout, opts)
        outputs = given(output_tensor_list, output, output_tensors, output_tensor)
        args = outputs, given(input_tensor_list, input, input_tensors, input_tensor)
        return self._run(dispatching.ALL_TO_ALL, args, outputs, timeout, opts, async_op)

    @quick
    @collective
    def all_to_all_single(
        self,
        output: Tensor | None = None,
        input: Tensor | None = None,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        timeout: timedelta | Options | None = None,
        *,
        async_op: bool = True,
        output_tensor: Tensor | None = None,
        input_tensor: Tensor | None = None,
        opts: Options | None = None,
    ) -> Work:
        """`all_to_all` of the parts of one tensor. Splits count rows of it; without them all parts are equal."""
        timeout, opts = timing_of(timeout, opts)
        output = output_tensor if output is None else output
        received = whole_list(self._info, "all_to_all", "output_split_sizes", output_split_sizes)
        sent = whole_list(self._info, "all_to_all", "input_split_sizes", input_split_sizes)
        args = output, input_tensor if input is None else input, received, sent
        return self._run(dispatching.ALL_TO_ALL_SINGLE, args, [output], timeout, opts, async_op)

    # Barriers.

    @quick
    @collective
    def barrier(
        self, timeout: timedelta | Options | None = None, *, async_op: bool = True, opts: Options | None = None
    ) -> Work:
        """Ends when all ranks have called it."""
        timeout, opts = timing_of(timeout, opts)
        return self._run(dispatching.BARRIER, (), [], timeout, opts, async_op)

    @collective
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that waits, and names all ranks that did not come, on every rank that did.

        `wait_all_ranks` is torch's, and has no effect: all missing ranks are always named.
        torch.distributed.monitored_barrier refuses backends of any name but gloo.
        """
        seconds_of(timeout, self._info, "monitored_barrier")
        self._run(dispatching.BARRIER, (), [], timeout, _SYNCHRONOUS)

    # Messages.

    @quick
    def send(
        self,
        tensor: OneTensor | None = None,
        dst: int | None = None,
        tag: int = 0,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        tensors: OneTensor | None = None,
        dstRank: int | None = None,
    ) -> Work:
        """Sends the tensor to rank `dst`, which receives it with the same tag."""
        tensor, dst = tensors if tensor is None else tensor, dstRank if dst is None else dst
        work = self._message("send", tensor, dst, tag, timeout)
        if not async_op:
            work.wait()
        return work

    @quick
    def recv(
        self,
        tensor: OneTensor | None = None,
        src: int | None = None,
        tag: int = 0,
        timeout: timedelta | None = None,
        *,
        async_op: bool = True,
        tensors: OneTensor | None = None,
        srcRank: int | None = None,
    ) -> Work:
        """Receives a tensor from rank `src`; without `src`, from any rank, which `Work.source_rank()` tells."""
        tensor, src = tensors if tensor is None else tensor, srcRank if src is None else src
        if src is None:
            src = message.ANY_SOURCE
        else:
            if type(src) is not int:
                src = whole(self._info, "recv", "PEER", "the peer", src)
            if src == message.ANY_SOURCE:
                hint = "to receive from any rank leave out src, or call recv_anysource"
                fail(self._info, "recv", "PEER", "expected the peer as a rank, got -1", hint)
        work = self._message("recv", tensor, src, tag, timeout)
        if not async_op:
            work.wait()
        return work

    # torch.distributed's other names for them.

    all_gather_into_tensor = all_gather_single
    reduce_scatter_tensor = reduce_scatter_single
    isend = send
    irecv = recv
