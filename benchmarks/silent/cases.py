"""The cases: a function each, which raises ``DifferentError`` where an engine's result is wrong."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks.silent.engines import Engine, NotApplicableError, bare, whole


class DifferentError(Exception):
    """The engine's numbers are not the oracle's."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    title: str
    source: str
    run: Callable[[Engine], None]
    ranks: int = 2
    against: tuple[str, ...] = ()
    """Engines whose documentation rules this use out."""


CASES: dict[str, Case] = {}
Run = Callable[[Engine], None]


def case(
    title: str, source: str, *, ranks: int = 2, against: tuple[str, ...] = ()
) -> Callable[[Run], Run]:
    """Adds a function to the table under its own name."""

    def add(run: Run) -> Run:
        CASES[run.__name__] = Case(title, source, run, ranks, against)
        return run

    return add


# What cases share ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, which therefore belong to one unit."""

    one_unit = True

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(rows, rows), nn.Linear(rows, rows)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x).tanh())
        return result


class Block(nn.Module):
    """What tensor parallelism divides, and a norm that it does not."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(self.up(self.norm(x)).tanh()))
        return result


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class OneUnit(nn.Sequential):
    """Of which no layer is sharded on its own."""

    one_unit = True


def mlp(width: int = 8, kind: type[nn.Sequential] = nn.Sequential, **given: Any) -> nn.Sequential:
    return kind(nn.Linear(width, width, **given), nn.Tanh(), nn.Linear(width, width, **given))


def data(rank: int, width: int = 8) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 + rank))


def mine() -> Tensor:
    return data(dist.get_rank())


def loss(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5)


adam = partial(torch.optim.Adam, lr=0.1)


def same(got: dict[str, Tensor], want: dict[str, Tensor], what: str, allowed: float = 1e-5) -> None:
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


def grid(first: int, second: int, *names: str) -> DeviceMesh:
    """A mesh of ``first`` by ``second`` ranks."""
    return init_device_mesh("cpu", (first, second), mesh_dim_names=names or ("replicate", "shard"))


class Twins:
    """A model with an engine, and the oracle: a copy in this process with the global batch."""

    def __init__(
        self,
        engine: Engine,
        plain: Any = None,
        make: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd,
        **options: Any,
    ) -> None:
        self.plain: Any = mlp() if plain is None else plain
        self.width = next(self.plain.parameters()).shape[-1]
        self.theirs = make(self.plain.parameters())
        self.job = engine(copy.deepcopy(self.plain), make, **options)

    def everyone(self) -> Tensor:
        return torch.cat([data(rank, self.width) for rank in range(dist.get_world_size())])

    def forward_backward(self, times: float = 1.0) -> None:
        """``times`` is how often the oracle has this gradient."""
        self.job.backward(loss(self.job.model, data(dist.get_rank(), self.width)))
        (times * loss(self.plain, self.everyone())).backward()

    def oracle_step(self) -> None:
        self.theirs.step()
        self.theirs.zero_grad()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.forward_backward()
            self.job.step()
            self.oracle_step()

    def check_steps(self, steps: int = 2) -> None:
        self.train(steps)
        self.same_values()

    def check_gradients(self) -> None:
        self.forward_backward()
        self.same_gradients()

    def same_gradients(self) -> None:
        same(self.job.gradients(), grads(self.plain), "gradient")

    def same_values(self, allowed: float = 1e-5) -> None:
        same(self.job.parameters(), values(self.plain), "value", allowed)

    def same_loss(self, model: Any = None, what: str = "loss") -> None:
        with torch.no_grad():
            found = loss(self.job.model if model is None else model, self.everyone())
            close(found, loss(self.plain, self.everyone()), what)


# Sharding -----------------------------------------------------------------------------------------


@case("Tied weight, rows that do not divide", "pytorch#176076")
def tied_uneven(engine: Engine) -> None:
    Twins(engine, Tied(7)).check_steps()


@case("Fewer rows than ranks", "pytorch#176076")
def empty_shard(engine: Engine) -> None:
    Twins(engine, mlp(1)).check_steps()


@case("Layers made and sharded one after another", "pytorch#176225")
def one_after_another(engine: Engine) -> None:
    engine.only_units()
    layers, plain = [], []
    for _ in range(12):  # what was sharded is freed, and others come to its address
        layer = nn.Linear(8, 8)
        plain.append(copy.deepcopy(layer))
        layers.append(engine.fully_shard(layer))
    model, alone = engine.fully_shard(nn.Sequential(*layers)), nn.Sequential(*plain)
    if len({id(p) for p in model.parameters()}) != 24:
        raise DifferentError("layers share parameters")
    loss(model, mine()).backward()
    loss(alone, torch.cat([data(0), data(1)])).backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    same(found, grads(alone), "gradient")


@case("Tied weight after meta and to_empty", "accelerate#3154")
def tied_from_meta(engine: Engine) -> None:
    engine.only_units()
    twins = Twins(engine, Tied(8))
    with torch.device("meta"):
        twins.job = engine(Tied(8))
    model = twins.job.model
    model.to_empty(device="cpu")
    if model.first.weight is not model.last.weight:
        raise DifferentError("first.weight and last.weight are two parameters")
    with torch.no_grad():
        for parameter in (*model.parameters(), *twins.plain.parameters()):
            parameter.fill_(0.125)
    twins.check_gradients()


@case("Shard axis of one rank beside replicas", "verl#7493, pytorch#154888")
def size_one_axis(engine: Engine) -> None:
    Twins(engine, mesh=grid(2, 1)).check_gradients()


@case("Mean over replicas and shards", "Arctic-Platform#55", ranks=4)
def mean_over_both(engine: Engine) -> None:
    Twins(engine, mesh=grid(2, 2)).check_gradients()


@case("Replicas summed by the last micro-batch alone, compiled", "torchtitan#4505")
def replicas_compiled(engine: Engine) -> None:
    engine.only_units()
    twins = Twins(engine, mesh=grid(2, 1))
    model = twins.job.model
    twins.job.model = torch.compile(model, backend="aot_eager")
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        twins.forward_backward()
    twins.same_gradients()


class Numbered(nn.Sequential):
    """Computes with attributes of its layers that have common names."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x) * layer.id * layer.state
        return x


