"""What numbers are exact, what is assumed, and where figures come from."""

from __future__ import annotations

from polyshard_cli.plan.page.blocks import Items, Section, Table
from polyshard_cli.plan.report.document import Document

__all__ = ["assumptions_section"]

READING = (
    ("Bytes", "those of the engine's own transfers are exact; sums over replicas and collectives "
     "of tensor parallelism are what a ring sends."),
    ("Memory", "without the device's context, fragmentation and workspaces of libraries; the loss "
     "is taken to be cross entropy in float32, attention one that never holds its scores."),
    ("Time", "arithmetic over the machine's figures, kernel by kernel: what limits a step, not a "
     "promise."),
)  # fmt: skip


def assumptions_section(document: Document) -> Section:
    """How to read the numbers, what was planned, and sources."""
    model, machine = document.model, document.machine
    axes = ", ".join(f"{axis.name} = {axis.size} ({axis.role})" for axis in document.mesh.axes)
    planned = Table(
        "What was planned",
        ("what", "value"),
        (
            ("model", model.name),
            ("parameters", f"{model.parameters:,}"),
            ("trainable", f"{model.trainable:,}"),
            ("units", f"{model.units:,}"),
            ("mesh", axes),
            ("sequences a step and data-parallel rank", f"{model.batch:,}"),
            ("tokens a sequence", f"{model.sequence:,}"),
            ("optimizer", model.optimizer),
            ("rank", f"{model.rank:,}"),
            ("machine", machine.name),
            ("backend", machine.backend),
            ("polyshard", document.polyshard),
            ("torch", document.torch),
        ),
        ("value",),
    )
    sources = Items(tuple(("", source) for source in machine.sources))
    blocks = (planned, Items(READING), *((sources,) if machine.sources else ()))
    return Section("assumptions", "What was assumed, and sources", blocks)
