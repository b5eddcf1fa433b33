"""Where a backward pass is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

__all__ = ["at_end_of_backward", "in_backward", "in_final_callback"]


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_final_callback() -> bool:
    """Whether the backward pass under way is through, and the engine calls what was queued for its end."""
    return torch._C._current_autograd_node() is None


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Has the autograd engine call it when the backward pass under way is through, before those queued later."""
    Variable._execution_engine.queue_callback(callback)