@case("Attributes of modules with common names", "TrainCheck's DeepSpeed#6772")
def own_attributes(engine: Engine) -> None:
    plain = mlp(kind=Numbered)
    layers: list[Any] = list(plain)
    for number, layer in enumerate(layers):
        layer.id, layer.state = number + 2.0, 0.5
    Twins(engine, plain).check_steps()


# Parameters that are more than a tensor -----------------------------------------------------------


class Scaled(nn.Parameter):
    """Integers with a scale, as ``Params4bit`` of bitsandbytes keeps its ``quant_state``."""

    scale: Tensor | None = None


class ScaledLinear(nn.Module):
    """A frozen layer of integers that are scaled when they are used, if their scale is there."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.abs().max() / 127
        self.weight = Scaled((weight / scale).round(), requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self.weight, "scale", None)
        weight = self.weight if scale is None else self.weight * scale
        return nn.functional.linear(x, weight)


@case("Quantized parameter with state of its own", "axolotl#2992")
def quantized_state(engine: Engine) -> None:
    twins, weight = Twins(engine), torch.randn(8, 8)
    model, twins.plain = (
        nn.Sequential(ScaledLinear(weight), copy.deepcopy(twins.plain[2])) for _ in range(2)
    )
    twins.job = engine(model, sgd)
    twins.same_loss()


def _half(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> Any:
    return (self.a.to(torch.bfloat16),), True


def _whole(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
    if out is not None:
        out.copy_(outputs[0])
        return None
    full = outputs[0].to(dtype)
    return full, (full,)


@case("Low-precision gather asked for by a tensor's protocol", "torchtitan#3123")
def codec_dropped(engine: Engine) -> None:
    """FSDP2's protocol, as torchao's float8 weights have it, on torch's own toy subclass."""
    if not engine.gathers_by_tensor:
        raise NotApplicableError
    half: Any = TwoTensor
    half.fsdp_pre_all_gather, half.fsdp_post_all_gather = _half, _whole
    twins = Twins(engine)
    model, weight = copy.deepcopy(twins.plain), twins.plain[0].weight
    model[0].weight = nn.Parameter(TwoTensor(weight.detach().clone(), weight.detach().clone()))
    twins.job = engine(model, sgd)
    with torch.no_grad():
        weight.copy_(weight.bfloat16())
    twins.same_loss()


# Optimizers ---------------------------------------------------------------------------------------


