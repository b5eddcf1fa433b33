"""What a group needs of a transport."""

from __future__ import annotations

from typing import Protocol

import torch

from phalanx.types import Call


class Transport(Protocol):
    """One rank's connection to the other ranks of a group. Calls of one rank are carried out one after another."""

    def run(self, call: Call, timeout: float) -> None:
        """Takes part in the op and returns when this rank's side is done.

        Raises Mismatch, CallTimeout, PeerLost or Aborted; after that the group is broken and every call says so.
        """

    def all_reduce_plain(self, tensor: torch.Tensor, dtype_code: int, reduce_op: int, timeout: float) -> None:
        """`run` for an all_reduce of one contiguous tensor, without a Call: the quick way for most calls."""

    def abort(self, reason: str) -> None:
        """Ends all waits of the group, on every rank, with Aborted. May be called from any thread."""

    def close(self) -> None:
        """Leaves the group: peers that wait for a further call of this rank are told. Idempotent."""

    @property
    def seq(self) -> int:
        """The seq of the last call of this rank; 0 before the first."""
