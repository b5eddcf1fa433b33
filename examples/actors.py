"""Actors and learners: three worlds in one process, and no default group.

Actors play a bandit with eight arms, each by a policy that a learner sends it, and send back what they tried and won.
The learners average their gradients and improve the policy until it has found the best arm.

    everybody  all ranks: policies go one way in messages, plays the other
    learners   all ranks but the last: they average gradients
    actors     all ranks but the first: they agree on what they won

With three ranks or more there are processes that learn and play at once, in two threads. Such a process is in all three
groups, under different ranks. Run it with torchrun, with any number of ranks from 2 on:

    torchrun --nproc-per-node 4 examples/actors.py
"""

from __future__ import annotations

import argparse
import os
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

import phalanx
import phalanx.functional

NUM_ARMS = 8
BEST_ARM = 5
PLAYS = 64
POLICY, ARMS, REWARDS = 1, 2, 3  # tags of messages


@dataclass(frozen=True)
class Worlds:
    """The groups of one process. Rank r of `learners` is rank r of all, rank a of `actors` is rank a + 1 of all."""

    everybody: phalanx.ProcessGroup
    learners: phalanx.ProcessGroup | None  # None: this process does not learn
    actors: phalanx.ProcessGroup | None

    @classmethod
    def of(cls, everybody: phalanx.ProcessGroup) -> Worlds:
        ranks = list(range(everybody.size()))
        return cls(
            everybody,
            everybody.split_group(ranks[:-1], name="learners"),
            everybody.split_group(ranks[1:], name="actors"),
        )

    def learner_of(self, actor: int) -> int:
        """Who sends policies to an actor; both are ranks of all."""
        return (actor - 1) % (self.everybody.size() - 1)

    def actors_of(self, learner: int) -> list[int]:
        return [actor for actor in range(1, self.everybody.size()) if self.learner_of(actor) == learner]


def play(arms: Tensor, chance: torch.Generator) -> Tensor:
    """What the arms pay: the best one 1 on average, its neighbours half of it, the others nothing."""
    mean = (1 - 0.5 * (arms - BEST_ARM).abs()).clamp(min=0)
    return mean + 0.1 * torch.randn(len(arms), generator=chance)


class Actor:
    """Plays in a thread of its own. `average` is what all actors have won in the last round."""

    def __init__(self, worlds: Worlds, actors: phalanx.ProcessGroup, rounds: int) -> None:
        self._everybody = worlds.everybody
        self._actors = actors
        self._rounds = rounds
        self._learner = worlds.learner_of(worlds.everybody.rank())
        self._chance = torch.Generator().manual_seed(actors.rank())
        self.average = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._play_all)
        self._thread.start()

    def join(self) -> float:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.average

    def _play_all(self) -> None:
        try:
            for _ in range(self._rounds):
                self.average = self._play_once()
        except BaseException as error:
            self._error = error

    def _play_once(self) -> float:
        policy = torch.empty(NUM_ARMS)
        self._everybody.recv(policy, self._learner, tag=POLICY, async_op=False)
        arms = torch.multinomial(policy.softmax(0), PLAYS, replacement=True, generator=self._chance)
        rewards = play(arms, self._chance)
        sent = [
            self._everybody.send(arms, self._learner, tag=ARMS),
            self._everybody.send(rewards, self._learner, tag=REWARDS),
        ]
        average = phalanx.functional.all_reduce(rewards.mean(), self._actors, op=ReduceOp.AVG)
        for work in sent:
            work.wait()
        return average.item()


def learn(worlds: Worlds, learners: phalanx.ProcessGroup, rounds: int) -> Tensor:
    """Improves a policy by what this learner's actors try with it; all learners end with the same one."""
    actors = worlds.actors_of(learners.rank())
    policy = torch.zeros(NUM_ARMS, requires_grad=True)
    optimizer = torch.optim.SGD([policy], lr=2.0)
    for _ in range(rounds):
        optimizer.zero_grad()
        for actor in actors:
            worlds.everybody.send(policy.detach(), actor, tag=POLICY)
        for actor in actors:
            arms, rewards = torch.empty(PLAYS, dtype=torch.int64), torch.empty(PLAYS)
            worlds.everybody.recv(arms, actor, tag=ARMS, async_op=False)
            worlds.everybody.recv(rewards, actor, tag=REWARDS, async_op=False)
            # The policy gradient, with the average reward as its baseline.
            chosen = policy.log_softmax(0)[arms]
            loss = (-(rewards - rewards.mean()) * chosen).mean()
            loss.backward()
        assert policy.grad is not None
        learners.all_reduce(policy.grad, op=ReduceOp.AVG, async_op=False)
        optimizer.step()
    for other in phalanx.functional.all_gather(policy.detach(), learners):
        assert torch.equal(other, policy), "learners have different policies"
    return policy.detach()


def run(everybody: phalanx.ProcessGroup, rounds: int) -> str:
    """What the program prints: the same on every rank."""
    worlds = Worlds.of(everybody)
    actor = None if worlds.actors is None else Actor(worlds, worlds.actors, rounds)
    policy = torch.zeros(NUM_ARMS) if worlds.learners is None else learn(worlds, worlds.learners, rounds)
    average = torch.tensor(0.0 if actor is None else actor.join())
    # Rank 0 learns, and the last rank plays.
    everybody.broadcast(policy, src=0, async_op=False)
    everybody.broadcast(average, src=everybody.size() - 1, async_op=False)
    for group in (worlds.learners, worlds.actors):
        if group is not None:
            group.shutdown()
    return f"found arm {int(policy.argmax())} of {NUM_ARMS}; the last plays won {average.item():.2f} on average"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="how often actors play (default: %(default)s)")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        parser.error("expected 2 ranks or more: torchrun --nproc-per-node 4 examples/actors.py")
    with phalanx.new_group(name="everybody") as everybody:
        told = run(everybody, options.rounds)
        if everybody.rank() == 0:
            print(told)
            for op, total in sorted(everybody.statistics().items()):
                print(f"  rank 0 among everybody: {op}, {total.calls} calls, {total.bytes} bytes")


if __name__ == "__main__":
    main()