@case("Misuse: optimizer that holds a parameter twice", "pytorch#176257")
def parameter_twice(engine: Engine) -> None:
    def twice(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.SGD([{"params": every}, {"params": every[:1]}], 0.5)

    engine(Tied(8), twice)
    raise DifferentError("an optimizer took one parameter in two groups")


@case("Misuse: optimizer built before sharding", "TrainCheck's accelerate#2665, DeepSpeed#6770")
def optimizer_before(engine: Engine) -> None:
    twins = Twins(engine)
    model = copy.deepcopy(twins.plain)
    optimizer = sgd(model.parameters())
    twins.job = engine(model)
    twins.job.take(optimizer)
    twins.check_steps(1)


@case("Misuse: optimizer built while parameters are gathered", "pytorch#149205")
def optimizer_while_gathered(engine: Engine) -> None:
    """A forward without a backward leaves the root gathered."""
    twins = Twins(engine, mlp(kind=OneUnit))
    twins.job = engine(copy.deepcopy(twins.plain))
    loss(twins.job.model, mine())
    twins.job.take(sgd(twins.job.model.parameters()))
    twins.job.optimizer.zero_grad()
    twins.check_steps(1)


@case("Misuse: state of another optimizer loaded", "arXiv 2506.10426")
def other_state(engine: Engine) -> None:
    def momentum(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    twins = Twins(engine, make=momentum)
    twins.forward_backward()
    twins.job.optimizer.step()
    state = twins.job.optimizer.state_dict()
    if "param_groups" not in state:
        raise NotApplicableError  # has its own kind of state dict
    other = torch.optim.Adam(twins.job.model.parameters())
    other.load_state_dict(state)
    other.step()
    raise DifferentError("Adam stepped with the state of SGD")


@case("Optimizer state is sharded as its parameter", "TransformerEngine#2795")
def optimizer_state(engine: Engine) -> None:
    twins = Twins(engine, make=adam)
    job = twins.job
    if not isinstance(job.optimizer, torch.optim.Optimizer) or not job.optimizer.param_groups:
        raise NotApplicableError
    twins.forward_backward()
    job.optimizer.step()
    for p in job.model.parameters():
        if not p.numel() and not job.optimizer.state[p]:
            continue  # FSDP1 has no state for a parameter of which this rank has nothing
        state = job.optimizer.state[p]["exp_avg"]
        if type(state) is not type(p.data) or whole(p).shape != whole(state).shape:
            raise DifferentError("a state has another type or shape than its parameter")


@case("Compiled optimizer, one step without gradients", "TrainCheck's pytorch#115607")
def compiled_step(engine: Engine) -> None:
    twins = Twins(engine, make=adam)
    if not isinstance(twins.job.optimizer, torch.optim.Optimizer):
        raise NotApplicableError
    step = torch.compile(twins.job.optimizer.step, backend="eager")
    for has_gradients in (True, True, False, True, True):
        if has_gradients:
            twins.forward_backward()
        step()
        twins.job.optimizer.zero_grad()
        twins.oracle_step()
    twins.same_values(allowed=1e-4)


@case("Muon on rows of matrices", "Megatron-LM#5961")
def muon(engine: Engine) -> None:
    twins = Twins(engine, mlp(bias=False), partial(torch.optim.Muon, lr=0.1))
    twins.train(1)
    twins.same_values(allowed=1.5e-2)  # computed in bfloat16


@case("GradScaler, infinity in one rank's rows alone", "pytorch#132816")
def scaler(engine: Engine) -> None:
    twins = Twins(engine)
    job, grad_scaler = twins.job, twins.job.scaler()
    job.backward(grad_scaler.scale(loss(job.model, twins.everyone())))
    for name, p in job.model.named_parameters():
        if bare(name) == "0.weight" and p.grad is not None:
            local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            if dist.get_rank() == 0 or local.shape == (8, 8):
                with torch.no_grad():
                    local.view(-1)[0] = float("inf")
    grad_scaler.step(job.plain_optimizer())
    grad_scaler.update()
    twins.same_values()  # the step is left out on all ranks
    close(grad_scaler.get_scale(), 2.0, "scale")


# Gradients ----------------------------------------------------------------------------------------


@case("Norm that the engine's clipping returns, logged", "pytorch#170862")
def norm_logged(engine: Engine) -> None:
    twins = Twins(engine, clip=1e9)
    twins.forward_backward()
    norm = torch.cat([g.flatten() for g in grads(twins.plain).values()]).norm()
    found = twins.job.clipped_step()
    close(found.item() if isinstance(found, Tensor) else found, norm, "norm")


@case("Clipping by the norm", "pytorch#170862")
def clipping(engine: Engine) -> None:
    twins = Twins(engine, clip=0.01)
    twins.forward_backward()
    nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
    twins.job.clipped_step()
    twins.oracle_step()
    twins.same_values()


@case("Clipping by torch.nn.utils", "RLinf#1542", against=("FSDP1", "DeepSpeed"))
def clipping_of_torch(engine: Engine) -> None:
    twins = Twins(engine)
    twins.forward_backward()
    for each in (twins.job.model, twins.plain):
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)
    twins.same_gradients()


@case("Clipping beside tensor parallelism", "TrainCheck's BLOOM-176B, DeepSpeed#1801", ranks=4)
def clipping_divided(engine: Engine) -> None:
    mesh = grid(2, 2, "dp", "tp")
    plan = {f"{i}.{name}": style for i in range(2) for name, style in PLAN.items()}
    twins = Twins(engine, nn.Sequential(Block(), Block()), mesh=mesh, plan=plan)
    twins.job.backward(loss(twins.job.model, data(mesh.get_local_rank("dp"))))
    loss(twins.plain, torch.cat([data(0), data(1)])).backward()
    twins.job.clip(0.01)
    nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
    twins.same_gradients()


@case("Gradient scale, which Adam hides", "arXiv 2506.14813")
def gradient_scale(engine: Engine) -> None:
    Twins(engine, make=adam).check_gradients()


@case("Accumulation without synchronisation", "cosmos-framework#161")
def accumulation(engine: Engine) -> None:
    twins = Twins(engine)
    with twins.job.unsynchronised():
        twins.forward_backward()
    twins.check_gradients()


@case("Misuse: optimizer step before gradients are synchronised", "cosmos-framework#162")
def step_unsynchronised(engine: Engine) -> None:
    twins = Twins(engine)
    with twins.job.unsynchronised():
        twins.forward_backward()
        twins.job.optimizer.step()
    twins.oracle_step()
    twins.same_values()


@case("Frozen layer trained later", "pytorch#104148", against=("DDP",))
def thawed(engine: Engine) -> None:
    plain = mlp()
    plain[0].requires_grad_(False)
    twins = Twins(engine, plain)
    twins.train(1)
    for p in (*twins.job.model.parameters(), *plain.parameters()):
        p.requires_grad_(True)
    twins.check_gradients()


@case("Layer frozen after a step", "TrainCheck's mmpretrain#702", against=("DDP",))
def frozen_later(engine: Engine) -> None:
    twins = Twins(engine)
    twins.train(1)
    for name, p in (*twins.job.model.named_parameters(), *twins.plain.named_parameters()):
        p.requires_grad_(not bare(name).startswith("0."))
    twins.check_steps(2)


@case("Misuse: model cast to float64 and back", "TrainCheck's pytorch#104336", against=("DDP",))
def cast_and_back(engine: Engine) -> None:
    """Replaces what holds the values, as a move to the host and back does with an accelerator."""
    twins = Twins(engine)
    twins.job.model.double()
    twins.job.model.float()
    twins.check_steps(2)


@case("NaN on one rank only", "arXiv 2512.20345")
def nan_on_one(engine: Engine) -> None:
    job, x = engine(mlp(), sgd), mine()
    if dist.get_rank():
        x[0, 0] = float("nan")
    job.backward(loss(job.model, x))
    if not job.gradients()["0.weight"].isnan().any():
        raise DifferentError("the gradient has no NaN")


class WithMethod(nn.Sequential):
    """A model with a loss of its own beside ``forward``."""

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]


