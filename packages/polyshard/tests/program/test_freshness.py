"""Weights written between turns, in any way, are the ones the next forward computes with.

Every way of writing (most bump no version counter of a ``DTensor``) meets every way in which what
was made of the shards outlives a forward. The oracle is the same model in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from toy_codecs import GatherFactory, Keeping
from toy_meeting import await_all
from toy_storage import EagerPlugin
from toy_tensors import OldForm

from polyshard import MixedPrecisionPolicy, Plugin, fully_shard, hookimpl
from polyshard.plugins.seams import GroupInfo
from polyshard.program import freshness
from polyshard.program.freshness import Freshness, differs, imprint
from polyshard.program.unshard import NativeGather
from polyshard.transport.base import Turn
from polyshard_testing import World, ranks


class Coding(Plugin):
    """A codec whose payload is not kept."""

    name = "coding"

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherFactory:
        return GatherFactory()


class Net(nn.Module):
    """Rows that do not divide evenly, a row per rank or none, a root with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.norm(x)
        return out


ROWS = torch.tensor([0, 1, 2, 3, 4, 5, 6])


def make() -> Net:
    torch.manual_seed(0)
    return Net()


@dataclass(frozen=True)
class Model:
    """A model and its parameters as an optimizer got them; ``size`` ranks share each of them."""

    module: Any
    parameters: list[nn.Parameter]
    size: int


# Ways of writing -----------------------------------------------------------------------------


def step_with(kind: type[torch.optim.Optimizer], **how: Any) -> Callable[[Model], None]:
    def write(model: Model) -> None:
        optimizer = kind(model.parameters, lr=0.1, **how)  # type: ignore[call-arg]
        for number, parameter in enumerate(model.parameters):
            parameter.grad = torch.full_like(parameter.detach(), 0.5 + number)
        optimizer.step()
        optimizer.zero_grad()

    return write


def average(model: Model) -> None:
    """What an averaged teacher is updated with."""
    values = [p.detach() for p in model.parameters]
    torch._foreach_lerp_(values, [torch.ones_like(v) for v in values], 0.25)


def scale(model: Model) -> None:
    torch._foreach_mul_([p.detach() for p in model.parameters], 1.25)


def local_parts(model: Model) -> list[Tensor]:
    """What each rank holds, or the same parts of the whole parameters."""
    parts: list[Tensor] = []
    for parameter in model.parameters:
        if isinstance(parameter, DTensor):
            data: Any = parameter.data
            local = data.to_local()
            parts.append(getattr(local, "held", local))
        else:
            parts.extend(parameter.data.chunk(model.size))
    return parts


def permute_rows(model: Model) -> None:
    """Past all counters, and no sum of values changes."""
    for part in local_parts(model):
        part.copy_(part.flip(0).clone())


def permute_words(model: Model) -> None:
    for part in local_parts(model):
        part.copy_(part.flip(-1).clone())


def negate_in_place(model: Model) -> None:
    with torch.no_grad():
        for part in local_parts(model):
            part.neg_()


