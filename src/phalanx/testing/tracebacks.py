"""Tracebacks as users want to see them: without frames of torch and Phalanx, and from rank processes as well.

Pickle drops the traceback of an exception and the exceptions it came from. `Sent` keeps them: the process that runs the
tests gets a traceback with the same files, functions and lines, in frames that stand for those of the rank.
"""

from __future__ import annotations

import ast
import contextlib
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple

from phalanx.errors import PhalanxError, restored
from phalanx.transports.places import is_framework

__all__ = ["Sent", "linked", "trim"]

_NO_COLUMN = -1


def linked(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it came from or consists of, each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, link.__context__]
            todo += link.exceptions if isinstance(link, BaseExceptionGroup) else ()


def trim(error: BaseException) -> None:
    """Errors of Phalanx lose the frames of torch and Phalanx, all along the chain: their reports say more."""
    for link in linked(error):
        if isinstance(link, PhalanxError):
            entries = [entry for entry in _entries(link.__traceback__) if not _is_framework(entry)]
            # An error without any frame of the program keeps what there is.
            link.__traceback__ = _joined(entries) or link.__traceback__


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _is_framework(entry: TracebackType) -> bool:
    return is_framework(entry.tb_frame.f_code.co_filename)


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    trace: TracebackType | None = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace


class _Frame(NamedTuple):
    """A line of a traceback that goes to another process."""

    filename: str
    function: str
    first_line: int
    line: int


def _frames(trace: TracebackType | None) -> list[_Frame]:
    """From the first one of the program on: how the rank's function came to be called is not of interest."""
    entries = _entries(trace)
    begin = next((number for number, entry in enumerate(entries) if not _is_framework(entry)), 0)
    frames = []
    for entry in entries[begin:]:
        code = entry.tb_frame.f_code
        frames.append(_Frame(code.co_filename, code.co_name, code.co_firstlineno, entry.tb_lineno))
    return frames


def _rebuilt(frames: list[_Frame]) -> TracebackType | None:
    trace: TracebackType | None = None
    for frame in reversed(frames):
        function = FunctionType(_code(frame), {"here": sys._getframe, "__file__": frame.filename})
        stand_in = function()
        trace = TracebackType(trace, stand_in, stand_in.f_lasti, frame.line)
    return trace


def _code(frame: _Frame) -> CodeType:
    """Of a function that returns its frame, at the place where the original was."""
    tree = ast.parse("def function(): return here()")
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            # Without columns, no part of the line is marked.
            node.lineno = node.end_lineno = frame.first_line if isinstance(node, ast.FunctionDef) else frame.line
            node.col_offset = node.end_col_offset = _NO_COLUMN
    module = compile(tree, frame.filename, "exec")
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    return code.replace(co_name=frame.function, co_qualname=frame.function)


class _Parts:
    """An exception whose class takes other arguments than it keeps, which pickle can't make anew."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self._error), self._error.args, self._error.__dict__)


@dataclass
class Sent:
    """An exception on its way to another process, with its traceback and those it came from."""

    pickled: bytes
    frames: list[_Frame]
    cause: Sent | None
    context: Sent | None
    suppresses: bool

    @classmethod
    def of(cls, error: BaseException) -> Sent:
        return _send(error, {})

    def unpack(self) -> BaseException:
        error: BaseException = pickle.loads(self.pickled)
        error.__cause__ = None if self.cause is None else self.cause.unpack()
        error.__context__ = None if self.context is None else self.context.unpack()
        error.__suppress_context__ = self.suppresses
        return error.with_traceback(_rebuilt(self.frames))


def _send(error: BaseException, seen: dict[int, BaseException]) -> Sent:
    seen[id(error)] = error

    def send(link: BaseException | None) -> Sent | None:
        return None if link is None or id(link) in seen else _send(link, seen)

    cause = send(error.__cause__)
    context = send(error.__context__)
    return Sent(_pickled(error), _frames(error.__traceback__), cause, context, error.__suppress_context__)


def _pickled(error: BaseException) -> bytes:
    for attempt in (error, _Parts(error)):
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(attempt)
            pickle.loads(pickled)
            return pickled
    return pickle.dumps(RuntimeError("".join(traceback.format_exception_only(error)).rstrip()))
