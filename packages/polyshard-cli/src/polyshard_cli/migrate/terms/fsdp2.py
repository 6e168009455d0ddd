"""FSDP2: ``torch.distributed.fsdp.fully_shard``, whose names polyshard has too."""

from polyshard_cli.migrate.terms.term import Guide, Table, Term, Verdict

__all__ = ["AROUND", "GUIDE", "KEYWORDS", "METHODS", "NAMES"]

MOVED, TORCH = Verdict.MOVED, Verdict.TORCH

NAMES = Table(
    "Names of `torch.distributed.fsdp`",
    (
        Term("fully_shard", MOVED, "`polyshard.fully_shard`"),
        Term("FSDPModule", MOVED, "`polyshard.FSDPModule`"),
        Term("MixedPrecisionPolicy", MOVED, "`polyshard.MixedPrecisionPolicy`, torch's own class"),
        Term("OffloadPolicy", MOVED, "`polyshard.OffloadPolicy`, torch's own class"),
        Term(
            "CPUOffloadPolicy",
            MOVED,
            "`polyshard.CPUOffloadPolicy`, torch's own class",
            "Needs polyshard-offload.",
        ),
        Term("DataParallelMeshDims", MOVED, "`polyshard.DataParallelMeshDims`"),
        Term("UnshardHandle", MOVED, "`polyshard.UnshardHandle`"),
        Term("register_fsdp_forward_method", MOVED, "`polyshard.register_fsdp_forward_method`"),
        Term("share_comm_ctx", MOVED, "`polyshard.share_comm_ctx`"),
    ),
)

_SAME = "the same"
KEYWORDS = Table(
    "Keywords of `fully_shard`",
    (
        Term("mesh", MOVED, _SAME, "Other than data-parallel axes need a plugin."),
        Term("reshard_after_forward", MOVED, _SAME, "1 means `False`, with a warning."),
        Term("shard_placement_fn", MOVED, f"{_SAME}; `Replicate()` keeps a parameter whole"),
        Term("mp_policy", MOVED, _SAME),
        Term("offload_policy", MOVED, _SAME, "Needs polyshard-offload."),
        Term("ignored_params", MOVED, _SAME),
        Term("dp_mesh_dims", MOVED, _SAME),
    ),
)

METHODS = Table(
    "Methods of sharded modules",
    tuple(
        Term(name, MOVED, _SAME)
        for name in (
            "reshard",
            "unshard",
            "reset_iter_state",
            "set_is_last_backward",
            "set_requires_gradient_sync",
            "set_requires_all_reduce",
            "set_reshard_after_forward",
            "set_reshard_after_backward",
            "set_modules_to_forward_prefetch",
            "set_modules_to_backward_prefetch",
            "set_custom_all_gather",
            "set_custom_reduce_scatter",
            "set_all_reduce_hook",
            "set_post_optim_event",
            "set_reduce_scatter_divide_factor",
            "set_gradient_divide_factor",
            "set_force_sum_reduction_for_comms",
            "set_reduce_scatter_unused_params",
            "set_reduce_scatter_max_input_buffers",
            "set_separate_reduce_scatter_group",
            "set_unshard_in_backward",
            "set_allocate_memory_from_process_group_for_comm",
            "set_symm_mem_for_comm",
        )
    ),
)

AROUND = Table(
    "Around it",
    (
        Term(
            "torch.nn.utils.clip_grad_norm_",
            Verdict.REWRITTEN,
            "`polyshard.clip_grad_norm_`, in files that shard something",
            "It returns a plain tensor: drop `.full_tensor()`. It sums in another order than "
            "torch's, so clipped steps differ in the last bits; torch's works too, on one mesh.",
        ),
        Term("torch.distributed.checkpoint", TORCH, "works as before"),
        Term(
            "torch.distributed.tensor.parallel.parallelize_module",
            TORCH,
            "works as before",
            "Needs polyshard-tensor-parallel.",
        ),
    ),
)

GUIDE = Guide(
    "FSDP2",
    "Only the import changes, and losses are bitwise the same, but for clipping (see below).",
    (NAMES, KEYWORDS, METHODS, AROUND),
)
