"""What ranks run with a plugin and without, so that a test can compare."""

from __future__ import annotations

import contextlib
import copy
import gc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from polyshard.plugins.contributions import ROLES, Contributions
from polyshard.plugins.stack import PluginStack, build_stack
from polyshard_testing.cases import Case, SmallModel

Factory = Callable[[], object]
ROUNDING = 1e-5
"""What the order of a sum changes, for a matrix that lies another way, say."""


def plugins_of(factory: Factory) -> list[object]:
    """What ``factory`` makes: the plugin to be judged, and after it those that it needs beside it.

    One that wraps another's part is judged with something to wrap.
    """
    made = factory()
    return list(made) if isinstance(made, list | tuple) else [made]


class Kit:
    """Fixtures and comparisons. Override :meth:`factory`."""

    tolerance: float = 0.0
    """Error a lossy codec admits, relative to the largest value of a parameter."""
    loss_tolerance: float | None = None
    """How far losses may be off, relative and absolute; by default twice :attr:`tolerance`."""
    bias_steps: int = 16
    """Steps until the errors of a codec are looked at, and then as many that are: more for one that
    makes up for its errors late."""
    kept_share: float = 1.75
    """Memory that a plugin may keep between steps beside what checkpoints hold of it, as a share of
    the unsharded parameters; rows that the engine keeps for a codec count, and take up to 1."""
    host_waits: int = 0
    """Times a step that the plugin may have the host wait for a device."""

    @property
    def closeness(self) -> float:
        """How far the losses of a plugin that is not exact may be off."""
        if self.loss_tolerance is not None:
            return self.loss_tolerance
        return max(2 * self.tolerance, ROUNDING)

    def is_exact(self, factory: Factory) -> bool:
        """Whether training with the plugin has to give every bit of training without."""
        return self.tolerance == 0.0 and not build_stack(plugins_of(factory)).transforms

    @pytest.fixture
    def factory(self) -> Factory:
        """A module-level callable that makes the plugin."""
        raise NotImplementedError(
            f"{type(self).__name__} must override the fixture 'factory' and return a callable "
            "that makes the plugin"
        )

    @pytest.fixture
    def stack(self, factory: Factory) -> PluginStack:
        """The plugin alone."""
        return build_stack(plugins_of(factory))

    def contributions(self, stack: PluginStack, at: Case) -> Contributions:
        """What the plugin adds to a standard group."""
        return stack.contributions(at.info)

    def skip_unless_claimed(self, part: Any, what: str) -> None:
        """Skip where the engine's own part answered."""
        if part is None or type(part) in {role.engine for role in ROLES}:
            pytest.skip(f"the plugin takes no {what}")

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        """Equal within :attr:`tolerance` of the largest expected value."""
        assert found.shape == expected.shape
        if expected.numel():
            error = (found - expected).abs().max()
            assert bool(error <= self.tolerance * expected.abs().max()), float(error)


STEPS = 4
Tensors = dict[str, Tensor]


def train_with(rank: int, size: int, factory: Factory | None, backwards: int = 1) -> list[float]:
    """Losses of a few steps on two gloo ranks, with the plugin or without."""
    del size
    run = _Run(factory)
    generator = torch.Generator("cpu").manual_seed(rank)
    return [run.step([_drawn(generator) for _ in range(backwards)]) for _ in range(STEPS)]


class _Run:
    """A model with the plugin, or without, and its optimizer."""

    def __init__(self, factory: Factory | None) -> None:
        from polyshard import fully_shard

        torch.manual_seed(0)
        self.model = SmallModel()
        plugins = [] if factory is None else plugins_of(factory)
        fully_shard(self.model.first, plugins=plugins)
        fully_shard(self.model, plugins=plugins)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batches: Sequence[Tensor]) -> float:
        """One step of the optimizer after a backward for each batch; the last one's loss."""
        for x in batches:
            loss = F.cross_entropy(self.model(x), _targets())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return cast("float", loss.item())


