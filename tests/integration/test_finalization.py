"""Threads that are inside the native core, or want the GIL back from it, when the interpreter ends: the process ends
with the exit code of its main thread."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Here, World

from phalanx import _native
from phalanx.collectives import barrier
from phalanx.types import GroupInfo

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_PRIVATE = 0x80
_LINE = 128
_SOON = 0.05
_BARRIER = barrier.build(GroupInfo("pair", 0, 2)).description


class _Pair:
    """Both ranks of a group that is left by nobody: nothing ends its calls before the interpreter ends."""

    def __init__(self) -> None:
        segment = _native.Segment.create_memfd(2, _native.tuning_for(2, 2), bytes(16))
        self.first, self.second = _native.GroupEnd(segment, 0), _native.GroupEnd(segment, 1)
        self.data = torch.zeros(1 << 20)

    def barrier(self, timeout: float) -> object:
        return _native.run_call(self.first, _BARRIER, None, None, timeout)

    def start(self) -> _native.CallHandle:
        started = _native.start_call(self.first, _BARRIER, None, None, 1000.0).pending
        assert started is not None
        return started

    def message(self, sends: bool) -> _native.CallHandle:
        started = _native.start_message(self.first, sends, self.data, 1, 0, 1000.0).pending
        assert started is not None
        return started


def _ask(pair: _Pair) -> object:
    pair.first.ask(1)
    return pair.first.answer_of(1, _SOON)


def _tell_slow(pair: _Pair) -> object:
    """A call that takes long has Python told, which blocks there."""
    _native.set_slow(_SOON, lambda *_: ctypes.CDLL(None).usleep(int(_SOON * 1e6)))
    return pair.barrier(10 * _SOON)


# Functions of the core that work or wait without the GIL, until main does what is beside them, or by themselves.
_ENTRIES: dict[str, tuple[Callable[[_Pair], object], Callable[[], object]]] = {
    "run": (lambda pair: pair.barrier(_SOON), lambda: None),
    "wait": (lambda pair: pair.start().wait(_SOON), lambda: None),
    "recv": (lambda pair: pair.message(False).wait(_SOON), lambda: None),
    "send": (lambda pair: pair.message(True).wait(_SOON), lambda: None),
    "answer_of": (_ask, lambda: None),
    "next_question": (lambda pair: _native.next_question(), lambda: _native.close_listener(True)),
    "next_completion": (lambda pair: _native.next_completion(False, False), lambda: _native.close_completions(True)),
    "tell_slow": (_tell_slow, lambda: None),
}


class _Watched:
    """Where a thread of this process waits."""

    def __init__(self, thread: int) -> None:
        self._path = f"/proc/self/task/{thread}/syscall".encode()

    def private_futex(self, system: ctypes.CDLL) -> int:
        """The cache lines of the futex in which it sleeps, if that is one of this process alone; else 0."""
        text = ctypes.create_string_buffer(256)
        fd = system.open(self._path, os.O_RDONLY)
        system.read(fd, text, 255)
        system.close(fd)
        number, *arguments = text.value.split() or [b""]
        if number != str(_FUTEX).encode() or not int(arguments[1], 16) & _PRIVATE:
            return 0
        return int(arguments[0], 16) // _LINE


class _Output:
    """What the interpreter flushes when it has begun to end: the thread can have the GIL until it is somewhere else."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched
        # Found before modules are taken down.
        self._system = ctypes.CDLL(None)
        self._is_finalizing = sys.is_finalizing

    def write(self, text: str) -> None:
        self._system.write(1, text.encode(), len(text))

    def flush(self) -> None:
        if self._is_finalizing():
            while self._watched.private_futex(self._system):
                self._system.sched_yield()
            self.write("ended")
            sys.stdout = None


def _end(here: Here, entry: str) -> None:
    enter, let_go = _ENTRIES[entry]
    # Nothing gives up the GIL between the end of this function and that of the interpreter, and no thread loses it.
    atexit._run_exitfuncs()
    sys.setswitchinterval(1e6)
    pair = _Pair()
    inside = threading.Event()
    ids: list[int] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        inside.set()
        enter(pair)

    threading.Thread(target=run, daemon=True).start()
    # The thread gives up the GIL when it has entered the core.
    inside.wait()
    watched, keeps_gil = _Watched(ids[0]), ctypes.PyDLL(None)
    own = 0
    if entry == "next_completion":
        while not own:
            own = watched.private_futex(keeps_gil)
    let_go()
    while watched.private_futex(keeps_gil) in (0, own):
        continue
    sys.stdout = _Output(watched)


@pytest.mark.parametrize("entry", _ENTRIES)
def test_a_thread_waits_for_the_gil_when_the_interpreter_ends(entry: str, tmp_path: Path) -> None:
    world = World(_end, 1, tmp_path, entry, way="program")
    (end,) = world.ends()
    assert (end.exitcode, world.output(0)) == (0, "ended")


def test_the_core_takes_the_gil_in_one_place_only() -> None:
    sources = (Path(__file__).parents[2] / "src/phalanx/_core").glob("*.?pp")
    ways = re.compile(
        r"gil_scoped|PyEval_(RestoreThread|SaveThread|AcquireThread)|PyGILState|Py_(BEGIN|END)_ALLOW_THREADS"
    )
    assert [path.name for path in sources if ways.search(path.read_text())] == ["gil.hpp"]
