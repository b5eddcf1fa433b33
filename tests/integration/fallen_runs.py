"""Runs the jobs of `fallen_jobs.py`, in one of three ways.

- without a launcher: the test ends the ranks that are left when one has failed;
- below the part of torchrun that starts and ends processes (`start_processes` of torch's elastic launcher), without its
  agent and its rendezvous: it ends all ranks by SIGTERM when one has failed. Ranks are forked and so begin at once;
- by the command torchrun itself, which takes seconds: this module is the program that it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fallen_jobs import JOBS, SIZE, Job, Rank
from ranks import until

import forking
import programs
from quick_end import skip_library_destructors


def be_rank(rank: int, folder: Path, body: Callable[[Rank], None]) -> None:
    """Ends as a program does, but for the interpreter's own end, which takes a second."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.environ["PHALANX_FOLDER"] = os.fspath(folder / "jobs")
    gc.freeze()
    code = 1

    def main() -> None:
        nonlocal code
        try:
            body(Rank(rank, folder))
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
            raise

    def end() -> None:
        sys.stderr.flush()
        ctypes.CDLL(None).exit(code)

    # It runs last, because it is registered first.
    atexit.register(end)
    sys.modules["__main__"].main = main  # type: ignore[attr-defined]
    ctypes.pythonapi.Py_Exit(1 if ctypes.pythonapi.PyRun_SimpleString(b"main()") else 0)


def be_forked_rank(rank: int, folder: Path, body: Callable[[Rank], None]) -> None:
    skip_library_destructors()
    be_rank(rank, folder, body)


def be_launcher(folder: Path, body: Callable[[Rank], None]) -> None:
    """Starts the ranks as torchrun does, and ends them so."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(output, fd)
    context = start_processes(
        name="job",
        entrypoint=be_forked_rank,
        args={rank: (rank, folder, body) for rank in range(SIZE)},
        envs={rank: {} for rank in range(SIZE)},
        logs_specs=DefaultLogsSpecs(log_dir=os.fspath(folder / "logs")),
        start_method="fork",
    )
    try:
        # As torchrun does, it ends the others by SIGTERM when one has failed.
        context.wait(period=0.1)
    except SignalException as error:
        context.close(death_sig=error.sigval)


def output_of(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("output*")))


class Run:
    """A job that runs, with or without a launcher."""

    def __init__(self, context: Any, job: Job, folder: Path, *, has_launcher: bool) -> None:
        self.job, self.folder = job, folder
        self._has_launcher = has_launcher
        starts = [(be_launcher, (folder, job.body))]
        if not has_launcher:
            starts = [(be_forked_rank, (rank, folder, job.body)) for rank in range(SIZE)]  # type: ignore[misc]
        self._processes = [context.Process(target=target, args=args) for target, args in starts]
        for process in self._processes:
            process.start()

    def end(self, deadline: float) -> None:
        """Plays the part of whoever ends the job."""
        if self.job.from_outside:
            until(lambda: len(list(self.folder.glob("hangs*"))) == SIZE, "ranks do not come")
            self._end_all(self._processes)
        while any(process.is_alive() for process in self._processes):
            assert time.monotonic() < deadline, f"{self.job.name} does not end: {self.output()}"
            alive = [process for process in self._processes if process.is_alive()]
            if not self._has_launcher and all(self._is_left(process) for process in alive):
                self._end_all(alive)
            time.sleep(0.01)

    def _end_all(self, processes: list[Any]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, self.job.ended_by)

    def _is_left(self, process: Any) -> bool:
        """Whether the rank hangs, and will not end by itself."""
        rank = self._processes.index(process)
        return (self.folder / f"hangs{rank}").exists() and self._something_ended()

    def _something_ended(self) -> bool:
        return any(not process.is_alive() for process in self._processes)

    def output(self) -> str:
        return output_of(self.folder)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def running(jobs: list[Job], folder: Path, *, has_launcher: bool) -> Iterator[list[Run]]:
    """All at once."""
    runs: list[Run] = []
    try:
        for number, job in enumerate(jobs):
            place = folder / f"{number}-{job.name}"
            place.mkdir(parents=True)
            runs.append(Run(forking.context, job, place, has_launcher=has_launcher))
        yield runs
    finally:
        for run in runs:
            run.kill()


@dataclass(frozen=True)
class EndedRun:
    """A job that the command torchrun has run."""

    job: Job
    folder: Path

    def output(self) -> str:
        return output_of(self.folder)


def run_by_torchrun(job: Job, folder: Path, *, is_forked: bool) -> EndedRun:
    """`is_forked`: processes are forked from a server that has torch loaded. Otherwise all are fresh interpreters."""
    command = ["--standalone", f"--nproc-per-node={SIZE}", __file__, os.fspath(folder), str(JOBS.index(job))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(Path(forking.__file__).parent)}
    if is_forked:
        done = programs.run(["torchrun", *command], folder, env)
    else:
        done = _run_fresh([sys.executable, "-m", "torch.distributed.run", *command], env)
    (folder / "output").write_text(done.stdout + (done.stderr or ""))
    return EndedRun(job, folder)


def _run_fresh(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        # With its ranks, which torchrun does not end where it is killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(words, process.returncode, output)


if __name__ == "__main__":
    be_rank(int(os.environ["RANK"]), Path(sys.argv[1]), JOBS[int(sys.argv[2])].body)
