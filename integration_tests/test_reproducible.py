"""The same bits at every world size, beside other plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_testing import World

pytest.importorskip("polyshard_optimizers")
pytest.importorskip("polyshard_reproducible")
pytest.importorskip("polyshard_tensor_parallel")

from reproducible_runs import Run, Words, differences, digest, digests

from polyshard_optimizers import MatrixOptimizer
from polyshard_reproducible import Recorder, RecordsError, compare
from polyshard_tensor_parallel import TensorParallel, demo_plan

Digests = dict[str, str]

PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
"""31 words over two ranks: pieces of 16 and of 15 rows, which data axes cut further."""


def language_model() -> LanguageModel:
    """Attention, and activations that sequence parallelism cuts."""
    return LanguageModel(ModelSettings(width=32, layers=2, heads=4, hidden=60, sequence=6))


KINDS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "columns and rows": (PLAN, lambda: Words(hidden=40)),
    "sequence": (demo_plan(sequence_parallel=True), language_model),
    "heads": (demo_plan(), language_model),
}


def mesh_of(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Data axes, and the last one, of tensor parallelism."""
    names = ("replicas", "dp", "tp")[-len(shape) :]
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh["dp"]
    return data, mesh["tp"]


def run_of(shape: tuple[int, ...], kind: str, beside: Sequence[Any] = (), **given: Any) -> Run:
    """A run on data axes and one of tensor parallelism."""
    data, tensor = mesh_of(shape)
    plan, make = KINDS[kind]
    plugin = TensorParallel(plan, mesh=tensor)

    def parallel() -> nn.Module:
        model = make()
        plugin.apply(model)
        return model

    return Run(data, beside=[plugin, *beside], make=parallel, **given)


def trained(rank: int, size: int, shape: tuple[int, ...], kind: str, **given: Any) -> Digests:
    """What two steps leave behind, whole."""
    return run_of(shape, kind, **given).train(range(2)).state()


