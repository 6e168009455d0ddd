"""Real training steps, and what they sent: counted by the engine, and by this file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import plan_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, fully_shard, stats, transport
from polyshard.program import reduce
from polyshard_cli.plan import Document, PlanError, Settings, describe, parse_mesh
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.request.plugins import make_plugins

STEPS = 2


class Collectives(TorchDispatchMode):
    """Bytes of tensors that operations give to functional collectives."""

    payload_bytes = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            first = args[0]
            is_local = "wrap" in str(func)
            self.payload_bytes += 0 if is_local else first.numel() * first.element_size()
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_replicas() -> Iterator[list[int]]:
    """Bytes that each sum over replicas is given."""
    found: list[int] = []
    all_reduce, all_gather = transport.all_reduce, transport.all_gather

    def reduced(values: Tensor, *rest: Any) -> None:
        found.append(values.nbytes)
        all_reduce(values, *rest)

    def gathered(rows: Tensor, row: Tensor, *rest: Any) -> None:
        found.append(row.nbytes)
        all_gather(rows, row, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "all_reduce", reduced)
        patch.setattr(reduce, "all_gather", gathered)
        yield found


def run_micro_batches(model: Any, tokens: Tensor, count: int) -> None:
    """Forward and backward of each; gradients are reduced in the last."""
    for index in range(count):
        model.set_requires_gradient_sync(index + 1 == count)
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()


def measured_peak(rank: int, size: int, settings: Settings) -> int:
    """Bytes that a steady step of a real run takes from the allocator at most, beside what rests.

    Every buffer of the model must be small: large ones are mapped, and seen by no allocator.
    """
    del rank, size
    model = plan_models.small()
    mesh = settings.mesh.build(torch.get_default_device().type)
    policy = MixedPrecisionPolicy()
    if settings.bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for members in (*units_of(model, settings.units).values(), (model,)):
        unit: Any = list(members) if len(members) > 1 else members[0]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard)
    tokens = torch.zeros(settings.local_batch, settings.sequence, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        run_micro_batches(model, tokens, settings.accumulate)

    for _ in range(3):
        step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    allocated = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def settings_of(factory: str, mesh: str, given: dict[str, object]) -> Settings:
    """Of a run on ``mesh``, with one sequence for each data-parallel rank."""
    spec = parse_mesh(mesh)
    chosen = {
        "model": f"plan_models:{factory}",
        "mesh": spec,
        "batch": spec.data_ranks * int(cast("int", given.get("accumulate", 1))),
        "sequence": 16,
        "backend": "gloo",
    }
    if spec.size("tensor") > 1:
        chosen["tp_plan"] = "polyshard_tensor_parallel:demo_plan"
    return Settings(**(chosen | given))  # type: ignore[arg-type]


def sharded(settings: Settings, factory: str) -> Any:
    """The model of a run of ``settings``, as a user shards it."""
    model = plan_models.factories()[factory]()
    mesh = settings.mesh.build(torch.get_default_device().type)
    plugins = make_plugins(settings)
    if settings.mesh.size("tensor") > 1:
        from polyshard_tensor_parallel import TensorParallel, demo_plan

        tensor_parallel = TensorParallel(demo_plan(), mesh=mesh["tp"])
        tensor_parallel.apply(model)
        plugins.append(tensor_parallel)
    policy = MixedPrecisionPolicy()
    if settings.bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    keywords: dict[str, Any] = {
        "mesh": mesh[settings.mesh.data_axes],
        "plugins": plugins,
        "mp_policy": policy,
        "reshard_after_forward": settings.reshard,
    }
    if settings.placement:
        keywords["shard_placement_fn"] = getattr(plan_models, settings.placement.partition(":")[2])
    for block in model.blocks:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)
    return model


def described(rank: int, size: int, settings: Settings, factory: str) -> Document:
    """The document of a model that is sharded on real ranks, before and after it has run."""
    del rank, size
    model = sharded(settings, factory)
    before = describe(model)
    tokens = torch.zeros(settings.local_batch, plan_models.SEQUENCE, dtype=torch.int64)
    model(tokens).float().sum().backward()
    assert describe(model).memory == before.memory
    return describe(model)


def of_the_default_mesh(rank: int, size: int) -> Document:
    """The document of a model that was sharded without a mesh."""
    del rank, size
    model = plan_models.Pair()
    for module in (*model.layers, model):
        fully_shard(module)
    return describe(model)


def refusal(rank: int, size: int, meshes: Sequence[str]) -> str:
    """Words about a model whose units are on several meshes; or about one that is not sharded."""
    del rank, size
    model = plan_models.small()
    for block, mesh in zip(model.blocks, meshes, strict=False):
        fully_shard(block, mesh=parse_mesh(mesh).build(torch.get_default_device().type))
    with pytest.raises(PlanError) as caught:
        describe(model)
    return str(caught.value)


def sent_in_a_step(rank: int, size: int, settings: Settings, factory: str) -> dict[str, Any]:
    """What the last step of a run sent from this rank: by group, to replicas, by the model."""
    del size
    model = sharded(settings, factory)
    tokens = torch.zeros(settings.local_batch, plan_models.SEQUENCE, dtype=torch.int64)
    before: dict[str, int] = {}
    summed = 0
    own = Collectives()  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        before = {name: t.sent_bytes for name, t in stats(model).groups.items()}
        own.payload_bytes = 0
        with counted_replicas() as given, own:
            run_micro_batches(model, tokens, settings.accumulate)
        summed = sum(given)
    after = {name: t.sent_bytes for name, t in stats(model).groups.items()}
    return {
        "rank": rank,
        "groups": {name: after[name] - before[name] for name in after},
        "replicas": summed,
        "own": own.payload_bytes,
    }
