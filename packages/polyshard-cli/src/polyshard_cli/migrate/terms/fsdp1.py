"""FSDP1: ``FullyShardedDataParallel``, its keywords, policies and methods."""

from polyshard_cli.migrate.terms.term import Guide, Table, Term, Verdict

__all__ = ["GUIDE", "KEYWORDS", "METHODS", "NAMES", "POLICIES", "PRECISION", "STRATEGIES"]

DROPPED, HAND, REWRITTEN = Verdict.DROPPED, Verdict.HAND, Verdict.REWRITTEN
_DCP = "`torch.distributed.checkpoint.state_dict`"
_FULL = f"`get_model_state_dict` of {_DCP} with `StateDictOptions(full_state_dict=True)`"
_OPTIM = f"`get_optimizer_state_dict` and `set_optimizer_state_dict` of {_DCP}"
_PLAIN = "`model.state_dict()` is sharded by itself; save it with `torch.distributed.checkpoint`"

NAMES = Table(
    "Names of `torch.distributed.fsdp`",
    (
        Term(
            "FullyShardedDataParallel",
            REWRITTEN,
            "`fully_shard`, bottom-up; `FSDPModule` in annotations and `isinstance`",
            "There is no wrapper and no `.module`, and state dicts are sharded, wherever the model "
            "goes. Parameters keep names and shapes (`DTensor`); make the optimizer afterwards.",
        ),
        Term("MixedPrecision", REWRITTEN, "`MixedPrecisionPolicy`"),
        Term(
            "CPUOffload",
            REWRITTEN,
            "`offload_policy=CPUOffloadPolicy()`",
            "Needs polyshard-offload.",
        ),
        Term("ShardingStrategy", REWRITTEN, "`reshard_after_forward=`, `mesh=`"),
        Term("BackwardPrefetch", DROPPED, "`set_modules_to_backward_prefetch`, if wanted"),
        Term("StateDictType", HAND, _FULL),
        Term("StateDictConfig", HAND, _FULL),
        Term("FullStateDictConfig", HAND, _FULL),
        Term("ShardedStateDictConfig", HAND, _PLAIN),
        Term("LocalStateDictConfig", HAND, _PLAIN),
        Term("StateDictSettings", HAND, _PLAIN),
        Term("OptimStateDictConfig", HAND, _OPTIM),
        Term("FullOptimStateDictConfig", HAND, _OPTIM),
        Term("ShardedOptimStateDictConfig", HAND, _OPTIM),
        Term("LocalOptimStateDictConfig", HAND, _OPTIM),
        Term("OptimStateKeyType", HAND, _OPTIM),
    ),
)

KEYWORDS = Table(
    "Keywords of `FullyShardedDataParallel`",
    (
        Term("module", REWRITTEN, "the first argument"),
        Term("process_group", HAND, "`mesh=DeviceMesh.from_group(process_group, device_type)`"),
        Term("sharding_strategy", REWRITTEN, "`reshard_after_forward=`, `mesh=`"),
        Term("cpu_offload", REWRITTEN, "`offload_policy=CPUOffloadPolicy()`, or left out"),
        Term("auto_wrap_policy", REWRITTEN, "a loop that shards those modules first"),
        Term("backward_prefetch", DROPPED, "", "Gathers follow the order of the last step."),
        Term("mixed_precision", REWRITTEN, "`mp_policy=MixedPrecisionPolicy(...)`"),
        Term("ignored_modules", HAND, "`ignored_params={...}`, the parameters of those modules"),
        Term(
            "param_init_fn",
            HAND,
            "shard on the meta device, then `model.to_empty(device=...)` and initialise",
        ),
        Term(
            "device_id",
            DROPPED,
            "",
            "Call `torch.cuda.set_device` before, or pass `mesh=`.",
        ),
        Term(
            "sync_module_states",
            REWRITTEN,
            "`plugins=[SameValues()]` where it was `True`",
            "Ranks with other values are refused; buffers are not compared. Seed all ranks "
            "equally, or load with `set_model_state_dict` and `broadcast_from_rank0`.",
        ),
        Term("forward_prefetch", DROPPED, "", "Gathers follow the order of the last step."),
        Term("limit_all_gathers", DROPPED, "", "At most two units are gathered at once."),
        Term("use_orig_params", DROPPED, "", "Parameters are always the original ones."),
        Term("ignored_states", HAND, "`ignored_params={...}`"),
        Term("device_mesh", REWRITTEN, "`mesh=`"),
    ),
)

