"""The mesh of a plan: from ``replicate=2,dp=4,tp=2`` to axes with roles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard_cli.plan.errors import PlanError, nearest

Role = Literal["replicate", "shard", "tensor"]

NAMES: dict[str, Role] = {
    "replicate": "replicate",
    "dp_replicate": "replicate",
    "dp": "shard",
    "shard": "shard",
    "fsdp": "shard",
    "dp_shard": "shard",
    "tp": "tensor",
}
ORDER: tuple[Role, ...] = ("replicate", "shard", "tensor")
"""From the outermost axis to the innermost, whose ranks are neighbours."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: ``size`` ranks, and what they share."""

    name: str
    size: int
    role: Role


@dataclass(frozen=True)
class MeshSpec:
    """Axes from the outermost to the innermost."""

    axes: tuple[Axis, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def data_ranks(self) -> int:
        """Parts that a batch is divided into."""
        return math.prod(axis.size for axis in self.axes if axis.role != "tensor")

    @property
    def text(self) -> str:
        """As ``--mesh`` takes it."""
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    def size(self, role: Role) -> int:
        """Ranks of the axis with ``role``; 1 without one."""
        return math.prod(axis.size for axis in self.axes if axis.role == role)

    def name(self, role: Role) -> str:
        """What the axis with ``role`` is called; empty without one."""
        return next((axis.name for axis in self.axes if axis.role == role), "")

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Names of the axes that ``fully_shard`` is given."""
        return tuple(axis.name for axis in self.axes if axis.role != "tensor")

    def build(self, device: str) -> DeviceMesh:
        """The whole mesh, over the process group in use."""
        sizes = tuple(axis.size for axis in self.axes)
        names = tuple(axis.name for axis in self.axes)
        return init_device_mesh(device, sizes, mesh_dim_names=names)


def parse_mesh(text: str) -> MeshSpec:
    """The mesh that ``text`` names, such as ``dp=512,tp=8``.

    Raises:
        PlanError: for text that cannot be read, unknown axes and sizes, two axes of one role, or
            none to shard over.
    """
    axes: dict[Role, Axis] = {}
    for part in (part.strip() for part in text.split(",")):
        axis = _axis(part, text)
        if axis.role in axes:
            raise PlanError(
                f"--mesh {text}: {axes[axis.role].name} and {axis.name} are both {axis.role} "
                f"axes; multiply their sizes into one: {axis.name}="
                f"{axes[axis.role].size * axis.size}"
            )
        axes[axis.role] = axis
    if "shard" not in axes:
        others = MeshSpec(tuple(axes.values())).text
        raise PlanError(f"--mesh {text} has no axis to shard over; add one: --mesh dp=1,{others}")
    return MeshSpec(tuple(axes[role] for role in ORDER if role in axes))


def _axis(part: str, text: str) -> Axis:
    name, equals, size = part.partition("=")
    if not equals or not size.isdecimal() or int(size) < 1:
        raise PlanError(
            f"--mesh {text}: cannot read {part!r}; write axes with sizes of at least 1, as "
            "dp=8 or replicate=2,dp=4,tp=2"
        )
    if name not in NAMES:
        raise PlanError(
            f"--mesh {text}: no axis is called {name!r}; did you mean "
            f"{nearest(name, NAMES, 0.4) or 'dp'}={size}? "
            f"Known: {', '.join(NAMES)}"
        )
    return Axis(name, int(size), NAMES[name])
