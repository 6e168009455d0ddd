"""FSDP1: calls become ``fully_shard``, inner modules first, or stay, all of them."""

from __future__ import annotations

import textwrap

import pytest
from migrate_runs import migrated, unchanged

HEAD = """\
import functools
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, FullyShardedDataParallel as FSDP, MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body).lstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ""),
        ("device_id=0, use_orig_params=True, limit_all_gathers=True", ""),
        ("sharding_strategy=ShardingStrategy.FULL_SHARD", ""),
        ("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "reshard_after_forward=False"),
        ("None, ShardingStrategy.SHARD_GRAD_OP", "reshard_after_forward=False"),
        ("sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh", "mesh=mesh"),
        (
            "sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2, device_mesh=mesh",
            "mesh=mesh, reshard_after_forward=False",
        ),
        ("cpu_offload=CPUOffload(offload_params=True)", "offload_policy=CPUOffloadPolicy()"),
        ("cpu_offload=CPUOffload(False)", ""),
        ("cpu_offload=None, mixed_precision=None, process_group=None", ""),
        ("sync_module_states=False", ""),
        ("sync_module_states=True", "plugins=[SameValues()]"),
        ("backward_prefetch=BackwardPrefetch.BACKWARD_PRE", ""),
        (
            "mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)",
            "mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        ),
        (
            "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True,"
            " keep_low_precision_grads=False)",
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)",
        ),
        (
            "mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=False)",
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        ),
    ],
)
def test_keywords(arguments: str, expected: str) -> None:
    given = f", {arguments}" if arguments else ""
    found = migrated(script(f"\nmodel = FSDP(nn.Linear(2, 2){given})\n"))
    then = f", {expected}" if expected else ""
    assert found.text.endswith(f"model = fully_shard(nn.Linear(2, 2){then})\n")
    assert not found.left


@pytest.mark.parametrize(
    ("arguments", "term"),
    [
        ("group", "process_group"),
        ("process_group=group", "process_group"),
        ("sharding_strategy=strategy()", "sharding_strategy"),
        ("sharding_strategy=ShardingStrategy.NO_SHARD", "NO_SHARD"),
        ("sharding_strategy=ShardingStrategy.HYBRID_SHARD", "HYBRID_SHARD"),
        ("sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"),
        ("cpu_offload=offload()", "cpu_offload"),
        ("cpu_offload=CPUOffload(offload_params=flag)", "cpu_offload"),
        ("mixed_precision=precision()", "mixed_precision"),
        ("mixed_precision=MixedPrecision(**precision)", "mixed_precision"),
        (
            "mixed_precision=MixedPrecision(keep_low_precision_grads=True)",
            "keep_low_precision_grads",
        ),
        (
            "mixed_precision=MixedPrecision(cast_root_forward_inputs=False)",
            "cast_root_forward_inputs",
        ),
        (
            "mixed_precision=MixedPrecision(_module_classes_to_ignore=[nn.Linear])",
            "_module_classes_to_ignore",
        ),
        ("ignored_modules=[a]", "ignored_modules"),
        ("ignored_states=[a]", "ignored_states"),
        ("param_init_fn=init", "param_init_fn"),
        ("sync_module_states=flag", "sync_module_states"),
        ("auto_wrap_policy=policy()", "auto_wrap_policy"),
        ("auto_wrap_policy=size_based_auto_wrap_policy", "auto_wrap_policy"),
        (
            "auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=9)",
            "auto_wrap_policy",
        ),
        ("auto_wrap_policy=CustomPolicy(f)", "auto_wrap_policy"),
        ("**options", "FullyShardedDataParallel"),
        ("*options", "FullyShardedDataParallel"),
        ("unheard_of=3", "FullyShardedDataParallel"),
        (
            "device_mesh=make_mesh(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})",
            "auto_wrap_policy",
        ),
    ],
)
def test_what_needs_a_hand_stays(arguments: str, term: str) -> None:
    found = unchanged(script(f"\nmodel = FSDP(nn.Linear(2, 2), {arguments})\n"))
    assert term in [name for line, name in found.left if line == HEAD.count("\n") + 1]


@pytest.mark.parametrize(
    ("policy", "condition"),
    [
        ("ModuleWrapPolicy({nn.Linear})", "isinstance(module, (nn.Linear,))"),
        ("ModuleWrapPolicy([nn.Linear, Block])", "isinstance(module, (nn.Linear, Block))"),
        ("ModuleWrapPolicy(classes)", "isinstance(module, tuple(classes))"),
        (
            "functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})",
            "isinstance(module, (Block,))",
        ),
        ("functools.partial(lambda_auto_wrap_policy, lambda_fn=takes)", "takes(module)"),
        (
            "functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m.large)",
            "(lambda m: m.large)(module)",
        ),
    ],
)
def test_policies_become_loops(policy: str, condition: str) -> None:
    found = migrated(script(f"\nmodel = FSDP(model, auto_wrap_policy={policy})\n"))
    assert found.text.endswith(
        "for module in reversed(list(model.modules())):\n"
        f"    if module is not model and {condition}:\n"
        "        fully_shard(module)\n"
        "model = fully_shard(model)\n"
    )
    assert not found.left


def test_a_variable_holds_what_the_policy_was_made_of() -> None:
    found = migrated(
        script("""

        def build(config):
            # which blocks
            blocks = ModuleWrapPolicy({nn.Linear})  # all
            precision = MixedPrecision(param_dtype=torch.bfloat16)
            # then wrap
            self.model = FSDP(make(config), auto_wrap_policy=blocks, mixed_precision=precision)
            return FSDP(other, auto_wrap_policy=blocks)
        """)
    )
    assert found.text[found.text.index("def build") :] == textwrap.dedent("""\
        def build(config):
            # which blocks
            blocks = (nn.Linear,)  # all
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            # then wrap
            self.model = make(config)
            for module in reversed(list(self.model.modules())):
                if module is not self.model and isinstance(module, blocks):
                    fully_shard(module, mp_policy=precision)
            self.model = fully_shard(self.model, mp_policy=precision)
            for module in reversed(list(other.modules())):
                if module is not other and isinstance(module, blocks):
                    fully_shard(module)
            return fully_shard(other)
        """)


def test_imports_that_nobody_needs_go_and_others_stay() -> None:
    found = migrated("""
        import functools
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        @functools.cache
        def build():
            return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({A}))
    """)
    head = found.text.split("\n\n")[0]
    assert head == (
        "import functools\n"
        "from torch.distributed.fsdp import StateDictType\n"
        "from polyshard import fully_shard"
    )


def test_arguments_keep_their_lines_and_comments() -> None:
    found = migrated("""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(
            model,  # the whole
            device_mesh=mesh,  # two axes
            device_id=0,  # gone
        )
    """)
    assert found.text.split("\n\n")[1] == (
        "model = fully_shard(\n    model,  # the whole\n    mesh=mesh,  # two axes\n)\n"
    )


def test_one_call_that_stays_keeps_the_others() -> None:
    found = unchanged("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        a = FSDP(a)
        b = FSDP(b, process_group=group)
    """)
    assert found.left == [(2, "FullyShardedDataParallel"), (3, "process_group")]