STRATEGIES = Table(
    "Members of `ShardingStrategy`",
    (
        Term("FULL_SHARD", REWRITTEN, "the default"),
        Term("SHARD_GRAD_OP", REWRITTEN, "`reshard_after_forward=False`"),
        Term("NO_SHARD", HAND, "`shard_placement_fn=lambda parameter: Replicate()`, or DDP"),
        Term(
            "HYBRID_SHARD",
            REWRITTEN,
            "`mesh=device_mesh`; without one by hand: "
            '`init_device_mesh(device, (hosts, ranks), mesh_dim_names=("replicate", "shard"))`',
        ),
        Term(
            "_HYBRID_SHARD_ZERO2",
            REWRITTEN,
            "`reshard_after_forward=False` and `mesh=`",
        ),
    ),
)

PRECISION = Table(
    "Fields of `MixedPrecision`",
    (
        Term("param_dtype", REWRITTEN, "`param_dtype`"),
        Term("reduce_dtype", REWRITTEN, "`reduce_dtype`"),
        Term(
            "buffer_dtype",
            DROPPED,
            "",
            "Buffers keep their dtype.",
        ),
        Term("keep_low_precision_grads", HAND, "gradients have the dtype of their parameters"),
        Term(
            "cast_forward_inputs",
            REWRITTEN,
            "`cast_forward_inputs`",
            "Without it, units below the root cast their inputs too.",
        ),
        Term("cast_root_forward_inputs", HAND, "another `MixedPrecisionPolicy` for the root"),
        Term(
            "_module_classes_to_ignore",
            HAND,
            "shard those modules first with their own policy",
        ),
    ),
)

POLICIES = Table(
    "Names of `torch.distributed.fsdp.wrap`",
    (
        Term("ModuleWrapPolicy", REWRITTEN, "a loop over modules of those classes"),
        Term("transformer_auto_wrap_policy", REWRITTEN, "a loop over modules of those classes"),
        Term("lambda_auto_wrap_policy", REWRITTEN, "a loop over modules that the function takes"),
        Term("size_based_auto_wrap_policy", HAND, "choose units by class and shard them in a loop"),
        Term("always_wrap_policy", HAND, "choose units by class and shard them in a loop"),
        Term("CustomPolicy", HAND, "a loop with keywords per module"),
        Term("enable_wrap", HAND, "shard in a loop, once the model is built"),
        Term("wrap", HAND, "shard in a loop, once the model is built"),
    ),
)

METHODS = Table(
    "Methods of wrapped modules",
    (
        Term(
            "clip_grad_norm_",
            REWRITTEN,
            "`clip_grad_norm_(model.parameters(), ...)` of polyshard",
        ),
        Term("no_sync", Verdict.MOVED, "the same"),
        Term("forward", Verdict.MOVED, "the same"),
        Term("apply", HAND, "initialise before sharding"),
        Term("module", HAND, "there is no wrapper: drop `.module`"),
        Term("state_dict", HAND, f"sharded now; for a whole one {_FULL}"),
        Term(
            "load_state_dict", HAND, f"takes a sharded one; else `set_model_state_dict` of {_DCP}"
        ),
        Term("state_dict_type", HAND, _FULL),
        Term("set_state_dict_type", HAND, _FULL),
        Term("get_state_dict_type", HAND, _FULL),
        Term("summon_full_params", HAND, "`model.unshard()` and `model.reshard()`, unit by unit"),
        Term("optim_state_dict", HAND, _OPTIM),
        Term("optim_state_dict_to_load", HAND, _OPTIM),
        Term("full_optim_state_dict", HAND, _OPTIM),
        Term("sharded_optim_state_dict", HAND, _OPTIM),
        Term("shard_full_optim_state_dict", HAND, _OPTIM),
        Term("flatten_sharded_optim_state_dict", HAND, _OPTIM),
        Term("scatter_full_optim_state_dict", HAND, _OPTIM),
        Term("rekey_optim_state_dict", HAND, _OPTIM),
        Term("fsdp_modules", HAND, "`[m for m in model.modules() if isinstance(m, FSDPModule)]`"),
        Term("check_is_root", HAND, "compare with the module you sharded last"),
        Term("named_parameters", Verdict.MOVED, "the same"),
        Term("named_buffers", Verdict.MOVED, "the same"),
        Term(
            "register_comm_hook",
            HAND,
            "a reduce codec, or `set_all_reduce_hook`",
        ),
    ),
)

GUIDE = Guide(
    "FSDP1",
    "Calls of the wrapper become `fully_shard`, inner modules first. A call with anything to do by "
    "hand stays as it is. [`FSDPExtensions` can be kept](../how-to/fsdp1.md).",
    (NAMES, KEYWORDS, STRATEGIES, PRECISION, POLICIES, METHODS),
)
