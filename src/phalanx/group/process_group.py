"""The group as torch.distributed sees it: the class that torch wants, which carries out calls in torch's spellings."""

# torch's stubs give every spelling of a method as an overload; one method of the mixins takes them all.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

from phalanx.group.calling import CallingGroup
from phalanx.group.derived import DerivableGroup
from phalanx.group.group import Group
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.group.torch_names import TorchNames
from phalanx.types import Store

__all__ = ["ProcessGroup"]


@not_traced
class ProcessGroup(TorchNames, CallingGroup, DerivableGroup):
    """A process group on one host.

    Made by `init_process_group("phalanx")` and `new_group`, or directly from any torch Store that all ranks reach. The
    constructor returns when all ranks have come.
    """

    def _prepare(self, group: Group, store: Store) -> None:
        super()._prepare(group, store)
        self._prepare_calls(group)
