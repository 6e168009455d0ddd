"""Short trainings of either engine, which end in numbers that a missing wait would change."""

from __future__ import annotations

import gc
import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import sim
from benchmarks.harness import bf16, local

WIDTH, HIDDEN, ROWS, STEPS = 16, 48, 4, 2
sharded = partial(sim.sharded, sizes=(4, WIDTH, HIDDEN))
Scenario = Callable[[Any], list[Tensor]]
"""Takes the engine's module; returns what the ranks compare."""


def batch(number: int = 0) -> Tensor:
    """This rank's, drawn on the CPU."""
    generator = torch.Generator("cpu").manual_seed(10 * number + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator, device="cpu").to("sim")


def backward(model: nn.Module, number: int = 0) -> Tensor:
    """Forward and backward of a batch; the loss."""
    loss: Tensor = model(batch(number)).float().square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, steps: int = STEPS, optimizer: Any = None) -> list[Tensor]:
    """Losses, and the weights after the steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        losses.append(backward(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return losses + local(model.parameters())


def named(*scenarios: Scenario) -> dict[str, Scenario]:
    return {scenario.__name__: scenario for scenario in scenarios}


def bystanders() -> list[Tensor]:
    """Memory taken after something was freed: a transfer that still uses that would spoil it."""
    made = [torch.full((n,), float(n), device="sim") for n in (64, 500, 800, 1600, 3300, 7000)]
    for _ in range(4):
        made[0] = made[0] * 1
    return made


# Both engines ---------------------------------------------------------------------------------


def accumulated(library: Any) -> list[Tensor]:
    model = sharded(library, **bf16(library))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        backward(model)
    for is_last in (False, True):  # reduced each time
        model.set_is_last_backward(is_last)
        backward(model)
    return train(model)


def replicas_accumulated(library: Any) -> list[Tensor]:
    model = sharded(library, (2, 1))
    for sums in (False, False, True):
        model.set_requires_all_reduce(sums)
        backward(model)
    return train(model, 1)


def prefetched(library: Any) -> list[Tensor]:
    model = sharded(library)
    for before, after in itertools.pairwise(model):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return train(model)


def several_reductions(library: Any) -> list[Tensor]:
    model = sharded(library, **bf16(library))
    model.set_reduce_scatter_max_input_buffers(3)
    return train(model)


def hooked(library: Any) -> list[Tensor]:
    model = sharded(library)
    side = torch.get_device_module("sim").Stream()
    for layer in model:
        layer.set_all_reduce_hook(lambda gradient: gradient.mul_(2), stream=side)
    return train(model)


def by_hand(library: Any) -> list[Tensor]:
    model, seen = sharded(library), []
    for layer in model:
        handle = layer.unshard(async_op=True)
        handle.wait()
        seen.append(F.linear(batch(), layer.up.weight).detach())
        layer.reshard()
    seen += train(model, 1)
    model[0].unshard(async_op=True)
    model[0].reshard()  # in the middle
    return seen + train(model, 1)


def evaluated(library: Any) -> list[Tensor]:
    model, seen = sharded(library), []
    with torch.no_grad():
        for number in range(3):
            seen.append(model(batch(number)))
            for parameter in local(model.parameters()):
                parameter.mul_(0.9)
    return seen + train(model, 1)


def optimizer_on_a_stream(library: Any) -> list[Tensor]:
    module, model = torch.get_device_module("sim"), sharded(library)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [backward(model)]
    side = module.Stream()  # the newest, which the device's mode "lowest" runs last
    for number in range(3):
        losses.append(backward(model, number))
        side.wait_stream(module.current_stream())
        with module.stream(side):
            optimizer.step()
        event = module.Event()
        event.record(side)
        model.set_post_optim_event(event)
    losses.append(model(batch()).detach())
    module.current_stream().wait_stream(side)  # gradients are freed below
    return losses + local(model.parameters())


def offloaded_accumulated(library: Any) -> list[Tensor]:
    model = sharded(library, offload_policy=library.CPUOffloadPolicy())
    backward(model)
    backward(model, 1)
    return train(model)


def dropped_in_a_gather(library: Any) -> list[Tensor]:
    model = sharded(library)
    seen = train(model, 1)
    model[1].unshard(async_op=True)
    del model
    gc.collect()
    return seen + bystanders()


def dropped_in_a_reduction(library: Any) -> list[Tensor]:
    model = sharded(library, **bf16(library))
    model.set_is_last_backward(False)
    backward(model)
    del model
    gc.collect()
    return bystanders()


def reset(library: Any) -> list[Tensor]:
    """Broken off in a gather, and in a backward."""
    model = sharded(library, **bf16(library))
    train(model, 1)
    model[1].unshard(async_op=True)
    _reset(model)
    model.set_is_last_backward(False)
    backward(model)
    _reset(model)
    model.set_is_last_backward(True)
    model.zero_grad()
    return train(model, 1)


def _reset(model: Any) -> None:
    dist.all_reduce(torch.zeros(1, device="cpu"))  # all have gone through it
    model.reset_iter_state()


BOTH: dict[str, Scenario] = {
    "plain": lambda library: train(sharded(library)),
    "mixed": lambda library: train(sharded(library, **bf16(library))),
    "kept": lambda library: train(sharded(library, reshard_after_forward=False)),
    "replicas": lambda library: train(sharded(library, (2, 1), **bf16(library))),
    "offloaded": lambda library: train(
        sharded(library, offload_policy=library.CPUOffloadPolicy()), 3
    ),
    **named(
        accumulated, replicas_accumulated, prefetched, several_reductions, hooked, by_hand,
        evaluated, optimizer_on_a_stream, offloaded_accumulated, dropped_in_a_gather,
        dropped_in_a_reduction, reset,
    ),
}  # fmt: skip


# polyshard's own ------------------------------------------------------------------------------


@contextmanager
def small_transfers() -> Iterator[None]:
    """Have parameters travel one by one, as large ones do."""
    collective = importlib.import_module("polyshard.transport.collective")
    with mock.patch.object(collective.CollectiveTransport, "staging_bytes", 4):
        yield


def coalesced(library: Any) -> list[Tensor]:
    with small_transfers():
        model = sharded(library, **bf16(library))
        for layer in model.modules():
            unit = getattr(layer, "_polyshard_unit", None)
            for group in unit.groups if unit else ():
                group.transport.coalesces = True
        return train(model)


def separate_reductions(library: Any) -> list[Tensor]:
    model = sharded(library)
    for layer in model:
        layer.set_separate_reduce_scatter_group(True)
    return train(model)


def two_streams(library: Any) -> list[Tensor]:
    """Gathered on one stream, used and freed on another; both continue. (FSDP2 is wrong there.)"""
    module, model = torch.get_device_module("sim"), sharded(library)
    seen = train(model, 1)
    given, side = batch(), module.Stream()
    for layer in model:
        handle = layer.unshard(async_op=True)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            handle.wait()
            seen.append(F.linear(given, layer.up.weight).detach())
            layer.reshard()
        seen += bystanders()
    module.current_stream().wait_stream(side)
    return seen + train(model, 1)


def together(library: Any) -> list[Tensor]:
    models = [sharded(library), sharded(library)]
    library.share_comm_ctx(models)
    return [tensor for model in models for tensor in train(model, 1)]


def quantized(**parts: bool) -> Any:
    """A plugin that sends these as int8."""
    plugin: Any = importlib.import_module("polyshard_quantized")
    every, block = plugin.Exclusions(min_ndim=0, min_numel=0), plugin.Int8Block(16)
    return plugin.QuantizedComm(exclude=every, **dict.fromkeys(parts, block))


def int8(library: Any) -> list[Tensor]:
    seen = []
    for mesh in ((2,), (2, 1)):
        plugin = quantized(weights=True, gradients=True)
        seen += train(sharded(library, mesh, plugins=[plugin]))
    return seen


class _Gather:
    """A collective of a user's, asynchronous."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, out: Tensor, own: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_single(out, own, group=group, async_op=async_op)


