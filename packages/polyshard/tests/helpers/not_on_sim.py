"""Tests that ``pytest --device=sim`` (and ``cuda``) skips, and why; a page lists them."""

from __future__ import annotations

CPU = "compares tensors of the device with tensors on the CPU"
GLOO = "tests the engine's use of gloo"
CHECKED = "expects a check before gradients are sent, which the engine makes over gloo only"
KERNELS = "needs `torch.use_deterministic_algorithms(True)` on devices"
MENDING = "aborts gloo process groups; `test_device.py` has a device's"
UNKNOWN = "fails for an unknown reason: the test, the engine or the device"

NOT_ON_SIM: dict[str, dict[str, tuple[str, ...]]] = {
    CPU: {
        "packages/polyshard-checkpoint/tests": (
            "checkpoint/test_resume.py::test_plain_torch_loads_it",
            "safetensors/test_names.py::test_what_is_named_is_saved_and_loaded",
            "safetensors/test_safetensors.py::test_what_is_saved_is_what_the_library_reads",
        ),
        "packages/polyshard/tests": (
            "engine/test_native_state.py::test_full_state_dicts",
            "engine/test_state_dict.py::test_full_state_dicts",
            "params/test_aliases.py::test_a_cached_state_dict_follows_the_model",
            "params/test_saving.py::test_every_option_of_a_state_dict",
        ),
        "plugins/polyshard-offload/tests": (
            "optimizer/test_attempts.py::test_failures_change_nothing",
            "optimizer/test_changes_between_steps.py::test_edits_of_sharded_state_are_honoured",
            "optimizer/test_flat_offloaded.py",
            "optimizer/test_step.py::test_delays_change_no_bit",
            "optimizer/test_step.py::test_integers_beside_what_is_trained",
            "optimizer/test_step_in_backward.py::test_however_it_is_cut",
            "optimizer/test_step_in_backward.py::test_the_same_training",
            "test_checkpoints.py::test_parameters_are_saved_alone",
            "test_training.py",
        ),
        "plugins/polyshard-quantized/tests": ("test_offload.py::test_the_same_bits_as_alone",),
    },
    GLOO: {
        "packages/polyshard/tests": (
            "program/test_kept_sums.py::test_sums_of_the_transport",
            "program/test_kept_sums.py::test_the_wire_dtype_is_that_of_gradients",
            "memory/test_resident.py::test_gradients_use_the_pages_of_freed_parameters",
            "test_module.py::test_custom_collectives_move_the_bytes",
            "torch/test_comm_debug.py",
            "transport/test_owner_routes.py::test_whole_tensors",
            "transport/test_transport.py::test_exchange",
        ),
        "packages/polyshard-resilience/tests": ("gloo",),
        "plugins/polyshard-quantized/tests": (
            "test_reports.py::test_bytes_are_exactly_as_predicted",
        ),
    },
    CHECKED: {
        "packages/polyshard/tests": (
            "program/test_landing.py::test_ranks_with_other_gradients_are_told_before_anything_is_sent",
            "program/test_presence.py::test_a_unit_that_one_backward_skips",
        ),
    },
    KERNELS: {"plugins/polyshard-reproducible/tests": ("",)},
    MENDING: {
        "packages/polyshard-resilience/tests": (
            "alarm/test_alarm.py",
            "rollback/test_ranks.py::test_ranks_retry_together",
        ),
    },
    UNKNOWN: {
        "packages/polyshard/tests": (
            "engine/test_native_state.py::test_full_values_pass_through_an_adapter",
            "engine/test_pipelining.py::test_trains_as_with_torch_and_as_alone",
            "program/test_codecs.py::test_kept_payloads_follow_every_write",
            "program/test_protocol_like_torch.py::test_meta_init",
            "group/test_kept_payloads.py::test_a_codec_may_read_a_shard_where_it_rests",
            "test_complex.py",
            "test_same_values.py::test_parameters_without_values_are_listed",
        ),
        "plugins/polyshard-calibration/tests": (
            "test_calibration.py::test_a_calibration_for_another_size_is_reported",
            "test_calibration.py::test_ways_do_not_change_a_bit",
        ),
        "plugins/polyshard-offload/tests": (
            "shards/test_checksums.py::test_changes_on_disk_are_found",
        ),
    },
}
"""Beginnings of tests' names below a folder, by reason; an empty one is the whole folder."""


def reason_for(test: str) -> str | None:
    """Why a test is skipped, if it is."""
    for reason, folders in NOT_ON_SIM.items():
        for folder, names in folders.items():
            if test.startswith(tuple(f"{folder}/{name}" for name in names)):
                return reason
    return None


def lines() -> list[str]:
    """The table of the page."""
    made = ["| tests | why they are skipped |", "|---|---|"]
    for reason, folders in NOT_ON_SIM.items():
        names = [f"`{folder}/{name}`" for folder, each in folders.items() for name in each]
        made.append(f"| {'<br>'.join(names)} | {reason} |")
    return made
