"""What happens in a world of the kill tests: a random program of calls, who dies in it, how, and where.

A scenario is a pure function of its seed. Every rank makes it for itself; nothing about it is communicated.

The program begins with the default group and ends with a barrier of it, so that every survivor comes to need the
victim. In between there are calls on several groups, and groups are made and destroyed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from calls import What
from ops import POINT_TO_POINT, collectives_of, dtypes_of

# How a rank dies: killed by the keeper; or by its own doing, of which the last two leave Python in order.
DEATHS = ("outside", "SIGKILL", "SIGSEGV", "_exit", "exception", "sys.exit")
_OWN_THREAD = ("SIGKILL", "SIGSEGV", "_exit")
# Spellings of one op.
_FAMILIES = {
    "coalesced": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_object": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_EXIT_CODES = (0, 1, 3, 77)
# Elements of a small, a medium and a large call: inline, one chunk, many chunks.
_COUNTS = {"small": (1, 1_000), "medium": (5_000, 60_000), "large": (700_000, 3_000_000)}
_WEIGHTS = (6, 2, 3)
_LONGEST_WINDOW = 12


class VictimError(Exception):
    """What a victim raises and nobody catches."""


@dataclass(frozen=True)
class Step:
    """One step: a `call`, a `wait` for all async calls, `make` or `destroy` a group. `group` is the group's number."""

    kind: str
    group: int = 0
    ranks: tuple[int, ...] = ()
    what: What | None = None
    size: str = ""

    @property
    def name(self) -> str:
        if self.what is not None:
            return self.what.op
        if self.kind == "make":
            return "new_group" if self.group else "init_process_group"
        return self.kind

    def takes_part(self, rank: int) -> bool:
        if self.what is None:
            return self.kind == "wait" or rank in self.ranks
        return rank in [self.ranks[member] for member in self.what.members(len(self.ranks))]

    def sends_to_anybody(self, rank: int) -> bool:
        """Whether the rank sends what is received from anybody, and others could send that, too."""
        if self.what is None or self.what.op != "any_source" or len(self.ranks) < 3:
            return False
        return self.ranks[self.what.ends(len(self.ranks))[0]] == rank

    def with_known_sender(self) -> Step:
        """The same message, received from its sender.

        A receive from anybody goes on waiting for the others when the sender is dead, and they may wait for the
        receiver in another group.
        """
        assert self.what is not None
        return replace(self, what=replace(self.what, op="send"))

    def __str__(self) -> str:
        if self.what is None:
            return self.name
        return f"{'async' if self.what.async_op else 'sync'} {self.size} {self.name}"


@dataclass(frozen=True)
class Scenario:
    """`moment` is where in the step the victim dies: before it, during it, after it was issued."""

    seed: int
    backend: str
    size: int
    steps: tuple[Step, ...]
    victim: int
    death: str
    moment: str
    target: int
    yields: int
    code: int
    reaped_late: bool
    stops: bool

    @classmethod
    def of(cls, seed: int, *, backend: str = "phalanx", p2p: bool = True) -> Scenario:
        rng = random.Random(seed)
        size = rng.choice((2, 2, 3, 3, 4))
        victim = rng.choice((0, *range(size)))
        steps = _program(rng, size, backend, p2p)
        death = rng.choice((*DEATHS, "outside", "SIGKILL"))
        moments = ["during"] * 2 if death in _OWN_THREAD else []
        moment = "during" if death == "outside" else rng.choice([*moments, "before", "after"])
        target = _target(rng, steps, victim)
        # A turn of the keeper takes about half a microsecond, one of a second thread ten.
        longest = (1.5 if steps[target].size == "small" else 2.5) + (death == "outside")
        scenario = cls(
            seed=seed,
            backend=backend,
            size=size,
            steps=steps,
            victim=victim,
            death=death,
            moment=moment,
            target=target,
            yields=int(10 ** rng.uniform(0, longest)) - 1,
            code=rng.choice(_EXIT_CODES),
            reaped_late=rng.random() < 0.7,
            stops=rng.random() < 0.3,
        )
        return replace(scenario, steps=tuple(scenario._receivable(i, step) for i, step in enumerate(steps)))

    def _receivable(self, number: int, step: Step) -> Step:
        """The step, with a known sender where that may be gone when the message is received."""
        senders = range(self.size) if self.stops else [self.victim]
        may_be_gone = number >= self.target or (step.what is not None and step.what.async_op)
        from_anybody = any(step.sends_to_anybody(rank) for rank in senders)
        return step.with_known_sender() if may_be_gone and from_anybody else step

    @property
    def own_thread(self) -> bool:
        """The victim dies by a second thread while the first is in the step."""
        return self.death in _OWN_THREAD and self.moment == "during"

    @property
    def may_die_unknown(self) -> bool:
        """The victim may die before it has said who it is: then only the timeout can tell that it does not come."""
        return self.target == 0 and self.moment != "after"

    @property
    def words(self) -> str:
        """What the victim's exception says."""
        return f"the end of seed {self.seed}"

    @property
    def status(self) -> int:
        """The exit status that the victim must have."""
        statuses = {"outside": -9, "SIGKILL": -9, "SIGSEGV": -11, "exception": 1}
        return statuses.get(self.death, self.code)

    def __str__(self) -> str:
        how = {
            "outside": "SIGKILL from outside",
            "exception": "an uncaught exception",
            "_exit": f"os._exit({self.code})",
            "sys.exit": f"sys.exit({self.code})",
        }.get(self.death, f"its own {self.death}")
        thread = " by a second thread" if self.own_thread else ""
        return (
            f"{self.size} ranks, rank {self.victim} dies by {how}{thread} {self.moment} step {self.target} of "
            f"{len(self.steps)} ({self.steps[self.target]}), reaped {'late' if self.reaped_late else 'at once'}, "
            f"survivors {'stop' if self.stops else 'go on'}"
        )

    def features(self) -> set[str]:
        """What this scenario has, of the things that a set of scenarios should have each once."""
        step = self.steps[self.target]
        features = {
            f"death {self.death}",
            f"{'second thread' if self.own_thread else 'first thread'} {self.death}",
            f"moment {self.moment}",
            f"in {_FAMILIES.get(step.name, step.name)}",
            f"{self.size} ranks",
            f"reaped {'late' if self.reaped_late else 'at once'}",
            f"survivors {'stop' if self.stops else 'go on'}",
            "rank 0" if self.victim == 0 else "another rank",
        }
        if self.death == "_exit":
            features.add(f"exit code {'zero' if self.code == 0 else 'above zero'}")
        if step.what:
            kind = "point to point" if step.name in POINT_TO_POINT else "collective"
            features |= {f"{kind} {step.size}", f"{kind} {'async' if step.what.async_op else 'sync'}"}
            features.add("default group" if step.group == 0 else "another group")
        elif step.kind == "make":
            features |= {"making a group " + ("as rank 0" if self.victim == 0 else "as another rank")}
            features |= {f"making a group {self.moment}"}
        return features | {f"runs {step.name}" for step in self.steps}


