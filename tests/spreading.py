"""How `pytest -n` spreads the tests: a file stays on one worker, long files begin first.

The contract suite's files are cut in two, one part per transport: what they start they start once per transport. Both
parts ask the same oracle, which computes an answer once if the second part comes later.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

__all__ = ["Spreading", "place"]

# What takes longest; each of the others takes less than 10 seconds. `make test PYTEST="--durations=50"` shows it.
_LONGEST = [
    "contract/test_contract.py shm",
    "integration/test_docs.py",
    "testing/test_plugin.py",
    "integration/test_kills.py",
    "integration/test_fallen_jobs.py",
    "contract/test_contract.py threads",
    "integration/test_ddp.py",
    "contract/test_messages.py shm",
    "reports/test_wrong_programs.py",
    "conformance/test_torch_suite.py",
    "testing/test_helpers.py",
    "testing/test_processes.py",
    "testing/test_killed_threads.py",
    "training/test_examples.py",
    "testing/test_reports.py",
    "integration/test_black_box.py",
    "integration/test_sharing.py",
    "integration/test_exits.py",
    "integration/test_deaths.py",
    "contract/test_messages.py threads",
    "unit/test_autoload.py",
    "training/test_compiled.py",
    "integration/test_report_of_makings.py",
    "integration/test_functional.py",
    "integration/test_splitting.py",
    "integration/test_new_group.py",
    "integration/test_hangs.py",
    "unit/test_on_torch.py",
]
_PLACES = {part: place for place, part in enumerate(_LONGEST)}


def part_of(nodeid: str) -> str:
    """What stays on one worker."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    transport = re.search(r"\[(shm|threads)\b", test) if file.startswith("contract/") else None
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
