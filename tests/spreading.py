"""How `pytest -n` spreads the tests: a file stays on one worker, long files begin first.

The contract suite's files are cut into parts, one per transport: what they start they start once per transport. All
parts ask the same oracle, which computes an answer once if the other parts come later.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

__all__ = ["Spreading", "place"]

# What takes longest; each of the others takes less than 10 seconds. `make test PYTEST="--durations=50"` shows it.
_LONGEST = [
    "training/test_compiled.py",
    "contract/test_contract.py shm",
    "contract/test_contract.py threads",
    "integration/test_docs.py",
    "testing/test_plugin.py",
    "unit/test_agreement.py",
    "testing/test_helpers.py",
    "contract/test_messages.py threads",
    "testing/test_processes.py",
    "integration/test_fallen_jobs.py",
    "testing/test_killed_threads.py",
    "integration/test_kills.py",
    "unit/test_autoload.py",
    "contract/test_messages.py shm",
    "contract/test_contract.py seats",
    "contract/test_messages.py seats",
    "integration/test_ddp.py",
    "unit/test_on_torch.py",
    "integration/test_exits.py",
    "training/test_examples.py",
    "reports/test_wrong_programs.py",
    "integration/test_swapped_memory.py",
    "reports/test_random_programs.py",
    "training/test_sharding.py",
    "unit/test_commands.py",
    "testing/test_run.py",
    "testing/test_free.py",
    "conformance/test_torch_suite.py",
    "integration/test_deaths.py",
]
_PLACES = {part: place for place, part in enumerate(_LONGEST)}


def part_of(nodeid: str) -> str:
    """What stays on one worker."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    transport = re.search(r"\[(shm|threads|seats)\b", test) if file.startswith("contract/") else None
    return f"{file} {transport[1]}" if transport else file


def place(nodeid: str) -> int:
    """The place of a test in the order in which parts begin."""
    return _PLACES.get(part_of(nodeid), len(_PLACES))


class Spreading(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out the parts in the order in which they come; a worker that has finished one gets the next one."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)
