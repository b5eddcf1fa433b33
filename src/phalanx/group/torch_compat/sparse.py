"""The parts of sparse COO tensors that are not coalesced."""

from __future__ import annotations

import torch

__all__ = ["entries_of", "num_entries"]


def entries_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse COO tensor consists of, coalesced or not."""
    plain = tensor.detach()
    return [plain._indices(), plain._values()]


def num_entries(tensor: torch.Tensor) -> int:
    return tensor._nnz()
