"""What the plan of a model says of the transfers of each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import describe
from polyshard.planning import GroupPlan
from polyshard_cli.trace.events import Kind

__all__ = ["Facts"]

Args = Mapping[str, object]


@dataclass(frozen=True)
class Facts:
    """Arguments of spans, by kind and group; none before a plan is known."""

    found: Mapping[tuple[Kind, str], Args] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Facts:
        """Of every group of ``model``, by the names that ``describe(model)`` shows."""
        found: dict[tuple[Kind, str], Args] = {}
        for plan in describe(model).groups:
            shard, replicate = _axes(plan)
            roles = plan.roles.exclusive
            said = {
                Kind.GATHER: {"axis": shard, "codec": roles["gather codec"]},
                Kind.REDUCE: {"axis": shard, "codec": roles["reduce codec"]},
                Kind.REPLICAS: {"axis": replicate, "codec": roles["reduce codec"]},
                Kind.STAGING: {"storage": roles["shard storage"]},
            }
            found.update({(kind, plan.name): args for kind, args in said.items()})
        return cls(found)

    def args(self, kind: Kind, group: str, **args: object) -> dict[str, object]:
        """``args``, and what is known of such a span."""
        return {"group": group, **self.found.get((kind, group), {}), **args}


def _axes(plan: GroupPlan) -> tuple[str, str]:
    """Names of the axis that shards and of those that replicate, as the plan's mesh has them."""
    mesh: DeviceMesh = plan.parameters[0].mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return names[-1], ",".join(names[:-1])
