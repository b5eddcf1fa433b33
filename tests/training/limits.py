"""What torch raises for something that it does not do, by version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

WORKS = "works"


@dataclass(frozen=True)
class Limit:
    """What torch does not allow: the errors, or WORKS, by the first version of torch that has them.

    A build of torch for CUDA may stumble over the missing GPU or driver first. Which of the errors it raises then
    depends on what the process did with accelerators before.
    """

    attempt: Callable[..., Any]
    outcomes: dict[tuple[int, int], str]
    on_cuda_build: tuple[str, ...] = ()

    def expected(self) -> tuple[str, ...]:
        if self.on_cuda_build and torch.version.cuda is not None:
            return self.on_cuda_build
        here = tuple(int(number) for number in torch.__version__.split(".")[:2])
        return (self.outcomes[max(version for version in self.outcomes if version <= here)],)

    def outcome(self, *args: Any) -> str:
        """The error of an attempt, or WORKS."""
        try:
            self.attempt(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return WORKS

    def texts(self) -> Iterator[str]:
        yield from self.outcomes.values()
        yield from self.on_cuda_build
