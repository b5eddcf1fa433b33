"""What torch's spellings need of the class that has them: it carries out calls whose arguments were read."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from phalanx import _native
from phalanx.errors import InvalidCall
from phalanx.types import GroupInfo

if TYPE_CHECKING:
    from phalanx.group.dispatching import Form
    from phalanx.group.work import Work, Works

__all__ = ["Carrier"]


class Carrier:
    """To be implemented by a group (calling.py), or by whatever else torch calls in its spellings.

    No Protocol: its metaclass does not go together with that of torch's classes.
    """

    _info: GroupInfo
    # What carries out plain calls natively, if there is such a way.
    _front: _native.Front | None = None
    # The works of the coalescing manager that is open, if one is.
    _coalesced: Works | None = None

    def _run(
        self,
        form: Form,
        args: tuple[Any, ...],
        results: list[torch.Tensor],
        timeout: timedelta | None,
        opts: Any,
        async_op: bool = True,
    ) -> Work:
        """Makes a collective. It waits where `async_op` is False, or the `asyncOp` of the options."""
        raise NotImplementedError

    def _run_sparse(self, tensor: torch.Tensor, reduce_op: int, timeout: timedelta | None) -> Work:
        """Makes an all_reduce of a sparse tensor, and waits for it."""
        raise NotImplementedError

    def _message(self, op: str, tensors: Any, peer: Any, tag: int, timeout: timedelta | None) -> Work:
        """Sends or receives."""
        raise NotImplementedError

    def _refuse_call(self, error: InvalidCall) -> None:
        """The arguments of a collective were wrong: peers that make the same call wait for it."""
        raise NotImplementedError
