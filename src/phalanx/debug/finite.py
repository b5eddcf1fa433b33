"""Looks for numbers that are none: NaN and infinities."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["describe_not_finite"]


def describe_not_finite(tensors: Sequence[torch.Tensor]) -> str:
    """What the first tensor says that holds a NaN or an infinity; empty where none does."""
    for number, tensor in enumerate(tensors):
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_sparse:
            continue
        with torch.inference_mode():
            # Dtypes of 8 bits can't be asked.
            values = tensor.detach().to(torch.float32) if tensor.element_size() == 1 else tensor.detach()
            finite = torch.isfinite(values).reshape(-1)
            if bool(finite.all()):
                continue
            first = int(finite.logical_not().to(torch.uint8).argmax())
            value = values.reshape(-1)[first].item()
            bad = int(finite.numel() - finite.sum())
        which = f" of tensor {number}" if len(tensors) > 1 else ""
        return f"the input has {value} at element {first}{which} ({bad} of {finite.numel()} are not finite)"
    return ""
