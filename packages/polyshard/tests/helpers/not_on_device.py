"""Tests that ``pytest --device`` skips on ``sim`` and ``cuda``, and why; a page counts them."""

from __future__ import annotations

GLOO = "tests gloo"
CHECKED = "expects a check before gradients are sent"
IN_FLIGHT = "steps, or counts, before what is in flight is in place"
LATER = "expects what raises on a device later, or ends its communicators"
ASSIGNED = "assigns values of the device beside others that rest on the host"
ORDER = "compares bits of sums of three or more ranks"
LOOKS = "has shards compared with payloads, on CPUs only"
MENDING = "aborts gloo groups; `test_device.py` has others"
FUSED = "refuses `fused=True` on CPUs"
HOST = "measures CPUs, or runs scripts for them"
PARENT = "compares with the parent's tensors"
FOREACH = "mixes DTensors and others in foreach"
DEFAULT = "has transformers refuse a default device"
COMPILED = "compiles to other kernels"
OPERATORS = "needs a kernel that CPUs lack"
UNKNOWN = "has accelerate count unknown devices"
UNSET = "has ranks without a device"
KERNELS = "compares with what a CPU's kernels, or foreach, make"
NO_TIMEOUT = "needs time-outs that raise"
FORKED = "forks the process, which CUDA forbids"

