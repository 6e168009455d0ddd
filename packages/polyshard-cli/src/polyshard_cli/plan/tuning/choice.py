"""One choice of everything that is searched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyshard_cli.plan.request.mesh import MeshSpec
from polyshard_cli.plan.request.settings import Settings


@dataclass(frozen=True)
class Choice:
    """Settings that a search varies, in the words of the command's options."""

    mesh: MeshSpec
    units: tuple[str, ...] = ()
    reshard: bool | int | None = None
    quantize: str = ""
    offload: str = ""

    @classmethod
    def of(cls, settings: Settings) -> Choice:
        """The one that ``settings`` make."""
        return cls(
            settings.mesh, settings.units, settings.reshard, settings.quantize, settings.offload
        )

    def applied(self, settings: Settings) -> Settings:
        """``settings`` with this choice.

        Raises:
            PlanError: where the batch does not divide over the mesh.
        """
        return replace(
            settings,
            mesh=self.mesh,
            units=self.units,
            reshard=self.reshard,
            quantize=self.quantize,
            offload=self.offload,
        )

    @property
    def name(self) -> str:
        """Options that make it, as a person writes them."""
        words = [f"--mesh {mesh_text(self.mesh)}"]
        words += [f"--units '{pattern}'" for pattern in self.units]
        words += [f"--reshard {reshard_text(self.reshard)}"] * (self.reshard is not None)
        words += [f"--quantize {self.quantize}"] * bool(self.quantize)
        words += [f"--offload {self.offload}"] * bool(self.offload)
        return " ".join(words)


def mesh_text(mesh: MeshSpec) -> str:
    """As ``--mesh`` takes it."""
    return ",".join(f"{axis.name}={axis.size}" for axis in mesh.axes)


def reshard_text(reshard: bool | int | None) -> str:
    """As ``--reshard`` takes it."""
    if reshard is None:
        return "auto"
    return {True: "yes", False: "no"}[reshard] if isinstance(reshard, bool) else str(reshard)
