"""Tests every plugin should pass: subclass, give one fixture, inherit the tests.

    from polyshard.testing import PluginConformance

    class TestMyPlugin(PluginConformance):
        @pytest.fixture
        def factory(self):
            return MyPlugin          # module-level and picklable; called without arguments

Tests of seams the plugin does not take are skipped. A lossy codec sets ``tolerance``, the error it
admits relative to the largest value of a parameter.
"""

from __future__ import annotations

import re
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from polyshard.errors import PluginError
from polyshard.plugins.builtin import EnginePlugin
from polyshard.plugins.contract import Contract, hookimpl
from polyshard.plugins.manager import Member
from polyshard.plugins.roles import ROLES
from polyshard.plugins.stack import PluginStack, build_stack
from polyshard.plugins.validation import fitting, problems_of
from polyshard.seams import ShardStorage
from polyshard.testing.cases import (
    SmallModel,
    case,
    cases,
)
from polyshard.testing.codecs import CodecConformance
from polyshard.testing.kit import Factory
from polyshard.testing.world import World

STEPS = 4


class Bystander:
    """Another plugin of the stack, which does nothing."""

    polyshard_contract = Contract("bystander")

    @hookimpl
    def polyshard_observer(self) -> None:
        """Nothing."""


class PluginConformance(CodecConformance):
    """See the module. Override :meth:`factory`."""

    # Registration -----------------------------------------------------------------------------

    def test_registration_is_clean(self, factory: Factory) -> None:
        """Nothing wrong with hooks, arguments, identity or API version."""
        assert problems_of(factory()) == []

    def test_contract_and_settings_are_stable(self, factory: Factory) -> None:
        """Two instances made alike are the same line of a plan."""
        first, second = (Member.of(factory()) for _ in range(2))
        assert first.contract == second.contract
        assert first.settings == second.settings
        assert " at 0x" not in first.settings, "settings must not show addresses"
        assert first.contract.name != EnginePlugin.name

    def test_order_does_not_depend_on_registration(self, factory: Factory) -> None:
        """The same plan, whichever plugin is passed first."""
        one = build_stack([factory(), Bystander()]).lines()
        assert build_stack([Bystander(), factory()]).lines() == one

    def test_answers_are_the_same_on_every_rank(self, factory: Factory) -> None:
        """Names, settings and sizes follow from metadata alone."""
        for members in cases():
            seen = set()
            for at in members:
                found = build_stack([factory()]).contributions(at.info)
                gather = found.gather_codec.bind(at.info, at.layout)
                reduce = found.reduce_codec.bind(at.info, at.layout)
                parts = [found[role] for role in ROLES]
                seen.add(
                    (
                        tuple((p.name, p.settings) for p in parts),
                        gather.payload_bytes if gather is not None else None,
                        reduce.payload_bytes if reduce is not None else None,
                    )
                )
            assert len(seen) == 1

    # Storage, transforms, adapters ------------------------------------------------------------

    def test_storage_life_cycle(self, stack: PluginStack) -> None:
        """Fetched values are those put to rest, in the same tensor every time."""
        at = case(2, 1)
        factory = self.contributions(stack, at).storage
        self.skip_unless_claimed(factory, "shard storage")
        made = factory.create(at.info, at.layout)
        storage = fitting(made, ShardStorage, factory, "create")
        shard = at.shard(at.values())
        resting = storage.rest(shard.clone())
        assert torch.equal(resting.cpu(), shard)
        view = storage.view()
        for _ in range(3):
            storage.prefetch()
            storage.fetch()
            assert storage.view() is view
            assert torch.equal(view.cpu(), shard)
            storage.release()
            with torch.no_grad():
                resting.add_(1.0)  # the optimizer
            shard = shard + 1.0
        placed = storage.place_gradient(shard.clone())
        assert placed.device == resting.device
        assert torch.equal(placed.cpu(), shard)

    def test_transforms_are_undone(self, stack: PluginStack) -> None:
        """Unflattening gives the parameter back, over the same memory."""
        at = case(2, 0)
        if not stack.onion:
            pytest.skip("the plugin takes no transform")
        for value, info in zip(at.values(), at.info.parameters, strict=True):
            flat, extensions = stack.onion.flatten(value, info)
            memory = flat.contiguous().clone()
            back = stack.onion.unflatten(memory, extensions, info)
            assert torch.equal(back, value)
            if value.numel():
                assert back.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def test_adapters_keep_checkpoints_native(self, stack: PluginStack) -> None:
        """What is saved can be loaded."""
        at = case(2, 0)
        adapters = self.contributions(stack, at).adapters
        if not adapters:
            pytest.skip("the plugin takes no state-dict adapter")
        for adapter in adapters:
            for value, info in zip(at.values(), at.info.parameters, strict=True):
                assert torch.equal(adapter.on_load(info, adapter.on_save(info, value)), value)

    # Training ---------------------------------------------------------------------------------

    def test_two_ranks_train_like_without(self, factory: Factory, world2: World) -> None:
        """Bitwise the same losses if the plugin is exact, else within a percent."""
        found = world2.run(train_with, factory)[0]
        expected = world2.run(train_with, None)[0]
        if self.tolerance == 0.0:
            assert found == expected
        else:
            torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)

    def test_memory_is_released(self, factory: Factory, world2: World) -> None:
        """After a step no unsharded parameter is left, and the next steps need no more memory."""
        for states, resident in world2.run(release_with, factory):
            assert states == {"SHARDED"}
            assert resident[-1] <= 1.02 * resident[1]

    def test_state_dict_round_trip(self, factory: Factory, world2: World) -> None:
        """What one sharded model saved, another one with the plugin loads, to the last bit."""
        assert all(world2.run(reload_with, factory))

    def test_a_second_copy_is_refused_by_name(self, factory: Factory) -> None:
        """Errors call the plugin what its contract calls it."""
        name = Member.of(factory()).contract.name
        with pytest.raises(PluginError, match=f"'{re.escape(name)}'"):
            build_stack([factory(), factory()])

    def test_a_plan_can_be_shown(self, factory: Factory, world2: World) -> None:
        """The plan names the plugin, and predicts the bytes of a step."""
        name = Member.of(factory()).contract.name
        for text, predicted, sent in world2.run(describe_with, factory):
            assert name in text
            assert predicted == sent


