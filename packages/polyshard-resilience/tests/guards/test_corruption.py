"""Bits that flip while memory rests, and replicas that differ: every one is found and named."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from toy_meshes import on_several_meshes
from toy_models import build, loss_of, shard, tokens_for

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.errors import SettingError, UnsupportedError
from polyshard_resilience import Corruption, NonFinite
from polyshard_resilience.errors import CorruptionError
from polyshard_resilience.guards.watch import watched_of
from polyshard_testing import ranks

SMALL = {"width": 24, "hidden": 30, "layers": 2}


def local(value: Any) -> Tensor:
    found: Tensor = value._local_tensor if isinstance(value, DTensor) else value
    return found


def flip(value: Any, bit: int) -> None:
    """Change one bit of a tensor's memory, as no program would."""
    memory = local(value).detach().data.view(-1).view(torch.uint8)
    memory[bit // 8] ^= 1 << bit % 8


class Training:
    """A model, its optimizer and a guard that looks around every step."""

    def __init__(self, model: nn.Module, **kwargs: Any) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        )
        self.guard = Corruption(model, self.optimizer, **{"every": 1, **kwargs})
        self.count = 0

    def backward(self, rank: int = 0) -> None:
        loss_of(self.model, tokens_for(self.count, rank)).backward()
        self.count += 1

    def step(self, rank: int = 0) -> None:
        self.backward(rank)
        self.optimizer.step()
        self.optimizer.zero_grad()


def small() -> Any:
    model = build(**SMALL)
    model.blocks[0].norm.requires_grad_(False)
    return model


def sharded(shape: tuple[int, ...], **kwargs: Any) -> Any:
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    return shard(small(), fully_shard, mesh=mesh, **kwargs)


# --- in one process -------------------------------------------------------------------------------


def test_any_bit_of_anything_is_found_and_named() -> None:
    """Every tensor of weights and state, frozen ones too; bits chosen at random."""
    training = Training(small())
    for _ in range(2):
        training.step()
    choose = random.Random(0)
    names = {id(p): n for n, p in training.model.named_parameters()}
    every = [(names[id(w.parameter)], w.entry, w.value) for w in watched_of(training.optimizer)]
    frozen = training.model.blocks[0].norm
    every += [("blocks.0.norm.weight", "", frozen.weight), ("blocks.0.norm.bias", "", frozen.bias)]
    assert len(every) == 4 * (len(names) - 2) + 2
    for name, entry, value in every:
        bit = choose.randrange(8 * value.nbytes)
        flip(value, bit)
        training.backward()
        with pytest.raises(CorruptionError) as caught:
            training.optimizer.step()
        what = f"'{entry}' of '{name}'" if entry else f"'{name}'"
        assert f"{what} changed without a write on rank 0" in str(caught.value)
        assert "more" not in str(caught.value).split(". Nothing")[0]  # and nothing else is named
        flip(value, bit)
        training.optimizer.zero_grad()
        training.guard.rebase()
        training.step()


def test_the_place_within_a_large_tensor_is_told() -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Corruption(model, optimizer)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    flip(model.weight, 32 * 70_000)
    with pytest.raises(CorruptionError, match=r"'weight' .* elements 65536 to 81919 of its part"):
        guard.check()


def test_a_guard_that_goes_in_the_middle_of_a_step() -> None:
    """torch iterates over hooks then."""
    training, others = Training(small()), [Training(small())]
    guard = weakref.ref(others[0].guard)

    def drop(*_: object) -> None:
        others.clear()
        gc.collect()

    hooks = [register_optimizer_step_post_hook(hook) for hook in (drop, lambda *_: None)]
    try:
        training.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert guard() is None


def test_windows_open_every_so_many_steps() -> None:
    training = Training(small(), every=3)
    found = []
    for step in range(9):
        training.backward()
        try:
            training.optimizer.step()
        except CorruptionError:
            found.append(step)
            training.optimizer.step()
        training.optimizer.zero_grad()
        flip(training.model.head.weight, step)  # after every step
    assert found == [1, 4, 7]


