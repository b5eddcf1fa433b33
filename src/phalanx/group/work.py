"""The handle that a call returns to torch."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import Work as TorchWork
from torch.futures import Future


class Work(TorchWork):
    """A call that has been carried out. `tensors` is what its future gives: the call's outputs."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[torch.Tensor]]:
        if self._future is None:
            future: Future[list[torch.Tensor]] = Future()
            future.set_result(self._tensors)
            self._future = future
        return self._future
