"""What the results say: docs/conformance.md for people, and what there is to object to."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from plan import ADAPTATIONS, LEFT_OUT, adaptation_of

__all__ = ["AllResults", "ByVersion", "Results", "Verdict", "kind_of", "objections", "only_on_gloo", "write_table"]


class Verdict(TypedDict):
    status: str
    why: str
    seconds: float


class Results(TypedDict):
    backend: str
    ranks: int
    torch: str
    python: str
    seconds: float
    tests: dict[str, Verdict]


AllResults = Mapping[tuple[str, int], Results]  # of one version of torch, by backend and number of ranks
ByVersion = Mapping[str, AllResults]
KINDS = ("passed", "failed", "skipped: GPU", "skipped: ranks", "skipped: other")
_RANK_WORDS = ("world size", "ranks")
_GPU_WORDS = ("CUDA", "accelerator")  # the second since torch 2.15


def kind_of(test: Verdict) -> str:
    if test["status"] != "skipped":
        return test["status"]
    if any(word in test["why"] for word in _GPU_WORDS):
        return "skipped: GPU"
    return "skipped: ranks" if any(word in test["why"] for word in _RANK_WORDS) else "skipped: other"


def left_out(name: str) -> str | None:
    return next((why for pattern, why in LEFT_OUT.items() if fnmatch.fnmatchcase(name, pattern)), None)


def only_on_gloo(results: AllResults) -> list[str]:
    """The tests that pass there and not on Phalanx."""
    return sorted(
        {
            name
            for ranks in {ranks for _, ranks in results}
            for name, test in results["gloo", ranks]["tests"].items()
            if test["status"] == "passed" and results["phalanx", ranks]["tests"][name]["status"] != "passed"
        }
    )


def title_of(backend: str) -> str:
    return backend.removesuffix("gloo").capitalize() + "Gloo" if backend.endswith("gloo") else backend.capitalize()


def objections(results: AllResults) -> list[str]:
    versions = {result["torch"] for result in results.values()}
    if len(versions) > 1:
        return [f"the results are of different versions of torch, {', '.join(sorted(versions))}: make Gloo's again"]
    found = []
    for ranks in sorted({ranks for _, ranks in results}):
        gloo = results["gloo", ranks]
        found += [f"{name}, {ranks} ranks: {problem}" for name, problem in _objections(gloo, results["phalanx", ranks])]
        guarded = _differences(gloo, results["guarded gloo", ranks])
        found += [f"{name}, guarded Gloo, {ranks} ranks: {problem}" for name, problem in guarded]
    return found


def _differences(gloo: Results, guarded: Results) -> Iterator[tuple[str, str]]:
    """A test does on guarded Gloo what it does on Gloo, unless it fails there."""
    for name in sorted(gloo["tests"].keys() | guarded["tests"].keys()):
        if name not in gloo["tests"] or name not in guarded["tests"]:
            yield name, "one of the results does not have it; make Gloo's again"
            continue
        theirs, ours = gloo["tests"][name], guarded["tests"][name]
        if ours["status"] == "failed" or theirs["status"] not in (ours["status"], "failed"):
            yield name, f"{theirs['status']} on Gloo; {ours['status']}: {ours['why']}".removesuffix(": ")


def _objections(gloo: Results, phalanx: Results) -> Iterator[tuple[str, str]]:
    for name in sorted(gloo["tests"].keys() | phalanx["tests"].keys()):
        if name not in gloo["tests"] or name not in phalanx["tests"]:
            yield name, "one of the results does not have it; make Gloo's again"
            continue
        theirs, ours = gloo["tests"][name], phalanx["tests"][name]
        if ours["status"] == "failed":
            yield name, f"failed: {ours['why']}"
        elif ours["status"] == "skipped" and left_out(name) is None:
            if theirs["status"] == "passed":
                yield name, f"passes on Gloo; skipped: {ours['why']}"
            elif kind_of(ours) == "skipped: other":
                yield name, f"skipped, though for no want of a GPU or of ranks: {ours['why']}"


def write_table(path: Path, by_version: ByVersion) -> None:
    path.write_text("\n".join(_page(by_version)) + "\n")


def _page(by_version: ByVersion) -> Iterator[str]:
    yield "# PyTorch's own suite on Phalanx and on guarded Gloo"
    yield ""
    yield "Written by `make conformance` from the tests of `torch.testing._internal.distributed.distributed_test`:"
    first_of = {version: next(iter(results.values())) for version, results in by_version.items()}
    yield (
        ", ".join(f"{len(first['tests'])} in torch {first['torch'].split('+')[0]}" for first in first_of.values()) + "."
    )
    yield "They are imported from the installed torch; nothing is copied. Results are kept in files, Gloo's too:"
    yield "`make conformance CONFORMANCE='--backend gloo \"guarded gloo\" phalanx'` makes those for torch 2.13 again,"
    yield "and with `TORCH=2.15.0` those for torch 2.15."
    yield ""
    yield "| | | " + " | ".join(KINDS) + " | seconds |"
    yield "| --- | --- |" + " ---: |" * (len(KINDS) + 1)
    for version, results in by_version.items():
        for (backend, ranks), result in results.items():
            counts = Counter(kind_of(test) for test in result["tests"].values())
            cells = [f"torch {version}", f"{title_of(backend)}, {ranks} ranks"]
            cells += [str(counts[kind]) for kind in KINDS]
            yield "| " + " | ".join(cells) + f" | {result['seconds']:.0f} |"
    yield ""
    yield from _how(by_version)
    yield "## Every test"
    yield ""
    yield "A cell without a version is the same for all of them."
    yield ""
    columns = list(next(iter(by_version.values())))
    yield "| test | " + " | ".join(f"{title_of(backend)}, {ranks}" for backend, ranks in columns) + " | remark |"
    yield "| --- |" + " --- |" * (len(columns) + 1)
    for name in sorted({name for first in first_of.values() for name in first["tests"]}):
        cells = [_cell(by_version, column, name) for column in columns]
        yield f"| {name} | " + " | ".join(cells) + f" | {_remark(name)} |"


def _how(by_version: ByVersion) -> Iterator[str]:
    yield "## How it is run"
    yield ""
    yield "No test's body is changed. Each test gets freshly forked ranks, from a process that imported the suite once."
    yield "On Gloo the tests run as the suite has them. On guarded Gloo, too: in ranks with `PHALANX_GUARD=1`, whose"
    yield "groups are checked to be guarded; a test must pass, or be skipped, as it does on Gloo."
    yield "On Phalanx they run with these adaptations, so the numbers of tests that passed are not of the same tests:"
    yield ""
    yield "- The suite's sets of backends that have a feature (`ddp`, `subgroup`, `gpu`, `plugin`) are told of Phalanx."
    yield "  `gpu` is also what its tests of objects ask for."
    yield "- Its lists of backends that the profiler shows are not: they ask for ranges marked as asynchronous,"
    yield "  and torch lets nobody but C++ make those. The ranges are tested in `tests/training/test_profiler.py`."
    yield "- The suite's barrier between ranks polls a folder; here it is one of multiprocessing's."
    yield "- A test that asks for CUDA devices, in its decorators or by its name, is skipped for want of a GPU."
    yield "- These tests are run although the suite skips them, each through the function under the skip. Of those that"
    yield "  ask for more ranks or CUDA devices than they use, the function under all decorators is run; for those that"
    yield "  are written for CUDA tensors, what places a tensor on a device (`Tensor.to`, `Tensor.cuda`,"
    yield "  `torch.cuda.set_device`, the suite's `init_multigpu_helper`) leaves it on the CPU:"
    yield ""
    for adaptation in ADAPTATIONS:
        yield f"  - {adaptation.why}: " + ", ".join(f"`{name}`" for name in adaptation)
    yield ""
    passed = ", ".join(
        f"`{name}`" for name in sorted({name for results in by_version.values() for name in only_on_gloo(results)})
    )
    yield f"Not run, of which {passed or 'none'} pass on Gloo:"
    yield ""
    for pattern, why in LEFT_OUT.items():
        yield f"- `{pattern}`: {why}."
    yield ""


def _cell(by_version: ByVersion, column: tuple[str, int], name: str) -> str:
    texts = {version: _text(results[column]["tests"].get(name)) for version, results in by_version.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{version}: {text}" for version, text in texts.items())


def _text(test: Verdict | None) -> str:
    if test is None:
        return "not there"
    kind = kind_of(test)
    return f"skipped: {test['why']}" if kind == "skipped: other" else kind


def _remark(name: str) -> str:
    adaptation = adaptation_of(name)
    if adaptation is not None:
        return adaptation.why
    return left_out(name) or ""