WRITES: dict[str, Callable[[Training], object]] = {
    "in place": lambda t: t.model.head.weight.detach().mul_(0.5),
    "fill": lambda t: nn.init.zeros_(t.model.head.weight),
    "load": lambda t: t.model.load_state_dict(small().state_dict()),
    "load a child": lambda t: t.model.head.load_state_dict(small().head.state_dict()),
    "assign": lambda t: t.model.load_state_dict(small().state_dict(), assign=True),
    "state in place": lambda t: t.optimizer.state[t.model.head.weight]["exp_avg"].zero_(),
    "load state": lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict())),
    "new state": lambda t: t.optimizer.state.clear(),
    "another optimizer": lambda t: torch.optim.SGD(t.model.parameters(), lr=1.0).step(),
    "another group": lambda t: t.optimizer.add_param_group(
        {"params": list(t.model.blocks[0].norm.parameters())}
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_are_no_corruption(write: Callable[[Training], object]) -> None:
    training = Training(small())
    for _ in range(2):
        training.step()
    training.backward()
    with torch.no_grad():
        write(training)
    training.optimizer.step()
    training.step()
    flip(training.model.blocks[1].up.weight, 5)
    training.backward()
    if write is not WRITES["assign"]:  # the optimizer then has parameters that the model lacks
        with pytest.raises(CorruptionError, match=r"'blocks\.1\.up\.weight'"):
            training.optimizer.step()


def test_uncounted_writes_are_said_with_rebase() -> None:
    training = Training(small())
    training.step()
    weight = training.model.head.weight
    for says in (True, False):
        training.backward()
        weight.data[0] = 1.0
        if says:
            training.guard.rebase()
            training.optimizer.step()
        else:
            flip(weight, 9)
            with pytest.raises(CorruptionError, match=r"call rebase\(\)"):
                training.optimizer.step()


def test_a_step_left_out_keeps_the_window_open() -> None:
    training = Training(small())
    NonFinite(training.optimizer, "skip")
    training.step()
    training.backward()
    training.model.head.weight.grad.fill_(float("nan"))
    with pytest.warns(UserWarning, match="left out"):
        training.optimizer.step()
    training.optimizer.zero_grad()
    flip(training.model.head.weight, 3)
    with pytest.raises(CorruptionError):
        training.step()


def test_several_optimizers_have_windows_of_their_own() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in model]
    Corruption(model, *optimizers, every=1)  # kept alive by the optimizers
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    model(torch.ones(1, 3)).sum().backward()
    flip(optimizers[1].state[model[1].weight]["exp_avg_sq"], 2)
    optimizers[0].step()
    with pytest.raises(CorruptionError, match=r"'exp_avg_sq' of '1\.weight'"):
        optimizers[1].step()


def test_check_looks_at_once_and_remove_ends_it() -> None:
    training = Training(small(), every=100)
    training.guard.check()
    training.step()
    training.guard.check()
    flip(training.model.head.weight, 0)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"'head\.weight'"):
            training.guard.check()
    training.guard.remove()
    training.step()


def test_nobody_is_kept_alive() -> None:
    training = Training(small())
    training.step()
    gone = [weakref.ref(x) for x in (training.model, training.optimizer, training.guard)]
    gc.disable()
    try:
        del training
        assert [one() for one in gone] == [None, None, None]
    finally:
        gc.enable()


def test_bad_settings() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="takes the optimizers"):
        Corruption(model)
    with pytest.raises(SettingError, match="at least 1 step"):
        Corruption(model, optimizer, every=0)
    with pytest.raises(SettingError, match=r"takes a torch\.optim\.Optimizer"):
        Corruption(model, model)  # type: ignore[arg-type]
    optimizer.steps_in_backward = True  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="steps in backward"):
        Corruption(model, optimizer)


# --- on ranks -------------------------------------------------------------------------------------


def same_everywhere(text: str) -> None:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    assert len(set(said)) == 1


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@ranks(4)
def test_flips_on_one_rank_stop_all(rank: int, size: int, shape: tuple[int, ...]) -> None:
    """Weights, state and frozen weights of sharded models, and training after that."""
    training = Training(sharded(shape))
    for _ in range(2):
        training.step(rank)
    model, state = training.model, training.optimizer.state
    cases = {
        "'blocks.1.down.weight' changed": model.blocks[1].down.weight,
        "'exp_avg' of 'head.weight' changed": state[model.head.weight]["exp_avg"],
        "'step' of 'head.weight' changed": state[model.head.weight]["step"],
        "'blocks.0.norm.bias' changed": model.blocks[0].norm.bias,
    }
    for odd, (words, value) in enumerate(cases.items()):
        training.backward(rank)
        if rank == odd:
            flip(value, 7)
        with pytest.raises(CorruptionError) as caught:
            training.optimizer.step()
        assert f"{words} without a write on rank {odd}" in str(caught.value)
        same_everywhere(str(caught.value))
        if rank == odd:
            flip(value, 7)
        training.optimizer.zero_grad()
        training.guard.rebase()
        training.step(rank)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@ranks(4)
