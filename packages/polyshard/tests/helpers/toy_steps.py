"""Whole steps of small models, for the stand-in device that records them: one for each path."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_codecs import BytesGather, Codecs
from toy_comms import CountingComm

from polyshard import MixedPrecisionPolicy, Plugin, fully_shard, hookimpl, share_comm_ctx
from polyshard.plugins.seams import CollectivesBackend, GroupInfo
from polyshard.program.unshard import crossing as crossing_codec
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import (
    Pending,
    Transport,
    WrappedTransport,
    choose_transport,
)
from polyshard.transport.collective import CollectiveTransport, gather_single, reduce_single
from polyshard_testing.streams import Recorder, recorded

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WIDTH = 6


def sharded(mesh: tuple[int, ...] = (2,), layers: int = 3, **keywords: Any) -> Any:
    """A chain of units below a root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    names = ("replicas", "shards")[-len(mesh) :]
    placed = init_device_mesh(torch.get_default_device().type, mesh, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=placed, **keywords)
    return fully_shard(model, mesh=placed, **keywords)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def backward(model: nn.Module) -> None:
    model(inputs()).square().sum().backward()


def step(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def small_transfers() -> Iterator[None]:
    """Have parameters travel one by one, as large ones do."""
    with mock.patch.object(CollectiveTransport, "staging_bytes", 4):
        yield


# Steps --------------------------------------------------------------------------------------------


def packed(recorder: Recorder) -> None:
    step(sharded())


def direct(recorder: Recorder) -> None:
    with small_transfers():
        step(sharded((4,)))  # 6 rows on 4 ranks: padded


def cast(recorder: Recorder) -> None:
    with small_transfers():
        step(sharded(mp_policy=BF16))


def coalesced(recorder: Recorder) -> None:
    with small_transfers():
        model = sharded(mp_policy=BF16)
        for layer in model.modules():
            for group in layer._polyshard_unit.groups:
                group.transport.coalesces = True
        step(model)


def kept_until_backward(recorder: Recorder) -> None:
    step(sharded(reshard_after_forward=False))


def blocks(recorder: Recorder) -> None:
    step(sharded((4,), reshard_after_forward=2))


def several_reductions(recorder: Recorder) -> None:
    model = sharded(mp_policy=BF16)
    model.set_reduce_scatter_max_input_buffers(3)
    step(model)


def separate_reductions(recorder: Recorder) -> None:
    model = sharded()
    for layer in model:
        layer.set_separate_reduce_scatter_group(True)
    step(model)


def explicit_prefetch(recorder: Recorder) -> None:
    model = sharded(layers=4)
    for before, after in itertools.pairwise(model):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    step(model)


def accumulated(recorder: Recorder) -> None:
    model = sharded(mp_policy=BF16)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        backward(model)
    for is_last in (False, True):  # reduced each time
        model.set_is_last_backward(is_last)
        backward(model)
    step(model)


def replicated(recorder: Recorder) -> None:
    with small_transfers():
        step(sharded((2, 2), mp_policy=BF16))


def replicas_alone(recorder: Recorder) -> None:
    step(sharded((2, 1)))


def replicas_accumulated(recorder: Recorder) -> None:
    model = sharded((2, 2))
    for sums in (False, False, True):
        model.set_requires_all_reduce(sums)
        backward(model)
    step(model, 1)


def hooked(recorder: Recorder) -> None:
    model = sharded((2, 2))
    for layer in model:
        layer.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
    step(model)
    side: Any = recorder.module.Stream()
    model = sharded()
    for layer in model:
        layer.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=side)
    step(model)


def evaluated(recorder: Recorder) -> None:
    model = sharded()
    with torch.no_grad():
        for _ in range(3):
            model(inputs())
            for parameter in model.parameters():
                parameter.mul_(0.9)
    step(model, 1)


def by_hand(recorder: Recorder) -> None:
    with small_transfers():
        model = sharded()
    for layer in model:
        handle = layer.unshard(async_op=True)
        handle.wait()
        nn.functional.linear(inputs(), layer.weight)
        layer.reshard()
        layer.unshard()
        nn.functional.linear(inputs(), layer.weight)
        layer.reshard()
        layer.unshard(async_op=True)
        layer.reshard()  # in the middle
    step(model, 1)
    model[0].unshard(async_op=True)  # and it is not awaited
    step(model, 1)


def two_streams(recorder: Recorder) -> None:
    """Issued on one stream, completed and freed on another."""
    model, module = sharded(mp_policy=BF16), recorder.module
    step(model, 1)
    for layer in model:
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            handle = layer.unshard(async_op=True)
        handle.wait()
        nn.functional.linear(inputs().bfloat16(), layer.weight)
        layer.reshard()
        module.current_stream().wait_stream(side)
    backward(model)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    model.set_is_last_backward(False)
    with module.stream(side):
        backward(model)  # the last reduction stays in flight
    module.current_stream().wait_stream(side)
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(2)
    model.set_is_last_backward(True)
    backward(model)


