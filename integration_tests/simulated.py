"""Trainings that ranks make twice: on the CPU over gloo, and on the simulated accelerator."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import polyshard_resilience
from benchmarks import sim
from polyshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard

WIDTH, HIDDEN, ROWS, STEPS = 32, 96, 6, 3
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

Result = tuple[list[Tensor], list[Tensor]]
"""Losses of the steps, and this rank's part of every weight after them."""


class Block(sim.Block):
    """Small; tensor parallelism may divide its layers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HIDDEN)


class Checkpointed(Block):
    """Recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def build(kind: type[Block] = Block) -> nn.Sequential:
    """The same weights on every rank and device."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(*(kind() for _ in range(3)), nn.Linear(WIDTH, 5))


@dataclass
class Case:
    """A training: how its model is made and sharded, and what a step does."""

    mesh: tuple[int, ...] = ()
    kind: type[Block] = Block
    keywords: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], list[Any]] = list
    optimizers: Callable[[nn.Module, list[Any]], list[Any]] = lambda model, _: [
        torch.optim.AdamW(model.parameters(), lr=1e-2)
    ]
    micro: int = 1
    clips: bool = False
    attempts: bool = False
    compiles: bool = False
    moves: bool = True
    """Whether the model is moved before it is sharded; else ``fully_shard`` does."""
    moves_again: bool = False
    """Whether it is moved after each backward as well, gradients included."""


def mesh_of(case: Case, size: int, device: str) -> DeviceMesh:
    """All ranks in one row, unless the case says otherwise."""
    shape = case.mesh or (size,)
    return init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def batch(rank: int, step: int, micro: int) -> Tensor:
    """Drawn on the CPU, whatever the device."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, device="cpu")


def train(rank: int, size: int, device: str, case: Case) -> Result:
    """Some steps of ``case``."""
    model: Any = build(case.kind)
    plugins, mesh = case.plugins(), mesh_of(case, size, device)
    if case.moves:
        model.to(device)
    keywords: Any = dict(mesh=mesh, plugins=plugins, **case.keywords)
    for layer in model:
        fully_shard(layer, **keywords)
    fully_shard(model, **keywords)
    called: Callable[..., Tensor] = model
    if case.compiles:
        called = torch.compile(model, backend="aot_eager")
    optimizers = case.optimizers(model, plugins)
    losses: list[Tensor] = []
    for step in range(STEPS):
        guard = (
            polyshard_resilience.attempt(model, *optimizers)
            if case.attempts
            else contextlib.nullcontext()
        )
        with guard:
            for micro in range(case.micro):
                model.set_requires_gradient_sync(micro == case.micro - 1)
                loss = called(batch(rank, step, micro).to(device)).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            if case.moves_again:
                model.to(device)
            if case.clips:
                losses.append(clip_grad_norm_(model.parameters(), 0.05).detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return values(losses), weights(model)


def values(tensors: list[Tensor]) -> list[Tensor]:
    """On the host, where both runs can be compared."""
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().cpu().clone() for t in tensors]


def weights(model: nn.Module) -> list[Tensor]:
    """This rank's part of each."""
    return values(list(model.parameters()))


# Cases of one model ---------------------------------------------------------------------------


def int8() -> list[Any]:
    from polyshard_quantized import Exclusions, Int8Block, QuantizedComm

    every = Exclusions(min_ndim=0, min_numel=0)
    return [QuantizedComm(weights=Int8Block(64), gradients=Int8Block(64), exclude=every)]


def offload(**switches: Any) -> Callable[[], list[Any]]:
    def plugins() -> list[Any]:
        from polyshard_offload import DiskSettings, Offload

        folder = Path(tempfile.gettempdir())
        return [Offload(**switches, disk=DiskSettings(path=folder))]

    return plugins


def wrapped(model: nn.Module, plugins: list[Any]) -> list[Any]:
    return [plugins[0].wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))]


def muon() -> list[Any]:
    from polyshard_optimizers import MatrixOptimizer

    return [MatrixOptimizer(torch.optim.Muon, lr=0.02)]


def matrices(model: nn.Module, plugins: list[Any]) -> list[Any]:
    return [plugins[0].optimizer(model), torch.optim.AdamW(plugins[0].rest(model), lr=1e-2)]


CASES = {
    "plain": Case(),
    "moved by fully_shard": Case(moves=False),
    "bf16": Case(keywords={"mp_policy": BF16}),
    "kept": Case(keywords={"reshard_after_forward": False}),
    "hsdp": Case(mesh=(2, 2)),
    "hsdp bf16": Case(mesh=(2, 2), keywords={"mp_policy": BF16}),
    "blocks": Case(keywords={"reshard_after_forward": 2}),
    "accumulation": Case(micro=3),
    "accumulation bf16": Case(micro=2, keywords={"mp_policy": BF16}),
    "clipping": Case(clips=True),
    "activation checkpointing": Case(kind=Checkpointed),
    "compile": Case(compiles=True),
    "int8": Case(plugins=int8),
    "offload to host": Case(plugins=offload(params="host")),
    "offload to host, moved": Case(plugins=offload(params="host"), moves_again=True),
    "optimizer on host": Case(
        plugins=offload(params="device", optimizer="host"), optimizers=wrapped
    ),
    "offload to disk": Case(plugins=offload(params="disk"), optimizers=wrapped),
    "muon": Case(plugins=muon, optimizers=matrices),
    "muon hsdp": Case(mesh=(2, 2), plugins=muon, optimizers=matrices),
    "attempt": Case(attempts=True),
}


