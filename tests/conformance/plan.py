"""How torch's own distributed suite is run on Phalanx: every adaptation, by name, with its reason.

A test that is not named here runs just as the suite has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ADAPTATIONS", "LEFT_OUT", "WRAPPER_TESTS", "Adaptation", "adaptation_of"]


@dataclass(frozen=True)
class Adaptation:
    """Tests that are run although the suite would skip them.

    The function that is under the skip is run, unchanged. With `under_all`, under every decorator: of a test that asks
    for a world size that it does not use. With `on_cpu`, what the test places on a CUDA device stays on the CPU. Under
    `name` the test's body knows the backend.
    """

    why: str
    names: str
    ranks: int = 2
    under_all: bool = False
    on_cpu: bool = False
    name: str | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names.split())


ADAPTATIONS = (
    # The suite has lists of the names of backends that have a feature, and Phalanx's is not on them.
    Adaptation(
        "only for a backend that is named gloo",
        """
        test_all_reduce_coalesced_full_group_max test_all_reduce_coalesced_full_group_min
        test_all_reduce_coalesced_full_group_product test_all_reduce_coalesced_full_group_sum
        test_all_reduce_coalesced_max test_all_reduce_coalesced_min test_all_reduce_coalesced_product
        test_all_reduce_coalesced_sum
        test_barrier_timeout_full_group test_barrier_timeout_global
        test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags
        test_grads_same_across_ranks_with_no_sync
        test_scatter_object_list
        test_sparse_all_reduce_sum
        """,
    ),
    Adaptation(
        "on the CPU only for a backend that is named mpi",
        """
        test_all_to_all test_all_to_all_complex test_all_to_all_full_group
        test_all_to_all_single_equal_split test_all_to_all_single_equal_split_complex
        test_all_to_all_single_equal_split_full_group
        test_all_to_all_single_unequal_split test_all_to_all_single_unequal_split_complex
        test_all_to_all_single_unequal_split_full_group
        """,
    ),
    Adaptation(
        "only for backends that are named mpi, nccl or gloo",
        """
        test_get_future
        """,
    ),
    Adaptation(
        "only for backends that are named mpi, nccl or gloo, by which it chooses the device; here it is named mpi",
        """
        test_accumulate_gradients_no_sync test_accumulate_gradients_no_sync_allreduce_hook
        test_accumulate_gradients_no_sync_allreduce_with_then_hook test_accumulate_gradients_no_sync_grad_is_view
        """,
        name="mpi",
    ),
    Adaptation(
        "only for a backend that is named nccl",
        "test_batch_isend_irecv_op_list_err",
    ),
    Adaptation("disabled, as it fails on another backend", "test_broadcast_object_list", under_all=True),
    # Their groups are ranks 1 and 2.
    Adaptation(
        "asks for eight ranks and uses three",
        """
        test_all_gather_coalesced_group test_all_gather_group
        test_all_reduce_coalesced_group_max test_all_reduce_coalesced_group_min
        test_all_reduce_coalesced_group_product test_all_reduce_coalesced_group_sum
        test_all_reduce_group_max test_all_reduce_group_min test_all_reduce_group_product test_all_reduce_group_sum
        test_all_to_all_group test_all_to_all_single_equal_split_group test_all_to_all_single_unequal_split_group
        test_barrier_group test_barrier_timeout_group
        test_broadcast_group
        test_gather_group
        test_reduce_group_max test_reduce_group_min test_reduce_group_product test_reduce_group_sum
        test_scatter_group
        """,
        ranks=3,
        under_all=True,
    ),
    # These ops have no test in the suite but for CUDA tensors, or the test asks for CUDA devices and uses none.
    Adaptation(
        "asks for CUDA devices and uses none",
        """
        test_new_subgroups_by_enumeration_negative_input_rank test_new_subgroups_group_size_exceeds_world_size
        """,
        under_all=True,
    ),
    Adaptation(
        "asks for CUDA devices and uses none",
        """
        test_new_subgroups test_new_subgroups_by_enumeration_input_rank_exceeds_world_size
        test_new_subgroups_overlap_not_allowed test_new_subgroups_world_size_not_divisible_by_group_size
        """,
        ranks=4,
        under_all=True,
    ),
    Adaptation(
        "written for CUDA tensors; the suite has no other test of these ops",
        """
        test_all_gather_into_cat_tensor_cuda test_all_gather_into_stack_tensor_cuda
        test_batch_isend_irecv_op_err
        test_coalescing_manager test_coalescing_manager_async
        test_nccl_backend_bool_allgather test_nccl_backend_bool_allreduce test_nccl_backend_bool_broadcast
        test_nccl_backend_bool_reduce
        test_reduce_scatter_tensor_cuda
        """,
        under_all=True,
        on_cpu=True,
    ),
)

# Tests of what torch gives to one backend alone, by its name, and what else can't be run here.
LEFT_OUT = {
    "test_monitored_barrier_*": "match the texts of Gloo's errors, and torch 2.13's monitored_barrier takes no backend "
    "that is not named gloo",
    "test_batch_isend_irecv_mixed_backend_err": "makes groups of the backends gloo and nccl, by their names",
    "test_barrier_timeout_arg": "disabled on Linux, and matches the text of Gloo's own error",
    "test_SyncBatchNorm_process_group": "needs torchvision, and CUDA devices",
}


# torch's tests of its own wrapper (test/distributed/test_pg_wrapper.py) are not in its wheel: what they look for, and
# the tests of the same programs on guarded Gloo. Those are in tests/integration/.
WRAPPER_TESTS = {
    "test_collective_hang: a rank does not come": "test_guarded_as_torchs_wrapper.py: test_a_rank_that_does_not_come",
    "test_collectives_op_mismatch*: ops": "test_guarded_as_torchs_wrapper.py: "
    "test_ranks_that_disagree[test_collectives_op_mismatch*]",
    "test_collectives_op_mismatch*: device types": "test_guarded_device_engine.py",
    "test_collective_shape_mismatch*: shapes, numbers of tensors": "test_guarded_as_torchs_wrapper.py: "
    "test_ranks_that_disagree[test_collective_shape_mismatch*], [number of tensors]",
    "dtypes": "test_guarded_as_torchs_wrapper.py: test_ranks_that_disagree[dtype]",
    "reduce ops and roots, which torch's wrapper does not compare": "test_guarded_as_torchs_wrapper.py: "
    "test_ranks_that_disagree[reduce op], [root]",
    "nothing found in calls that agree": "test_guarded_as_torchs_wrapper.py: test_ranks_that_agree",
    "test_new_group_no_gloo, test_debug_level_detail_no_gloo": "none: a guard needs no Gloo group of its own",
}


def adaptation_of(name: str) -> Adaptation | None:
    return next((adaptation for adaptation in ADAPTATIONS if name in adaptation), None)