def train_with(rank: int, size: int, factory: Factory | None) -> list[float]:
    """Losses of a few steps on two gloo ranks, with the plugin or without."""
    from polyshard import fully_shard

    del size
    torch.manual_seed(0)
    model = SmallModel()
    plugins = [] if factory is None else [factory()]
    fully_shard(model.first, plugins=plugins)
    fully_shard(model, plugins=plugins)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(8, 96, generator=generator)
        loss = F.cross_entropy(model(x), torch.arange(8) % 7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(cast("float", loss.item()))
    return losses


def release_with(rank: int, size: int, factory: Factory) -> tuple[set[str], list[int]]:
    """States of all groups after each of some steps, and resident pages."""
    from polyshard import fully_shard
    from polyshard.engine.root import unit_of

    del rank, size
    model = SmallModel()
    fully_shard(model, plugins=[factory()])
    resident = []
    for _ in range(STEPS):
        model(torch.ones(4, 96)).sum().backward()
        model.zero_grad()
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident.append(int(statm.read().split()[1]))
    unit = unit_of(model)
    assert unit is not None
    return {group.state.name for group in unit.groups}, resident


def describe_with(rank: int, size: int, factory: Factory) -> tuple[str, int, int]:
    """The printed plan, and the bytes of a step as predicted and as sent."""
    from polyshard import describe, fully_shard, stats

    del rank, size
    model = SmallModel()
    fully_shard(model, plugins=[factory()])
    plan = describe(model)
    model(torch.ones(4, 96)).sum().backward()
    return str(plan), plan.step_bytes, stats(model).bytes_sent


def reload_with(rank: int, size: int, factory: Factory) -> bool:
    """Whether a model that loads another one's state dict gives the same outputs."""
    from polyshard import fully_shard

    del rank, size
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = SmallModel()
        fully_shard(model, plugins=[factory()])
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        first, second = (m(torch.ones(4, 96)) for m in models)
    return torch.equal(first, second)
