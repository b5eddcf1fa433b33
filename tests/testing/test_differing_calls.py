"""Where the calls of ranks that are threads differ: what the native engine finds, whatever is in flight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt


@pytest.mark.parametrize("differs_at", [1, 2, 33, 50, 100])
def test_a_rank_that_is_far_ahead(differs_at: int) -> None:
    """More calls in flight than the rings of the engine hold: each call is compared before it is carried out."""
    codes: dict[int, str] = {}
    sums: dict[int, list[float]] = {}

    def make_all(world: pt.World, tensors: list[torch.Tensor]) -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        world.store.set("ahead", "1")
        for work in works:
            work.wait()

    def program(rank: int, world: pt.World) -> None:
        if rank == 1:
            world.store.wait(["ahead"])
        tensors = [torch.ones(2 if rank == 1 and seq == differs_at else 1) for seq in range(1, 101)]
        with pytest.raises(phalanx.Mismatch) as caught:
            make_all(world, tensors)
        codes[rank] = f"{caught.value.code} {caught.value.seq}"
        sums[rank] = [float(tensor[0]) for tensor in tensors]

    pt.run(program, 2)
    assert set(codes.values()) == {f"MISMATCH:COUNT {differs_at}"}
    # No call was carried out with one that it does not fit.
    expected = [2.0] * (differs_at - 1) + [1.0] * (101 - differs_at)
    assert sums == {0: expected, 1: expected}


def test_calls_in_flight_differ_while_a_rank_is_absent() -> None:
    """The second call is compared when the first has ended, although the third rank never makes it."""
    errors: dict[int, phalanx.Mismatch] = {}

    def program(rank: int, world: pt.World) -> None:
        dist.all_reduce(torch.ones(1), async_op=True)
        if rank == 2:
            world.store.wait(["told"])
            return
        with pytest.raises(phalanx.Mismatch) as caught:
            dist.all_reduce(torch.ones(1 + rank))
        errors[rank] = caught.value
        world.store.set("told", "1")

    pt.run(program, 3)
    assert {error.code for error in errors.values()} == {"MISMATCH:COUNT"}
    assert "rank 2: had not made this call" in str(errors[0])
    assert "last completed call of all ranks: all_reduce, seq 1, at " in str(errors[0])


def test_many_places_in_the_program() -> None:
    """Reports know the lines of the last calls, however many lines the run has come from."""
    lines = "\n".join(["def many(call):", *("    call()" for _ in range(200))])
    scope: dict[str, object] = {}
    exec(compile(lines, "program.py", "exec"), scope)

    def program(rank: int, world: pt.World) -> None:
        many = scope["many"]
        assert callable(many)
        many(dist.barrier)
        dist.all_reduce(torch.ones(1 + rank))

    with pytest.raises(phalanx.Mismatch, match=r"barrier, seq 200, at program\.py:201, in many"):
        pt.run(program, 2)
