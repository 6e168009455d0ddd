"""DeepSpeed: keys of its configuration, and methods of its engine.

Names of ``zero_optimization`` are those of ``deepspeed/runtime/zero/config.py`` of its repository
(deepspeedai/DeepSpeed, read in November 2026).
"""

from polyshard_cli.migrate.terms.term import Guide, Table, Term, Verdict

__all__ = ["GUIDE", "KEYS", "KEYWORDS", "METHODS", "NAMES"]

DROPPED, HAND, REFUSED, REWRITTEN = (
    Verdict.DROPPED,
    Verdict.HAND,
    Verdict.REFUSED,
    Verdict.REWRITTEN,
)
_ZERO = "zero_optimization"
_OPT, _PARAM = f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"
_SIZES = "Transfers are as large as units."
_OFFLOAD = "polyshard-offload"
_DCP = "`torch.distributed.checkpoint`"

_BATCHES = (
    Term("train_batch_size", DROPPED, "", "The loader decides."),
    Term("train_micro_batch_size_per_gpu", DROPPED, "", "The loader decides."),
    Term(
        "gradient_accumulation_steps",
        HAND,
        "divide the loss, and run all micro-batches but the last in `model.no_sync()`",
    ),
    Term(
        "gradient_clipping",
        REWRITTEN,
        "`polyshard.clip_grad_norm_(model.parameters(), value)` before the step",
    ),
    Term("prescale_gradients", HAND, "`set_gradient_divide_factor`"),
    Term("gradient_predivide_factor", HAND, "`set_gradient_divide_factor`"),
    Term("sparse_gradients", REFUSED, "gradients travel dense"),
    Term("communication_data_type", REWRITTEN, "`MixedPrecisionPolicy(reduce_dtype=...)`"),
    Term("seq_parallel_communication_data_type", REFUSED, "sequence parallelism is the model's"),
    Term("data_types", HAND, "`MixedPrecisionPolicy(reduce_dtype=...)`"),
)

_PRECISION = (
    Term(
        "bf16",
        REWRITTEN,
        "`mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)`",
        "Do not cast the module: its parameters are the master weights.",
    ),
    Term(
        "fp16",
        HAND,
        "`mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)`, and torch's `GradScaler`",
    ),
    Term("amp", REFUSED, "`mp_policy=` does what NVIDIA's Apex did"),
    Term("torch_autocast", HAND, "`mp_policy=`, or `torch.autocast` in the loop"),
)

_OPTIMIZER = (
    Term(
        "optimizer",
        HAND,
        '`torch.optim.AdamW`, made after sharding: what "Adam" is unless `"adam_w_mode"` is false',
    ),
    Term("scheduler", HAND, "make it, and step it after the optimizer"),
    Term("zero_allow_untested_optimizer", DROPPED),
    Term("zero_force_ds_cpu_optimizer", DROPPED),
)

