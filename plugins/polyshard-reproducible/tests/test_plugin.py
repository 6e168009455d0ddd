"""What the plugin refuses, and what it leaves as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from reproducible_runs import Run, Words, loss_of, mesh_of, samples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toy_models import full

import polyshard
from polyshard import (
    Around,
    DataParallelMeshDims,
    GatherCodecPlugin,
    MixedPrecisionPolicy,
    Plugin,
    fully_shard,
)
from polyshard.errors import ConflictError, GradientMismatchError
from polyshard.plugins.contract import hookimpl
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard.sharding.layout import GroupLayout
from polyshard_optimizers import flat
from polyshard_reproducible import Reproducible, ReproducibleError, check_optimizer
from polyshard_reproducible.checks import check_device
from polyshard_reproducible.tree import TreeSum
from polyshard_testing import raises_in_step, ranks


@pytest.mark.parametrize("slots", [0, 3, -4, 12])
def test_slots_are_a_power_of_two(slots: int) -> None:
    with pytest.raises(ReproducibleError, match=f"power of two.*got {slots}"):
        Reproducible(slots=slots)


@pytest.mark.parametrize("given", [{"slots": 2.0}, {"slots": True}, {"seed": "1"}], ids=str)
def test_settings_are_numbers(given: dict[str, Any]) -> None:
    with pytest.raises(ReproducibleError, match="must be a number"):
        Reproducible(**given)


def test_fused_steps_are_refused_on_the_cpu() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    check_optimizer(torch.optim.AdamW(parameters, foreach=True))
    with pytest.raises(ReproducibleError, match=r"AdamW\(fused=True\) on the CPU"):
        check_optimizer(torch.optim.AdamW(parameters, fused=True))


@pytest.mark.parametrize("made_by", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_of_whole_tensors_are_refused(made_by: Any) -> None:
    optimizer = made_by([nn.Parameter(torch.zeros(3, 3))])
    with pytest.raises(ReproducibleError, match=f"what {made_by.__name__} makes of an element"):
        check_optimizer(optimizer)


class Homemade(torch.optim.SGD):
    """What it does is not known."""


def test_optimizers_that_nobody_knows_have_to_say_so() -> None:
    optimizer = Homemade([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ReproducibleError, match=r"Homemade is not among.*sees_shards = False"):
        check_optimizer(optimizer)
    optimizer.sees_shards = False  # type: ignore[attr-defined]
    check_optimizer(optimizer)
    check_optimizer(flat(Homemade([nn.Parameter(torch.zeros(3))]), elementwise=True))


WRONG: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    r"AdamW\(fused=True\)": lambda p: torch.optim.AdamW(p, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Homemade": lambda p: Homemade(p, lr=1.0),
}


@ranks(2)
def test_nobody_has_to_ask_for_optimizers_to_be_looked_at(rank: int, size: int) -> None:
    run = Run((2,), slots=2)
    early = {name: make(run.model.parameters()) for name, make in WRONG.items()}
    run.train(range(1))
    before = run.state()
    for _ in run.plugin.each_slot(run.model, step=1):
        loss_of(run.model, samples()[:3]).backward()
    for name, optimizer in early.items():
        for _ in range(2):  # what was refused once is refused again
            with pytest.raises(ReproducibleError, match=name):
                optimizer.step()
    run.optimizer.param_groups[0]["fused"] = True  # after it was looked at
    with pytest.raises(ReproducibleError, match="fused=True"):
        run.optimizer.step()
    run.optimizer.param_groups[0]["fused"] = None
    assert run.state() == before
    other = nn.Linear(2, 2)  # of no model of ours
    other(torch.ones(2)).sum().backward()
    Homemade(other.parameters(), lr=1.0).step()


@ranks(1)
def test_optimizers_are_looked_at_for_as_long_as_the_plugin_lives(rank: int, size: int) -> None:
    """Also where it goes in the middle of a step, while torch iterates over hooks."""
    runs = [Run((1,), slots=2).train(range(1)) for _ in range(2)]
    optimizer = Homemade(runs[0].model.parameters(), lr=1.0)
    with pytest.raises(ReproducibleError, match="Homemade"):
        optimizer.step()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()

    def drop(*_: object) -> None:
        runs.clear()
        gc.collect()

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (drop, lambda *_: None)]
    try:
        torch.optim.SGD(other.parameters(), lr=1.0).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert not runs
    optimizer.step()


@ranks(1)
def test_optimizers_of_what_nobody_shards_are_left_alone(rank: int, size: int) -> None:
    """Their parameters are whole on every rank; with a sharded one among them they are refused."""
    plugin = Reproducible(slots=1)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignored = model[1].weight
    fully_shard(model, plugins=[plugin], ignored_params={ignored})
    for _ in plugin.each_slot(model, step=0):
        model(torch.ones(2, 4)).sum().backward()
    before = ignored.detach().clone()
    torch.optim.Muon([ignored]).step()
    assert not torch.equal(ignored, before)
    with pytest.raises(ReproducibleError, match="Muon"):
        torch.optim.Muon([ignored, model[0].weight]).step()


@ranks(1)
def test_models_that_are_dropped_are_forgotten(rank: int, size: int) -> None:
    run = Run((1,), slots=2).train(range(1))
    plugin, model = run.plugin, weakref.ref(run.model)
    assert len(plugin._known.groups) == 3
    del run
    gc.collect()
    assert model() is None
    assert len(plugin._known.groups) == 0


@contextmanager
def peaks_of_trees() -> Iterator[dict[int, int]]:
    """Of each tree, the bytes that its sums have held at most."""
    peaks: dict[int, int] = {}
    plain = TreeSum.add

    def add(tree: TreeSum, leaf: Tensor) -> None:
        plain(tree, leaf)
        storages = {node.data_ptr(): node.untyped_storage() for _, node in tree._nodes}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        peaks[id(tree)] = max(peaks.get(id(tree), 0), nbytes)

    with patch.object(TreeSum, "add", add):
        yield peaks


@ranks(2)
def test_memory_of_kept_sums_is_what_is_said(rank: int, size: int) -> None:
    """Of 16 slots two ranks make 8 turns: three sums wait, while the eighth is made."""
    for slots, held in ((2, 0), (4, 1), (16, 3)):
        run = Run((2,), slots=slots)
        description = polyshard.describe(run.model)
        shards = sum(plan.layout.shard_numel for plan in description.groups)
        assert description.kept_bytes == held * shards * 4
        assert ("kept between backwards" in str(description)) == bool(held)
        with peaks_of_trees() as peaks:
            run.train(range(1))
        assert sum(peaks.values()) == description.kept_bytes


def test_fused_steps_depend_on_where_shards_end() -> None:
    """The reason, for as long as it holds."""
    generator = torch.Generator().manual_seed(0)

    def stepped(values: list[Tensor]) -> Tensor:
        parameter = nn.Parameter(values[0].clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=True)
        for gradient in values[1:]:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    differ = 0
    for numel in range(20, 70):
        values = [torch.randn(numel, generator=generator) for _ in range(4)]
        cut = numel // 2 + 1
        parts = [stepped([v[a] for v in values]) for a in (slice(cut), slice(cut, None))]
        differ += not torch.equal(torch.cat(parts), stepped(values))
    if not differ:
        pytest.skip("this processor rounds all elements alike")


def refuses(says: str, given: dict[str, Any], slots: int = 8) -> None:
    with pytest.raises(ReproducibleError, match=says):
        fully_shard(nn.Linear(8, 8), plugins=[Reproducible(slots=slots)], **given)


@ranks(2)
def test_what_has_no_tree_is_refused(rank: int, size: int) -> None:
    mesh = mesh_of((2,))
    refuses("2 ranks, and there are 1 slots", {"mesh": mesh}, slots=1)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    refuses("reduced in torch.bfloat16", {"mesh": mesh, "mp_policy": policy})


@ranks(2)
def test_sums_of_the_backend_are_refused(rank: int, size: int) -> None:
    kept = {"mesh": mesh_of((2,)), "shard_placement_fn": lambda p: Replicate()}
    refuses("parameters kept whole", kept)


@ranks(4)
def test_axes_may_come_in_any_order(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("shards", "replicas")
    )
    dims = DataParallelMeshDims(shard="shards", replicate="replicas")
    plugin = Reproducible(slots=8)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=dims, plugins=[plugin])
    slots = []
    for slot in plugin.each_slot(model, step=0):
        slots.append(slot)
        model(torch.ones(2, 8)).sum().backward()
    shard, replica = divmod(rank, 2)
    assert slots == [4 * replica + shard, 4 * replica + 2 + shard]  # neighbours share a turn


@ranks(2)
def test_groups_on_different_meshes_are_refused(rank: int, size: int) -> None:
    model, plugin = Words(), Reproducible()
    fully_shard(model.blocks[0], mesh=mesh_of((2, 1)), plugins=[plugin])
    fully_shard(model, mesh=mesh_of((2,)), plugins=[plugin])
    with pytest.raises(ReproducibleError, match="live on different meshes"):
        next(iter(plugin.each_slot(model, step=0)))


def test_accelerators_need_kernels_that_are_deterministic() -> None:
    with pytest.raises(ReproducibleError, match=r"use_deterministic_algorithms\(True\)"):
        check_device(torch.device("cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        check_device(torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)


class Halves(GatherCodecPlugin):
    """Weights travel in fewer bits."""

    name = "halves"
    provides: ClassVar[tuple[str, ...]] = ("gather-codec",)

    def payload_size(self) -> int | None:
        return None

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        raise NotImplementedError

    def decode(self, payloads: Tensor, regions: Any) -> None:
        raise NotImplementedError


class Silent(Halves):
    """Does not say so."""

    name = "silent"
    provides = ()

    def payload_size(self) -> int | None:
        return 64


@ranks(2)
def test_lossy_codecs_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ConflictError, match=r"(?s)reproducible.*halves|halves.*reproducible"):
        fully_shard(nn.Linear(8, 8), plugins=[Reproducible(), Halves()])
    plugin = Reproducible()
    model = fully_shard(nn.Linear(8, 8), plugins=[plugin, Silent()])
    with pytest.raises(ReproducibleError, match=r"gather codec of group .* is silent"):
        next(iter(plugin.each_slot(model, step=0)))


class Louder(ReduceCodec):
    """Wraps another codec, and would change what that sums."""

    name = "louder"
    settings = "by=2"

    def __init__(self, inner: ReduceCodec) -> None:
        self._inner = inner

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        return self._inner.bind(group, layout)


class Wrapping(Plugin):
    """Wraps the reduce codec."""

    name = "louder"

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> Around[ReduceCodec]:
        """Around whatever there is."""
        return Around(Louder)


@ranks(2)
def test_what_goes_around_the_tree_is_refused(rank: int, size: int) -> None:
    plugin = Reproducible()
    model = fully_shard(nn.Linear(8, 8), plugins=[plugin, Wrapping()])
    with pytest.raises(ReproducibleError, match=r"reduce codec of group .* is louder"):
        next(iter(plugin.each_slot(model, step=0)))


def backward_twice(run: Run) -> None:
    for _ in run.plugin.each_slot(run.model, step=0):
        for _ in range(2):
            loss_of(run.model, samples()[:3]).backward()


@ranks(2)
def test_a_backward_outside_of_slots_is_refused(rank: int, size: int) -> None:
    run = Run((2,))
    with raises_in_step(ReproducibleError, "outside of a slot"):
        loss_of(run.model, samples()[:3]).backward()
    run.model.reset_iter_state()
    with raises_in_step(ReproducibleError, "twice in one slot"):
        backward_twice(run)
    run.model.reset_iter_state()
    for p in run.model.parameters():
        p.grad = None
    expected = Run((2,)).train(range(2)).state()
    assert run.train(range(2)).state() == expected  # nothing of the failed ones is left


@ranks(2)
def test_a_step_that_failed_may_be_made_again(rank: int, size: int) -> None:
    expected = Run((2,)).train(range(2)).state()
    run = Run((2,))
    before = torch.get_rng_state()
    for turn, slot in enumerate(run.plugin.each_slot(run.model, step=0)):
        loss_of(run.model, samples()[run.sampler.indices(0, slot)]).backward()
        if turn == 1:
            break
    run.optimizer.zero_grad()
    assert run.train(range(2)).state() == expected
    assert torch.equal(torch.get_rng_state(), before)


class Sometimes(nn.Module):
    """Uses a layer in some slots."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.rarely = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, uses: bool) -> Tensor:
        out: Tensor = self.always(x)
        return self.rarely(out) if uses else out


