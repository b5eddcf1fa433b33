"""What many groups cost: the shared memory of 64 groups of 4 ranks, and the CPU time of processes that only have them.

Each group has run one all_reduce of 4 MiB. A page that several ranks map counts once: the kernel divides every shared
page among the processes that map it (Pss), so the sum over the ranks is that of the distinct pages, whatever else runs
on the machine. The change of the whole machine's Shmem is shown beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness import Benchmark, Result, Target, main, print_table, progress, run_ranks

NUM_RANKS = 4
NUM_GROUPS = 64
TENSOR_MIB = 4
IDLE_SECONDS = 2.0
MAX_SHARED_MIB = 300
MAX_IDLE_TICKS = 1


@dataclass(frozen=True)
class Usage:
    """One rank's view while all groups are alive."""

    machine_shmem_change_mib: float
    mapped_shmem_mib: float
    share_of_shmem_mib: float
    idle_cpu_ticks: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    ranks: list[Usage] = run_ranks(measure_on_rank, NUM_RANKS, _machine_shmem_mib(), backend=options.backend)
    shared_mib = sum(usage.share_of_shmem_mib for usage in ranks)
    idle_ticks = max(usage.idle_cpu_ticks for usage in ranks)
    rows = [
        ["shared memory, distinct pages, MiB", f"{shared_mib:.1f}"],
        ["change of the machine's Shmem, MiB", f"{ranks[0].machine_shmem_change_mib:.1f}"],
        ["RssShmem by rank, MiB", ", ".join(f"{usage.mapped_shmem_mib:.1f}" for usage in ranks)],
        [f"CPU ticks in {IDLE_SECONDS:.0f} idle seconds, by rank", ", ".join(str(u.idle_cpu_ticks) for u in ranks)],
    ]
    title = f"{NUM_GROUPS} groups of {NUM_RANKS} ranks, each after a {TENSOR_MIB} MiB all_reduce"
    print_table(title, ["", options.backend], rows)
    return Result([asdict(usage) for usage in ranks], _targets(shared_mib, idle_ticks))


def _targets(shared_mib: float, idle_ticks: int) -> list[Target]:
    return [
        Target(
            f"shared memory of {NUM_GROUPS} groups: at most {MAX_SHARED_MIB} MiB",
            f"{shared_mib:.1f} MiB",
            shared_mib <= MAX_SHARED_MIB,
        ),
        Target(
            f"an idle process uses no CPU: at most {MAX_IDLE_TICKS} tick in {IDLE_SECONDS:.0f} s",
            f"{idle_ticks}",
            idle_ticks <= MAX_IDLE_TICKS,
        ),
    ]


def measure_on_rank(rank: int, shmem_before_mib: float) -> Usage:
    with progress(1, shown=rank == 0) as announce:
        announce(f"memory of {NUM_GROUPS} groups")
        _use_groups()
    dist.barrier()
    usage = Usage(
        _machine_shmem_mib() - shmem_before_mib,
        _proc_mib("/proc/self/status", "RssShmem"),
        _proc_mib("/proc/self/smaps_rollup", "Pss_Shmem"),
        _idle_cpu_ticks(),
    )
    dist.barrier()
    return usage


def _use_groups() -> None:
    """Make all groups, counting the default one, and use each. torch keeps them alive until they are destroyed."""
    tensor = torch.zeros((TENSOR_MIB << 20) // torch.float32.itemsize)
    dist.all_reduce(tensor)
    for _ in range(NUM_GROUPS - 1):
        dist.all_reduce(tensor, group=dist.new_group())


def _machine_shmem_mib() -> float:
    return _proc_mib("/proc/meminfo", "Shmem")


def _proc_mib(path: str, field: str) -> float:
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path(path).read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"this kernel's {path} has no {field}")
    return int(match[1]) / 1024


def _idle_cpu_ticks() -> int:
    """CPU ticks that all threads of this process use while its main thread sleeps."""
    before = _cpu_ticks()
    time.sleep(IDLE_SECONDS)
    return _cpu_ticks() - before


def _cpu_ticks() -> int:
    # Counted from after the command's name, which may hold spaces: utime and stime are fields 14 and 15 of the line.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


BENCHMARK = Benchmark("memory", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
