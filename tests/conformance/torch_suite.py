"""Runs single tests of torch's own distributed suite, each with freshly forked ranks.

The suite (`torch.testing._internal.distributed.distributed_test`) ships in torch's wheel. Importing it takes seconds,
so one server process imports it once and forks the ranks of every test from there. Invariants:

- The server never makes a group or a thread: what it forks is clean.
- A rank that dies, hangs or skips is an outcome, never a pass. Only "passed" means that the whole test ran.
- Nothing outlives the server: ranks die with it, it dies with its parent, every test's folder goes with the test.

`Suite` is the client's side. Run as a program, this file is the server: requests and replies are lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import unittest.mock
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

from plan import Adaptation

__all__ = ["BACKENDS", "Outcome", "Suite", "report", "status_of"]

# What the suite runs on. Guarded Gloo is Gloo by its name, in ranks whose groups are guarded.
BACKENDS = ("gloo", "guarded gloo", "phalanx")

# A rank that can't go on should hear so from its group before the harness ends it.
GROUP_TIMEOUT_S = 30.0
RANK_LIMIT_S = 60.0
# What the peers of a failed rank get to end by themselves, and a rank past its limit to print its stack.
GRACE_S = 5.0
LOG_TAIL = 6000

_GUARDED = "guarded "

Outcome = dict[str, Any]
Demand = dict[str, Any]


class Suite:
    """A running server. `run` gives one outcome a rank: {"status", "text", "log"}."""

    def __init__(self, backend: str, folder: Path, ranks: int = 4) -> None:
        """`ranks` is for the marks of tests that ask for a world size, which are read once."""
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, __file__, backend, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_server_environment(backend, folder, ranks),
                text=True,
                start_new_session=True,
            )
        try:
            # Every test of the suite: whether it asks for CUDA devices, and why the suite would skip it (None where
            # it would not, or where it finds out only when the test runs).
            self.tests: dict[str, Demand] = self._read()
        except BaseException:
            self.close()
            raise

    def run(
        self, name: str, ranks: int, adaptation: Adaptation | None = None, limit: float = RANK_LIMIT_S
    ) -> list[Outcome]:
        """Runs one test, as the suite has it or with an adaptation."""
        request = {
            "name": name,
            "ranks": ranks,
            "unskip": adaptation is not None,
            "under_all": adaptation is not None and adaptation.under_all,
            "on_cpu": adaptation is not None and adaptation.on_cpu,
            "backend_name": adaptation.name if adaptation is not None else None,
            "limit": limit,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        outcomes: list[Outcome] = self._read()
        return outcomes

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        try:
            self._server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the suite's server ended:\n{_tail(self._log)}")
        return json.loads(line)


def status_of(outcomes: list[Outcome]) -> str:
    """Of a test as a whole: "passed" and "skipped" are what all of its ranks say."""
    statuses = {outcome["status"] for outcome in outcomes}
    return statuses.pop() if len(statuses) == 1 and statuses <= {"passed", "skipped"} else "failed"


def report(outcomes: list[Outcome]) -> str:
    lines = []
    for rank, outcome in enumerate(outcomes):
        lines.append(f"rank {rank} {outcome['status']}: {outcome['text']}".rstrip())
        if outcome["log"]:
            lines += [f"rank {rank} wrote:", outcome["log"].rstrip()]
    return "\n".join(lines)


def _server_environment(backend: str, folder: Path, ranks: int) -> dict[str, str]:
    unset = ("PYTHONWARNINGS", "PHALANX_GUARD")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    if backend.startswith(_GUARDED):
        environment["PHALANX_GUARD"] = "1"
    environment |= {
        "BACKEND": backend.removeprefix(_GUARDED),
        "WORLD_SIZE": str(ranks),
        "INIT_METHOD": f"file://{folder}/init",
        "TEMP_DIR": str(folder),
        # The suite's imports leave a cache folder behind.
        "TMPDIR": str(folder),
        # Thread pools made at import would not survive the fork.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # The profiler, which most tests use, would write more lines than the test.
        "KINETO_LOG_LEVEL": "99",
    }
    return environment


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if log.exists() else ""


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _load(backend: str) -> ModuleType:
    from torch.testing._internal.common_distributed import DistTestCases

    # "gpu" is also what the suite asks of a backend for its object tests.
    for feature in ("gpu", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(backend.removeprefix(_GUARDED))
    from torch.testing._internal.distributed import distributed_test

    # What the first group of a rank would load.
    import phalanx.debug.observing
    import phalanx.group.registry
    import phalanx.guards.guarding  # noqa: F401

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"importing the suite started {len(threads) - 1} threads: ranks can't be forked"
    return distributed_test


def _serve(backend: str, folder: Path) -> None:
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(value: object) -> None:
        print(json.dumps(value), file=replies, flush=True)

    suite = _load(backend)
    tests = suite.DistributedTest._DistTestBase
    names = [name for name in dir(tests) if name.startswith("test_")]
    reply({name: _demand(name, getattr(tests, name)) for name in names})
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            reply(_run_test(suite, Path(scratch), json.loads(line)))


def _demand(name: str, test: Any) -> Demand:
    skip = getattr(test, "__unittest_skip_why__", None)
    decorators = set()
    while hasattr(test, "__wrapped__"):
        decorators.add(test.__code__.co_qualname.split(".")[0])
        test = test.__wrapped__
    return {"cuda": bool(decorators & {"skip_if_no_gpu", "skip_if_lt_x_gpu"}) or "_cuda" in name, "skip": skip}


def _run_test(suite: ModuleType, scratch: Path, request: dict[str, Any]) -> list[Outcome]:
    for name in ("barrier", "test_dir", "init_dir"):
        (scratch / name).mkdir()
    fork = multiprocessing.get_context("fork")
    meeting = fork.Barrier(request["ranks"])
    ranks = [
        fork.Process(target=_run_rank, args=(suite, scratch, request, number, meeting))
        for number in range(request["ranks"])
    ]
    began = time.monotonic()
    deadline = began + request["limit"] + GRACE_S
    try:
        for rank in ranks:
            rank.start()
        while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
            if not connection.wait(running, max(0.0, deadline - time.monotonic())):
                break
            ended = [number for number, rank in enumerate(ranks) if not rank.is_alive()]
            if any(_result(scratch, number)["status"] != "passed" for number in ended):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
        for rank in ranks:
            if rank.pid is not None:
                rank.join()
    late = time.monotonic() - began >= request["limit"]
    return [_outcome(scratch, number, rank.exitcode, late) for number, rank in enumerate(ranks)]


def _outcome(scratch: Path, rank: int, exit_code: int | None, late: bool) -> Outcome:
    result = _result(scratch, rank)
    status, text = result["status"], result["text"]
    if status == "died":
        text = f"exit code {exit_code}" + (", past its limit: its stack is in its output" if late else "")
    elif exit_code != 0:
        status, text = "died", f"exit code {exit_code} after the test had {status}\n{text}"
    return {"status": status, "text": text, "log": _tail(scratch / f"rank{rank}.log")}


def _result(scratch: Path, rank: int) -> dict[str, str]:
    path = scratch / f"rank{rank}.json"
    result: dict[str, str] = json.loads(path.read_text()) if path.exists() else {"status": "died", "text": ""}
    return result


def _run_rank(suite: ModuleType, scratch: Path, request: dict[str, Any], rank: int, meeting: threading.Barrier) -> None:
    _die_with_parent()
    log = os.open(scratch / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["limit"], exit=True)
    os.environ["TEMP_DIR"] = str(scratch)
    os.environ["WORLD_SIZE"] = str(request["ranks"])
    suite.INIT_METHOD = f"file://{scratch}/init_dir/shared_init_file"  # type: ignore[attr-defined]
    try:
        _run_case(suite, scratch, request, rank, meeting)
        result = {"status": "passed", "text": ""}
    except (unittest.SkipTest, SystemExit) as skip:
        result = {"status": "skipped", "text": _skip_reason(suite, skip)}
    except BaseException:
        result = {"status": "failed", "text": traceback.format_exc()}
    # Of a skip the others learn by themselves; some may still be on their way out of the first meeting.
    if result["status"] == "failed":
        meeting.abort()
    partial = scratch / f"rank{rank}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(scratch / f"rank{rank}.json")


def _skip_reason(suite: ModuleType, skip: BaseException) -> str:
    if isinstance(skip, SystemExit):
        reasons = {known.exit_code: known.message for known in suite.TEST_SKIPS.values()}
        return str(reasons.get(skip.code, f"exit code {skip.code}"))
    return str(skip)


def _run_case(suite: ModuleType, scratch: Path, request: dict[str, Any], rank: int, meeting: threading.Barrier) -> None:
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    from phalanx.guards.guarded import GuardedGroup

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            # The suite's own polls a folder ten times a second.
            meeting.wait(timeout)

    case = Case(request["name"])
    case.rank = rank
    test = getattr(Case, request["name"])
    if request["under_all"]:
        test = inspect.unwrap(test)
    elif request["unskip"]:
        test = _without_skips(test)
    elif getattr(test, "__unittest_skip__", False):
        raise unittest.SkipTest(test.__unittest_skip_why__)
    dist.init_process_group(
        backend=suite.BACKEND,
        init_method=f"file://{scratch}/init_dir/first",
        world_size=request["ranks"],
        rank=rank,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    # What is asked for is what runs.
    is_guarded = isinstance(dist.distributed_c10d._get_default_group(), GuardedGroup)
    assert is_guarded == bool(os.environ.get("PHALANX_GUARD")), f"guarded: {is_guarded}"
    meeting.wait(GROUP_TIMEOUT_S)
    set_rng_seed()
    if request["backend_name"]:
        suite.BACKEND = request["backend_name"]  # type: ignore[attr-defined]
    with _cuda_is_cpu(suite) if request["on_cpu"] else contextlib.nullcontext():
        test(case)
    meeting.wait(GROUP_TIMEOUT_S)
    dist.destroy_process_group()


def _without_skips(test: Any) -> Any:
    """The function under unittest's skips. Most of torch's own are marks, which do nothing when it is called."""
    while test.__code__.co_name == "skip_wrapper":
        test = test.__wrapped__
    return test


@contextlib.contextmanager
def _cuda_is_cpu(suite: ModuleType) -> Iterator[None]:
    """Makes the suite's ways of placing a tensor on a CUDA device leave it on the CPU."""
    import torch

    to = torch.Tensor.to

    def to_device(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if args and isinstance(args[0], int) else to(tensor, *args, **kwargs)

    with (
        unittest.mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_: tensor),
        unittest.mock.patch.object(torch.Tensor, "to", to_device),
        unittest.mock.patch.object(torch.cuda, "set_device"),
        unittest.mock.patch.object(suite, "init_multigpu_helper", lambda size, _: {r: [None] for r in range(size)}),
    ):
        yield


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
