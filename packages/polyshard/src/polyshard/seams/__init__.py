"""The seams of the engine: what a plugin may replace or watch, as base classes with defaults.

The engine's own behaviour goes through the same classes (see ``plugins.builtin``), so a plugin adds
a class and edits no engine file. Everything here is asked for at plan time, frozen into the plan of
a group, and used as plain objects during a step.

Rules that hold for all of them:

* Answers must be the same on every rank; sizes are derived from metadata, never from values.
* ``name`` and ``settings`` go into the plan that all ranks compare before the first collective.
* Tensors handed in are owned by the engine and valid only during the call, unless said otherwise.
"""

from __future__ import annotations

from polyshard._torch.optimizers import like, local_of, repointed, spec_of
from polyshard.seams.base import Around, Named, Stateful, Undoable, overrides
from polyshard.seams.codecs import (
    BoundGatherCodec,
    BoundReduceCodec,
    BoundReplicaCodec,
    GatherCodec,
    ReduceCodec,
)
from polyshard.seams.info import (
    CollectivesBackend,
    GroupIdentity,
    GroupInfo,
    ParameterTransform,
    ParamInfo,
    ShardingConstraint,
    StateDictAdapter,
)
from polyshard.seams.landing import GradientLanding, OwnedParameter, Rows
from polyshard.seams.observer import Observer, StepObserver
from polyshard.seams.storage import ShardStorage, StorageFactory
from polyshard.sharding.layout import GroupLayout, ParameterLayout

__all__ = [
    "Around",
    "BoundGatherCodec",
    "BoundReduceCodec",
    "BoundReplicaCodec",
    "CollectivesBackend",
    "GatherCodec",
    "GradientLanding",
    "GroupIdentity",
    "GroupInfo",
    "GroupLayout",
    "Named",
    "Observer",
    "OwnedParameter",
    "ParamInfo",
    "ParameterLayout",
    "ParameterTransform",
    "ReduceCodec",
    "Rows",
    "ShardStorage",
    "ShardingConstraint",
    "StateDictAdapter",
    "Stateful",
    "StepObserver",
    "StorageFactory",
    "Undoable",
    "like",
    "local_of",
    "overrides",
    "repointed",
    "spec_of",
]