class _Reduce(_Gather):
    def __call__(  # type: ignore[override]
        self, out: Tensor, own: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_single(out, own, group=group, op=op, async_op=async_op)


def custom(library: Any) -> list[Tensor]:
    model = sharded(library, **bf16(library))
    for layer in (model, *model):
        layer.set_custom_all_gather(_Gather())
        layer.set_custom_reduce_scatter(_Reduce())
    return train(model)


def dropped_with_replicas(library: Any) -> list[Tensor]:
    model = sharded(library, (2, 1))
    model.set_is_last_backward(False)
    backward(model)
    del model
    gc.collect()
    return bystanders()


def matrices(library: Any) -> list[Tensor]:
    """Gradients that land whole on an owner."""
    optimizers: Any = importlib.import_module("polyshard_optimizers")
    seen = []
    for mesh in ((2,), (2, 1)):
        muon = optimizers.MatrixOptimizer(torch.optim.Muon, lr=0.02)
        model = sharded(library, mesh, plugins=[muon])
        for sums in (False, True):
            model.set_requires_all_reduce(sums)
            backward(model)
        whole = muon.optimizer(model)
        seen += train(model, 1, whole) + train(model, 1, whole)
    return seen


def offload(
    library: Any,
    accumulates: bool = False,
    mesh: tuple[int, ...] = (2,),
    plugins: Sequence[Any] = (),
    **switches: Any,
) -> list[Tensor]:
    tiers: Any = importlib.import_module("polyshard_offload")
    with tempfile.TemporaryDirectory() as folder:
        plugin = tiers.Offload(**switches, disk=tiers.DiskSettings(path=Path(folder)))
        model = sharded(library, mesh, plugins=[plugin, *plugins])
        if accumulates:
            backward(model, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if switches["params"] != "host":
            optimizer = plugin.wrap(optimizer)
        found = [tensor.clone() for tensor in train(model, 3, optimizer)]
        library.close(model)
        return found


OWN: dict[str, Scenario] = {
    "direct": small_transfers()(lambda library: BOTH["plain"](library) + BOTH["mixed"](library)),
    "direct_replicas": small_transfers()(BOTH["replicas"]),
    "on_host": lambda library: [
        *offload(library, params="host"),
        *offload(library, True, params="host"),
        *offload(library, mesh=(2, 1), params="host"),
        *offload(library, plugins=[quantized(weights=True)], params="host"),
    ],
    "optimizer_on_host": lambda library: offload(library, params="device", optimizer="host"),
    "on_disk": lambda library: offload(library, params="disk"),
    **named(
        coalesced, separate_reductions, two_streams, together, int8, custom, matrices,
        dropped_with_replicas,
    ),
}  # fmt: skip

SCENARIOS = {"polyshard": BOTH | OWN, "FSDP2": BOTH}