def copy_in_place(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters:
            parameter.copy_(parameter * 1.5)


def load(model: Model) -> None:
    state = model.module.state_dict()
    model.module.load_state_dict({name: value * 3 for name, value in state.items()})


WRITERS: dict[str, Callable[[Model], None]] = {
    "adamw-foreach": step_with(torch.optim.AdamW, foreach=True),
    "adamw-fused": step_with(torch.optim.AdamW, fused=True),
    "adamw-one-by-one": step_with(torch.optim.AdamW, foreach=False),
    "sgd-foreach": step_with(torch.optim.SGD, foreach=True),
    "average": average,
    "scale": scale,
    "rows": permute_rows,
    "words": permute_words,
    "signs": negate_in_place,
    "copy": copy_in_place,
    "load": load,
}


PAST_DTENSORS = ("rows", "words", "signs")
"""What a toy tensor class with a gather of its own takes part in."""


# Ways of keeping -----------------------------------------------------------------------------


def evaluate(model: Model) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.module(ROWS)
    return out


def forward_only(model: Model) -> Tensor:
    """As if training, but no backward comes."""
    out: Tensor = model.module(ROWS)
    return out.detach()


def train(model: Model) -> Tensor:
    out: Tensor = model.module(ROWS)
    out.square().sum().backward()
    for parameter in model.parameters:
        parameter.grad = None
    return out.detach()


def by_hand(model: Model) -> Tensor:
    """Gathered by the user before and after."""
    for module in model.module.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return evaluate(model)


def ahead(model: Model) -> Tensor:
    """The user starts gathers and waits for none of them."""
    if hasattr(model.module, "unshard"):
        for module in (model.module, *model.module.layers):
            module.unshard(async_op=True)
    return evaluate(model)


def part_by_part(model: Model) -> Tensor:
    """Units called from outside, each a turn of its own."""
    with torch.no_grad():
        model.module(ROWS)
        out: Tensor = model.module.layers[1](model.module.layers[0](torch.ones(6)))
    return out


@dataclass(frozen=True)
class Keeper:
    """How units are sharded, what is run before and after the write, and what is set."""

    run: Callable[[Model], Tensor]
    reshard: bool | int | None = None
    plugin: Callable[[], object] | None = None
    keeps_after_backward: bool = False
    policy: MixedPrecisionPolicy | None = None
    replicated: bool = False
    wraps: bool = False


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
KEEPERS: dict[str, Keeper] = {
    "evaluation": Keeper(evaluate, reshard=False),
    "evaluation-cast": Keeper(evaluate, reshard=False, policy=BF16),
    "evaluation-replicas": Keeper(evaluate, reshard=False, replicated=True),
    "evaluation-parts": Keeper(part_by_part, reshard=False),
    "root": Keeper(forward_only),
    "accumulation": Keeper(train, keeps_after_backward=True),
    "accumulation-unfreed": Keeper(train, reshard=False, keeps_after_backward=True),
    "blocks": Keeper(forward_only, reshard=2),
    "blocks-accumulation": Keeper(train, reshard=2, keeps_after_backward=True),
    "by-hand": Keeper(by_hand),
    "ahead": Keeper(ahead),
    "payload": Keeper(evaluate, plugin=Keeping),
    "payload-training": Keeper(train, plugin=Keeping),
    "payload-kept": Keeper(evaluate, reshard=False, plugin=Keeping),
    "codec-kept": Keeper(evaluate, reshard=False, plugin=Coding),
    "prefetched": Keeper(evaluate, plugin=lambda: EagerPlugin(3)),
    "prefetched-training": Keeper(train, plugin=lambda: EagerPlugin(3)),
    "far-kept": Keeper(evaluate, reshard=False, plugin=lambda: EagerPlugin(1)),
    "protocol": Keeper(evaluate, reshard=False, wraps=True),
}


def sharded(keeper: Keeper, size: int) -> Model:
    module: Any = make()
    kwargs: dict[str, Any] = {}
    if keeper.replicated:
        mesh = init_device_mesh(
            torch.get_default_device().type, (2, size // 2), mesh_dim_names=("replicate", "shard")
        )
        kwargs["mesh"] = mesh
        size //= 2
    if keeper.plugin is not None:
        kwargs["plugins"] = [keeper.plugin()]
    if keeper.policy is not None:
        kwargs["mp_policy"] = keeper.policy
    if keeper.reshard is not None:
        kwargs["reshard_after_forward"] = keeper.reshard
    if keeper.wraps:
        for layer in module.layers:
            layer.weight = nn.Parameter(OldForm(layer.weight.detach()))
    for layer in module.layers:
        fully_shard(layer, **kwargs)
    fully_shard(module, **kwargs)
    module.set_reshard_after_backward(not keeper.keeps_after_backward)
    return Model(module, list(module.parameters()), size)


def expected_of(keeper: Keeper, plain: Model) -> Tensor:
    if keeper.policy is None:
        return keeper.run(plain)
    cast = make()
    cast.load_state_dict(plain.module.state_dict())
    return keeper.run(Model(cast.to(torch.bfloat16), [], 1))


def told(when: str) -> Callable[[str], str]:
    return lambda text: f"{when}: {text}"


def written_between(rank: int, size: int, keeping: str) -> None:
    keeper = KEEPERS[keeping]
    model = sharded(keeper, size)
    module = make()
    plain = Model(module, list(module.parameters()), model.size)
    for _ in range(3):  # so that orders are known
        torch.testing.assert_close(keeper.run(model), expected_of(keeper, plain))
    for writing in PAST_DTENSORS if keeper.wraps else WRITERS:
        write = WRITERS[writing]
        for each in (model, plain):
            write(each)
        for _ in range(2):
            ours, wanted = keeper.run(model), expected_of(keeper, plain)
            torch.testing.assert_close(ours, wanted, msg=told(f"after {writing}"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("keeping", [k for k in KEEPERS if "replicas" not in k])
def test_written_between_turns(world2: World, keeping: str) -> None:
    world2.run(written_between, keeping)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keeping", ["evaluation-replicas", "blocks", "blocks-accumulation"])
def test_written_between_turns_on_more_ranks(world4: World, keeping: str) -> None:
    world4.run(written_between, keeping)


@pytest.mark.parametrize("keeping", ["evaluation", "evaluation-cast", "payload", "by-hand"])
def test_written_between_turns_alone(world1: World, keeping: str) -> None:
    world1.run(written_between, keeping)


# Ranks agree -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False, 2])
@ranks(2)
def test_ranks_whose_rows_stay_gather_with_the_others(
    rank: int, size: int, reshard: bool | int
) -> None:
    """Rows that only the other rank holds get a gradient: this rank's part stays as it is."""
    model = sharded(Keeper(train, reshard=reshard, keeps_after_backward=True), size)
    module = make()
    plain = Model(module, list(module.parameters()), size)
    for each in (model, plain):
        for name, parameter in zip(dict(make().named_parameters()), each.parameters, strict=True):
            parameter.requires_grad_(name == "embedding.weight")
    optimizers = [torch.optim.SGD(m.parameters, lr=0.5) for m in (model, plain)]
    for step in range(4):
        rows = torch.tensor([0, 1] if step % 2 else [5, 6])
        outputs = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            out = each.module(rows)
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(out.detach())
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(evaluate(model), evaluate(plain))


@ranks(2)
def test_plain_training_looks_at_nothing(rank: int, size: int) -> None:
    """Plain training and evaluation keep nothing from one turn to the next."""
    looks: list[str] = []
    model = sharded(Keeper(train), size)
    optimizer = torch.optim.AdamW(model.parameters, lr=0.1)
    for _ in range(3):
        evaluate(model)
        model.module(ROWS).square().sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NativeGather, "differs", lambda self, fetch: looks.append("native"))
            patch.setattr(Freshness, "is_current", lambda self, is_near: looks.append("payload"))
            evaluate(model)
            model.module(ROWS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not looks


@ranks(2)
def test_a_payload_is_checked_once_a_forward(rank: int, size: int) -> None:
    """A payload's shard is read once a forward, and not at all in backward."""
    model = sharded(Keeper(train, plugin=Keeping), size)
    train(model)
    seen: list[int] = []

    def counted(shard: Tensor) -> int | None:
        seen.append(1)
        return imprint(shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freshness, "imprint", counted)
        for _ in range(2):
            seen.clear()
            train(model)
            assert len(seen) == 3  # the layers, and the root
            scale(model)


# What a look sees ------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one word": lambda t: t.view(torch.int32)[17].add_(1),
    "one bit": lambda t: t.view(torch.uint8)[99].bitwise_xor_(1),
    "two rows": lambda t: t.view(8, -1).index_copy_(
        0, torch.tensor([1, 5]), t.view(8, -1)[[5, 1]].clone()
    ),
    "halves": lambda t: t.copy_(t.roll(t.numel() // 2).clone()),
    "reversed": lambda t: t.copy_(t.flip(0).clone()),
    "transposed": lambda t: t.view(8, -1).copy_(t.view(-1, 8).t().clone()),
    "a zero's sign": lambda t: t[3:4].neg_(),
    "a NaN's payload": lambda t: t.view(torch.int32)[4].add_(1),
    "two of opposite sign": lambda t: t[8:10].copy_(t[8:10].flip(0).clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_look_sees_every_change(change: str) -> None:
    values = torch.randn(64 * 8)
    values[3], values[4], values[8], values[9] = 0.0, float("nan"), 2.5, -2.5
    copy, before = values.clone(), imprint(values)
    assert imprint(values) == before
    assert not differs([(copy, values)])
    CHANGES[change](values)
    assert imprint(values) != before
    assert differs([(copy, values)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
def test_copies_are_compared_as_what_they_were_cast_to(dtype: torch.dtype) -> None:
    values = torch.randn(3, 700_000).to(torch.complex64 if dtype.is_complex else torch.float32)
    copy = values.to(dtype, copy=True)
    assert not differs([(copy, values), (torch.tensor(1.0), torch.tensor(1.0))])
    copy[2, -1] += 1
    assert differs([(torch.ones(2), torch.ones(2)), (copy, values)])


def test_turns_vouch_for_what_was_made_in_them() -> None:
    turn = Turn()
    assert not turn.vouches(0), "outside of any turn everything is looked at"
    turn.begin()
    assert turn.vouches(1)
    assert not turn.vouches(0)
    turn.in_forward = False
    assert not turn.vouches(1)
    turn.in_backward = True
    assert turn.vouches(1)


# Micro-batches ---------------------------------------------------------------------------------


def announce_by_last(module: Any, is_last: bool) -> None:
    module.set_is_last_backward(is_last)


def announce_by_sync(module: Any, is_last: bool) -> None:
    module.set_requires_gradient_sync(is_last)


def announce_nothing(module: Any, is_last: bool) -> None:
    del module, is_last


ANNOUNCE = {"last": announce_by_last, "sync": announce_by_sync, "": announce_nothing}
KEPT = Keeper(train, keeps_after_backward=True)
FREED = Keeper(train)


def micro_batch(model: Model, number: int) -> tuple[Tensor, int]:
    """The output of a forward with its backward, and how many groups it compared on this rank."""
    looks: list[NativeGather] = []

    def look(gather: NativeGather, fetch: Callable[[], None]) -> Tensor:
        looks.append(gather)
        return differs_of(gather, fetch)

    differs_of = NativeGather.differs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeGather, "differs", look)
        out = model.module(ROWS.roll(number))
        out.square().sum().backward()
    return out.detach(), len(looks)


@pytest.mark.parametrize("how", ANNOUNCE)
@ranks(2)
def test_announced_micro_batches_compare_nothing(rank: int, size: int, how: str) -> None:
    """And give the bits of a model that gathers for each of them."""
    models = [sharded(keeper, size) for keeper in (KEPT, FREED)]
    optimizers = [torch.optim.AdamW(m.parameters, lr=0.1, foreach=True) for m in models]
    for _ in range(3):
        for number in range(4):
            results = []
            for model in models:
                ANNOUNCE[how](model.module, number == 3)
                results.append(micro_batch(model, number))
            assert torch.equal(results[0][0], results[1][0])
            assert results[1][1] == 0
            is_compared = number > 0 and not how  # a step frees what it changes
            assert results[0][1] == (3 if is_compared else 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(models[0].parameters, models[1].parameters, strict=True):
        assert torch.equal(
            local_parts(Model(None, [ours], size))[0], local_parts(Model(None, [wanted], size))[0]
        )


STEPPED: dict[str, Callable[[Model], None]] = {
    "foreach": step_with(torch.optim.AdamW, foreach=True),
    "fused": step_with(torch.optim.AdamW, fused=True),
    "one by one": step_with(torch.optim.SGD, foreach=False),
    "one parameter": lambda model: step_with(torch.optim.SGD)(
        replace(model, parameters=model.parameters[-1:])
    ),
    "loaded": load,
}


@pytest.mark.parametrize("how", ["last", "sync"])
@ranks(4)
def test_steps_between_micro_batches_are_seen(rank: int, size: int, how: str) -> None:
    """By the last rank as well, which has a row of the embedding and no other."""
    model, module = sharded(KEPT, size), make()
    plain = Model(module, list(module.parameters()), size)
    for writing, write in STEPPED.items():
        ANNOUNCE[how](model.module, False)
        for each in (model, plain):
            for _ in range(2):
                train(each)
            write(each)
        for _ in range(2):
            torch.testing.assert_close(train(model), train(plain), msg=told(f"after {writing}"))


@ranks(2)
def test_other_optimizers_and_ends_of_iterations(rank: int, size: int) -> None:
    """What is compared after which event, in a model whose last backward was announced."""
    model, other = sharded(KEPT, size), nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)

    def compares_after(event: Callable[[], object]) -> bool:
        announce_by_last(model.module, False)
        micro_batch(model, 0)
        event()
        return micro_batch(model, 1)[1] > 0

    def write_by_hand() -> None:
        scale(model)

    def end() -> None:
        announce_by_last(model.module, True)
        train(model)
        announce_by_last(model.module, False)

    def gather_by_hand() -> None:
        # a rank still in its backward would hear that the other gave its step up
        await_all("compared", dist.get_world_size())
        model.module.reset_iter_state()
        for module in (model.module, *model.module.layers):
            module.unshard()

    micro_batch(model, 0)
    assert not compares_after(lambda: None)
    assert not compares_after(elsewhere.step if rank == 0 else list)
    assert not compares_after(write_by_hand)  # documented
    assert compares_after(end)
    assert compares_after(gather_by_hand)
    assert not compares_after(step_of(model))  # nothing is kept over it


def step_of(model: Model) -> Callable[[], None]:
    return lambda: step_with(torch.optim.SGD)(model)


@ranks(2)
def test_manual_finalization_ends_what_was_announced(rank: int, size: int) -> None:
    model = sharded(KEPT, size)
    model.module.set_manual_backward_finalization(True)
    for _ in range(2):
        micro_batch(model, 0)
        assert micro_batch(model, 1)[1] == 0
        model.module.finalize_backward()
        assert micro_batch(model, 2)[1] == 3
        model.module.finalize_backward()
        step_of(model)()