NOT_ON_ANY: dict[str, dict[str, tuple[str, ...]]] = {
    GLOO: {
        "packages/polyshard/tests": (
            "program/test_kept_sums.py::test_sums_of_the_transport",
            "program/test_kept_sums.py::test_the_wire_dtype_is_that_of_gradients",
            "engine/test_unusual_steps.py::test_memory_of_a_transfer_that_failed_is_not_given_away",
            "memory/test_resident.py::test_gradients_use_the_pages_of_freed_parameters",
            "test_failure_seam.py::test_a_rank_that_fails_leaves_its_peers_to_the_time_out",
            "test_module.py::test_custom_collectives_move_the_bytes",
            "torch/test_comm_debug.py",
            "torch/test_planned.py::test_plans_are_those_of_real_ranks",
            "transport/test_owner_routes.py::test_whole_tensors[2 ranks-gloo",
            "transport/test_owner_routes.py::test_whole_tensors[4 ranks-gloo",
            "transport/test_owner_routes.py::test_wrapped_ones_are_seen",
            "transport/test_transport.py::test_exchange[gloo",
            "transport/test_transport.py::test_gather[gloo",
            "transport/test_transport.py::test_groups_do_not_depend_on_each_others_order",
            "transport/test_transport.py::test_reduce[gloo",
            "transport/test_transport.py::test_reduce_in_tree",
            "transport/test_transport.py::test_sums_do_not_depend_on_the_rank",
        ),
        "packages/polyshard-resilience/tests": ("gloo",),
        "plugins/polyshard-calibration/tests": (
            "test_calibration.py::test_a_calibration_for_another_size_is_reported",
            "test_calibration.py::test_every_rank_holds_the_same_figures",
            "test_calibration.py::test_it_goes_around_whatever_moves_bytes",
            "test_calibration.py::test_ways_do_not_change_a_bit",
        ),
        "plugins/polyshard-quantized/tests": (
            "test_reports.py::test_bytes_are_exactly_as_predicted",
            "test_reports.py::test_bytes_between_replicas_are_exactly_as_predicted",
            "test_tensor_parallel.py::test_bytes_are_exactly_as_predicted",
        ),
    },
    CHECKED: {
        "packages/polyshard/tests": (
            "program/test_landing.py::test_ranks_with_other_gradients_are_told_before_anything_is_sent",
            "program/test_presence.py::test_a_unit_that_one_backward_skips",
            "program/test_presence.py::test_different_parameters",
            "program/test_presence.py::test_replicas_are_compared_when_they_are_summed",
        ),
    },
    IN_FLIGHT: {
        "packages/polyshard/tests": (
            "program/test_freshness.py::test_steps_between_micro_batches_are_seen[4 ranks-last",
        ),
        "plugins/polyshard-offload/tests": (
            "optimizer/test_step_in_backward.py::test_gradients_are_freed_group_by_group",
        ),
    },
    LATER: {
        "plugins/polyshard-offload/tests": (
            "optimizer/test_step_in_backward.py::test_a_forward_that_raises_needs_nothing",
            "optimizer/test_step_in_backward.py::test_a_backward_that_raises_needs_a_checkpoint",
        ),
    },
    ASSIGNED: {
        "plugins/polyshard-offload/tests": (
            "test_checkpoints.py::test_state_dicts_taken_early_follow",
        ),
    },
    ORDER: {
        "packages/polyshard-optimizers/tests": (
            "matrix/test_steps.py::test_gradients_in_rows_give_the_same_bits[muon-3 ranks]",
            "matrix/test_steps.py::test_gradients_in_rows_give_the_same_bits[shampoo-3 ranks]",
            "matrix/test_steps.py::test_twenty_muon_steps_are_those_of_one_process[3 ranks]",
        ),
        "packages/polyshard-resilience/tests": (
            "rollback/test_ranks.py::test_a_failure_of_one_rank_undoes_all[3 ranks",
        ),
    },
    LOOKS: {
        "packages/polyshard/tests": (
            "program/test_codecs.py::test_kept_payloads_follow_every_write",
            "group/test_kept_payloads.py::test_a_codec_may_read_a_shard_where_it_rests",
        ),
        "plugins/polyshard-quantized/tests": (
            "test_training.py::test_payloads_are_encoded_once_a_step",
        ),
    },
    FUSED: {
        "plugins/polyshard-reproducible/tests": (
            "test_plugin.py::test_nobody_has_to_ask_for_optimizers_to_be_looked_at",
        ),
    },
    HOST: {
        "packages/polyshard-checkpoint/tests": (
            "pretrained/test_pretrained.py::test_a_rank_reads_and_holds_its_part",
        ),
        "packages/polyshard-cli/tests": (
            "compare/training/test_peak_memory.py",
            "migrate/test_samples.py",
            "plan",
        ),
    },
    PARENT: {
        "integration_tests": ("test_publish.py",),
        "packages/polyshard-checkpoint/tests": (
            "safetensors/test_names.py::test_the_first_name_that_is_kept_is_that_of_a_tied_tensor",
        ),
        "packages/polyshard-publish/tests": (
            "test_folder.py::test_versions_are_folders_that_others_load",
            "test_publisher.py::test_whole_tensors_for_engines_that_send_themselves",
        ),
    },
    FOREACH: {
        "packages/polyshard-publish/tests": ("test_publisher.py::test_every_layout_arrives",),
        "packages/polyshard-resilience/tests": (
            "resizing/test_resize.py::test_a_fresh_rank_joins",
            "resizing/test_resize.py::test_guards_follow_the_ranks_that_join",
            "resizing/test_resize.py::test_ranks_leave_and_join",
        ),
    },
    DEFAULT: {
        "packages/polyshard-checkpoint/tests": (
            "pretrained/test_pretrained.py::test_old_weights_are_replaced",
            "safetensors/test_safetensors.py::test_transformers_loads_and_generates_from_it",
        ),
    },
    COMPILED: {
        "integration_tests": (
            "test_composition.py::test_cell[core-fsdp-fp32-compiled",
            "test_composition.py::test_cell[offload+quantized+tensor-parallel-fsdp-fp32-compiled",
        ),
    },
    MENDING: {
        "packages/polyshard-resilience/tests": (
            "alarm/test_alarm.py",
            "rollback/test_ranks.py::test_groups_that_cannot_be_mended_end_the_attempt_on_all",
            "rollback/test_ranks.py::test_ranks_retry_together",
        ),
    },
}
"""Beginnings of tests' names below a folder, by reason; an empty one is the whole folder."""