# Trainings of their own -----------------------------------------------------------------------


def tensor_parallel(rank: int, size: int, device: str) -> Result:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from polyshard_tensor_parallel import TensorParallel

    mesh = init_device_mesh(device, (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = build().to(device)
    tp = TensorParallel({"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}, mesh=mesh["tp"])
    tp.apply(model)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"], plugins=[tp])
    fully_shard(model, mesh=mesh["dp"], plugins=[tp])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(batch(rank // 2, step, 0).to(device)).square().mean()
        loss.backward()
        losses += [loss.detach(), clip_grad_norm_(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
    return values(losses), weights(model)


def reproducible(rank: int, size: int, device: str) -> Result:
    from polyshard_reproducible import Reproducible
    from polyshard_reproducible import clip_grad_norm_ as clip

    torch.use_deterministic_algorithms(device != "cpu")
    plugin = Reproducible(slots=4)
    model, mesh = build().to(device), init_device_mesh(device, (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, plugins=[plugin])
    fully_shard(model, mesh=mesh, plugins=[plugin])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        losses = []
        for slot in plugin.each_slot(model, step=step):
            losses.append(model(batch(slot, step, 0).to(device)).square().mean())
            losses[-1].backward()
        seen += [torch.as_tensor(plugin.mean(model, losses)), clip(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
    return values(seen), weights(model)


def checkpoints(rank: int, size: int, device: str) -> Result:
    """Saved in the middle, loaded into a new model and optimizer, which continue."""
    from polyshard_checkpoint import Checkpoints, TrainingState

    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    mesh = init_device_mesh(device, (size,))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build().to(device)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        loss: Tensor = model(batch(rank, number, 0).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = made()
    losses = [step(model, optimizer, 0)]
    Checkpoints(folder[0]).save(1, TrainingState(model, [optimizer]))
    again, its_optimizer = made()
    Checkpoints(folder[0]).load(TrainingState(again, [its_optimizer]))
    losses += [step(again, its_optimizer, 1), step(model, optimizer, 1)]
    assert all(map(torch.equal, weights(again), weights(model)))
    return values(losses), weights(again)


def pipelining(rank: int, size: int, device: str) -> Result:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("pp", "dp"))
    index, micro = mesh["pp"].get_local_rank(), 4
    stage = nn.Sequential(*list(build())[2 * index : 2 * index + 2]).to(device)
    for layer in stage:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    on_stage = PipelineStage(stage, index, 2, torch.device(device), group=mesh["pp"].get_group())
    runner = Schedule1F1B(on_stage, micro, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    for step in range(STEPS):
        x = torch.cat([batch(mesh["dp"].get_local_rank(), step, i) for i in range(2)]).to(device)
        if index == 0:
            runner.step(x)
        else:
            seen: list[Tensor] = []
            runner.step(target=torch.zeros(len(x), 5, device=device), losses=seen)
            losses += [loss.detach() for loss in seen]
        optimizer.step()
        optimizer.zero_grad()
    return values(losses), weights(stage)


OTHERS = {f.__name__: f for f in (tensor_parallel, reproducible, checkpoints, pipelining)}


BITWISE = (
    "hsdp",
    "hsdp bf16",
    "muon hsdp",
    "int8",
    "tensor_parallel",
    "pipelining",
    "reproducible",
)
"""Also on four ranks: sums are over two of them, or in an order of the engine's."""


def _same(here: Tensor, there: Tensor, *, is_bitwise: bool) -> bool:
    return here.equal(there) if is_bitwise else torch.allclose(here, there, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    """For what makes tensors without being told where."""
    with torch.device(device):
        yield


def compare(rank: int, size: int, name: str) -> None:
    """Train on both: the same bits, but where more than two ranks add in an order of their own."""

    # On the CPU the engine adds in rank order, a backend's reduce-scatter in its own.
    is_bitwise = size <= 2 or name in BITWISE

    def once(device: str) -> Result:
        with default_device(device):
            if name in OTHERS:
                return OTHERS[name](rank, size, device)
            return train(rank, size, device, CASES[name])

    losses, trained = once("cpu")
    on_device = once("sim")
    for what, here, there in (
        ("losses", losses, on_device[0]),
        ("weights", trained, on_device[1]),
    ):
        assert len(here) == len(there)
        pairs = enumerate(zip(here, there, strict=True))
        differ = [i for i, (a, b) in pairs if not _same(a, b, is_bitwise=is_bitwise)]
        assert not differ, f"{what} {differ} of {len(here)} differ on rank {rank}"
    assert torch.isfinite(torch.stack([loss.float() for loss in losses])).all() if losses else True