_STAGES = (
    Term(
        f"{_ZERO}.stage",
        REWRITTEN,
        "1 and 2: `fully_shard(model, reshard_after_forward=False)`; 3: `fully_shard(model)`",
        "One unit holds the whole model while it runs: shard layers first to save memory.",
    ),
    Term(f"{_ZERO}.zero_hpz_partition_size", REWRITTEN, "`reshard_after_forward=` that many ranks"),
    Term(
        f"{_ZERO}.zero_quantized_weights",
        HAND,
        "polyshard-quantized: `plugins=[QuantizedComm(weights=Int8Block(256))]`",
    ),
    Term(
        f"{_ZERO}.zero_quantized_nontrainable_weights",
        HAND,
        "polyshard-quantized: units of frozen modules with `QuantizedComm()`",
    ),
    Term(
        f"{_ZERO}.zero_quantized_gradients",
        HAND,
        "polyshard-quantized: `QuantizedComm(gradients=Int8Block(256))`, or `Int4Block(64)`",
    ),
    Term(f"{_ZERO}.zeropp_loco_param", REFUSED, "a reduce codec with state"),
    Term(f"{_ZERO}.mics_shard_size", HAND, "a mesh of two axes, `mesh=`: replicate, shard"),
    Term(f"{_ZERO}.mics_hierarchical_params_gather", HAND, "a mesh of two axes, `mesh=`"),
    Term(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        HAND,
        "`get_model_state_dict` of `torch.distributed.checkpoint.state_dict` with "
        "`StateDictOptions(full_state_dict=True)`",
    ),
    Term(
        f"{_ZERO}.stage3_param_persistence_threshold",
        DROPPED,
        "",
        "`shard_placement_fn` returns `Replicate()` for parameters to keep whole.",
    ),
    Term(f"{_ZERO}.stage3_model_persistence_threshold", DROPPED, "", "As for one parameter."),
    Term(f"{_ZERO}.stage3_prefetch_bucket_size", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.stage3_max_live_parameters", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.stage3_max_reuse_distance", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.reduce_bucket_size", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.allgather_bucket_size", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.sub_group_size", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.allgather_partitions", DROPPED),
    Term(f"{_ZERO}.reduce_scatter", DROPPED),
    Term(f"{_ZERO}.overlap_comm", DROPPED, "", "Transfers always overlap with compute."),
    Term(f"{_ZERO}.contiguous_gradients", DROPPED),
    Term(f"{_ZERO}.round_robin_gradients", DROPPED),
    Term(f"{_ZERO}.ignore_unused_parameters", DROPPED),
    Term(f"{_ZERO}.use_multi_rank_bucket_allreduce", DROPPED),
    Term(f"{_ZERO}.load_from_fp32_weights", DROPPED),
    Term(f"{_ZERO}.elastic_checkpoint", DROPPED, "", "Checkpoints load at any number of ranks."),
    Term(f"{_ZERO}.memory_efficient_linear", DROPPED),
    Term(f"{_ZERO}.override_module_apply", DROPPED),
    Term(f"{_ZERO}.log_trace_cache_warnings", DROPPED),
    Term(f"{_ZERO}.enable_sanity_checks", DROPPED),
    Term(f"{_ZERO}.cpu_offload_use_pin_memory", DROPPED),
    Term(f"{_ZERO}.stage3_module_granularity_threshold", DROPPED, "", _SIZES),
    Term(f"{_ZERO}.stage3_use_all_reduce_for_fetch_params", DROPPED),
    Term(f"{_ZERO}.stage3_allgather_sequential", DROPPED),
    Term(f"{_ZERO}.zenflow", REFUSED, f"{_OFFLOAD} steps all parameters"),
    Term(f"{_ZERO}.leaf_module", HAND, "shard those modules, and nothing in them, as units"),
    Term(f"{_ZERO}.legacy_stage1", DROPPED),
    Term(f"{_ZERO}.cpu_offload", HAND, f'{_OFFLOAD}: `Offload(optimizer="host")`, and `wrap`'),
    Term(f"{_ZERO}.cpu_offload_param", HAND, f'{_OFFLOAD}: `Offload(params="host")`'),
)

_TIERS = (
    Term(
        f"{_OPT}.device",
        HAND,
        f'{_OFFLOAD}: `Offload(optimizer="host")` for `cpu`, `optimizer="disk"` for `nvme`, and '
        "`optimizer = offload.wrap(optimizer)`",
    ),
    Term(f"{_OPT}.nvme_path", HAND, f"{_OFFLOAD}: `Offload(disk=DiskSettings(path=...))`"),
    Term(f"{_OPT}.ratio", HAND, f"{_OFFLOAD}: `Offload(fraction=...)`"),
    Term(f"{_OPT}.pin_memory", DROPPED, "", f"{_OFFLOAD} pins where there is an accelerator."),
    Term(f"{_OPT}.buffer_count", DROPPED, "", f"{_OFFLOAD}: `Offload(prefetch=...)`."),
    Term(f"{_OPT}.pipeline_read", DROPPED),
    Term(f"{_OPT}.pipeline_write", DROPPED),
    Term(f"{_OPT}.fast_init", DROPPED),
    Term(
        f"{_PARAM}.device",
        HAND,
        f'{_OFFLOAD}: `Offload(params="host", optimizer="host")` for `cpu`, `"disk"` for `nvme`',
    ),
    Term(f"{_PARAM}.nvme_path", HAND, f"{_OFFLOAD}: `Offload(disk=DiskSettings(path=...))`"),
    Term(f"{_PARAM}.pin_memory", DROPPED, "", f"{_OFFLOAD} pins where there is an accelerator."),
    Term(f"{_PARAM}.buffer_count", DROPPED, "", f"{_OFFLOAD}: `Offload(prefetch=...)`."),
    Term(f"{_PARAM}.buffer_size", DROPPED),
    Term(f"{_PARAM}.max_in_cpu", DROPPED),
    Term("aio", DROPPED, "", f"{_OFFLOAD}: `DiskSettings(io_threads=..., block_bytes=...)`."),
)

