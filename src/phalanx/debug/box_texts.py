"""The texts of black boxes: the groups and the places in the program that records refer to by offsets.

A file may come from anywhere, and a short text can name a lot: a group "0-1023" is six letters and a thousand ranks. So
the boxes of a report share a `Room`, which keeps each text and each list of ranks once, and only so many of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx import _native
from phalanx.debug.box_layout import Layout
from phalanx.phrases import short_path
from phalanx.printable import printable

__all__ = ["CallSite", "GroupName", "Room", "Texts"]

# Of all boxes of a report together.
_MOST_RECORDS = 500_000
_MOST_RANKS = 1_000_000
_MOST_LETTERS = 16_000_000
# Of all groups of one box together.
_MOST_MEMBERS = 250_000
_MOST_TEXT_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where in the program a call was made."""

    filename: str
    line: int
    function: str

    def describe(self) -> str:
        return f"{short_path(self.filename)}:{self.line}, in {self.function}"


@dataclass(frozen=True, slots=True)
class GroupName:
    """A group as one of its ranks knows it. `ranks` are those of the job, in the order of the group's own."""

    name: str
    desc: str
    rank: int
    ranks: tuple[int, ...]
    identity: str = ""  # equal on all of its ranks, and on those of no other group; empty in boxes of version 1
    venue: str = ""  # where the ranks of a group that is being made meet

    @property
    def key(self) -> str:
        """What tells it from other groups of the same name and ranks; empty where nothing does."""
        return self.identity or self.venue

    def rank_in_job(self, rank: int) -> int:
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


_UNKNOWN = GroupName("", "", -1, ())


class NoRoomError(Exception):
    """There is as much as a reader keeps."""


class Room:
    """What the boxes of a report may keep together, and what they have kept."""

    def __init__(
        self,
        num_boxes: int = 1,
        *,
        most_records: int = _MOST_RECORDS,
        most_ranks: int = _MOST_RANKS,
        most_letters: int = _MOST_LETTERS,
    ) -> None:
        # Each box has its share, so that the last one is read as well as the first.
        self.records_per_box = max(1, most_records // max(1, num_boxes))
        self._num_ranks = most_ranks
        self._num_letters = most_letters
        self._texts: dict[str, str] = {}
        self._ranks: dict[str, tuple[int, ...] | None] = {}

    def text(self, text: str) -> str:
        """The same text, as it was kept before."""
        if text not in self._texts:
            if len(text) > self._num_letters:
                raise NoRoomError
            self._num_letters -= len(text)
            self._texts[text] = text
        return self._texts[text]

    def ranks(self, text: str) -> tuple[int, ...] | None:
        """Of a list of ranks and runs of them, "0-2,5". None where it is no such list."""
        if text not in self._ranks:
            kept, found = self.text(text), _ranks(text)
            if len(found or ()) > self._num_ranks:
                raise NoRoomError
            self._num_ranks -= len(found or ())
            self._ranks[kept] = found
        return self._ranks[text]


class Texts:
    """The texts of one box. They only grow: each is read once, and made into an object once."""

    def __init__(self, group_layout: Layout | None, room: Room) -> None:
        self._arena = bytearray()
        # None: a group is one text.
        self._group_layout = group_layout
        self._world_size = 0
        self._room = room
        self._groups: dict[tuple[int, bool], GroupName] = {}
        self._call_sites: dict[int, CallSite | None] = {}
        self._num_members = _MOST_MEMBERS
        # Groups for which there was no room.
        self.num_left_out = 0

    @property
    def num_bytes(self) -> int:
        """How much of the arena was taken in."""
        return len(self._arena)

    def take_in(self, more: bytes, world_size: int) -> None:
        """What has followed in the arena, and how many ranks the job has now."""
        self._arena += more
        self._world_size = world_size

    def group(self, offset: int, *, is_making: bool) -> GroupName:
        key = (offset, is_making)
        if key not in self._groups:
            try:
                parts = self._group_parts(offset) if self._group_layout else self._old_group_parts(offset, is_making)
                self._groups[key] = self._make_group(*parts) if parts else _UNKNOWN
            except NoRoomError:
                self._groups[key] = _UNKNOWN
                self.num_left_out += 1
        return self._groups[key]

    def call_site(self, offset: int) -> CallSite | None:
        if offset not in self._call_sites:
            try:
                self._call_sites[offset] = self._make_call_site(self._parts(offset, 3))
            except NoRoomError:
                self._call_sites[offset] = None
        return self._call_sites[offset]

    def _group_parts(self, offset: int) -> tuple[str, str, int, str, str, str] | None:
        """None where there is no group."""
        layout = self._group_layout
        if layout is None or not 0 < offset <= len(self._arena) - layout.size:
            return None
        found = layout.unpack(self._arena, offset)
        names = ("name", "description", "ranks", "identity", "venue")
        parts = [self._parts(found[name], 1) if found[name] else [""] for name in names]
        if found["rank"] < 0 or not all(parts):
            return None
        name, desc, ranks, identity, venue = (part[0] for part in parts)
        return name, desc, found["rank"], ranks, identity, venue

    def _old_group_parts(self, offset: int, is_making: bool) -> tuple[str, str, int, str, str, str] | None:
        """Of a text: name, description, rank, ranks, and the identity, or the venue of a making."""
        parts = self._parts(offset, 4, 5)
        if not parts:
            return None
        name, desc, rank, ranks, *more = parts
        last = "".join(more)
        return name, desc, _number(rank), ranks, *(("", last) if is_making else (last, ""))

    def _make_group(self, name: str, desc: str, rank: int, ranks_text: str, identity: str, venue: str) -> GroupName:
        ranks = self._room.ranks(ranks_text)
        # A group whose ranks in the job nobody knows is taken for the first one.
        if ranks == () and self._world_size:
            ranks = self._room.ranks(f"0-{self._world_size - 1}")
        if ranks is None:
            return _UNKNOWN
        if len(ranks) > self._num_members:
            raise NoRoomError
        self._num_members -= len(ranks)
        name, desc, identity, venue = map(self._room.text, (name, desc, identity, venue))
        return GroupName(name, desc, rank, ranks, identity, venue)

    def _make_call_site(self, parts: list[str]) -> CallSite | None:
        if not parts:
            return None
        return CallSite(self._room.text(parts[0]), _number(parts[1]), self._room.text(parts[2]))

    def _parts(self, offset: int, *nums: int) -> list[str]:
        # A text begins where the one before it ends.
        if not 0 < offset < len(self._arena) or self._arena[offset - 1]:
            return []
        end = self._arena.find(b"\0", offset, offset + _MOST_TEXT_BYTES)
        parts = self._arena[offset:end].decode(errors="replace").split(_native.BOX_DIVIDER) if end > offset else []
        return [printable(part) for part in parts] if len(parts) in nums else []


def _ranks(text: str) -> tuple[int, ...] | None:
    """None also where they are more than a group can have."""
    ranks: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        begin, end = _number(first), _number(last or first) + 1
        if begin < 0 or len(ranks) + max(0, end - begin) > _native.MAX_RANKS:
            return None
        ranks += range(begin, end)
    return tuple(ranks)


def _number(text: str) -> int:
    # int() takes time that grows with the square of the length.
    try:
        return int(text) if len(text) < 20 else -1
    except ValueError:
        return -1
