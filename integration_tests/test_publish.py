"""Publishing beside plugins, and a generator in another process that follows a trainer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from tp_models import Mlp, meshes, mlp, mlp_plan

from polyshard import fully_shard
from polyshard_offload import Offload
from polyshard_publish import Part, Publisher, Receiver, ReceiverServer
from polyshard_quantized import QuantizedComm
from polyshard_tensor_parallel import TensorParallel
from polyshard_testing import World

ACTIONS = 4
BATCH = 64


def sharded_mlp(dp: int, tp: int, replicas: int = 0, plugins: Any = ()) -> tuple[Any, Any]:
    """A sharded model, and its plugins."""
    model: Any = mlp(hidden=20)
    mesh = meshes(dp, tp, replicas)
    stack = list(plugins)
    if tp > 1:
        stack.append(TensorParallel(mlp_plan(), mesh=mesh["tp"]))
        stack[-1].apply(model)
    axes = ("replicas", "dp") if replicas else ("dp",)
    return fully_shard(model, mesh=mesh[axes], plugins=stack), stack


def full(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


STACKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tp": partial(sharded_mlp, 2, 2),
    "hsdp": partial(sharded_mlp, 2, 1, 2),
    "tp only": partial(sharded_mlp, 1, 4),
    "hsdp x tp": partial(sharded_mlp, 1, 2, 2),
    "host": lambda: sharded_mlp(4, 1, plugins=[Offload(params="host")]),
    "disk": lambda: sharded_mlp(4, 1, plugins=[Offload(params="disk")]),
    "quantized": lambda: sharded_mlp(4, 1, plugins=[QuantizedComm()]),
    "quantized x tp": lambda: sharded_mlp(2, 2, plugins=[QuantizedComm()]),
}


ROWS = 7


def in_two(name: str) -> str | list[Part]:
    """Weights by their first rows and the rest, as projections are split."""
    if not name.endswith("weight"):
        return name
    first, rest = slice(0, ROWS), slice(ROWS, None)
    return [Part(f"{name}.first", take=(first,)), Part(f"{name}.rest", take=(rest,))]


def publishes(rank: int, size: int, stack: str, address: str) -> tuple[dict[str, Tensor], bool]:
    model, plugins = STACKS[stack]()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if plugins and isinstance(plugins[0], Offload):
        optimizer = plugins[0].wrap(optimizer)
    with Publisher(
        model, to=address, dtype=torch.bfloat16, names=in_two, keep="values"
    ) as publisher:
        publisher.publish(1)
        model(torch.ones(4, 10)).square().mean().backward()
        optimizer.step()
        published = publisher.publish(2)
    wanted: dict[str, Tensor] = {}
    for name, value in full(model).items():
        rounded = value.cpu().to(torch.bfloat16)
        parts = {name: rounded}
        if name.endswith("weight"):
            parts = {f"{name}.first": rounded[:ROWS], f"{name}.rest": rounded[ROWS:]}
        wanted |= parts
    return wanted, published.patched == (address,)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stack", STACKS)
def test_weights_arrive_whatever_the_plugins(world4: World, stack: str) -> None:
    receiver = Receiver()
    with ReceiverServer(receiver) as server:
        for wanted, was_patched in world4.run(publishes, stack, server.address):
            assert was_patched
            with receiver.serving() as served:
                assert served.tensors.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert torch.equal(served.tensors[name], tensor), name


# A loop as in reinforcement learning ----------------------------------------------------------


def log_probabilities(weights: dict[str, Tensor], states: Tensor) -> Tensor:
    """What a policy of these weights thinks of each action; computed in fp32."""
    with torch.device("meta"):
        policy = Mlp(hidden=20)
    wide = {name: value.float() for name, value in weights.items()}
    found: Tensor = functional_call(policy, wide, (states,))
    return F.log_softmax(found[:, :ACTIONS], -1)


def generate(pipe: Connection) -> None:
    """The generator: takes versions, and acts on states with the newest one."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    receiver = Receiver()
    with ReceiverServer(receiver) as server, Listener(("127.0.0.1", 0), authkey=b"loop") as door:
        pipe.send((server.address, door.address))
        with door.accept() as trainer:
            while True:
                try:
                    version, states = trainer.recv()
                except EOFError:
                    return
                receiver.wait(version, 30)
                with receiver.serving() as served:
                    assert served.version == version
                    found = log_probabilities(dict(served.tensors), states)
                actions = torch.multinomial(found.exp(), 1).flatten()
                trainer.send((actions, found))


def reinforces(
    rank: int, size: int, tp: int, steps: int, addresses: tuple[str, Any]
) -> list[float]:
    """REINFORCE: the action wanted in a state is its number. The mean reward of each step."""
    torch.set_num_threads(1)
    if size == 1 and tp == 1:
        model: Any = fully_shard(mlp(hidden=20))
    else:
        model, _ = sharded_mlp(size // tp, tp)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = Client(addresses[1], authkey=b"loop") if rank == 0 else None
    random = torch.Generator().manual_seed(0)
    rewards = []
    publisher = Publisher(model, to=addresses[0], dtype=torch.bfloat16, keep="values")
    for version in range(steps):
        publisher.publish(version)
        numbers = torch.randint(0, ACTIONS, (BATCH,), generator=random)
        states = F.one_hot(numbers, 10).float()
        told: list[Any] = [None]
        if trainer is not None:
            trainer.send((version, states))
            told = [trainer.recv()]
        torch.distributed.broadcast_object_list(told)
        actions, theirs = told[0]
        weights = {name: value.bfloat16() for name, value in full(model).items()}
        ours = log_probabilities(weights, states)
        assert torch.equal(ours.cpu(), theirs.cpu()), version  # the same bits
        mine = F.log_softmax(model(states)[:, :ACTIONS], -1)
        # two layers of weights, each rounded by a relative 2^-9, with activations of some units
        assert (mine - theirs).abs().max() < 16 * 2**-9 * mine.detach().abs().max()
        reward = (actions == numbers).float()
        chosen = mine.gather(1, actions.unsqueeze(1)).flatten()
        (-(reward - reward.mean()) * chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.mean().item())
    return rewards


@pytest.mark.sampled(4)
@pytest.mark.parametrize("steps", [20, pytest.param(200, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_generator_follows_its_trainer(
    request: pytest.FixtureRequest, size: int, tp: int, steps: int
) -> None:
    world: World = request.getfixturevalue(f"world{size}")
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    generator = context.Process(target=generate, args=(theirs,), daemon=True)
    generator.start()
    theirs.close()
    try:
        rewards = world.run(reinforces, tp, steps, pipe.recv())
        assert all(one == rewards[0] for one in rewards)
        if steps == 200:
            assert sum(rewards[0][-20:]) > 20 * 0.9
    finally:
        generator.kill()
        generator.join()