def check(rank_sizes: tuple[World, World], shapes: list[tuple[int, ...]], kind: str) -> None:
    """All ranks of all meshes end as those of the first."""
    expected = rank_sizes[0].run(trained, shapes[0], kind, timeout=120.0)[0]
    for shape in shapes[1:]:
        for found in rank_sizes[1].run(trained, shape, kind, timeout=120.0):
            assert differences(found, expected) == [], shape


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_data_axes_of_any_size_beside_tensor_parallelism(
    world2: World, world4: World, kind: str
) -> None:
    replicas = [(2, 1, 2)] if kind == "columns and rows" else []
    check((world2, world4), [(1, 2), (2, 2), *replicas], kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks_beside_tensor_parallelism(world2: World, world4: World, kind: str) -> None:
    world = World(8)
    try:
        check((world2, world), [(1, 2), (4, 2), (2, 2, 2)], kind)
        if kind != "sequence":  # of 6 words torch cuts no 4 parts
            check((world4, world), [(1, 4), (2, 4)], kind)
    finally:
        world.close()


def resumed(rank: int, size: int, folder: str, data: int, steps: range) -> Digests:
    """Continue from what another number of data-parallel ranks has saved, and save."""
    run = run_of((data, 2), "columns and rows")
    state = TrainingState(run.model, [run.optimizer])
    checkpoints = Checkpoints(folder)
    restored = checkpoints.load(state)
    assert (restored.step if restored is not None else 0) == steps.start
    run.train(steps)
    checkpoints.save(steps.stop, state)
    return digests(run.model, run.optimizer, [])


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_at_another_data_axis(world2: World, world4: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    world4.run(resumed, folder, 2, range(1))
    found = world2.run(resumed, folder, 1, range(1, 2))
    expected = world2.run(resumed, str(tmp_path / "other"), 1, range(2))[0]
    for each in found:
        assert differences(each, expected) == []


def recorded(rank: int, size: int, folder: str, shape: tuple[int, ...], kind: str, at: int) -> None:
    """Two steps; rank ``at`` flips a bit of its piece of a gradient in the second."""
    run = run_of(shape, kind)

    def flip(step: int) -> None:
        gradient = run.model.blocks[1].up.weight.grad
        if step == 1 and rank == at and gradient is not None:
            with torch.no_grad():
                gradient.to_local().view(-1).view(torch.int32)[3] ^= 1

    if at >= 0:
        run.after_backward = flip
    with Recorder(folder, run.plugin, run.model, run.optimizer):
        run.train(range(2))


@pytest.mark.thorough
def test_records_tell_tensor_parallel_ranks_apart(
    world2: World, world4: World, tmp_path: Path
) -> None:
    kind = "columns and rows"
    folders = [str(tmp_path / name) for name in ("two", "four", "flipped", "other")]
    world2.run(recorded, folders[0], (1, 2), kind, -1)
    world4.run(recorded, folders[1], (2, 2), kind, -1)
    world4.run(recorded, folders[2], (2, 2), kind, 3)
    world2.run(recorded, folders[3], (2, 1), kind, -1)
    equal = compare(folders[0], folders[1])
    assert equal.first is None
    assert equal.compared > 200
    assert str(compare(folders[0], folders[2]).first) == (
        "step 1, gradients, group 'blocks.1': blocks.1.up.weight on tensor-parallel rank 1 differs"
    )
    with pytest.raises(RecordsError, match="have 2 and 1 tensor-parallel ranks"):
        compare(folders[0], folders[3])


@pytest.mark.thorough
def test_activations_that_are_cut_are_recorded(
    world2: World, world4: World, tmp_path: Path
) -> None:
    """Under sequence parallelism every tensor-parallel rank has another part of them."""
    folders = [str(tmp_path / name) for name in ("two", "four")]
    world2.run(recorded, folders[0], (1, 2), "sequence", -1)
    world4.run(recorded, folders[1], (2, 2), "sequence", -1)
    assert compare(*folders).first is None


class Both:
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, plugin: MatrixOptimizer, model: nn.Module) -> None:
        self.matrices = plugin.optimizer(model)
        self.rest = torch.optim.AdamW(plugin.rest(model), lr=0.01)

    def step(self) -> None:
        self.matrices.step()
        self.rest.step()

    def zero_grad(self) -> None:
        self.matrices.zero_grad()
        self.rest.zero_grad()


def heads(name: str, shape: tuple[int, ...]) -> int:
    """Four matrices in the rows of some, of which every one of up to four ranks has its own."""
    return 4 if "up" in name else 1


def muon(**given: Any) -> MatrixOptimizer:
    return MatrixOptimizer(torch.optim.Muon, lr=0.02, blocks=heads, **given)


def trained_matrices(rank: int, size: int, shape: tuple[int, ...], parallel: bool) -> Digests:
    """Weights, losses, norms and momentum, whole; with ``parallel`` the last axis divides."""
    plugin = muon(gradients="rows")
    if parallel:
        run = run_of(shape, "columns and rows", beside=[plugin])
    else:
        run = Run(shape, make=lambda: Words(hidden=40), beside=[plugin])
    run.optimizer = both = Both(plugin, run.model)
    run.train(range(3))
    found = digests(run.model, both.rest, run.losses + run.norms)
    for index, state in both.matrices.state_dict()["state"].items():
        found |= {f"matrix {index}.{name}": digest(value) for name, value in state.items()}
    return found


def test_matrices_whose_gradients_are_summed_in_rows(
    world1: World, world2: World, world4: World
) -> None:
    expected = world1.run(trained_matrices, (1,), False)[0]
    assert sum(name.startswith("matrix") for name in expected) == 4
    for world, shape in ((world2, (2,)), (world4, (4,)), (world4, (2, 2))):
        for found in world.run(trained_matrices, shape, False):
            assert differences(found, expected) == [], shape


def recorded_matrices(
    rank: int, size: int, folder: str, shape: tuple[int, ...], momentum: float = 0.95
) -> None:
    plugin = muon(gradients="rows", momentum=momentum)
    run = Run(shape, make=lambda: Words(hidden=40), beside=[plugin])
    run.optimizer = both = Both(plugin, run.model)
    with Recorder(folder, run.plugin, run.model, both.matrices, both.rest):
        run.train(range(2))


def test_records_leave_out_what_owners_have(world1: World, world2: World, tmp_path: Path) -> None:
    one, two, other = (str(tmp_path / name) for name in ("one", "two", "other"))
    world1.run(recorded_matrices, one, (1,))
    world2.run(recorded_matrices, two, (2,))
    found = compare(one, two)
    assert found.first is None
    # 16 parameters: themselves, gradients twice; 3 states of the 12 that AdamW steps; 4 of 8 slots
    assert found.compared == 2 * (16 * 3 + 12 * 3 + 4 * 8) + 16
    world1.run(recorded_matrices, other, (1,), 0.5)
    first = compare(one, other).first
    assert first is not None
    assert (first.step, first.key.phase) == (1, "parameters")  # state shows in the next weights


def test_matrices_that_tensor_parallelism_divides(world2: World, world4: World) -> None:
    expected = world2.run(trained_matrices, (1, 2), True)[0]
    for found in world4.run(trained_matrices, (2, 2), True):
        assert differences(found, expected) == []