@case("Misuse: a method other than the prepared module's forward", "TrainCheck's ddp-out-of-sync")
def other_method(engine: Engine) -> None:
    twins = Twins(engine, mlp(kind=WithMethod))
    model = twins.job.model
    inner = model if hasattr(model, "loss") else model.module
    twins.job.backward(inner.loss(mine()))
    loss(twins.plain, twins.everyone()).backward()
    twins.same_gradients()


# Values -------------------------------------------------------------------------------------------


@case("Evaluation between two training steps", "pytorch#110139")
def after_evaluation(engine: Engine) -> None:
    twins = Twins(engine)
    for _ in range(3):
        twins.same_loss()
        twins.check_steps(1)


@case("Misuse: parameters kept gathered over a step, then a forward", "pytorch#137348")
def kept_gathered(engine: Engine) -> None:
    engine.only_units()
    twins = Twins(engine)
    twins.job.model.set_reshard_after_backward(False)
    twins.train(2)
    twins.same_loss()


@case("Misuse: parameters kept gathered over a step, then read", "pytorch#144289")
def kept_and_read(engine: Engine) -> None:
    engine.only_units()
    twins = Twins(engine)
    twins.job.model.set_reshard_after_backward(False)
    twins.check_steps(1)


@case("Weights published after each step", "Megatron-LM#6336, verl#2424")
def published(engine: Engine) -> None:
    """A peer (another trainer, an inference engine) is sent the full state dict, and computes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    twins, peer = Twins(engine), mlp()
    options = StateDictOptions(full_state_dict=True)
    for _ in range(3):
        twins.train(1)
        if engine.name == "DeepSpeed":  # has its own state dicts
            state: dict[str, Any] = twins.job.parameters()
        else:
            state = get_model_state_dict(twins.job.model, options=options)
        held: list[Any] = [{bare(n): v for n, v in state.items()}]
        dist.broadcast_object_list(held)
        peer.load_state_dict(held[0])
        twins.same_loss(peer, "the peer's loss")


@case("Checkpoint of a model with a frozen layer", "TrainCheck's DeepSpeed#6771")
def frozen_saved(engine: Engine) -> None:
    def frozen() -> nn.Sequential:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    twins = Twins(engine, frozen(), adam)
    twins.train(2)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        twins.job.save(folder[0])
        twins.job = engine(frozen(), adam)
        twins.job.load(folder[0])
        dist.barrier()
    twins.check_steps()


@case("Misuse: a cached state dict published after another step", "verl#7014")
def published_late(engine: Engine) -> None:
    """A state dict follows the model; what it shows after a step is the new weights."""
    twins = Twins(engine)
    if engine.name == "DeepSpeed":
        raise NotApplicableError
    state = twins.job.model.state_dict()
    twins.train(2)
    found = {bare(n): whole(v) for n, v in state.items()}
    same(found, values(twins.plain), "value")


# Ranks that differ --------------------------------------------------------------------------------


@case("Misuse: ranks with different initial weights", "torchtitan#166")
def initial_weights(engine: Engine) -> None:
    torch.manual_seed(dist.get_rank())
    job = engine(mlp(), sgd)
    with torch.no_grad():
        loss(job.model, mine())
    torch.manual_seed(0)
    same(job.parameters(), values(mlp()), "value")


class Skips(nn.Sequential):
    """One rank goes through its first layer alone."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self[0](x) if dist.get_rank() else self[2](self[1](self[0](x)))
        return result