_REST = (
    Term("activation_checkpointing", HAND, "`torch.utils.checkpoint` in the model"),
    Term("checkpoint", HAND, _DCP),
    Term("tensor_parallel", HAND, "`parallelize_module`, with polyshard-tensor-parallel"),
    Term("pipeline", REFUSED, "`torch.distributed.pipelining` with a sharded module a stage"),
    Term("sparse_attention", REFUSED, "an attention of the model's own"),
    Term("compression_training", REFUSED, "torchao"),
    Term("curriculum_learning", REFUSED, "a loader of your own"),
    Term("data_efficiency", REFUSED, "a loader of your own"),
    Term("elasticity", REFUSED, "torchrun's `--nnodes=MIN:MAX`, and checkpoints"),
    Term("compile", HAND, "`torch.compile`"),
    Term("autotuning", DROPPED, "", "Use `polyshard plan`."),
    Term("flops_profiler", DROPPED, "", "torch's profiler names every phase."),
    Term("comms_logger", DROPPED, "", "`polyshard.stats(model)` counts bytes."),
    Term("steps_per_print", DROPPED),
    Term("wall_clock_breakdown", DROPPED),
    Term("dump_state", DROPPED),
    Term("memory_breakdown", DROPPED),
    Term("disable_allgather", DROPPED),
    Term("dataloader_drop_last", DROPPED),
    Term("tensorboard", DROPPED, "", "Log in the loop."),
    Term("wandb", DROPPED, "", "Log in the loop."),
    Term("csv_monitor", DROPPED, "", "Log in the loop."),
    Term("monitor_config", DROPPED, "", "Log in the loop."),
)

KEYS = Table(
    "Keys of the configuration",
    (*_BATCHES, *_PRECISION, *_OPTIMIZER, *_STAGES, *_TIERS, *_REST),
)

NAMES = Table(
    "Functions of `deepspeed`",
    (
        Term(
            "initialize",
            REWRITTEN,
            "`fully_shard` before the optimizer is made; the module is the engine",
            "Start it with torchrun. Ranks with other initial values are refused. State dicts are "
            "sharded, wherever the model goes.",
        ),
        Term(
            "init_distributed",
            REWRITTEN,
            "`torch.distributed.init_process_group()`",
            "Start it with torchrun, and call `torch.cuda.set_device` yourself.",
        ),
        Term("add_config_arguments", HAND, "take it out, and `--deepspeed` where it is started"),
        Term("init_inference", REFUSED, "an inference engine"),
        Term(
            "zero.Init", HAND, 'build under `torch.device("meta")`, shard, `to_empty`, initialise'
        ),
        Term("zero.GatheredParameters", HAND, "`module.unshard()`, and `module.reshard()` after"),
        Term("checkpointing.checkpoint", HAND, "`torch.utils.checkpoint.checkpoint`"),
        Term("pipe.PipelineModule", REFUSED, "`torch.distributed.pipelining`"),
        Term("ops.adam.FusedAdam", HAND, "`torch.optim.AdamW(..., fused=True)`"),
        Term("ops.adam.DeepSpeedCPUAdam", HAND, f"`torch.optim.AdamW` and {_OFFLOAD}"),
        Term("DeepSpeedEngine", HAND, "`FSDPModule`"),
    ),
)