NOT_ON_ONE: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "sim": {
        OPERATORS: {
            "integration_tests": ("test_mixtures.py",),
            "packages/polyshard-checkpoint/tests": (
                "pretrained/test_architectures.py::test_it_is_what_one_process_makes_of_it[Mixtral",
            ),
            "packages/polyshard/tests": (
                "engine/test_transformers.py::test_models_train_as_in_one_process[2 ranks-mixtral",
                "params/test_parameters.py::test_recurrent_modules",
            ),
        },
        KERNELS: {
            "plugins/polyshard-offload/tests": (
                "test_training.py::test_any_optimizer[disk-host-disk-NAdam",
            ),
        },
        UNKNOWN: {
            "packages/polyshard-accelerate/tests": (
                "test_accelerator.py::test_an_accelerator_that_is_there_becomes_one",
                "test_trainer.py::test_a_folder_fills_a_model_on_meta",
                "test_trainer.py::test_a_folder_that_does_not_fit",
                "test_trainer.py::test_another_number_of_ranks",
                "test_trainer.py::test_losses_and_norms_are_those_of_one_process",
                "test_trainer.py::test_resumed_losses_are_those_of_a_run_without_a_break",
                "test_trainer.py::test_saved_models_are_those_of_transformers",
                "test_trainer.py::test_the_best_model_is_loaded_at_the_end",
                "test_trainer.py::test_units_plugins_and_an_optimizer_of_ones_own",
                "test_trainer.py::test_what_was_evaluated_before_is_trained",
            ),
        },
    },
    "cuda": {
        UNSET: {
            "packages/polyshard/tests": ("transport/test_gloo_waits.py",),
            "packages/polyshard-checkpoint/tests": (
                "checkpoint/test_survivors.py::test_what_is_missing_is_said_and_refused",
            ),
        },
        FORKED: {"packages/polyshard-checkpoint/tests": ("checkpoint/test_killed.py",)},
        KERNELS: {
            "packages/polyshard/tests": (
                "test_policies.py::test_every_unit_has_a_policy_of_its_own",
                "test_seams.py::test_exact_plugins_change_nothing[2 ranks-transforms",
                "test_seams.py::test_two_transforms_compose_in_both_orders",
                "test_fsdp1.py::test_an_extension_object_of_torch_is_a_plugin",
            ),
            "integration_tests": ("test_composition.py",),
            "packages/polyshard-optimizers/tests": ("matrix/test_steps.py",),
            "plugins/polyshard-offload/tests": (
                "optimizer/test_flat_offloaded.py::test_a_part_is_offloaded",
                "optimizer/test_flat_offloaded.py::test_flat_alone",
                "optimizer/test_flat_offloaded.py::test_stepping_in_backward",
                "optimizer/test_step.py::test_delays_change_no_bit",
                "optimizer/test_step.py::test_what_users_write_is_seen",
                "shards/test_gradients.py::test_clipping_by_known_norms_is_clipping",
                "shards/test_gradients.py::test_norms_of_spent_gradients_are_known",
                "shards/test_shared_shards.py::test_the_dtype_may_change_between_steps",
                "shards/test_written.py::test_kernels_that_do_not_tell",
                "shards/test_written.py::test_what_was_written_is_computed_with",
                "test_plugin.py::TestDisk::test_checkpoints_are_native",
                "test_plugin.py::TestDisk::test_two_",
                "test_plugin.py::TestHost::test_checkpoints_are_native",
                "test_plugin.py::TestHost::test_two_",
                "test_training.py::test_any_optimizer[disk-host-disk-foreach",
            ),
            "plugins/polyshard-quantized/tests": (
                "test_offload.py::test_the_same_bits_as_alone",
                "test_offload.py::test_uneven_ranks_and_blocks_of_ranks",
                "test_training.py::test_two_hops_on_a_mesh_with_replicas",
            ),
            "packages/polyshard-accelerate/tests": (
                "test_trainer.py::test_a_folder_fills_a_model_on_meta[2 ranks",
            ),
        },
        UNKNOWN: {
            "packages/polyshard-accelerate/tests": (
                "test_accelerator.py::test_an_accelerator_that_is_there_becomes_one",
            ),
        },
        NO_TIMEOUT: {
            "packages/polyshard/tests": (
                "engine/test_fsdp_issues.py::test_a_unit_skipped_without_a_word_is_an_error_not_a_hang",
            ),
        },
    },
}
"""The same of one device only."""


def reasons(device: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """What a device skips."""
    return NOT_ON_ANY | NOT_ON_ONE.get(device, {})


def reason_for(test: str, device: str) -> str | None:
    """Why a test is skipped on ``device``, if it is."""
    for reason, folders in reasons(device).items():
        for folder, names in folders.items():
            if test.startswith(tuple(f"{folder}/{name}" for name in names)):
                return reason
    return None


def lines() -> list[str]:
    """The table of the page."""
    made = ["| names | why they are skipped |", "|---|---|"]
    for only, given in {"": NOT_ON_ANY, **NOT_ON_ONE}.items():
        where = f" (`--device={only}`)" if only else ""
        for reason, folders in given.items():
            made.append(f"| {sum(map(len, folders.values()))} | {reason}{where} |")
    return made
