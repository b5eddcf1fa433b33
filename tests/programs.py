"""Runs Python programs that begin at once: each is forked from a server that has torch loaded (forking.py).

A program has its own working folder, environment, arguments and output, `sys.path` is that of a fresh interpreter, and
it ends as a program does: the excepthook and what is registered with atexit run, only the interpreter does not take
itself down. Ranks that it starts with torchrun or torch.multiprocessing.spawn are forked from it.

What can not be shown so needs a fresh interpreter: imports, options of the interpreter (`-W`, `-I`), its own end, and
whole stacks, in which this module is seen.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from forking import context, share_server

__all__ = ["run", "run_pytest"]

# Whose functions have no types.
torch_multiprocessing: Any = torch.multiprocessing
_HERE = Path(__file__).parent
_LONGEST_START = 60.0


def run(
    command: Sequence[str | os.PathLike[str]],
    folder: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 100,
    loads: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`python program.py …`, `python -m module …`, `pytest …` or `torchrun …`, in this folder.

    `loads` are modules that are loaded once, before the launcher forks the ranks.
    """
    words = [os.fspath(word) for word in command]
    output = Path(tempfile.mkdtemp(prefix="phalanx-program-"))
    # Not a daemon: it may have children.
    process = context.Process(
        target=_be_program, args=(words, folder, dict(os.environ if env is None else env), output, loads), daemon=False
    )
    try:
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(_read(output, name) for name in ("1", "2")))
        return subprocess.CompletedProcess(words, process.exitcode or 0, _read(output, "1"), _read(output, "2"))
    finally:
        process.close()
        shutil.rmtree(output)


def run_pytest(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """As `pytester.runpytest_subprocess`."""
    base = tempfile.mkdtemp(prefix="runpytest-", dir=pytester.path)
    start = time.monotonic()
    done = run(["pytest", f"--basetemp={base}", *options], Path.cwd(), {**os.environ, "PYTHONPATH": os.getcwd()})
    for text in (done.stdout, done.stderr):
        print(text)
    lines = done.stdout.splitlines(), done.stderr.splitlines()
    return pytest.RunResult(done.returncode, *lines, time.monotonic() - start)


def _read(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_text(errors="replace") if path.exists() else ""


def _be_program(words: list[str], folder: Path, env: dict[str, str], output: Path, loads: Sequence[str]) -> None:
    os.setsid()
    for fd in (1, 2):
        file = os.open(output / str(fd), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in loads:
        importlib.import_module(name)
    torch_multiprocessing.spawn = _spawn
    share_server()
    _end_as_program(lambda: _PROGRAMS[words[0]](words))


def _spawn(
    function: Callable[..., object], args: tuple[object, ...] = (), nprocs: int = 1, join: bool = True
) -> object:
    return torch_multiprocessing.start_processes(function, args, nprocs, join, start_method="fork")


def _end_as_program(main: Callable[[], object]) -> None:
    """Calls `main` as the interpreter calls a main program, and ends the process with its exit code."""
    code, own = 1, os.getpid()

    def call_main() -> None:
        nonlocal code
        try:
            main()
            code = 0
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # A child that was forked ends in its own way.
        if os.getpid() == own:
            os._exit(code)

    # It is called last, because it is registered first.
    atexit.register(end)
    # From Python 3.13 on, a child of multiprocessing has forgotten what was to be called at the exit of its parent.
    if sys.version_info >= (3, 13):
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    gc.freeze()
    sys.modules["__main__"].main = call_main  # type: ignore[attr-defined]
    failed = ctypes.pythonapi.PyRun_SimpleString(b"main()")
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def _python(words: list[str]) -> None:
    _, *words = words
    if words[0] == "-m":
        _set_path(os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run_file(words)


def _run_file(words: Sequence[str]) -> None:
    path = os.path.abspath(words[0])
    _set_path(os.path.dirname(path))
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def _pytest(words: list[str]) -> None:
    _set_path(os.path.dirname(sys.executable))
    sys.argv = words
    sys.exit(pytest.main(words[1:]))


def _torchrun(words: list[str]) -> None:
    """The launcher itself, with its agent and rendezvous; the ranks are forked from it and not executed.

    Ranks begin when all of them are forked. A rank that connects to the launcher's store makes a thread of the launcher
    look up its name, under a lock of the C library: a rank that is forked at that moment would never get the lock.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    sys.argv = words
    args = torchrun.parse_args(words[1:])
    if args.standalone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", os.urandom(8).hex()
    config, _, _ = torchrun.config_from_args(args)
    config.start_method = "fork"
    all_forked = multiprocessing.get_context("fork").Barrier(config.nproc_per_node)
    elastic_launch(config, _be_rank)(all_forked, [args.training_script, *args.training_script_args])


def _be_rank(all_forked: Barrier, words: list[str]) -> None:
    """Returns where the program ends well: the launcher waits for that."""
    all_forked.wait(_LONGEST_START)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 0
    try:
        _run_file(words)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code if isinstance(code, int) else 1)


def _set_path(first: str) -> None:
    """The folder of the program, those of PYTHONPATH, and the interpreter's own."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Packages may lie in another folder than the interpreter (tools/on_torch.py).
    own = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)) or "site-packages" in path]
    own = [path for path in own if Path(path) != _HERE]
    sys.path[:] = [first, *filter(None, given), *own]


_PROGRAMS = {"pytest": _pytest, "torchrun": _torchrun, "python": _python}