def resumed_with(rank: int, size: int, factory: Factory) -> tuple[list[float], list[float]]:
    """Losses of a run's last steps, and of one that resumes from what was saved before them."""
    from polyshard import load_plugin_state_dict, plugin_state_dict

    del size
    generator = torch.Generator("cpu").manual_seed(rank)
    batches = [_drawn(generator) for _ in range(STEPS)]
    first, second = _Run(factory), _Run(factory)
    for x in batches[:2]:
        first.step([x])
    # Copies: what is saved is written to a file before training continues.
    saved = copy.deepcopy(get_state_dict(first.model, first.optimizer))
    kept = copy.deepcopy(plugin_state_dict(first.model))
    uninterrupted = [first.step([x]) for x in batches[2:]]
    model_state, optimizer_state = saved
    set_state_dict(
        second.model,
        second.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    load_plugin_state_dict(second.model, kept)
    return uninterrupted, [second.step([x]) for x in batches[2:]]


def gathered_with(rank: int, size: int, factory: Factory) -> list[dict[str, int]]:
    """Checksums of the unsharded parameters that this rank computes with, before two steps."""
    del size
    run = _Run(factory)
    generator = torch.Generator("cpu").manual_seed(rank)
    seen: dict[str, int] = {}

    def note(module: nn.Module, args: object) -> None:
        del args
        for name, value in module.named_parameters(recurse=False):
            local = value.to_local() if isinstance(value, DTensor) else value
            bits = local.detach().cpu().double().contiguous().numpy().tobytes()
            seen[f"{type(module).__name__}.{name}"] = zlib.crc32(bits)

    for module in run.model.modules():
        module.register_forward_pre_hook(note)  # behind the hook that gathers
    found = []
    for _ in range(2):
        run.step([_drawn(generator)])
        found.append(dict(seen))
    return found


def release_with(rank: int, size: int, factory: Factory) -> tuple[set[str], list[int], int]:
    """States of all groups at the end, and bytes of tensors that the plugin holds after each step.

    Counted as what is there beside what a model without the plugin has, and beside what
    checkpoints hold of the plugin. Last, bytes of the unsharded parameters.
    """
    from polyshard import plugin_state_dict

    _, plain, _ = _held_with(None)
    states, held, model = _held_with(factory)
    saved = sum(t.nbytes for t in tensors_in(plugin_state_dict(model)))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return states, [h - p - saved for h, p in zip(held, plain, strict=True)], whole


def _held_with(factory: Factory | None) -> tuple[set[str], list[int], nn.Module]:
    """States of groups after some steps, bytes of tensors since the start after each, the model."""
    from polyshard import fully_shard
    from polyshard.engine.root import unit_of

    before = bytes_of_tensors()
    model = SmallModel()
    fully_shard(model, plugins=[] if factory is None else plugins_of(factory))
    held = []
    for _ in range(STEPS):
        model(_ones()).sum().backward()
        model.zero_grad()
        held.append(bytes_of_tensors() - before)
    unit = unit_of(model)
    assert unit is not None
    return {group.state.name for group in unit.groups}, held, model


def bytes_of_tensors() -> int:
    """Memory of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        # By type: isinstance would have lazy objects of other libraries import things.
        if issubclass(type(found), Tensor) and type(found) is not DTensor:
            with contextlib.suppress(Exception):  # a tensor without memory of its own
                storage = found.untyped_storage()
                if storage.device.type != "meta":  # as those are that torch.compile keeps
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensors_in(state: object) -> Iterator[Tensor]:
    """All tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def describe_with(rank: int, size: int, factory: Factory) -> tuple[str, int, int]:
    """The printed plan, and the bytes of a step as predicted and as sent."""
    from polyshard import describe, fully_shard, stats

    del rank, size
    model = SmallModel()
    fully_shard(model, plugins=plugins_of(factory))
    plan = describe(model)
    model(_ones()).sum().backward()
    return str(plan), plan.step_bytes, stats(model).bytes_sent


def reload_with(rank: int, size: int, factory: Factory) -> bool:
    """Whether a model that loads another one's state dict gives the same outputs."""
    from polyshard import fully_shard

    del rank, size
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = SmallModel()
        fully_shard(model, plugins=plugins_of(factory))
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        first, second = (m(_ones()) for m in models)
    return torch.equal(first, second)


def resume_with(rank: int, size: int, factory: Factory) -> str | None:
    """What is wrong with the state that the plugin keeps in checkpoints; empty if nothing is.

    ``None`` where it keeps none.
    """
    from polyshard import fully_shard, load_plugin_state_dict, plugin_state_dict

    del size

    def step(model: nn.Module) -> None:
        model((1.0 + rank) * _ones()).square().sum().backward()
        model.zero_grad()

    first, second = (fully_shard(SmallModel(), plugins=plugins_of(factory)) for _ in range(2))
    fresh = copy.deepcopy(plugin_state_dict(second))
    for _ in range(2):
        step(first)
    state = plugin_state_dict(first)
    if not state:
        return None
    before, after = shapes_of_states(fresh), shapes_of_states(state)
    if before != after:
        return f"before the first step it has another form: {before}, not {after}"
    saved = copy.deepcopy(state)
    load_plugin_state_dict(second, state)
    if not equal_states(plugin_state_dict(second), saved):
        return "the state saved after loading differs from the loaded state"
    step(second)
    if not equal_states(plugin_state_dict(first), saved):
        return "the loaded state changes with the model that it was saved from"
    return ""


def shapes_of_states(state: object) -> object:
    """The form of a state: keys, and shapes of tensors."""
    if isinstance(state, dict):
        return {key: shapes_of_states(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [shapes_of_states(value) for value in state]
    return tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__


def equal_states(one: object, other: object) -> bool:
    """Whether two states hold the same values."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal_states(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal_states, one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):  # arrays of NumPy
        return _content(one) == _content(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _content(array: Any) -> tuple[object, ...]:
    return array.dtype, array.shape, array.tobytes()


def close_with(rank: int, size: int, factory: Factory) -> bool:
    """Whether a plugin serves another model as well when one of two was closed."""
    from polyshard import close, fully_shard

    del rank, size
    plugins = plugins_of(factory)
    closed, other = (fully_shard(SmallModel(), plugins=plugins) for _ in range(2))
    for model in (closed, other):
        model(_ones()).sum().backward()
    expected = other(_ones()).detach()
    close(closed)
    return torch.equal(other(_ones()).detach(), expected)


def saved_with(rank: int, size: int, factory: Factory | None) -> tuple[Tensors, Tensors]:
    """Full tensors of a model before its first step, and of its optimizer after two."""
    from polyshard import fully_shard

    del size
    torch.manual_seed(0)
    model = SmallModel()
    fully_shard(model, plugins=[] if factory is None else plugins_of(factory))
    parameters = {name: full(value) for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator("cpu").manual_seed(rank)
    for _ in range(2):
        x = _drawn(generator)
        F.cross_entropy(model(x), _targets()).backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, object] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    return parameters, {n: full(v) for n, v in state.items() if isinstance(v, Tensor)}


def _drawn(generator: torch.Generator) -> Tensor:
    """On the CPU, so that numbers do not depend on where ranks compute."""
    drawn = torch.randn(8, 96, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def full(value: Tensor) -> Tensor:
    """The whole of a tensor, which may be sharded, in memory of its own on the host."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _ones() -> Tensor:
    """An input (``[4, 96]``) on the device that the ranks run on."""
    return torch.ones(4, 96, device=torch.get_default_device())


def _targets() -> Tensor:
    """Classes of a drawn input (``[8]``)."""
    return torch.arange(8, device=torch.get_default_device()) % 7