class Pair(nn.Module):
    """Two modules of one unit, which is freed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        self.first.reshard()  # type: ignore[operator]
        after: Tensor = self.second(made)
        return after


def freed_between(recorder: Recorder) -> None:
    mesh, model = init_device_mesh(torch.get_default_device().type, (2,)), Pair()
    fully_shard([model.first, model.second], mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model, 1)


def together(recorder: Recorder) -> None:
    models = [sharded(), sharded()]
    share_comm_ctx(models)
    for model in models:
        step(model, 1)


def optimizer_on_a_stream(recorder: Recorder) -> None:
    model, module = sharded(), recorder.module
    optimizer, side = torch.optim.SGD(model.parameters(), lr=0.1), module.Stream()
    for _ in range(2):
        backward(model)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            optimizer.step()
        event = module.Event()
        event.record(side)
        model.set_post_optim_event(event)
    model(inputs())
    module.current_stream().wait_stream(side)  # gradients are freed below


def codecs(recorder: Recorder) -> None:
    step(sharded(plugins=[Codecs()]))
    step(sharded((2, 2), plugins=[Codecs()]))


class Wrapped(Plugin, CollectivesBackend):
    """A backend around the one the engine would choose."""

    name = "wrapped"

    @hookimpl
    def polyshard_collectives_backend(self) -> CollectivesBackend:
        return self

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return WrappedTransport(choose_transport(roles, group.device))


def wrapped(recorder: Recorder) -> None:
    step(sharded((2, 2), plugins=[Wrapped()], mp_policy=BF16))


class Slow(Wrapped):
    """Its transfers give their memory up when they were waited for, as the contract allows."""

    name = "slow"

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        return SlowTransport(choose_transport(roles, group.device))


class SlowTransport(WrappedTransport):
    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        return GivenUp(pending)


@dataclass
class GivenUp:
    pending: Pending | None

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None


def given_up(recorder: Recorder) -> None:
    step(sharded((2, 2), plugins=[Slow()], mp_policy=BF16))


class Gather(CountingComm):
    def __call__(self, out: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
        return gather_single(out, own, group, async_op)


class Reduce(CountingComm):
    def __call__(
        self, out: Tensor, own: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_single(out, own, op, group, async_op)


def custom(mesh: tuple[int, ...]) -> Any:
    model = sharded(mesh, mp_policy=BF16)
    for layer in (model, *model):
        layer.set_custom_all_gather(Gather())
        layer.set_custom_reduce_scatter(Reduce())
    return model


def customized(recorder: Recorder) -> None:
    step(custom((2,)))
    step(custom((2, 2)))


def dropped_in_a_gather(recorder: Recorder) -> None:
    models: tuple[Callable[[], Any], ...] = (sharded, lambda: custom((2,)))
    for make in models:
        model = make()
        step(model, 1)
        model[1].unshard(async_op=True)
        del model
        gc.collect()


def dropped_in_a_reduction(recorder: Recorder) -> None:
    models: tuple[Callable[[], Any], ...] = (
        lambda: sharded(mp_policy=BF16), lambda: custom((2,)), lambda: sharded((2, 2)),
    )  # fmt: skip
    for make in models:
        model = make()
        model.set_is_last_backward(False)
        backward(model)
        del model
        gc.collect()


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken")


def reset(recorder: Recorder) -> None:
    with small_transfers():
        model = sharded(layers=4)
    step(model, 1)  # now the order is known, and gathers run ahead
    linear, model[1].forward = model[1].forward, Broken().forward
    with pytest.raises(RuntimeError, match="broken"):
        model(inputs())
    model.reset_iter_state()
    model[1].forward = linear
    model.set_is_last_backward(False)
    backward(model)
    model.reset_iter_state()
    model.set_is_last_backward(True)
    step(model, 1)


def crossing(recorder: Recorder) -> None:
    """A codec that reads the shard on the host, and page-locked memory for what it makes."""
    whole = mock.Mock(shard_offset=0, chunk_numel=8)
    codec = BytesGather(mock.Mock(parameters=[whole]))
    shard, payload = torch.ones(8), torch.empty(32, dtype=torch.uint8)

    on_host = [shard]

    def pinned(*sizes: int, dtype: torch.dtype, device: str, pin_memory: bool) -> Tensor:
        on_host.append(torch.zeros(*sizes, dtype=dtype, device=device))
        return on_host[-1]

    with mock.patch.object(torch, "empty", pinned):
        encode = crossing_codec(codec, shard, payload)
    for tensor in on_host:
        recorder.is_host_memory(tensor.data_ptr(), tensor.nbytes)
    for _ in range(2):
        encode()


STEPS: tuple[Callable[[Recorder], None], ...] = (
    packed, direct, cast, coalesced, kept_until_backward, blocks, several_reductions,
    separate_reductions, explicit_prefetch, accumulated, replicated, replicas_alone,
    replicas_accumulated, hooked, evaluated, by_hand, two_streams, freed_between, together,
    optimizer_on_a_stream, codecs, wrapped, given_up, customized, dropped_in_a_gather,
    dropped_in_a_reduction, reset, crossing,
)  # fmt: skip

WORLD = 4


def races_of(run: Callable[[Recorder], None]) -> list[str]:
    """What a step does that an accelerator may do in another order."""
    with recorded(WORLD) as recorder:
        run(recorder)
        gc.collect()
        assert recorder.ledger.counted
        return [str(race) for race in recorder.races]
