"""DDP: ``torch.nn.parallel.DistributedDataParallel``, its keywords and methods."""

from polyshard_cli.migrate.terms.term import Guide, Table, Term, Verdict

__all__ = ["GUIDE", "KEYWORDS", "METHODS", "NAMES"]

DROPPED, HAND = Verdict.DROPPED, Verdict.HAND
_HOOK = "a reduce codec, or `set_all_reduce_hook`"
_DCP = "`torch.distributed.checkpoint.state_dict`"

NAMES = Table(
    "Names",
    (
        Term(
            "DistributedDataParallel",
            Verdict.REWRITTEN,
            "`fully_shard(model, plugins=[SameValues()])`",
            "There is no wrapper and no `.module`, and state dicts are sharded, wherever the model "
            "goes. One unit holds the whole model while it runs: shard layers first to save "
            "memory. Ranks with other initial values are refused. Buffers are each rank's own, as "
            "those of batch norms. Make the optimizer afterwards.",
        ),
    ),
)

KEYWORDS = Table(
    "Keywords of `DistributedDataParallel`",
    (
        Term("module", Verdict.REWRITTEN, "the first argument"),
        Term("device_ids", DROPPED, "", "Modules go to the device of the mesh."),
        Term("output_device", DROPPED),
        Term("dim", DROPPED),
        Term("broadcast_buffers", DROPPED, "", "Buffers are each rank's own."),
        Term("init_sync", DROPPED, "", "Values are compared, not sent."),
        Term("process_group", HAND, "`mesh=DeviceMesh.from_group(process_group, device_type)`"),
        Term("bucket_cap_mb", DROPPED, "", "A unit is a bucket."),
        Term(
            "find_unused_parameters",
            DROPPED,
            "",
            "Where ranks use different parameters, call `set_reduce_scatter_unused_params`.",
        ),
        Term("check_reduction", DROPPED),
        Term("gradient_as_bucket_view", DROPPED),
        Term("static_graph", DROPPED),
        Term("delay_all_reduce_named_params", HAND, "shard those modules as units of their own"),
        Term("param_to_hook_all_reduce", HAND, _HOOK),
        Term("mixed_precision", HAND, "`mp_policy=MixedPrecisionPolicy(...)`"),
        Term("device_mesh", Verdict.REWRITTEN, "`mesh=`"),
        Term("skip_all_reduce_unused_params", DROPPED),
        Term("bucket_cap_mb_list", DROPPED, "", "A unit is a bucket."),
        Term("batched_grad_copy", DROPPED),
        Term("forward_sync_buffers", DROPPED, "", "Buffers are each rank's own."),
    ),
)

METHODS = Table(
    "Methods of wrapped modules",
    (
        Term("no_sync", Verdict.MOVED, "the same"),
        Term("forward", Verdict.MOVED, "the same"),
        Term("train", Verdict.MOVED, "the same"),
        Term("require_backward_grad_sync", HAND, "`model.set_requires_gradient_sync(...)`"),
        Term("broadcast_buffers", HAND, "buffers are each rank's own"),
        Term("scatter", HAND, "move inputs yourself"),
        Term("to_kwargs", HAND, "move inputs yourself"),
        Term("gather", HAND, "outputs are each rank's own"),
        Term("module", HAND, "there is no wrapper: drop `.module`"),
        Term(
            "state_dict",
            HAND,
            "sharded, without the prefix `module.`; a whole one: `get_model_state_dict` of "
            f"{_DCP} with `StateDictOptions(full_state_dict=True)`",
        ),
        Term("load_state_dict", HAND, f"`set_model_state_dict` of {_DCP}"),
        Term("register_comm_hook", HAND, _HOOK),
        Term("join", HAND, "give all ranks the same number of batches"),
        Term("join_hook", HAND, "give all ranks the same number of batches"),
        Term("join_device", HAND, "give all ranks the same number of batches"),
        Term("join_process_group", HAND, "give all ranks the same number of batches"),
        Term("will_sync_module_buffers", HAND, "buffers are each rank's own"),
    ),
)

GUIDE = Guide(
    "DDP",
    "The wrapper becomes one sharded unit. Gradients are means, summed in another order.",
    (NAMES, KEYWORDS, METHODS),
)
