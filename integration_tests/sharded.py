"""The other side: a stack of plugins on ranks. Functions that take a rank run there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from small_model import build, loss_of, optimizer_for, prepare
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from training import EVALUATION, Outcome, train

from composition_table import Cell, Layout
from polyshard import MixedPrecisionPolicy, clip_grad_norm_, describe, fully_shard, stats
from polyshard_checkpoint import Checkpoints, TrainingState

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Sharded:
    """A :class:`training.Trainee` that is one rank of several."""

    def __init__(self, cell: Cell, folder: str, seed: int = 0, device: str = "") -> None:
        """``folder`` is for what is kept on disk."""
        self.device = device or torch.get_default_device().type
        self.model: Any = build(cell, seed).to(self.device)
        data, plugins, offload = self._stack(cell, folder)
        prepare(self.model, cell)
        keywords: dict[str, Any] = {"mesh": data, "plugins": plugins}
        if cell.dtype == "bf16":
            keywords["mp_policy"] = BF16
        for block in self.model.blocks:
            fully_shard(block, **keywords)
        fully_shard(self.model, **keywords)
        text = str(describe(self.model))
        assert all(name.replace("-", "_") in text for name in cell.stack)
        self.optimizer: torch.optim.Optimizer = optimizer_for(self.model)
        if offload is not None:
            self.optimizer = offload.wrap(self.optimizer)
        self.part = _part(data)

    def _stack(self, cell: Cell, folder: str) -> tuple[DeviceMesh, list[object], Any]:
        mesh = mesh_of(cell.layout, self.device)
        plugins: list[object] = []
        offload: Any = None
        if "tensor-parallel" in cell.stack:
            from polyshard_tensor_parallel import TensorParallel, demo_plan

            tensor_parallel = TensorParallel(demo_plan(), mesh=mesh["tp"])
            tensor_parallel.apply(self.model)
            plugins.append(tensor_parallel)
        if "quantized" in cell.stack:
            from polyshard_quantized import Exclusions, Int8Block, QuantizedComm

            matrices = Exclusions(min_numel=0)
            plugins.append(QuantizedComm(gradients=Int8Block(), exclude=matrices))
        if "offload" in cell.stack:
            from polyshard_offload import DiskSettings, Offload

            disk = DiskSettings(path=Path(folder), block_bytes=64 << 10)
            offload = Offload(params="host", optimizer="disk", disk=disk, chunk_bytes=20_000)
            plugins.append(offload)
        data: Any = mesh["replicas", "dp"] if cell.layout.replicas > 1 else mesh["dp"]
        return data, plugins, offload

    def backward(self, index: int, micro_batches: int, *, last: bool) -> list[float]:
        """This rank's part."""
        self.model.set_requires_gradient_sync(last)
        loss = loss_of(self.model, index, self.part) / micro_batches
        loss.backward()
        return [loss.item()]

    def clip(self, max_norm: float) -> float:
        """Over all meshes."""
        return clip_grad_norm_(self.model.parameters(), max_norm).item()

    def step(self) -> None:
        """This rank's shards."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check_bytes(self) -> None:
        """What the plan says of a step's transfers is what one sends."""
        self.model.reshard()
        predicted, before = describe(self.model).step_bytes, stats(self.model).bytes_sent
        loss_of(self.model, 0, self.part).backward()
        assert stats(self.model).bytes_sent - before == predicted

    def evaluate(self, index: int) -> list[float]:
        """This rank's part."""
        self.model.eval()
        with torch.no_grad():
            loss = loss_of(self.model, index, self.part).item()
        self.model.train()
        return [loss]

    def tensors(self) -> dict[str, Tensor]:
        """Gathered."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = whole(parameter.detach())
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}:{key}"] = whole(value)
        return found


def mesh_of(layout: Layout, device: str = "") -> DeviceMesh:
    """A new one for each call: the world destroys process groups between calls."""
    sizes = (layout.replicas, layout.shards, layout.tensor)
    device = device or torch.get_default_device().type
    return init_device_mesh(device, sizes, mesh_dim_names=("replicas", "dp", "tp"))


def _part(data: DeviceMesh) -> int:
    """Which of the batches is this rank's: replicas count before shards."""
    coordinate = data.get_coordinate()
    assert coordinate is not None
    part = 0
    for axis, place in enumerate(coordinate):
        part = part * data.size(axis) + place
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank, in memory of its own."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


Found = tuple[int, Outcome, str]
"""A rank's part, what it saw (tensors on the first rank alone), and a digest of its tensors."""


def trained(rank: int, size: int, cell: Cell, folder: str) -> Found:
    """Run a cell; leave a checkpoint in ``folder`` if the cell is about that."""
    trainee = Sharded(cell, folder)
    outcome = train(trainee, cell.feature)
    if cell.feature == "reload":
        Checkpoints(f"{folder}/saved").save(1, state_of(trainee.model, trainee.optimizer))
    elif cell.feature == "compiled":
        _check_compiled()
    elif cell.feature == "plain":
        trainee.check_bytes()
    found = outcome.tensors
    if rank:
        outcome.tensors = {}
    return trainee.part, outcome, digest(found)


def _check_compiled() -> None:
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    dynamo.reset()
    counters.clear()
    assert graphs > 0, "nothing was compiled"


def reloaded(rank: int, size: int, cell: Cell, folder: str) -> Found:
    """Load what ``trained`` saved into a model that has no plugins and other values; save it."""
    model: Any = build(cell, seed=1)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optimizer_for(model)
    assert Checkpoints(f"{folder}/saved").load(state_of(model, optimizer)) is not None
    Checkpoints(f"{folder}/plain").save(1, state_of(model, optimizer))
    with torch.no_grad():
        losses = [[loss_of(model, EVALUATION, 0).item()]]
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = whole(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            found[f"{name}:{key}"] = whole(value)
    return 0, Outcome(losses, [], {} if rank else found), digest(found)


def returned(rank: int, size: int, cell: Cell, folder: str) -> str:
    """Load what ``reloaded`` saved into a new stack; a digest of its tensors."""
    trainee = Sharded(cell, folder, seed=2)
    Checkpoints(f"{folder}/plain").load(state_of(trainee.model, trainee.optimizer))
    return digest(trainee.tensors())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    """Without random numbers: these ranks are others."""
    return TrainingState(model, [optimizer], random=False)
