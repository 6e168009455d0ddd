"""The sharded model of a case, and what its plugins say about it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from fuzzing.build import OPTIMIZERS, PLACEMENTS, Mlp, Table, build, policy_of, unit_calls
from fuzzing.case import Case, Save
from fuzzing.oracle import Rounded
from polyshard import describe, fully_shard
from polyshard_offload import DiskSettings, Offload
from polyshard_quantized import (
    BlockFormat,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    QuantizedComm,
)
from polyshard_tensor_parallel import TensorParallel

FORMATS: dict[str, type[BlockFormat]] = {
    "int8": Int8Block,
    "float8": Float8Block,
    "int4": Int4Block,
}


class Sharded:
    """A model on all ranks of a mesh."""

    def __init__(self, case: Case, mesh: DeviceMesh, folder: Path) -> None:
        """``folder``: where shards go that rest on disk."""
        self.case, self.mesh = case, mesh
        self.offload = _offload(case, folder)
        self.quantized = _quantized(case)
        self.units: list[Any] = []
        self.divides = False
        self.model: Any = self._sharded()
        self._choose_prefetch()
        self.parameters: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at the parameters anew; they must be the sharded ones now."""
        self.parameters = dict(self.model.named_parameters())

    def _sharded(self) -> nn.Module:
        case = self.case
        source = model = build(case)
        if case.meta:
            with torch.device("meta"):
                model = build(case)
        plugins: list[object] = [p for p in (self.offload, self.quantized) if p is not None]
        styles = self._styles(model) if case.mesh.tensor else {}
        self.divides = bool(styles)
        if styles:
            tensor_parallel = TensorParallel(styles, mesh=self.mesh["tensor"])
            tensor_parallel.apply(model)
            plugins.append(tensor_parallel)
        data = self.mesh[case.mesh.names[:-1]] if case.mesh.tensor else self.mesh
        for modules, unit in unit_calls(case, model):
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=data,
                reshard_after_forward=unit.reshard,
                shard_placement_fn=PLACEMENTS[unit.placement],
                mp_policy=policy_of(unit.policy),
                plugins=plugins,
            )
            self.units += modules
        if case.meta:
            _materialize(model, source)
        return model

    def _styles(self, model: nn.Module) -> dict[str, Any]:
        """What can be divided; where there is nothing, ranks of the axis do the same."""
        parts = self._parts()
        styles: dict[str, Any] = {}
        for name, module in model.named_modules():
            if isinstance(module, Mlp) and _divides(module.up.out_features, parts):
                styles[f"{name}.up"] = ColwiseParallel()
                styles[f"{name}.down"] = RowwiseParallel()
            if isinstance(module, Table) and module.table.num_embeddings % parts == 0:
                styles[f"{name}.table"] = RowwiseParallel(input_layouts=Replicate())
        return styles

    def _parts(self) -> int:
        """Torch cannot distribute full values where ranks hold unlike parts of what is divided."""
        case = self.case
        full = case.meta or any(isinstance(a, Save) and a.how == "full" for a in case.script)
        return case.mesh.tensor * (case.mesh.shards if full else 1)

    def _choose_prefetch(self) -> None:
        dice = Random(self.case.prefetch)
        for unit in self.units if self.case.prefetch else ():
            count = dice.randint(0, min(2, len(self.units)))
            unit.set_modules_to_forward_prefetch(dice.sample(self.units, count))
            unit.set_modules_to_backward_prefetch(dice.sample(self.units, count))

    def new_optimizer(self) -> torch.optim.Optimizer | None:
        """Without state; ``None`` if there is nothing to train."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if not trained:
            return None
        optimizer = OPTIMIZERS[self.case.optimizer](trained)
        return optimizer if self.offload is None else self.offload.wrap(optimizer)

    def rounded(self) -> dict[str, Rounded]:
        """How each parameter travels, as the plugin says before the first step."""
        found: dict[str, Rounded] = {}
        if self.quantized is None:
            return found
        describe(self.model)
        for group in self.quantized.report().groups:
            for transfer, gathers in ((group.gather, True), (group.reduce, False)):
                served = transfer.parameters if transfer is not None else ()
                for name in [p.fqn for p in served if p.excluded is None]:
                    assert transfer is not None
                    how = found.setdefault(name, self._cut(name))
                    setattr(how, "weights" if gathers else "gradients", transfer.format)
        return found

    def _cut(self, name: str) -> Rounded:
        parameter = self.parameters[name]
        assert isinstance(parameter, DTensor)
        axes: list[Any] = list(parameter.placements)
        tensor = axes.pop() if self.divides else None
        dims = {} if axes[-1].is_replicate() else {"shard_dim": axes[-1].dim}
        return Rounded(**dims, tensor_dim=getattr(tensor, "dim", None))


def _materialize(model: nn.Module, source: nn.Module) -> None:
    model.to_empty(device="cpu")
    buffers = dict(source.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, source.state_dict(), options=options)


def _divides(features: int, tensor: int) -> bool:
    """Torch's own tensor parallelism has no backward for a layer of one feature."""
    return features > 1 and features % tensor == 0


def _offload(case: Case, folder: Path) -> Offload | None:
    chosen = case.offload
    if chosen is None:
        return None
    return Offload(
        params=chosen.params,  # type: ignore[arg-type]
        grads=chosen.grads,  # type: ignore[arg-type]
        optimizer=chosen.optimizer,  # type: ignore[arg-type]
        fraction=chosen.fraction,
        prefetch=chosen.prefetch,
        chunk_bytes=chosen.chunk_bytes,
        disk=DiskSettings(path=folder, checksums=chosen.checksums),
    )


def _quantized(case: Case) -> QuantizedComm | None:
    chosen = case.quantized
    if chosen is None:
        return None
    weights, gradients = chosen.weights, chosen.gradients
    return QuantizedComm(
        weights=None if weights is None else FORMATS[weights[0]](weights[1]),
        gradients=None if gradients is None else FORMATS[gradients[0]](gradients[1]),
        exclude=Exclusions(min_ndim=chosen.min_ndim, min_numel=chosen.min_numel),
        rounding="stochastic" if chosen.stochastic else "nearest",
        hierarchical=chosen.hierarchical,
    )