def use(plugin: Reproducible, model: nn.Module, turns: Iterable[bool]) -> None:
    """A step whose turns use the layer, or not."""
    for uses, _ in zip(turns, plugin.each_slot(model, step=0), strict=True):
        model(torch.ones(2, 4), uses=uses).sum().backward()


@ranks(2)
def test_gradients_of_some_slots_are_refused(rank: int, size: int) -> None:
    for units in ([], ["rarely"]):
        for when in (0, 1, 3):
            plugin, model = Reproducible(slots=8), Sometimes()
            for name in units:
                fully_shard(getattr(model, name), plugins=[plugin])
            sharded: Any = fully_shard(model, plugins=[plugin])
            with raises_in_step(ReproducibleError, r"rarely.*in some slots"):
                use(plugin, model, (turn == when for turn in range(4)))
            sharded.reset_iter_state()


@ranks(2)
def test_slots_that_ranks_use_differently_are_refused_on_all(rank: int, size: int) -> None:
    plugin, model = Reproducible(slots=8), Sometimes()
    sharded: Any = fully_shard(model, plugins=[plugin])
    for when in (0, 1, 3):
        uses = [rank == 0 or turn != when for turn in range(4)]
        with pytest.raises(GradientMismatchError, match=r"'rarely.weight' has one on ranks"):
            use(plugin, model, uses)
        sharded.reset_iter_state()
    for parameter in sharded.parameters():
        assert parameter.grad is None
    use(plugin, model, [True] * 4)  # nothing of the failed ones is left
    torch.testing.assert_close(full(sharded.rarely.bias.grad), torch.full((4,), 2.0))


@ranks(2)
def test_every_group_has_to_have_it(rank: int, size: int) -> None:
    model = Words()
    fully_shard(model.blocks[0])
    plugin = Reproducible()
    fully_shard(model, plugins=[plugin])
    with pytest.raises(ReproducibleError, match="1 of the 2 groups"):
        next(iter(plugin.each_slot(model, step=0)))
    run = Run((2,))
    with pytest.raises(ReproducibleError, match="takes one loss of each slot"):
        run.plugin.mean(run.model, [torch.zeros(())])
