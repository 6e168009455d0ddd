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
from polyshard.plugins.base import Around, Named, Stateful, Undoable, overrides
from polyshard.plugins.codecs import (
    BoundGatherCodec,
    BoundReduceCodec,
    BoundReplicaCodec,
    GatherCodec,
    ReduceCodec,
)
from polyshard.plugins.info import (
    CollectivesBackend,
    GroupIdentity,
    GroupInfo,
    ParameterTransform,
    ParamInfo,
    ShardingConstraint,
    StateDictAdapter,
)
from polyshard.plugins.landing import GradientLanding, OwnedParameter, Rows
from polyshard.plugins.observer import Observer, StepObserver
from polyshard.plugins.storage import ShardStorage, StorageFactory
from polyshard.sharding.layout import GroupLayout, ParameterLayout
from polyshard.stepping.elementwise import check_takeable
from polyshard.stepping.keeper import Lent, OptimizerKeeper
from polyshard.stepping.stepper import SteppedOptimizer, Stepper
from polyshard.stepping.twins import Twins

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
    "Lent",
    "Named",
    "Observer",
    "OptimizerKeeper",
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
    "SteppedOptimizer",
    "Stepper",
    "StorageFactory",
    "Twins",
    "Undoable",
    "check_takeable",
    "like",
    "local_of",
    "overrides",
    "repointed",
    "spec_of",
]
