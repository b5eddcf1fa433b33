"""The part of torch's own distributed suite that every change must pass: collectives, messages, groups and DDP.

Some tests run on guarded Gloo, too. All are run by `make conformance`. A chosen test that skips itself fails. `TORCH_SUITE_BACKEND` names another
backend to compare with.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator

import pytest
import torch
from conform import VERSION, load_all, versions
from plan import ADAPTATIONS, LEFT_OUT, adaptation_of
from torch_suite import Outcome, Suite, report, status_of

BACKEND = os.environ.get("TORCH_SUITE_BACKEND", "phalanx")

# By the number of ranks.
CHOSEN = {
    2: """
        test_Backend_enum_class test_get_backend test_get_rank test_get_rank_size_group
        test_all_gather test_all_gather_complex test_all_gather_full_group
        test_all_gather_coalesced_simple test_all_gather_coalesced_complex test_all_gather_coalesced_with_empty
        test_all_gather_into_cat_tensor_cuda test_all_gather_into_stack_tensor_cuda
        test_all_gather_object_default_pg test_all_gather_object_subgroup
        test_all_reduce_sum test_all_reduce_product test_all_reduce_min test_all_reduce_max
        test_all_reduce_full_group_sum
        test_all_reduce_sum_async test_all_reduce_sum_complex test_all_reduce_complex_unsupported_ops
        test_all_reduce_coalesced_sum test_all_reduce_coalesced_full_group_max
        test_all_reduce_coalesced_max_complex_unsupported
        test_all_to_all test_all_to_all_complex test_all_to_all_full_group
        test_all_to_all_single_equal_split test_all_to_all_single_unequal_split
        test_all_to_all_single_unequal_split_complex
        test_barrier test_barrier_timeout_global
        test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags test_batch_isend_irecv_op_err
        test_broadcast test_broadcast_full_group test_broadcast_object_list
        test_coalescing_manager test_coalescing_manager_async
        test_destroy_group test_destroy_full_group
        test_gather test_gather_checks
        test_get_future
        test_irecv test_isend test_isend_torch_profiler
        test_nccl_backend_bool_allreduce
        test_new_subgroups_group_size_exceeds_world_size
        test_reduce_sum test_reduce_product test_reduce_min test_reduce_max test_reduce_sum_twice
        test_reduce_scatter_tensor_cuda
        test_scatter test_scatter_checks test_scatter_complex test_scatter_object_list
        test_send_recv test_send_recv_any_source test_send_recv_any_source_autograd_profiler test_send_recv_with_tag
        test_send_recv_with_tag_torch_profiler
        test_sparse_all_reduce_sum
        test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
        test_DistributedDataParallel_requires_grad
        test_accumulate_gradients_no_sync test_accumulate_gradients_no_sync_allreduce_hook
        test_accumulate_gradients_no_sync_allreduce_with_then_hook test_accumulate_gradients_no_sync_grad_is_view
        test_ddp_create_graph test_ddp_logging_data_cpu test_dump_DDP_relevant_env_vars
        test_grads_same_across_ranks_with_no_sync test_static_graph_api_cpu
    """,
    3: """
        test_all_gather_group test_all_reduce_group_sum test_all_reduce_coalesced_group_sum test_all_to_all_group
        test_barrier_group test_broadcast_group test_gather_group test_reduce_group_sum test_scatter_group
    """,
    4: """
        test_gather_object test_gather_object_subgroup test_new_subgroups test_new_subgroups_with_group_param
        test_new_subgroups_overlap_not_allowed
    """,
}

# On guarded Gloo, with two ranks.
CHOSEN_GUARDED = [
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_async",
    "test_all_reduce_coalesced_sum",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_send_recv_any_source_autograd_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]

PARAMETERS = [pytest.param(name, ranks, id=name) for ranks, names in CHOSEN.items() for name in names.split()]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    running = Suite(BACKEND, tmp_path_factory.mktemp("torch_suite"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def guarded_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    running = Suite("guarded gloo", tmp_path_factory.mktemp("torch_suite"), 2)
    yield running
    running.close()


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome["status"] for outcome in outcomes]


@pytest.mark.parametrize(("name", "ranks"), PARAMETERS)
def test_passes(suite: Suite, name: str, ranks: int) -> None:
    outcomes = suite.run(name, ranks, adaptation_of(name))
    if status_of(outcomes) != "passed":
        pytest.fail(report(outcomes), pytrace=False)


@pytest.mark.parametrize("name", CHOSEN_GUARDED)
def test_passes_on_guarded_gloo(guarded_suite: Suite, name: str) -> None:
    outcomes = guarded_suite.run(name, 2)
    if status_of(outcomes) != "passed":
        pytest.fail(report(outcomes), pytrace=False)


def test_the_plan_is_about_tests_of_the_suite(suite: Suite) -> None:
    adapted = [name for adaptation in ADAPTATIONS for name in adaptation]
    assert len(adapted) == len(set(adapted)), "adapted twice"
    assert set(adapted) - set(suite.tests) == set()
    assert [pattern for pattern in LEFT_OUT if not fnmatch.filter(suite.tests, pattern)] == []
    chosen = [name for names in CHOSEN.values() for name in names.split()]
    assert len(chosen) == len(set(chosen)), "chosen twice"


def test_the_kept_results_are_of_this_suite(suite: Suite) -> None:
    # Of a version between the first and the last that are supported, none are kept; its suite has the same tests.
    for version in {VERSION} & set(versions()) or versions():
        for kept in load_all(version).values():
            if version == VERSION:
                assert kept["torch"].split("+")[0] == torch.__version__.split("+")[0], "run make conformance again"
            assert set(kept["tests"]) == set(suite.tests), "run make conformance again"


def test_skip_is_an_outcome_of_its_own(suite: Suite) -> None:
    marked = suite.run("test_send_recv_nccl", 2)
    assert statuses(marked) == ["skipped", "skipped"]
    found_out_while_running = suite.run("test_broadcast_group", 2)
    assert statuses(found_out_while_running) == ["skipped", "skipped"]
    assert found_out_while_running[0]["text"] == "Skipped due to small world size."


def test_failure_shows_each_ranks_traceback(suite: Suite) -> None:
    # Its groups name ranks up to 3.
    outcomes = suite.run("test_new_subgroups_with_group_param", 2)
    assert statuses(outcomes) == ["failed", "failed"]
    for outcome in outcomes:
        assert "in test_new_subgroups_with_group_param" in outcome["text"]
        assert "ValueError" in outcome["text"]


def test_rank_past_its_limit_shows_its_stack(suite: Suite) -> None:
    # Sleeps longer than this limit on either rank. The first to be ended may take the other with it, which fails then,
    # and may also pass its limit while it ends.
    outcomes = suite.run("test_barrier", 2, limit=0.3)
    assert "passed" not in statuses(outcomes)
    late = [outcome for outcome in outcomes if "past its limit" in outcome["text"]]
    assert late
    for outcome in late:
        assert outcome["status"] == "died"
        # Where that is, is a matter of how busy the machine is.
        assert "(most recent call first):\n  File" in outcome["log"]
