"""The cases: a function each, which raises ``DifferentError`` where an engine's result is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from benchmarks.silent.engines import Engine, Job, NotApplicableError, bare, whole


class DifferentError(Exception):
    """The engine's numbers are not the oracle's."""


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


# What cases share ---------------------------------------------------------------------------------


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


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5)


adam = partial(torch.optim.Adam, lr=0.1)


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


def backward(job: Job, x: Tensor | None = None) -> None:
    """One of the engine's, by default with this rank's data."""
    job.backward(loss(job.model, mine() if x is None else x))


def check_gradients(job: Job, plain: nn.Module, *, times: float = 1.0) -> None:
    """Those of one backward beside one process with the global batch."""
    backward(job)
    (times * loss(plain, everyone())).backward()
    same(job.gradients(), grads(plain), "gradient")


def check_steps(job: Job, plain: nn.Module, make: Any = sgd, *, width: int = 8) -> None:
    """Values after two steps beside one process with the global batch."""
    theirs = make(plain.parameters())
    for _ in range(2):
        backward(job, mine(width))
        job.step()
        loss(plain, everyone(width)).backward()
        theirs.step()
        theirs.zero_grad()
    same(job.parameters(), values(plain), "value")


# Sharding -----------------------------------------------------------------------------------------


@case("Tied weight, rows that do not divide", "pytorch#176076")
def tied_uneven(engine: Engine) -> None:
    plain = Tied()
    check_steps(engine.prepare(copy.deepcopy(plain), sgd), plain, width=7)


@case("Fewer rows than ranks", "pytorch#176076")
def empty_shard(engine: Engine) -> None:
    plain = mlp(1)
    check_steps(engine.prepare(copy.deepcopy(plain), sgd), plain, width=1)


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
    loss(alone, everyone()).backward()
    found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    same(found, grads(alone), "gradient")


@case("Tied weight after meta and to_empty", "accelerate#3154")
def tied_from_meta(engine: Engine) -> None:
    engine.only_units()
    with torch.device("meta"):
        job = engine.prepare(Tied(8))
    job.model.to_empty(device="cpu")
    if job.model.first.weight is not job.model.last.weight:
        raise DifferentError("first.weight and last.weight are two parameters")
    plain = Tied(8)
    with torch.no_grad():
        for parameter in (*job.model.parameters(), *plain.parameters()):
            parameter.fill_(0.125)
    check_gradients(job, plain)


@case("Shard axis of one rank beside replicas", "verl#7493, pytorch#154888")
def size_one_axis(engine: Engine) -> None:
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    check_gradients(engine.prepare(copy.deepcopy(plain), sgd, mesh=mesh), plain)


@case("Mean over replicas and shards", "Arctic-Platform#55", ranks=4)
def mean_over_both(engine: Engine) -> None:
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_gradients(engine.prepare(copy.deepcopy(plain), sgd, mesh=mesh), plain)


@case("Replicas summed by the last micro-batch alone, compiled", "torchtitan#4505")
def replicas_compiled(engine: Engine) -> None:
    engine.only_units()
    plain = mlp()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    job = engine.prepare(copy.deepcopy(plain), sgd, mesh=mesh)
    compiled = torch.compile(job.model, backend="aot_eager")
    for is_last in (False, True):
        job.model.set_requires_all_reduce(is_last)
        loss(compiled, mine()).backward()
    (2 * loss(plain, everyone())).backward()
    same(job.gradients(), grads(plain), "gradient")


# Parameters that are more than a tensor -----------------------------------------------------------


class Scaled(nn.Parameter):
    """Integers with a scale, as ``Params4bit`` of bitsandbytes keeps its ``quant_state``."""

    scale: Tensor | None = None


class ScaledLinear(nn.Module):
    """A frozen layer of integers that are scaled when they are used, if their scale is there."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(8, 8)
        scale = weight.abs().max() / 127
        self.weight = Scaled((weight / scale).round(), requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self.weight, "scale", None)
        weight = self.weight if scale is None else self.weight * scale
        return nn.functional.linear(x, weight)


