"""Groups that are derived from a group: subgroups, and mergers with other groups."""

# torch's stubs give every spelling of a method as an overload; one method here takes them all.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from phalanx.group import merging, names, splitting
from phalanx.group.group import Group
from phalanx.group.joined import JoinedGroup
from phalanx.group.refusing import collective
from phalanx.group.timeouts import seconds_of
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.types import PrefixStore, Store

__all__ = ["DerivableGroup"]


@not_traced
class DerivableGroup(JoinedGroup):
    """A group that can be split, and merged with others."""

    @collective
    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
        *,
        name: str | None = None,
    ) -> Self | None:
        """Makes a smaller group. All ranks of this group call it; those in `ranks` get the group, the others None.

        `ranks` are ranks of this group, in the order that they have in the new one. Ranks may pass different lists in
        one call, so that several groups are made at once, as long as all ranks of a list pass that list. `timeout` is
        that of the new group, and of each wait of this call; by default, this group's. The other arguments are torch's.
        """
        info = self._info
        own = splitting.check_ranks(info, ranks)
        chosen = splitting.check_name(info, "split_group", name)
        seconds = seconds_of(timeout, info, "split_group")
        label = chosen or _text(group_desc) or _text(group_name)
        group = splitting.split(
            self._group, own, self._group.timeout if seconds is None else seconds, label, named=bool(chosen)
        )
        if group is None:
            return None
        store = PrefixStore(group_name or group.info.name, self._store)
        return self._hand_out_group(group, store, chosen, group_name, group_desc)

    @collective
    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        *,
        name: str | None = None,
    ) -> Self:
        """Merges this group with groups that were started apart. All ranks of all these groups call it.

        They meet in `store`, which all of them reach, by the name of the new group. It has `size` ranks: those of the
        group that came first, in their order, then those of the next one. `timeout` is that of the new group, and of
        each wait of this call; by default, this group's. `group_name` and `group_desc` are torch's.
        """
        info = self._info
        size = merging.check_size(info, size)
        chosen = splitting.check_name(info, "merge_remote_group", name)
        seconds = seconds_of(timeout, info, "merge_remote_group")
        label = chosen or _text(group_desc) or _text(group_name) or "merged"
        limit = self._group.timeout if seconds is None else seconds
        group = merging.merge(self._group, store, size, limit, label, named=bool(chosen))
        return self._hand_out_group(group, store, chosen, group_name, group_desc)

    def _hand_out_group(
        self, group: Group, store: Store, chosen: str, group_name: str | None, group_desc: str | None
    ) -> Self:
        made = type(self).around(group, store)
        if chosen:
            made._taken = names.take(chosen, made)
            made._keeps_name = True
        if group_name:
            made._set_group_name(group_name)  # type: ignore[arg-type]
        if group_desc:
            made._set_group_desc(group_desc)
        return made


def _text(value: Any) -> str:
    """The name that torch passes; empty for None and for torch's default, "undefined"."""
    return "" if value is None or value == "undefined" else str(value)
