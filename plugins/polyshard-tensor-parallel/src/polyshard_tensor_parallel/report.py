"""What applying a plan did, for people and for tests."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override


@dataclass(frozen=True)
class ParameterReport:
    """One parameter: global and local shape in elements, and its placement as text."""

    fqn: str
    style: str
    placement: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """One application of a plan.

    Attributes:
        world_size: tensor-parallel ranks.
        parameters: those that are ``DTensor`` s now.
        alike: names of those outside the plan, which every rank holds whole.
        inputs: modules whose inputs or outputs alone are redistributed, with the style.
        counts: attributes that counted heads, with the number before and after.
    """

    world_size: int
    parameters: tuple[ParameterReport, ...]
    alike: tuple[str, ...]
    inputs: tuple[str, ...]
    counts: tuple[str, ...]

    @override
    def __str__(self) -> str:
        lines = [f"tensor-parallel over {self.world_size} ranks"]
        for p in self.parameters:
            shapes = f"{p.shape} -> {p.local_shape}"
            lines.append(f"  {p.fqn:<40} {p.style:<18} {p.placement:<12} {shapes}")
        lines += [f"  {text}" for text in (*self.inputs, *self.counts)]
        if self.alike:
            lines.append(f"  alike on every rank: {', '.join(self.alike)}")
        return "\n".join(lines)