def test_a_policy_that_others_use_stays() -> None:
    found = unchanged("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        policy = ModuleWrapPolicy({Block})
        checkpointed(model, policy)
        model = FSDP(model, auto_wrap_policy=policy)
    """)
    assert (5, "auto_wrap_policy") in found.left


def test_a_loop_needs_a_place() -> None:
    found = unchanged("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
        models = [FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block})) for model in models]
        if x: model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    """)
    assert {line for line, _ in found.left} == {3, 4}


def test_an_optimizer_made_before_is_not_passed_over() -> None:
    found = unchanged("""
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        model = build()
        count = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = FSDP(model)
    """)
    assert found.left == [(6, "FullyShardedDataParallel")]
    assert "in line 5" in found.messages()


def test_types_are_those_of_sharded_modules() -> None:
    found = migrated("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        def build(model: FSDP | None) -> list[FSDP]:
            model = FSDP(model)
            assert isinstance(model, (FSDP, int))
            return isinstance(model, FSDP)
    """)
    assert "FSDP(" not in found.text
    assert "model: FSDPModule | None) -> list[FSDPModule]" in found.text
    assert "isinstance(model, (FSDPModule, int))" in found.text
    assert "isinstance(model, FSDPModule)\n" in found.text
    assert not found.left


def test_methods_of_the_wrapper() -> None:
    found = migrated("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        model = build()
        model = FSDP(model)
        norm = model.clip_grad_norm_(1.0, norm_type=2.0)
        with model.no_sync(): ...
        model.apply(init)
        model.module.weight
        FSDP.optim_state_dict(model, optimizer)
        with FSDP.summon_full_params(model): ...
        class A(FSDP): ...
        def save(): return model.state_dict()
    """)
    assert "norm = clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)\n" in found.text
    assert found.left == [
        (6, "apply"),
        (7, "module"),
        (8, "optim_state_dict"),
        (9, "summon_full_params"),
        (10, "FullyShardedDataParallel"),
        (11, "state_dict"),
    ]


def test_clipping_is_not_rewritten_where_its_import_does_not_reach() -> None:
    found = migrated("""
        class Trainer:
            def __init__(self, net):
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                self.model = FSDP(net)
                self.model.clip_grad_norm_(1.0)
            def step(self):
                self.model.clip_grad_norm_(1.0)
    """)
    assert "        clip_grad_norm_(self.model.parameters(), 1.0)\n    def step" in found.text
    assert found.text.endswith("        self.model.clip_grad_norm_(1.0)\n")
    assert found.left == [(7, "clip_grad_norm_")]


@pytest.mark.parametrize(
    "extra", ["fully_shard = 3", "def fully_shard(): ...", "from other import fully_shard"]
)
def test_a_name_that_is_taken(extra: str) -> None:
    found = unchanged(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        f"{extra}\nmodel = FSDP(model)\n"
    )
    assert found.left == [(3, "FullyShardedDataParallel")]


def test_a_name_that_may_be_something_else() -> None:
    found = unchanged("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        if plain:
            FSDP = lambda model: model
        model = FSDP(model)
    """)
    assert found.left == [(4, "FullyShardedDataParallel")]


def test_through_a_module() -> None:
    found = migrated("""
        import torch.distributed.fsdp as fsdp

        model = fsdp.FullyShardedDataParallel(
            model, sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP
        )
    """)
    assert found.text == (
        "from polyshard import fully_shard\n\n"
        "model = fully_shard(\n    model, reshard_after_forward=False\n)\n"
    )
    assert not found.left


def test_a_file_that_wraps_nothing_may_be_meant_for_others() -> None:
    found = unchanged("""
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        def whole(model: FSDP) -> object:
            if isinstance(model, FSDP):
                return FSDP.summon_full_params(model)
    """)
    assert found.left == [
        (3, "FullyShardedDataParallel"),
        (4, "FullyShardedDataParallel"),
        (5, "summon_full_params"),
    ]
    assert "FSDPModule" in found.messages()