def covering(number: int, among: int = 400) -> list[int]:
    """`number` seeds that have among them every feature that the first `among` seeds have."""
    features = {seed: Scenario.of(seed).features() for seed in range(among)}
    missing = set().union(*features.values())
    chosen: list[int] = []
    while missing and len(chosen) < number:
        best = max(features, key=lambda seed: (len(features[seed] & missing), -seed))
        chosen.append(best)
        missing -= features.pop(best)
    if missing:
        raise ValueError(f"{number} scenarios do not have {sorted(missing)}")
    return chosen + list(itertools.islice(features, number - len(chosen)))


def _target(rng: random.Random, steps: Sequence[Step], victim: int) -> int:
    """Where the victim dies. Large calls and groups in the making get more than their share."""
    able = [number for number, step in enumerate(steps) if step.takes_part(victim)]
    wanted = rng.choices(("any", "large", "make", "init"), (9, 5, 3, 1))[0]
    if wanted == "init":
        return 0
    picked = [number for number in able[1:] if wanted in ("any", steps[number].size, steps[number].kind)]
    return rng.choice(picked or able)


def _program(rng: random.Random, size: int, backend: str, p2p: bool) -> tuple[Step, ...]:
    world = tuple(range(size))
    steps = [Step("make", 0, world)]
    groups = {0: world}
    numbers = itertools.count(1)
    in_flight = 0
    for _ in range(rng.randint(10, 26)):
        kind = rng.choices(("call", "make", "destroy", "wait"), (80, 9, 5, 6))[0]
        if kind == "make" or len(steps) == 1:
            number = next(numbers)
            groups[number] = tuple(sorted(rng.sample(world, rng.randint(2, size))))
            steps.append(Step("make", number, groups[number]))
        elif kind == "destroy" and len(groups) > 2:
            number = rng.choice([number for number in groups if number])
            steps.append(Step("destroy", number, groups.pop(number)))
        elif kind == "wait" or in_flight == _LONGEST_WINDOW:
            steps.append(Step("wait"))
            in_flight = 0
        else:
            number = rng.choice((0, *groups))
            steps.append(_call(rng, number, groups[number], len(steps), backend, p2p))
            in_flight += 1
    steps += [Step("wait"), Step("call", 0, world, What("barrier", 1, torch.float32, 0, 0, 0, False), "small")]
    return tuple(steps)


def _call(rng: random.Random, group: int, ranks: tuple[int, ...], salt: int, backend: str, p2p: bool) -> Step:
    op = rng.choice(POINT_TO_POINT) if p2p and rng.random() < 0.35 else rng.choice(collectives_of(backend))
    size = rng.choices(tuple(_COUNTS), _WEIGHTS)[0]
    if op in ("barrier", "all_gather_object"):
        size = "small"
    dtype = rng.choice(dtypes_of(backend))
    count = rng.randint(*_COUNTS[size]) // (len(ranks) if size == "large" else 1)
    what = What(op, count, dtype, salt, rng.randrange(1 << 16), salt, rng.random() < 0.45)
    return Step("call", group, ranks, what, size)
