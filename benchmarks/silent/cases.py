"""The cases: a function each, which raises ``DifferentError`` where an engine's result is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.silent.engines import Engine, whole


class DifferentError(Exception):
    """The engine's numbers are not the oracle's."""


class NotApplicableError(Exception):
    """The engine has nothing that the case is about."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    title: str
    source: str
    run: Callable[[Engine], None]
    ranks: int = 2


CASES: dict[str, Case] = {}


def case(
    title: str, source: str, *, ranks: int = 2
) -> Callable[[Callable[[Engine], None]], Callable[[Engine], None]]:
    """Adds a function to the table under its own name."""

    def add(run: Callable[[Engine], None]) -> Callable[[Engine], None]:
        CASES[run.__name__] = Case(title, source, run, ranks)
        return run

    return add


class Tied(nn.Module):
    """Two layers with one weight."""

    tied = True

    def __init__(self, rows: int = 7) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(rows, rows), nn.Linear(rows, rows)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).tanh())
        return result


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def data(rank: int, width: int = 8) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 + rank))


def mine(width: int = 8) -> Tensor:
    return data(dist.get_rank(), width)


def everyone(width: int = 8) -> Tensor:
    return torch.cat([data(r, width) for r in range(dist.get_world_size())])


def loss(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


def same(
    got: dict[str, Tensor], want: dict[str, Tensor], what: str, *, allowed: float = 1e-5
) -> None:
    """The largest difference, in numbers."""
    for name, value in want.items():
        if name not in got:
            raise DifferentError(f"{what} of {name} is missing")
        off = (got[name] - value).abs().max().item()
        if not off <= allowed:
            largest = value.abs().max().item()
            raise DifferentError(
                f"{what} of {name} is off by {off:.3g} (largest value {largest:.3g})"
            )


def close(got: Any, want: Any, what: str) -> None:
    if not abs(float(got) - float(want)) <= 1e-5 * max(1.0, abs(float(want))):
        raise DifferentError(f"{what} is {float(got):.5g}, and should be {float(want):.5g}")


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def train(engine: Engine, plain: nn.Module, width: int, steps: int = 2) -> None:
    """Some steps of SGD beside one process with the global batch."""
    model = engine.shard(copy.deepcopy(plain))
    ours = torch.optim.SGD(model.parameters(), 0.5)
    theirs = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(steps):
        for each, optimizer, x in ((model, ours, mine(width)), (plain, theirs, everyone(width))):
            optimizer.zero_grad()
            loss(each, x).backward()
            optimizer.step()
    same(engine.parameters(model), values(plain), "value")


@case("Tied weight, rows that do not divide", "pytorch#176076")
def tied_uneven(engine: Engine) -> None:
    train(engine, Tied(), 7)


@case("Fewer rows than ranks", "pytorch#176076")
def empty_shard(engine: Engine) -> None:
    train(engine, mlp(1), 1)


@case("Misuse: optimizer that holds a parameter twice", "pytorch#176257")
def parameter_twice(engine: Engine) -> None:
    model = engine.shard(Tied())
    weights = [model.parameters(), [next(iter(model.parameters()))]]
    torch.optim.SGD([{"params": list(w)} for w in weights], 0.5)
    raise DifferentError("an optimizer took one parameter in two groups")


@case("Misuse: optimizer built before sharding", "accelerate#2665")
def optimizer_before(engine: Engine) -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model = engine.shard(model)
    loss(model, mine()).backward()
    optimizer.step()
    loss(plain, everyone()).backward()
    torch.optim.SGD(plain.parameters(), 0.5).step()
    same(engine.parameters(model), values(plain), "value")


def _norm(model: nn.Module) -> Tensor:
    norm: Tensor = torch.cat([g.flatten() for g in grads(model).values()]).norm()
    return norm


@case("Norm that the engine's clipping returns, logged", "pytorch#170862")
def norm_logged(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    close(engine.clip(model, 1e9).item(), _norm(plain).item(), "norm")


@case("Clipping by the norm", "pytorch#170862")
def clipping(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    engine.clip(model, 0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    same(engine.gradients(model), grads(plain), "gradient")


@case("Gradient scale, which Adam hides", "arXiv 2506.14813")
def gradient_scale(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    same(engine.gradients(model), grads(plain), "gradient")


@case("Evaluation between two training steps", "pytorch#110139")
def after_evaluation(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    for _ in range(2):
        with torch.no_grad():
            close(loss(model, everyone()), loss(plain, everyone()), "loss")
        model.zero_grad()
        plain.zero_grad()
        loss(model, mine()).backward()
        loss(plain, everyone()).backward()
    same(engine.gradients(model), grads(plain), "gradient")


@case("Accumulation without synchronisation", "cosmos-framework#161")
def accumulation(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    with engine.unsynchronised(model):
        loss(model, mine()).backward()
    loss(model, mine()).backward()
    (2 * loss(plain, everyone())).backward()
    same(engine.gradients(model), grads(plain), "gradient")


@case("Misuse: optimizer step before gradients are synchronised", "cosmos-framework#162")
def step_unsynchronised(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with engine.unsynchronised(model):
        loss(model, mine()).backward()
        optimizer.step()
    loss(plain, everyone()).backward()
    torch.optim.SGD(plain.parameters(), 0.5).step()
    same(engine.parameters(model), values(plain), "value")


@case("Misuse: ranks with different initial weights", "arXiv 2506.14813")
def initial_weights(engine: Engine) -> None:
    plain = mlp()
    torch.manual_seed(dist.get_rank())
    model = engine.shard(plain if dist.get_rank() == 0 else mlp())
    with torch.no_grad():
        loss(model, mine())
    torch.manual_seed(0)
    same(engine.parameters(model), values(mlp()), "value")


@case("A layer skipped on one rank", "pytorch#115607")
def skipped_layer(engine: Engine) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) if dist.get_rank() else self.b(self.a(x))
            return result

    model = engine.shard(Skips())
    loss(model, mine()).backward()
    found = engine.gradients(model)
    if not {"a.weight", "b.weight"} <= set(found):
        raise DifferentError(f"only {sorted(found)} have gradients")


@case("NaN on one rank only", "arXiv 2512.20345")
def nan_on_one(engine: Engine) -> None:
    model = engine.shard(mlp())
    x = mine()
    if dist.get_rank():
        x[0, 0] = float("nan")
    loss(model, x).backward()
    if not engine.gradients(model)["0.weight"].isnan().any():
        raise DifferentError("the gradient has no NaN")


@case("Frozen layer trained later", "deepspeed#1801")
def thawed(engine: Engine) -> None:
    plain = mlp()
    plain[0].requires_grad_(False)
    model = engine.shard(copy.deepcopy(plain))
    loss(model, mine()).backward()
    for each in (model, plain):
        each.zero_grad()
        for p in each.parameters():
            p.requires_grad_(True)
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    same(engine.gradients(model), grads(plain), "gradient")


@case("Misuse: state of another optimizer loaded", "arXiv 2506.10426")
def other_state(engine: Engine) -> None:
    model = engine.shard(mlp())
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss(model, mine()).backward()
    sgd.step()
    adam = torch.optim.Adam(model.parameters())
    adam.load_state_dict(sgd.state_dict())
    adam.step()
    raise DifferentError("Adam stepped with the state of SGD")


@case("Optimizer state is sharded as its parameter", "TransformerEngine#2795")
def optimizer_state(engine: Engine) -> None:
    model = engine.shard(mlp())
    adam = torch.optim.Adam(model.parameters())
    loss(model, mine()).backward()
    adam.step()
    for p in model.parameters():
        if (
            type(adam.state[p]["exp_avg"]) is not type(p.data)
            or whole(p).shape != whole(adam.state[p]["exp_avg"]).shape
        ):
            raise DifferentError("a state has another type or shape than its parameter")


def check_gradients(engine: Engine, model: Any, plain: nn.Module) -> None:
    """Those of one backward each, beside one process with the global batch."""
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    same(engine.gradients(model), grads(plain), "gradient")


def only_fully_shard(engine: Engine) -> None:
    if not engine.has_fully_shard:
        raise NotApplicableError


@case("Shard axis of one rank beside replicas", "verl#7493, pytorch#154888")
def size_one_axis(engine: Engine) -> None:
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    check_gradients(engine, engine.shard(copy.deepcopy(plain), mesh=mesh), plain)


@case("Mean over replicas and shards", "Arctic-Platform#55", ranks=4)
def mean_over_both(engine: Engine) -> None:
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_gradients(engine, engine.shard(copy.deepcopy(plain), mesh=mesh), plain)


@case("Replicas summed by the last micro-batch alone, compiled", "torchtitan#4505")
def replicas_compiled(engine: Engine) -> None:
    only_fully_shard(engine)
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = engine.shard(copy.deepcopy(plain), mesh=mesh)
    compiled = torch.compile(model, backend="aot_eager")
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        loss(compiled, mine()).backward()
    (2 * loss(plain, everyone())).backward()
    same(engine.gradients(model), grads(plain), "gradient")


@case("Tied weight after meta and to_empty", "accelerate#3154")
def tied_from_meta(engine: Engine) -> None:
    only_fully_shard(engine)
    with torch.device("meta"):
        model = engine.shard(Tied(8))
    model.to_empty(device="cpu")
    if model.first.weight is not model.last.weight:
        raise DifferentError("first.weight and last.weight are two parameters")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.125)
    plain = Tied(8)
    for parameter in plain.parameters():
        nn.init.constant_(parameter, 0.125)
    check_gradients(engine, model, plain)


@case("Muon on rows of matrices", "Megatron-LM#5961")
def muon(engine: Engine) -> None:
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    model = engine.shard(copy.deepcopy(plain))
    ours = torch.optim.Muon(model.parameters(), 0.1)
    loss(model, mine()).backward()
    ours.step()
    loss(plain, everyone()).backward()
    torch.optim.Muon(plain.parameters(), 0.1).step()
    same(engine.parameters(model), values(plain), "value", allowed=1.5e-2)  # computed in bfloat16


@case("Clipping by torch.nn.utils", "RLinf#1542")
def clipping_of_torch(engine: Engine) -> None:
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    loss(model, mine()).backward()
    loss(plain, everyone()).backward()
    for each in (model, plain):
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)
    same(engine.gradients(model), grads(plain), "gradient")


@case("Layers made and sharded one after another", "pytorch#176225")
def one_after_another(engine: Engine) -> None:
    only_fully_shard(engine)
    layers, plain = [], []
    for _ in range(12):  # what was sharded is freed, and others come to its address
        layer = nn.Linear(8, 8)
        plain.append(copy.deepcopy(layer))
        layers.append(engine.fully_shard(layer))  # type: ignore[attr-defined]
    whole_model = engine.fully_shard(nn.Sequential(*layers))  # type: ignore[attr-defined]
    if len({id(p) for p in whole_model.parameters()}) != 24:
        raise DifferentError("layers share parameters")
    check_gradients(engine, whole_model, nn.Sequential(*plain))


@case("Parameters kept gathered, and a step between", "set_reshard_after_backward of FSDP2")
def kept_gathered(engine: Engine) -> None:
    only_fully_shard(engine)
    plain = mlp()
    model = engine.shard(copy.deepcopy(plain))
    model.set_reshard_after_backward(False)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.5) for each in (model, plain))
    for _ in range(2):
        for each, optimizer, x in ((model, ours, mine()), (plain, theirs, everyone())):
            optimizer.zero_grad()
            loss(each, x).backward()
            optimizer.step()
    with torch.no_grad():
        close(loss(model, everyone()), loss(plain, everyone()), "loss")