@case("A layer skipped on one rank", "TrainCheck's DeepSpeed#5794")
def skipped_layer(engine: Engine) -> None:
    job = engine(mlp(kind=Skips), sgd)
    for _ in range(2):
        job.backward(loss(job.model, mine()))
    found = job.gradients()
    if not {"0.weight", "2.weight"} <= set(found):
        raise DifferentError(f"only {sorted(found)} have gradients")


def check_divided(engine: Engine, dropout: float, seeds: list[int], batches: list[Tensor]) -> None:
    """Gradients on two tensor-parallel ranks are those of one process, with one of the batches."""
    rank, plan = dist.get_rank(), {f"0.{name}": style for name, style in PLAN.items()}
    twins = Twins(engine, nn.Sequential(Block(dropout)), mesh=grid(1, 2, "dp", "tp"), plan=plan)
    torch.manual_seed(seeds[rank])
    twins.job.backward(loss(twins.job.model, batches[rank]))
    found, plain, wrong = twins.job.gradients(), twins.plain, []
    for seed, batch in zip(seeds, batches, strict=True):
        plain.zero_grad()
        torch.manual_seed(seed)
        loss(plain, batch).backward()
        try:
            return same(found, grads(plain), "gradient")
        except DifferentError as error:
            wrong.append(error)
    raise wrong[rank]


@case("Misuse: tensor-parallel ranks with data in different order", "accelerate#3092")
def other_data(engine: Engine) -> None:
    check_divided(engine, 0.0, [0, 0], [data(0), data(1)])


@case("Misuse: different dropout where tensor parallelism needs the same", "slapo#21")
def other_dropout(engine: Engine) -> None:
    check_divided(engine, 0.5, [0, 1], [data(0), data(0)])


@case("Dropout beside tensor parallelism", "slapo#21")
def same_dropout(engine: Engine) -> None:
    check_divided(engine, 0.5, [3, 3], [data(0), data(0)])
