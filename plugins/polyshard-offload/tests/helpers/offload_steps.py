"""Whole steps with shards on the host and on disk, for the device that records them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_offload import DiskSettings, Offload
from polyshard_offload.tiers.host_memory import Slab
from polyshard_offload.tiers.swap_file import SwapFile
from polyshard_testing.streams import Recorder, recorded

WIDTH = 6


class Later:
    """What a thread did, before anybody waited for it."""

    def __init__(self, recorder: Recorder, act: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.recorder = recorder
        self.error: Exception | None = None
        with recorder.other_thread() as self.ended:
            try:
                act(*args)
            except Exception as error:
                self.error = error

    def result(self) -> None:
        self.recorder.waited_for(self.ended)
        if self.error is not None:
            raise self.error

    def exception(self) -> Exception | None:
        self.recorder.waited_for(self.ended)
        return self.error


class Threads:
    """Stands for an executor, one logical thread for each call."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def submit(self, act: Callable[..., Any], *args: Any) -> Later:
        return Later(self.recorder, act, args)

    def shutdown(self, *, wait: bool) -> None:
        pass


@contextmanager
def on_the_host(recorder: Recorder) -> Iterator[None]:
    """Have the recorder know slabs for host memory, and see what file systems do."""
    known: set[tuple[int, int]] = set()
    lease, transfer = Slab.lease, SwapFile._transfer

    def leased(slab: Slab, *args: Any, **keywords: Any) -> Tensor:
        if (slab.address, slab.nbytes) not in known:
            known.add((slab.address, slab.nbytes))
            recorder.is_host_memory(slab.address, slab.nbytes)
        return lease(slab, *args, **keywords)

    def transferred(file: SwapFile, offset: int, tensor: Tensor, move: Any) -> None:
        recorder.host_uses(tensor, "the file system", writes=move.__name__ == "_read_block")
        transfer(file, offset, tensor, move)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Slab, "lease", leased))
        stack.enter_context(mock.patch.object(SwapFile, "_transfer", transferred))
        executor = "polyshard_offload.shards.staging.ThreadPoolExecutor"
        stack.enter_context(mock.patch(executor, side_effect=lambda *a, **k: Threads(recorder)))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        yield


def on_host(**keywords: Any) -> Offload:
    return Offload(params="host", optimizer="host", **keywords)


def sharded(
    offload: Offload,
    mesh: tuple[int, ...] = (2,),
    frozen: int | None = None,
    dtype: torch.dtype = torch.float32,
    **keywords: Any,
) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    placed = init_device_mesh(
        torch.get_default_device().type, mesh, mesh_dim_names=("replicas", "shards")[-len(mesh) :]
    )
    for layer in model:
        fully_shard(layer, mesh=placed, plugins=[offload], **keywords)
    return fully_shard(model, mesh=placed, plugins=[offload], **keywords)


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, WIDTH, dtype=dtype)).float().square().sum().backward()


def step(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def touch(model: nn.Module) -> None:
    """Write the shards, where they rest."""
    for parameter in model.parameters():
        parameter.detach().to_local().mul_(0.9)  # type: ignore[attr-defined]


# Steps --------------------------------------------------------------------------------------------


def host(recorder: Recorder, path: Path) -> None:
    step(sharded(on_host()))


def host_with_replicas(recorder: Recorder, path: Path) -> None:
    step(sharded(on_host(), (2, 2)))


def in_bf16(recorder: Recorder, path: Path) -> None:
    """Sums are in float32, and become gradients of the parameters' dtype."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    step(sharded(on_host(), dtype=torch.bfloat16, mp_policy=policy))


def held(recorder: Recorder, path: Path) -> None:
    """Gradients of several backwards are added up on the device."""
    model = sharded(on_host())
    for _ in range(2):
        for is_last in (False, False, True):
            model.set_is_last_backward(is_last)
            backward(model)
        touch(model)
        model.zero_grad()


def a_frozen_unit(recorder: Recorder, path: Path) -> None:
    model = sharded(on_host(), frozen=0)
    for _ in range(3):
        backward(model)
        touch(model)


def summed(recorder: Recorder, path: Path) -> None:
    """Gradients of several backwards are added up on the host."""
    model = sharded(on_host())
    for _ in range(3):
        backward(model)
    touch(model)


def hooked(recorder: Recorder, path: Path) -> None:
    model = sharded(on_host())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(2))
    backward(model)


def evaluated(recorder: Recorder, path: Path) -> None:
    model = sharded(on_host())
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, WIDTH))
            touch(model)


def by_hand(recorder: Recorder, path: Path) -> None:
    model = sharded(on_host())
    for layer in model:
        layer.unshard()
        layer.reshard()
    touch(model)


def fetched_twice(recorder: Recorder, path: Path) -> None:
    """What was fetched and not gathered is fetched again."""
    model = sharded(on_host())
    storage = model[0]._polyshard_unit.groups[0].shards.storage
    backward(model)
    storage.fetch()
    storage.release()
    storage.fetch()
    storage.fetch()
    storage.release()
    storage.settle()
    touch(model)


def dropped(recorder: Recorder, path: Path) -> None:
    """A model goes while copies are under way; the next one gets its memory."""
    offload = on_host()
    for _ in range(2):
        model = sharded(offload)
        step(model, steps=1)
        model[1].unshard(async_op=True)
        del model
        gc.collect()


def plugin_dropped(recorder: Recorder, path: Path) -> None:
    """The plugin goes as well, and the next owner of its memory writes to it."""
    offload = on_host()
    model = sharded(offload)
    backward(model)
    memory = model[0]._polyshard_unit.groups[0].shards.storage._arena._slab
    model[1].unshard(async_op=True)
    del model, offload
    gc.collect()
    memory.lease(0, memory.nbytes).zero_()


def disk(recorder: Recorder, path: Path) -> None:
    settings = DiskSettings(path=path)
    model = sharded(Offload(params="disk", grads="disk", optimizer="disk", disk=settings))
    for _ in range(3):
        backward(model)
        model.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    storage = model[0]._polyshard_unit.groups[0].shards.storage
    storage.prefetch()
    storage.release()


STEPS = (
    host, host_with_replicas, in_bf16, held, a_frozen_unit, summed, hooked, evaluated,
    by_hand, fetched_twice, dropped, plugin_dropped, disk,
)  # fmt: skip


def races_of(run: Callable[[Recorder, Path], None], path: Path) -> list[str]:
    with recorded(4) as recorder, on_the_host(recorder):
        run(recorder, path)
        gc.collect()
        assert recorder.ledger.counted
        return [str(race) for race in recorder.races]
