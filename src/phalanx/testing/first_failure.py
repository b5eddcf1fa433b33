"""Of several failures the first one, with notes on the others: those it caused, and those it did not."""

from __future__ import annotations

from phalanx.errors import PeerLost, PhalanxError
from phalanx.types import describe_ranks

__all__ = ["RankError", "first_failure"]

RankError = tuple[int, BaseException]


def first_failure(failures: list[RankError]) -> BaseException:
    """The failures come in the order in which they happened. The first is not one that only was told of another."""
    first = next((failure for failure in failures if not _is_caused(failure[1])), failures[0])
    alike = [failure for failure in failures if _text(failure[1]) == _text(first[1])]
    rank, error = next((failure for failure in alike if _has_other_cause(failure[1])), first)
    rest = sorted((failure for failure in failures if failure[1] is not error), key=lambda failure: failure[0])
    same = [other for other, failure in rest if _text(failure) == _text(error)]
    caused = [failure for failure in rest if failure[0] not in same and _is_caused(failure[1])]
    own = [failure for failure in rest if failure[0] not in same and not _is_caused(failure[1])]
    error.add_note(f"on rank {rank}" + (f", and the same on {describe_ranks(same)}" if same else ""))
    if caused:
        error.add_note("because of it:" + _folded(caused))
    if own:
        error.add_note("also, on its own:" + _folded(own))
    return error


def _is_caused(error: BaseException) -> bool:
    """Whether it only says that another rank has ended."""
    return isinstance(error, PeerLost) or getattr(error, "code", None) == "DEADLOCK:EXIT"


def _has_other_cause(error: BaseException) -> bool:
    """Whether it came from an error that is none of ours, which most likely is the one to look at."""
    link = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return isinstance(error, PhalanxError) and link is not None and not isinstance(link, PhalanxError)


def _folded(failures: list[RankError]) -> str:
    """A line for each that says something new."""
    ranks: dict[str, list[int]] = {}
    for rank, error in failures:
        ranks.setdefault(_text(error), []).append(rank)
    return "".join(f"\n  {describe_ranks(who)}: {text}" for text, who in ranks.items())


def _text(error: BaseException) -> str:
    """Without what differs between ranks that are told the same."""
    code = getattr(error, "code", None)
    if code is not None:
        op, seq = getattr(error, "op", None), getattr(error, "seq", None)
        where = (f" in {op}" if op else "") + (f", seq {seq}" if seq else "")
        return f"{code if ':' in code else type(error).__name__}{where}"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