def test_replicas_that_differ_are_named_at_any_time(
    rank: int, size: int, shape: tuple[int, ...]
) -> None:
    """Also where a bit flips outside of every window."""
    model = sharded(shape)
    training = Training(model, every=4)
    for _ in range(3):  # a window opens after the first, and is closed by the second
        training.step(rank)
    if rank == 2:
        flip(training.optimizer.state[model.head.weight]["exp_avg_sq"], 20)
    if rank == 3:
        flip(model.embedding.weight, 20)
    others = ("0, 1 and 3", "0, 1 and 2") if shape == (4, 1) else ("0", "1")
    plural = "s" if shape == (4, 1) else ""
    training.step(rank)
    training.step(rank)
    with pytest.raises(CorruptionError) as caught:
        training.step(rank)
    text = str(caught.value)
    same_everywhere(text)
    expected = ("'head.weight' (optimizer state): ", "'embedding.weight' (weights): ")
    for name, odd, other in zip(expected, (2, 3), others, strict=True):
        sides = f"rank {odd} and ranks {other}" if plural else f"rank {other} and rank {odd}"
        assert f"replicas of {name}{sides} differ" in text


@ranks(4)
def test_replicas_that_start_differently_are_found(rank: int, size: int) -> None:
    model = small()
    if rank >= 2:
        with torch.no_grad():
            model.head.weight[2, 2] += 1
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    training = Training(shard(model, fully_shard, mesh=mesh))
    with pytest.raises(CorruptionError, match=r"'head\.weight' \(weights\): rank 0 and rank 2"):
        training.guard.check()


@ranks(4)
def test_odd_parameters_of_several_meshes(rank: int, size: int) -> None:
    """Empty and uneven shards, a mesh of its own, replicated and plain parameters."""
    module = on_several_meshes(none=nn.Parameter(torch.ones(0, 3)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    guard = Corruption(module, optimizer, every=1)
    for _ in range(3):
        module().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("short", "wide", "expert", "whole", "plain"):
        for odd in range(size):
            value = local(getattr(module, name))
            holds = torch.tensor(bool(value.numel()) and rank == odd)
            if holds:
                flip(value, 8 * value.nbytes - 1)
            mine = bool(holds)
            dist.all_reduce(holds, dist.ReduceOp.MAX)
            if holds:
                with pytest.raises(CorruptionError, match=rf"'{name}' changed .* on rank {odd}"):
                    guard.check()
            else:
                guard.check()
            if mine:
                flip(value, 8 * value.nbytes - 1)
    if rank == 3:  # a replica that was written to
        module.whole.detach().to_local().add_(1)
    with pytest.raises(CorruptionError, match=r"'whole' \(weights\): rank 3 and ranks 0, 1 and 2"):
        guard.check()


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("keeps", [True, False])
@ranks(2)
def test_a_training_run_raises_no_alarm(rank: int, size: int, policy: str, keeps: bool) -> None:
    """Evaluation, state dicts, loading, averages: everything people do between steps."""
    kwargs: dict[str, Any] = {"reshard_after_forward": not keeps}
    if policy == "bf16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    training = Training(sharded((2,), **kwargs))
    model, optimizer = training.model, training.optimizer
    averaged = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    for _ in range(2):
        training.step(rank)
        with torch.no_grad():
            loss_of(model.eval(), tokens_for(9, rank))
        model.train().set_requires_gradient_sync(False)
        training.backward(rank)
        model.set_requires_gradient_sync(True)
        training.step(rank)
        values = get_model_state_dict(model)
        set_model_state_dict(model, values)
        training.step(rank)
        model.load_state_dict(model.state_dict())
        training.step(rank)
        moments = get_optimizer_state_dict(model, optimizer)
        training.step(rank)
        set_optimizer_state_dict(model, optimizer, moments)
        training.step(rank)
        with torch.no_grad():
            averaged(list(model.parameters()), [p.clone() for p in model.parameters()], 1)
        training.guard.rebase()
        training.step(rank)
        model.unshard()
        model.reshard()
        model.reset_iter_state()
        training.step(rank)
    if rank:
        flip(model.embedding.weight, 1)
    with pytest.raises(CorruptionError, match=r"'embedding\.weight' .* on rank 1"):
        training.step(rank)


@ranks(2)
def test_torchs_own_engine_is_watched_as_well(rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    training = Training(shard(small(), torch_fully_shard))
    for _ in range(3):
        training.step(rank)
    if rank == 0:
        flip(training.model.head.weight, 1)
    with pytest.raises(CorruptionError, match=r"'head\.weight' .* on rank 0"):
        training.step(rank)


@pytest.mark.parametrize("has_root", [True, False])
@ranks(1)
def test_what_stays_gathered_is_watched_where_it_rests(
    rank: int, size: int, has_root: bool
) -> None:
    """Gathered parameters show others than the optimizer of another unit has."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model) if has_root else model:
        fully_shard(module)
        module.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    Corruption(model, *optimizers, every=1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