KEYWORDS = Table(
    "Keywords of `deepspeed.initialize`",
    (
        Term("args", HAND, "`args.deepspeed_config`, if it names the configuration"),
        Term("model", REWRITTEN, "what is sharded"),
        Term("optimizer", REWRITTEN, "made after sharding"),
        Term("model_parameters", DROPPED),
        Term("training_data", HAND, "a `DataLoader` with a `DistributedSampler`"),
        Term("lr_scheduler", HAND, "step it yourself, after the optimizer"),
        Term("distributed_port", DROPPED, "", "torchrun's `--rdzv-endpoint` has the port."),
        Term("mpu", HAND, "`mesh=`"),
        Term("dist_init_required", DROPPED),
        Term("collate_fn", HAND, "pass it to the `DataLoader`"),
        Term("config", REWRITTEN, "keywords of `fully_shard`, by its keys"),
        Term("mesh_param", HAND, "`mesh=`"),
        Term("config_params", REWRITTEN, "as `config`"),
    ),
)

METHODS = Table(
    "Methods of the engine",
    (
        Term("backward", REWRITTEN, "`loss.backward()`"),
        Term(
            "step",
            REWRITTEN,
            "`clip_grad_norm_`, if asked for, `optimizer.step()`, `optimizer.zero_grad()`",
        ),
        Term("train", Verdict.MOVED, "the same"),
        Term("eval", Verdict.MOVED, "the same"),
        Term("forward", Verdict.MOVED, "the same"),
        Term("parameters", Verdict.MOVED, "the same"),
        Term("named_parameters", Verdict.MOVED, "the same"),
        Term("no_sync", Verdict.MOVED, "the same"),
        Term("zero_grad", HAND, "`optimizer.zero_grad()`"),
        Term("save_checkpoint", HAND, f"`save` of {_DCP}: see the how-to on checkpoints"),
        Term("load_checkpoint", HAND, f"`load` of {_DCP}; DeepSpeed's files are not read"),
        Term("save_16bit_model", HAND, "`get_model_state_dict` with `full_state_dict=True`"),
        Term("module", HAND, "there is no wrapper: drop `.module`"),
        Term(
            "state_dict",
            HAND,
            "sharded; a whole one: `get_model_state_dict` of "
            "`torch.distributed.checkpoint.state_dict` with "
            "`StateDictOptions(full_state_dict=True)`",
        ),
        Term(
            "load_state_dict",
            HAND,
            "`set_model_state_dict` of `torch.distributed.checkpoint.state_dict`",
        ),
        Term("is_gradient_accumulation_boundary", HAND, "count micro-batches"),
        Term("gradient_accumulation_steps", HAND, "count micro-batches"),
        Term("set_gradient_accumulation_boundary", HAND, "`model.set_requires_gradient_sync`"),
        Term("get_global_grad_norm", HAND, "what `polyshard.clip_grad_norm_` returns"),
        Term("get_lr", HAND, "`scheduler.get_last_lr()`"),
        Term("local_rank", HAND, '`int(os.environ["LOCAL_RANK"])`'),
        Term("global_rank", HAND, "`torch.distributed.get_rank()`"),
        Term("world_size", HAND, "`torch.distributed.get_world_size()`"),
        Term("device", HAND, "the device you chose"),
        Term("global_steps", HAND, "count steps"),
        Term("optimizer", HAND, "your own optimizer"),
    ),
)

GUIDE = Guide(
    "DeepSpeed",
    "ZeRO's stages become `fully_shard`. A script is rewritten if its configuration is known (a "
    "dict in the script, a JSON file it names, or `--deepspeed-config`) and fully supported, and "
    "if it builds its own optimizer. Otherwise everything is listed, unknown keys too.",
    (NAMES, KEYWORDS, KEYS, METHODS),
)
