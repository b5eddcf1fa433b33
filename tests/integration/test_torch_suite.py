"""An outside check: the collective, object and group tests of torch's own distributed suite, run on our backend.

Every test of the suite is either in CHOSEN and must pass, or in LEFT_OUT with a reason; `test_accounts_for_every_test`
holds that together. A chosen test that skips itself fails. `TORCH_SUITE_BACKEND` names another backend to compare with.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch_suite import Outcome, Suite

BACKEND = os.environ.get("TORCH_SUITE_BACKEND", "phalanx")


@dataclass(frozen=True)
class Batch:
    """Tests that run in the same way. With `skip`, the suite would skip them, for a reason that does not hold here."""

    names: str
    ranks: int = 2
    skip: str | None = None
    on_cpu: bool = False


CHOSEN = (
    Batch("""
        test_Backend_enum_class
        test_all_gather test_all_gather_complex test_all_gather_full_group
        test_all_gather_coalesced_simple test_all_gather_coalesced_complex test_all_gather_coalesced_full_group
        test_all_gather_coalesced_with_empty
        test_all_gather_object_default_pg test_all_gather_object_subgroup
        test_all_reduce_sum test_all_reduce_product test_all_reduce_min test_all_reduce_max
        test_all_reduce_full_group_sum test_all_reduce_full_group_product test_all_reduce_full_group_min
        test_all_reduce_full_group_max
        test_all_reduce_sum_async test_all_reduce_sum_complex test_all_reduce_complex_unsupported_ops
        test_all_reduce_coalesced_max_complex_unsupported
        test_barrier test_barrier_full_group
        test_broadcast test_broadcast_full_group
        test_destroy_group test_destroy_full_group
        test_gather test_gather_checks test_gather_full_group
        test_get_backend test_get_rank test_get_rank_size_group test_get_rank_size_full_group
        test_reduce_sum test_reduce_product test_reduce_min test_reduce_max test_reduce_sum_twice
        test_reduce_full_group_sum test_reduce_full_group_product test_reduce_full_group_min test_reduce_full_group_max
        test_scatter test_scatter_checks test_scatter_complex test_scatter_full_group
        test_send_recv test_send_recv_with_tag test_isend test_irecv
    """),
    Batch("test_gather_object test_gather_object_subgroup test_new_subgroups_with_group_param", ranks=4),
    Batch(
        """
        test_all_reduce_coalesced_sum test_all_reduce_coalesced_product test_all_reduce_coalesced_min
        test_all_reduce_coalesced_max
        test_all_reduce_coalesced_full_group_sum test_all_reduce_coalesced_full_group_product
        test_all_reduce_coalesced_full_group_min test_all_reduce_coalesced_full_group_max
        test_barrier_timeout_global test_barrier_timeout_full_group
        test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags
        test_scatter_object_list
        test_send_recv_any_source
        test_sparse_all_reduce_sum
        """,
        skip="only for a backend that is named gloo",
    ),
    Batch(
        """
        test_all_to_all test_all_to_all_complex test_all_to_all_full_group
        test_all_to_all_single_equal_split test_all_to_all_single_equal_split_complex
        test_all_to_all_single_equal_split_full_group
        test_all_to_all_single_unequal_split test_all_to_all_single_unequal_split_complex
        test_all_to_all_single_unequal_split_full_group
        """,
        skip="on the CPU only for a backend that is named mpi",
    ),
    Batch("test_get_future", skip="only for backends that are named mpi, nccl or gloo"),
    Batch("test_broadcast_object_list", skip="fails on another backend"),
    Batch(
        """
        test_all_gather_group test_all_gather_coalesced_group
        test_all_reduce_group_sum test_all_reduce_group_product test_all_reduce_group_min test_all_reduce_group_max
        test_all_reduce_coalesced_group_sum test_all_reduce_coalesced_group_product
        test_all_reduce_coalesced_group_min test_all_reduce_coalesced_group_max
        test_all_to_all_group test_all_to_all_single_equal_split_group test_all_to_all_single_unequal_split_group
        test_barrier_group
        test_broadcast_group
        test_gather_group
        test_reduce_group_sum test_reduce_group_product test_reduce_group_min test_reduce_group_max
        test_scatter_group
        """,
        ranks=3,
        skip="asks for eight ranks, but its group is ranks 1 and 2",
    ),
    Batch(
        "test_new_subgroups_group_size_exceeds_world_size test_new_subgroups_by_enumeration_negative_input_rank",
        skip="asks for CUDA devices, uses none",
    ),
    Batch(
        """
        test_new_subgroups test_new_subgroups_by_enumeration_input_rank_exceeds_world_size
        test_new_subgroups_overlap_not_allowed test_new_subgroups_world_size_not_divisible_by_group_size
        """,
        ranks=4,
        skip="asks for CUDA devices, uses none",
    ),
    Batch(
        """
        test_all_gather_into_cat_tensor_cuda test_all_gather_into_stack_tensor_cuda
        test_coalescing_manager test_coalescing_manager_async
        test_nccl_backend_bool_allgather test_nccl_backend_bool_allreduce test_nccl_backend_bool_broadcast
        test_nccl_backend_bool_reduce
        test_reduce_scatter_tensor_cuda
        """,
        skip="written for CUDA; the suite has no other test of these ops",
        on_cpu=True,
    ),
)

LEFT_OUT = {
    "about the names of profiler ranges": "test_isend_*_profiler test_send_recv*_profiler",
    "point to point with CUDA tensors, or about NCCL": """
        test_batch_isend_irecv_*nccl test_batch_isend_irecv_*_err test_send_recv_nccl
    """,
    "the same test as on the CPU, with CUDA tensors": """
        test_all_gather_cuda* test_all_reduce_sum_cuda* test_all_to_all*_cuda test_all_to_all*_cuda_complex
        test_barrier*_cuda test_broadcast_cuda test_gather_cuda test_reduce_sum_cuda* test_scatter_cuda*
        test_sparse_all_reduce_sum_cuda
    """,
    "about CUDA streams": "test_nccl_high_priority_stream",
    "sizes that differ across ranks, which only NCCL takes": "test_all_gather_v_cuda test_reduce_scatter_v_cuda",
    "torch.distributed.monitored_barrier takes no backend that is not named gloo": "test_monitored_barrier_*",
    "matches Gloo's own message, and is disabled on Linux": "test_barrier_timeout_arg",
    "waits five seconds for what test_barrier_timeout_full_group sees after one": "test_barrier_timeout_group",
    "compares device numbers, and is disabled on Linux": "test_new_subgroups_by_enumeration",
    "about DistributedDataParallel and its parts, not about collectives": """
        test_DistributedDataParallel* test_accumulate_gradients_no_sync* test_compute_bucket_assignment_by_size_*
        test_ddp_* test_detect_ddp_is_actually_static test_different_graph_across_ranks
        test_dump_DDP_relevant_env_vars test_get_data_parallel_params test_grads_same_across_ranks_with_no_sync
        test_invalid_static_graph test_output_unused_in_loss_* test_skip_all_reduce_unused_parameters
        test_stateless_api_with_ddp test_static_graph_* test_sync_bn_logged
        test_undefined_grad_parity_unused_parameters test_verify_model_across_rank_*
    """,
    "about model averaging on CUDA devices": """
        test_1_level_hierarchical_model_averager_* test_3_level_hierarchical_model_averager test_average_parameters
        test_periodic_model_averager* test_post_localSGD_optimizer_*
    """,
    "about data samplers, with CUDA tensors": "test_DistributedSampler_padding",
    "needs torchvision": "test_SyncBatchNorm_process_group",
}

PARAMETERS = [pytest.param(name, batch, id=name) for batch in CHOSEN for name in batch.names.split()]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    running = Suite(BACKEND, tmp_path_factory.mktemp("torch_suite"))
    yield running
    running.close()


def report(outcomes: list[Outcome]) -> str:
    lines = []
    for rank, outcome in enumerate(outcomes):
        lines.append(f"rank {rank} {outcome['status']}: {outcome['text']}".rstrip())
        if outcome["log"]:
            lines += [f"rank {rank} wrote:", outcome["log"].rstrip()]
    return "\n".join(lines)


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome["status"] for outcome in outcomes]


@pytest.mark.parametrize(("name", "batch"), PARAMETERS)
def test_passes(suite: Suite, name: str, batch: Batch) -> None:
    outcomes = suite.run(name, batch.ranks, unskip=batch.skip is not None, on_cpu=batch.on_cpu)
    if statuses(outcomes) != ["passed"] * batch.ranks:
        pytest.fail(report(outcomes), pytrace=False)


def test_accounts_for_every_test(suite: Suite) -> None:
    chosen = [name for batch in CHOSEN for name in batch.names.split()]
    patterns = [pattern for names in LEFT_OUT.values() for pattern in names.split()]
    left_out = {name for name in suite.tests if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    assert len(chosen) == len(set(chosen))
    assert set(chosen) - set(suite.tests) == set(), "chosen, but not in this version of the suite"
    assert left_out & set(chosen) == set(), "both chosen and left out"
    assert set(suite.tests) - left_out - set(chosen) == set(), "neither chosen nor left out: choose them or say why not"
    assert [pattern for pattern in patterns if not fnmatch.filter(suite.tests, pattern)] == [], "match no test"


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
    # Sleeps longer than this limit on either rank. The first to be ended may take the other with it.
    outcomes = suite.run("test_barrier", 2, limit=0.3)
    assert "passed" not in statuses(outcomes)
    ended = [outcome for outcome in outcomes if outcome["status"] == "died"]
    assert ended
    for outcome in ended:
        assert "past its limit" in outcome["text"]
        assert "in _run_rank" in outcome["log"]
