"""A composable fully-sharded data-parallel engine for PyTorch.

Names are imported when they are first used, so that ``polyshard.plugins.contract`` and the command
line do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyshard.__about__ import __version__

if TYPE_CHECKING:
    from polyshard.api import fully_shard, register_fsdp_forward_method
    from polyshard.clipping import clip_grad_norm_, grad_norm
    from polyshard.description import describe, stats
    from polyshard.engine.keeping import close, load_plugin_state_dict, plugin_state_dict
    from polyshard.engine.state_dict import attach_optimizer
    from polyshard.module import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        share_comm_ctx,
    )
    from polyshard.plugins.contract import HOOK_API, Contract, Plugin, hookimpl
    from polyshard.plugins.one_class import (
        BackendPlugin,
        GatherCodecPlugin,
        ObserverPlugin,
        ReduceCodecPlugin,
        StoragePlugin,
    )
    from polyshard.plugins.seams import (
        Around,
        BoundGatherCodec,
        BoundReduceCodec,
        BoundReplicaCodec,
        CollectivesBackend,
        GatherCodec,
        GroupInfo,
        GroupLayout,
        Observer,
        ParamInfo,
        ReduceCodec,
        ShardingConstraint,
        ShardStorage,
        StateDictAdapter,
        StorageFactory,
    )
    from polyshard.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from polyshard.same_values import SameValues
    from polyshard.sharding.placement import ShardPlacement

__all__ = [
    "HOOK_API",
    "Around",
    "BackendPlugin",
    "BoundGatherCodec",
    "BoundReduceCodec",
    "BoundReplicaCodec",
    "CPUOffloadPolicy",
    "CollectivesBackend",
    "Contract",
    "DataParallelMeshDims",
    "FSDPModule",
    "GatherCodec",
    "GatherCodecPlugin",
    "GradientReductionHandle",
    "GroupInfo",
    "GroupLayout",
    "MixedPrecisionPolicy",
    "Observer",
    "ObserverPlugin",
    "OffloadPolicy",
    "ParamInfo",
    "Plugin",
    "ReduceCodec",
    "ReduceCodecPlugin",
    "SameValues",
    "ShardPlacement",
    "ShardStorage",
    "ShardingConstraint",
    "StateDictAdapter",
    "StorageFactory",
    "StoragePlugin",
    "UnshardHandle",
    "__version__",
    "attach_optimizer",
    "clip_grad_norm_",
    "close",
    "describe",
    "fully_shard",
    "grad_norm",
    "hookimpl",
    "load_plugin_state_dict",
    "plugin_state_dict",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "stats",
]

_HOMES = {
    "BackendPlugin": "plugins.one_class",
    "GroupInfo": "plugins.seams",
    "GroupLayout": "plugins.seams",
    "ObserverPlugin": "plugins.one_class",
    "ParamInfo": "plugins.seams",
    "StoragePlugin": "plugins.one_class",
    "Around": "plugins.seams",
    "BoundGatherCodec": "plugins.seams",
    "BoundReduceCodec": "plugins.seams",
    "BoundReplicaCodec": "plugins.seams",
    "CollectivesBackend": "plugins.seams",
    "GatherCodec": "plugins.seams",
    "Observer": "plugins.seams",
    "ReduceCodec": "plugins.seams",
    "ShardStorage": "plugins.seams",
    "ShardingConstraint": "plugins.seams",
    "StateDictAdapter": "plugins.seams",
    "StorageFactory": "plugins.seams",
    "CPUOffloadPolicy": "policies",
    "Contract": "plugins.contract",
    "DataParallelMeshDims": "policies",
    "FSDPModule": "module",
    "GatherCodecPlugin": "plugins.one_class",
    "GradientReductionHandle": "module",
    "HOOK_API": "plugins.contract",
    "MixedPrecisionPolicy": "policies",
    "OffloadPolicy": "policies",
    "Plugin": "plugins.contract",
    "ReduceCodecPlugin": "plugins.one_class",
    "SameValues": "same_values",
    "ShardPlacement": "sharding.placement",
    "UnshardHandle": "module",
    "attach_optimizer": "engine.state_dict",
    "clip_grad_norm_": "clipping",
    "close": "engine.keeping",
    "describe": "description",
    "fully_shard": "api",
    "grad_norm": "clipping",
    "hookimpl": "plugins.contract",
    "load_plugin_state_dict": "engine.keeping",
    "plugin_state_dict": "engine.keeping",
    "register_fsdp_forward_method": "api",
    "share_comm_ctx": "module",
    "stats": "description",
}


if not TYPE_CHECKING:  # else every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'polyshard' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"polyshard.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
