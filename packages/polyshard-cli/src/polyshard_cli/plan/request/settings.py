"""What a plan is asked for, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.mesh import MeshSpec, parse_mesh

Backend = Literal["gloo", "nccl"]
OptimizerName = Literal["adamw", "sgd", "momentum"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every choice of a plan.

    Attributes:
        model: what :func:`polyshard_cli.plan.request.model.load_model` understands.
        mesh: axes with sizes.
        batch: sequences a step over all data-parallel ranks; 0: one for each of them.
        accumulate: micro-batches a step, of which only the last is reduced, as with
            ``set_requires_gradient_sync(False)`` before the others.
        sequence: tokens a sequence; 0: the model's own, at most 4096.
        plugins: names of installed plugins, or ``module:object``.
        quantize: formats of parameters and gradients, as ``int8`` or ``int8,native``.
        offload: tiers, as ``optimizer=host``.
        bf16: gather and compute in bfloat16, reduce in float32.
        reshard: whether units are freed between forward and backward; an int keeps them on blocks
            of so many ranks; ``None`` frees all but the root.
        optimizer: whose state is counted.
        machine: name or file of the machine that time is estimated for.
        backend: what ranks communicate over; ``None``: what the machine does.
        rank: whose bytes and memory are planned; ranks differ where sizes do not divide.
        overrides: fields of a transformers config.
        placement: ``module:function`` of a parameter that returns its placement, as
            ``shard_placement_fn`` does; empty: ``Shard(0)``.
        units: patterns of module names that become units; none: found.
        tp_plan: ``module:function`` that makes a tensor-parallel plan; empty: a ready-made one.
        inputs: ``module:function`` of (batch, sequence) that makes the model's inputs.
    """

    model: str
    mesh: MeshSpec = field(default_factory=lambda: parse_mesh("dp=8"))
    batch: int = 0
    accumulate: int = 1
    sequence: int = 0
    plugins: tuple[str, ...] = ()
    quantize: str = ""
    offload: str = ""
    bf16: bool = False
    reshard: bool | int | None = None
    optimizer: OptimizerName = "adamw"
    machine: str = "h100x8"
    backend: Backend | None = None
    rank: int = 0
    overrides: Mapping[str, object] = field(default_factory=dict)
    placement: str = ""
    units: tuple[str, ...] = ()
    tp_plan: str = ""
    inputs: str = ""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit the mesh."""
        if self.accumulate < 1:
            raise PlanError(f"--accumulate {self.accumulate}: a step has at least 1 micro-batch")
        parts = self.mesh.data_ranks * self.accumulate
        if self.batch < 0 or self.sequence < 0:
            raise PlanError("--batch and --sequence must not be negative; leave them out or give 1")
        if self.batch % parts:
            near = max(parts, round(self.batch / parts) * parts)
            raise PlanError(
                f"--batch {self.batch} does not divide over {self._words}; --batch {near} would do"
            )
        if not 0 <= self.rank < self.mesh.ranks:
            raise PlanError(
                f"--rank {self.rank}: ranks of this mesh are 0 to {self.mesh.ranks - 1}"
            )

    @property
    def local_batch(self) -> int:
        """Sequences of a micro-batch on each rank."""
        return max(1, self.batch // (self.mesh.data_ranks * self.accumulate))

    @property
    def _words(self) -> str:
        """What a batch divides over."""
        times = f" x {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        return f"{self.mesh.data_ranks} data-parallel ranks{times}"