@case("Quantized parameter with state of its own", "axolotl#2992")
def quantized_state(engine: Engine) -> None:
    plain = nn.Sequential(ScaledLinear(), nn.Linear(8, 8))
    for_engine = nn.Sequential(ScaledLinear(), nn.Linear(8, 8))
    with torch.no_grad():
        for ours, theirs in zip(for_engine.parameters(), plain.parameters(), strict=True):
            ours.copy_(theirs)
    for_engine[0].weight.scale = plain[0].weight.scale  # type: ignore[union-attr]
    job = engine.prepare(for_engine, sgd)
    with torch.no_grad():
        close(loss(job.model, everyone()), loss(plain, everyone()), "loss")


class Halved(torch.Tensor):
    """Asks by FSDP2's protocol to be gathered in bfloat16, as torchao's float8 weights do."""

    gathers = 0

    @staticmethod
    def __new__(cls, inner: Tensor) -> Halved:
        made: Halved = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner: Any = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Halved:
        return Halved(inner["inner"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        bare = torch.utils._pytree.tree_map_only(Halved, lambda t: t.inner, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        if func is aten.copy_.default:
            return args[0]
        keeps = {
            aten.detach.default, aten.split.Tensor, aten.clone.default, aten.new_zeros.default,
            aten.slice.Tensor, aten.view.default, aten.as_strided.default, aten._to_copy.default,
            aten.empty_like.default, aten.alias.default, aten.t.default, aten.chunk.default,
        }  # fmt: skip
        return torch.utils._pytree.tree_map_only(Tensor, Halved, out) if func in keeps else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Halved.gathers += 1
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            out.copy_(gathered)
            return None
        full = gathered.to(dtype)
        return full, (full,)


@case("Low-precision gather asked for by a tensor's protocol", "torchtitan#3123")
def codec_dropped(engine: Engine) -> None:
    plain: Any = mlp()
    for_engine = copy.deepcopy(plain)
    for_engine[0].weight = nn.Parameter(Halved(for_engine[0].weight.detach().clone()))
    job = engine.prepare(for_engine, sgd)
    with torch.no_grad():
        got = float(loss(job.model, mine()))
        plain[0].weight.copy_(plain[0].weight.bfloat16())
        want = float(loss(plain, mine()))
    if not Halved.gathers:
        raise DifferentError("fsdp_pre_all_gather was never called: fp32 is sent, or nothing")
    close(got, want, "loss")


# Optimizers ---------------------------------------------------------------------------------------


@case("Misuse: optimizer that holds a parameter twice", "pytorch#176257")
def parameter_twice(engine: Engine) -> None:
    def twice(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        every = list(parameters)
        return torch.optim.SGD([{"params": every}, {"params": every[:1]}], 0.5)

    engine.prepare(Tied(8), twice)
    raise DifferentError("an optimizer took one parameter in two groups")


@case("Misuse: optimizer built before sharding", "accelerate#2665")
def optimizer_before(engine: Engine) -> None:
    plain = mlp()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    job = engine.prepare(model)
    backward(job)
    optimizer.step()
    loss(plain, everyone()).backward()
    sgd(plain.parameters()).step()
    same(job.parameters(), values(plain), "value")


@case("Misuse: state of another optimizer loaded", "arXiv 2506.10426")
def other_state(engine: Engine) -> None:
    made: list[torch.optim.Optimizer] = []

    def momentum(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        every = list(parameters)
        made.append(torch.optim.Adam(every))
        return torch.optim.SGD(every, 0.1, momentum=0.9)

    job = engine.prepare(mlp(), momentum)
    backward(job)
    job.optimizer.step()
    other = torch.optim.Adam(job.model.parameters())
    other.load_state_dict(job.optimizer.state_dict())
    other.step()
    raise DifferentError("Adam stepped with the state of SGD")


@case("Optimizer state is sharded as its parameter", "TransformerEngine#2795")
def optimizer_state(engine: Engine) -> None:
    job = engine.prepare(mlp(), adam)
    if not isinstance(job.optimizer, torch.optim.Optimizer) or not job.optimizer.param_groups:
        raise NotApplicableError
    backward(job)
    job.optimizer.step()
    for p in job.model.parameters():
        state = job.optimizer.state[p]["exp_avg"]
        if type(state) is not type(p.data) or whole(p).shape != whole(state).shape:
            raise DifferentError("a state has another type or shape than its parameter")


@case("Muon on rows of matrices", "Megatron-LM#5961")
def muon(engine: Engine) -> None:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, 0.1)

    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    job = engine.prepare(copy.deepcopy(plain), make)
    backward(job)
    job.step()
    loss(plain, everyone()).backward()
    make(plain.parameters()).step()
    same(job.parameters(), values(plain), "value", allowed=1.5e-2)  # computed in bfloat16


@case("GradScaler, infinity in one rank's rows alone", "pytorch#132816")
def scaler(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = everyone()
    job.backward(grad_scaler.scale(loss(job.model, x)))
    for name, p in job.model.named_parameters():
        if name.endswith("0.weight") and p.grad is not None and p.grad.numel():
            with torch.no_grad():
                local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                if dist.get_rank() == 0 or local.shape == (8, 8):
                    local[0, 0] = float("inf")
    optimizer = getattr(job.optimizer, "optimizer", job.optimizer)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    same(job.parameters(), values(plain), "value")  # the step is left out on all ranks
    close(grad_scaler.get_scale(), 2.0, "scale")


# Gradients ----------------------------------------------------------------------------------------


def _norm(model: nn.Module) -> Tensor:
    norm: Tensor = torch.cat([g.flatten() for g in grads(model).values()]).norm()
    return norm


@case("Norm that the engine's clipping returns, logged", "pytorch#170862")
def norm_logged(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    backward(job)
    loss(plain, everyone()).backward()
    norm = job.clip(1e9)
    close(norm.item(), _norm(plain).item(), "norm")


@case("Clipping by the norm", "pytorch#170862")
def clipping(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    backward(job)
    loss(plain, everyone()).backward()
    job.clip(0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    same(job.gradients(), grads(plain), "gradient")


@case("Clipping by torch.nn.utils", "RLinf#1542")
def clipping_of_torch(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    backward(job)
    loss(plain, everyone()).backward()
    for each in (job.model, plain):
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)
    same(job.gradients(), grads(plain), "gradient")


@case("Clipping beside tensor parallelism", "TrainCheck, BLOOM-176B; deepspeed#1801", ranks=4)
def clipping_divided(engine: Engine) -> None:
    plain = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {f"{i}.{name}": style for i in range(2) for name, style in PLAN.items()}
    job = engine.prepare(copy.deepcopy(plain), sgd, mesh=mesh, plan=plan)
    backward(job, data(mesh.get_local_rank("dp")))
    loss(plain, torch.cat([data(0), data(1)])).backward()
    job.clip(0.01)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    same(job.gradients(), grads(plain), "gradient")


@case("Gradient scale, which Adam hides", "arXiv 2506.14813")
def gradient_scale(engine: Engine) -> None:
    plain = mlp()
    check_gradients(engine.prepare(copy.deepcopy(plain), adam), plain)


@case("Accumulation without synchronisation", "cosmos-framework#161")
def accumulation(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    with job.unsynchronised():
        backward(job)
    check_gradients(job, plain, times=2)


@case("Misuse: optimizer step before gradients are synchronised", "cosmos-framework#162")
def step_unsynchronised(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    with job.unsynchronised():
        backward(job)
        job.optimizer.step()
    loss(plain, everyone()).backward()
    sgd(plain.parameters()).step()
    same(job.parameters(), values(plain), "value")


@case("Frozen layer trained later", "pytorch#104148")
def thawed(engine: Engine) -> None:
    plain = mlp()
    plain[0].requires_grad_(False)
    job, theirs = engine.prepare(copy.deepcopy(plain), sgd), sgd(plain.parameters())
    backward(job)
    job.step()
    loss(plain, everyone()).backward()
    theirs.step()
    theirs.zero_grad()
    for p in (*job.model.parameters(), *plain.parameters()):
        p.requires_grad_(True)
    check_gradients(job, plain)


@case("NaN on one rank only", "arXiv 2512.20345")
def nan_on_one(engine: Engine) -> None:
    job = engine.prepare(mlp(), sgd)
    x = mine()
    if dist.get_rank():
        x[0, 0] = float("nan")
    backward(job, x)
    if not job.gradients()["0.weight"].isnan().any():
        raise DifferentError("the gradient has no NaN")


class WithMethod(nn.Sequential):
    """A model with a loss of its own beside ``forward``."""

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()  # type: ignore[no-any-return]


@case("Misuse: a method other than the prepared module's forward", "TrainCheck, ddp-out-of-sync")
def other_method(engine: Engine) -> None:
    plain = mlp()
    job = engine.prepare(WithMethod(*copy.deepcopy(plain)), sgd)
    inner = job.model if hasattr(job.model, "loss") else job.model.module
    job.backward(inner.loss(mine()))
    loss(plain, everyone()).backward()
    same(job.gradients(), grads(plain), "gradient")


# Values -------------------------------------------------------------------------------------------


@case("Evaluation between two training steps", "pytorch#110139")
def after_evaluation(engine: Engine) -> None:
    plain = mlp()
    job, theirs = engine.prepare(copy.deepcopy(plain), sgd), sgd(plain.parameters())
    for _ in range(3):
        with torch.no_grad():
            close(loss(job.model, everyone()), loss(plain, everyone()), "loss")
        backward(job)
        job.step()
        loss(plain, everyone()).backward()
        theirs.step()
        theirs.zero_grad()
    same(job.parameters(), values(plain), "value")


@case("Parameters kept gathered, and a step between", "set_reshard_after_backward of FSDP2")
def kept_gathered(engine: Engine) -> None:
    engine.only_units()
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    job.model.set_reshard_after_backward(False)
    theirs = sgd(plain.parameters())
    for _ in range(2):
        backward(job)
        job.step()
        loss(plain, everyone()).backward()
        theirs.step()
        theirs.zero_grad()
    with torch.no_grad():
        close(loss(job.model, everyone()), loss(plain, everyone()), "loss")


@case("Weights published after each step", "Megatron-LM#6336, verl#2424")
def published(engine: Engine) -> None:
    """A peer (another trainer, an inference engine) is sent the full state dict, and computes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    plain, peer = mlp(), mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    theirs = sgd(plain.parameters())
    for _ in range(3):
        backward(job)
        job.step()
        loss(plain, everyone()).backward()
        theirs.step()
        theirs.zero_grad()
        if engine.name == "DeepSpeed":  # has its own state dicts
            state: dict[str, Any] = job.parameters()
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(job.model, options=options)
        if dist.get_rank() == 0:
            peer.load_state_dict({bare(n): v for n, v in state.items()})
            with torch.no_grad():
                close(loss(peer, everyone()), loss(plain, everyone()), "the peer's loss")


@case("Misuse: a cached state dict published after another step", "verl#7014")
def published_late(engine: Engine) -> None:
    """A state dict follows the model; what it shows after a step is the new weights."""
    plain = mlp()
    job = engine.prepare(copy.deepcopy(plain), sgd)
    if engine.name == "DeepSpeed":
        raise NotApplicableError
    state = job.model.state_dict()
    check_steps(job, plain)
    found = {bare(n): whole(v) for n, v in state.items()}
    same(found, values(plain), "value")


# Ranks that differ --------------------------------------------------------------------------------


@case("Misuse: ranks with different initial weights", "torchtitan#166")
def initial_weights(engine: Engine) -> None:
    plain = mlp()
    torch.manual_seed(dist.get_rank())
    job = engine.prepare(plain if dist.get_rank() == 0 else mlp(), sgd)
    with torch.no_grad():
        loss(job.model, mine())
    torch.manual_seed(0)
    same(job.parameters(), values(mlp()), "value")


@case("A layer skipped on one rank", "pytorch#115607")
def skipped_layer(engine: Engine) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) if dist.get_rank() else self.b(self.a(x))
            return result

    job = engine.prepare(Skips(), sgd)
    backward(job)
    found = job.gradients()
    if not {"a.weight", "b.weight"} <= set(found):
        raise DifferentError(f"only {sorted(found)} have gradients")


def check_divided(engine: Engine, dropout: float, seeds: list[int], batches: list[Tensor]) -> None:
    """Gradients on two tensor-parallel ranks are those of one process, with one of the batches."""
    mesh, rank = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    plain = nn.Sequential(Block(dropout))
    plan = {f"0.{name}": style for name, style in PLAN.items()}
    job = engine.prepare(copy.deepcopy(plain), sgd, mesh=mesh, plan=plan)
    torch.manual_seed(seeds[rank])
    backward(job, batches[rank])
    found, wrong = job.gradients(), []
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
