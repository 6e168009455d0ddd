"""Tests every plugin should pass: subclass, give one fixture, inherit the tests.

    from polyshard_testing import PluginConformance

    class TestMyPlugin(PluginConformance):
        @pytest.fixture
        def factory(self):
            return MyPlugin          # module-level and picklable; called without arguments

The factory may return a list: the plugin to be judged, then those it needs beside it. One that
wraps another plugin's part is judged that way; alone it would have nothing to wrap.

Tests of seams the plugin does not take are skipped. A lossy codec sets ``tolerance``, the error it
admits relative to the largest value of a parameter; losses may then be off by ``loss_tolerance``,
by default twice as much.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from polyshard.errors import PluginError
from polyshard.plugins.contract import Contract, hookimpl
from polyshard.plugins.contributions import (
    ADAPTERS,
    CONSTRAINTS,
    GATHER_CODEC,
    REDUCE_CODEC,
    ROLES,
    STORAGE,
)
from polyshard.plugins.member import ENGINE, Member
from polyshard.plugins.seams import Named, ShardStorage
from polyshard.plugins.stack import PluginStack, build_stack
from polyshard.plugins.validation import fitting, problems_of
from polyshard_testing.cases import case, cases
from polyshard_testing.codecs import CodecConformance
from polyshard_testing.runs import (
    ROUNDING,
    STEPS,
    Factory,
    close_with,
    describe_with,
    gathered_with,
    plugins_of,
    release_with,
    reload_with,
    resume_with,
    resumed_with,
    saved_with,
    train_with,
)
from polyshard_testing.world import World

STATE_SLACK = 8
"""Optimizer state may be off by more than losses are: an error of one gradient is not averaged."""


class Bystander:
    """Another plugin of the stack, which does nothing."""

    polyshard_contract = Contract("bystander")

    @hookimpl
    def polyshard_observer(self) -> None:
        """Answers nothing: the hook alone makes it a plugin."""


class PluginConformance(CodecConformance):
    """See the module. Override :meth:`factory`."""

    # Registration -----------------------------------------------------------------------------

    def test_registration_is_clean(self, factory: Factory) -> None:
        """Nothing wrong with hooks, arguments, identity or API version."""
        for plugin in plugins_of(factory):
            assert problems_of(plugin) == []

    def test_contract_and_settings_are_stable(self, factory: Factory) -> None:
        """Two instances made alike are the same line of a plan."""
        first, second = (Member.of(plugins_of(factory)[0]) for _ in range(2))
        assert first.contract == second.contract
        assert first.settings == second.settings
        assert " at 0x" not in first.settings, "settings must not show addresses"
        assert first.contract.name != ENGINE

    def test_order_does_not_depend_on_registration(self, factory: Factory) -> None:
        """The same plan, whichever plugin is passed first."""
        one = build_stack([*plugins_of(factory), Bystander()]).lines()
        assert build_stack([Bystander(), *reversed(plugins_of(factory))]).lines() == one

    def test_answers_are_the_same_on_every_rank(self, factory: Factory) -> None:
        """Which plugins answer, names, settings and sizes follow from metadata alone."""
        for members in cases():
            seen = set()
            for at in members:
                found = build_stack(plugins_of(factory)).contributions(at.info)
                gather = found[GATHER_CODEC].bind(at.info, at.layout)
                reduce = found[REDUCE_CODEC].bind(at.info, at.layout)
                parts: list[Named] = [part for role in ROLES for part in found.all(role)]
                parts += [*found.all(CONSTRAINTS), *found.all(ADAPTERS)]
                blocks = [
                    constraint.block_elements(parameter)
                    for constraint in found.all(CONSTRAINTS)
                    for parameter in at.info.parameters
                ]
                assert all(type(b) is int and b >= 1 for b in blocks), f"blocks of {blocks}"
                seen.add(
                    (
                        tuple((p.name, p.settings) for p in parts),
                        gather.payload_bytes if gather is not None else None,
                        reduce.payload_bytes if reduce is not None else None,
                        tuple(blocks),
                    )
                )
            assert len(seen) == 1, f"ranks answer differently: {sorted(map(str, seen))}"

    def test_transforms_are_the_same_on_every_rank(self, stack: PluginStack) -> None:
        """The same parameters are flattened, to the same shape."""
        for members in cases():
            seen = set()
            for at in members:
                pairs = zip(at.values(), at.info.parameters, strict=True)
                flats = [stack.transforms.flatten(value, info) for value, info in pairs]
                layers = [stack.transforms.layers_of(extensions) for _, extensions in flats]
                seen.add(
                    str(
                        [
                            (flat.shape, layer)
                            for (flat, _), layer in zip(flats, layers, strict=True)
                        ]
                    )
                )
            assert len(seen) == 1, f"ranks flatten differently: {sorted(seen)}"

    # Storage, transforms, adapters ------------------------------------------------------------

    def test_storage_life_cycle(self, stack: PluginStack) -> None:
        """Fetched values are those put to rest, in the same tensor every time."""
        at = case(2, 1)
        factory = self.contributions(stack, at)[STORAGE]
        self.skip_unless_claimed(factory, "shard storage")
        made = factory.bind(*at.group)
        self.skip_unless_claimed(made, "shard storage for this group")
        storage = fitting(made, ShardStorage, factory, "bind")
        assert storage is not None
        shard = at.shard(at.values())
        resting = storage.rest(shard.clone())
        assert torch.equal(resting.cpu(), shard)
        view = storage.view()
        assert view.dtype == shard.dtype
        for _ in range(3):
            storage.changed()
            for _ in range(2):  # of the forward, and of the backward
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

    def test_storages_of_two_groups_do_not_mix(self, stack: PluginStack) -> None:
        """What rests of one group is not what rests of another of the same plugin."""
        at = case(2, 1)
        self.skip_unless_claimed(self.contributions(stack, at)[STORAGE], "shard storage")
        shards = [at.shard(at.values(seed)) for seed in range(2)]
        specs = [self.contributions(stack, at)[STORAGE] for _ in shards]
        made = [fitting(s.bind(*at.group), ShardStorage, s, "bind") for s in specs]
        storages = [storage for storage in made if storage is not None]
        for storage, shard in zip(storages, shards, strict=True):
            storage.rest(shard.clone())
        for storage, shard in zip(storages, shards, strict=True):
            view = storage.view()
            storage.fetch()
            assert torch.equal(view.cpu(), shard)
            storage.release()

    def test_transforms_are_undone(self, stack: PluginStack) -> None:
        """Unflattening gives the parameter back, over the same memory, to the same gradient."""
        at = case(2, 0)
        if not stack.transforms:
            pytest.skip("the plugin takes no transform")
        for value, info in zip(at.values(), at.info.parameters, strict=True):
            flat, extensions = stack.transforms.flatten(value, info)
            assert flat.dtype == value.dtype
            memory = flat.contiguous().clone()
            back = stack.transforms.unflatten(memory, extensions, info)
            assert back.shape == value.shape
            assert torch.equal(back, value)
            if value.numel():
                assert back.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def test_adapters_undo_what_they_do(self, stack: PluginStack) -> None:
        """Saved state can be loaded, and shares no memory with parameters."""
        at = case(2, 0)
        adapters = self.contributions(stack, at).all(ADAPTERS)
        if not adapters:
            pytest.skip("the plugin takes no state-dict adapter")
        for adapter in adapters:
            for value, info in zip(at.values(), at.info.parameters, strict=True):
                kept = stack.transforms.flatten(value, info)[0].contiguous()
                given = kept.clone()
                found = adapter.on_load(info, adapter.on_save(info, given))
                assert found.dtype == kept.dtype
                assert torch.equal(found, kept)
                assert torch.equal(given, kept), "on_save changed its argument"

    # Training ---------------------------------------------------------------------------------

    def test_two_ranks_train_like_without(self, factory: Factory, world2: World) -> None:
        """The same losses: bitwise for an exact plugin, to rounding where matrices lie another way.

        A lossy one may be off by ``loss_tolerance``.
        """
        self.check_losses(factory, world2, backwards=1)

    def test_two_backwards_before_a_step(self, factory: Factory, world2: World) -> None:
        """Gradients of both count: what holds the first is not written over by the second."""
        self.check_losses(factory, world2, backwards=2)

    def check_losses(self, factory: Factory, world2: World, *, backwards: int) -> None:
        """Whether losses are those of training without the plugin."""
        found = world2.run(train_with, factory, backwards)[0]
        expected = world2.run(train_with, None, backwards)[0]
        if self.is_exact(factory):
            assert found == expected
        else:
            closeness = self.closeness
            torch.testing.assert_close(found, expected, rtol=closeness, atol=closeness)

    def test_ranks_compute_with_the_same_values(self, factory: Factory, world2: World) -> None:
        """Every rank gathers the same bits: a part of its own is rounded like everybody's."""
        first, second = world2.run(gathered_with, factory)
        assert first == second

    def test_a_resumed_run_is_the_uninterrupted_one(self, factory: Factory, world2: World) -> None:
        """Bitwise, with the state of model, optimizer and plugin from a checkpoint."""
        for uninterrupted, resumed in world2.run(resumed_with, factory):
            assert resumed == uninterrupted, "the plugin keeps something that it does not save"

    def test_checkpoints_are_native(self, factory: Factory, world2: World) -> None:
        """A checkpoint has the same names, layout and values as without the plugin.

        So it loads where the plugin is not installed. This includes optimizer state: a parameter
        that the plugin stores in another form needs an adapter.
        """
        (found, state), (expected, wanted) = (
            world2.run(saved_with, each)[0] for each in (factory, None)
        )
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"the saved {name} differs"
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            self.check_state(name, state[name], value, exact=self.is_exact(factory))

    def check_state(self, name: str, found: Tensor, expected: Tensor, *, exact: bool) -> None:
        """Whether saved optimizer state is that of training without the plugin."""
        assert found.shape == expected.shape, f"optimizer state '{name}' has another shape"
        assert found.dtype == expected.dtype, f"optimizer state '{name}' has another dtype"
        if exact:
            assert torch.equal(found, expected), f"optimizer state '{name}' differs"
        elif expected.numel():
            error = (found - expected).float().norm() / expected.float().norm().clamp_min(1e-12)
            assert bool(error <= max(STATE_SLACK * self.closeness, ROUNDING)), (
                f"optimizer state '{name}' is off by {float(error):.1e}"
            )

    def test_memory_is_released(self, factory: Factory, world2: World) -> None:
        """After a step no unsharded parameter is left, and the next steps keep no more memory."""
        for states, held, whole in world2.run(release_with, factory):
            assert states == {"SHARDED"}
            assert held[-1] <= held[1], f"{held[-1] - held[1]} more bytes are held after {STEPS}"
            assert held[-1] <= self.kept_share * whole, (
                f"{held[-1]} bytes are held between steps, of {whole} unsharded; count them as "
                "kept_share of the kit if they are to be"
            )

    def test_state_dict_round_trip(self, factory: Factory, world2: World) -> None:
        """Another sharded model with the plugin loads the saved state bitwise."""
        assert all(world2.run(reload_with, factory))

    def test_plugin_state_round_trip(self, factory: Factory, world2: World) -> None:
        """The saved state of the plugin loads completely, into a model that has not run."""
        found = world2.run(resume_with, factory)
        if found == [None, None]:
            pytest.skip("the plugin keeps no state")
        for problem in found:
            assert not problem, problem

    def test_order_on_a_device(self, factory: Factory, device_judge: Any) -> None:
        """On polyshard-sim, however streams take turns: the same losses, no further host waits."""
        for found in device_judge.verdicts(factory):
            assert found.is_close(0.0 if self.is_exact(factory) else self.closeness), found
            assert found.host_waits <= self.host_waits, found

    def test_one_of_two_models_is_closed(self, factory: Factory, world2: World) -> None:
        """A plugin that has closed one model still serves another."""
        assert all(world2.run(close_with, factory))

    def test_a_second_copy_is_refused_by_name(self, factory: Factory) -> None:
        """Errors call the plugin what its contract calls it."""
        name = Member.of(plugins_of(factory)[0]).contract.name
        with pytest.raises(PluginError, match=f"'{re.escape(name)}'"):
            build_stack(plugins_of(factory) + plugins_of(factory))

    def test_a_plan_can_be_shown(self, factory: Factory, world2: World) -> None:
        """The plan names the plugin, and predicts the bytes of a step."""
        name = Member.of(plugins_of(factory)[0]).contract.name
        for text, predicted, sent in world2.run(describe_with, factory):
            assert name in text
            assert predicted == sent
