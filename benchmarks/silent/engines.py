"""The engines, each used as its documentation says, behind the few verbs that the cases need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class NotApplicableError(Exception):
    """The engine has nothing that the case is about."""


def whole(value: Tensor) -> Tensor:
    """All of a tensor; every rank calls."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


def bare(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    for wrapper in ("_fsdp_wrapped_module.", "_forward_module.", "_orig_mod.", "module."):
        name = name.replace(wrapper, "")
    return name


class Job:
    """A model, prepared by DDP, and its optimizer. Other engines override what differs."""

    has_units = False
    """Whether the engine shards module by module, with FSDP2's interface."""

    def __init__(self, model: nn.Module, make: Make | None = None, **options: Any) -> None:
        """Prepare ``model``, and the optimizer that ``make`` gives for its parameters.

        Options are ``mesh`` (replicate, shard) and, for tensor parallelism, ``plan`` with a mesh
        (dp, tp).
        """
        self.model: Any = self.wrap(model, **options)
        self.optimizer: Any = make(self.model.parameters()) if make else None

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        """The module to call."""
        if plan is not None:
            raise NotApplicableError
        return nn.parallel.DistributedDataParallel(model)

    def backward(self, loss: Tensor) -> None:
        """The backward of a loss."""
        loss.backward()

    def step(self) -> None:
        """The optimizer's step; gradients are cleared after it."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, limit: float) -> Any:
        """Clip gradients in the engine's own way and return their norm."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """A block whose backwards accumulate only."""
        context: AbstractContextManager[Any] = self.model.no_sync()
        return context

    def parameters(self) -> dict[str, Tensor]:
        """Full values by name."""
        return {bare(n): whole(p) for n, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by name."""
        found = {bare(n): p.grad for n, p in self.model.named_parameters()}
        return {n: whole(g) for n, g in found.items() if g is not None}


class Fsdp1(Job):
    """FSDP1 with ``use_orig_params``, one unit a linear layer."""

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if plan is not None:
            raise NotApplicableError
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=None if hasattr(model, "tied") else ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=None if mesh is None else ShardingStrategy.HYBRID_SHARD,
        )

    def _summoned(self, **options: Any) -> Any:
        return type(self.model).summon_full_params(self.model, **options)

    def parameters(self) -> dict[str, Tensor]:
        with self._summoned():
            return {bare(n): p.detach().clone() for n, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        with self._summoned(with_grads=True):
            found = {bare(n): p.grad for n, p in self.model.named_parameters()}
            return {n: g.clone() for n, g in found.items() if g is not None}

    def clip(self, limit: float) -> Any:
        return self.model.clip_grad_norm_(limit)


@contextmanager
def _accumulating(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


class Fsdp2(Job):
    """FSDP2 and what has its interface: a unit for each child, and the root."""

    has_units = True

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        if plan is not None:
            assert mesh is not None
            options = {"mesh": mesh["dp"], **self.parallelize(model, mesh["tp"], plan)}
        if not hasattr(model, "tied"):  # tied parameters belong to one unit
            for child in model.children():
                if any(True for _ in child.parameters()):
                    self.fully_shard(child, **options)
        return self.fully_shard(model, **options)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh, plan: Any) -> dict[str, Any]:
        """Apply tensor parallelism; what ``fully_shard`` needs to know of it."""
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, mesh, plan)
        return {}

    @staticmethod
    def fully_shard(module: Any, **options: Any) -> Any:
        """The engine's own function."""
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, **options)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        return _accumulating(self.model)


class Polyshard(Fsdp2):
    """polyshard with its own clipping."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh, plan: Any) -> dict[str, Any]:
        from polyshard_tensor_parallel import Plan, TensorParallel

        plugin = TensorParallel(Plan(plan), mesh=mesh)
        plugin.apply(model)
        return {"plugins": [plugin]}

    @staticmethod
    def fully_shard(module: Any, **options: Any) -> Any:
        import polyshard

        return polyshard.fully_shard(module, **options)

    def clip(self, limit: float) -> Any:
        import polyshard

        return polyshard.clip_grad_norm_(self.model.parameters(), limit)


class Accelerate(Fsdp2):
    """accelerate with ``fsdp_version=2``: model and optimizer are prepared together.

    accelerate uses FSDP on accelerators only, and DDP on the CPU without a word. So its state is
    told that this is an FSDP job, as it would be on an accelerator.
    """

    has_units = False

    def __init__(self, model: nn.Module, make: Make | None = None, **options: Any) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        if options:
            raise NotApplicableError  # it takes replicas on accelerators alone
        if hasattr(model, "tied"):
            wrapping: dict[str, Any] = {"auto_wrap_policy": "no_wrap"}
        else:
            wrapping = {
                "auto_wrap_policy": "transformer_based_wrap",
                "transformer_cls_names_to_wrap": ["Linear"],
            }
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapping)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        state = self.accelerator.state
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        if make is None:
            self.model = self.accelerator.prepare(model)
            self.optimizer = None
        else:
            optimizer = make(model.parameters())
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> Any:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), limit)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.no_sync(self.model)
        return context


class Lightning(Fsdp2):
    """Lightning's Fabric with ``ModelParallelStrategy``, whose function is FSDP2's wrapping."""

    has_units = False

    def __init__(self, model: nn.Module, make: Make | None = None, **options: Any) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        mesh, plan = options.get("mesh"), options.get("plan")
        if mesh is not None and plan is None:
            raise NotApplicableError  # it makes a mesh of its own, without replicas

        def parallelize(module: nn.Module, made: DeviceMesh) -> nn.Module:
            if plan is not None:
                Fsdp2.parallelize(self, module, made["tensor_parallel"], plan)
            wrapped: nn.Module = Fsdp2.wrap(self, module, mesh=made["data_parallel"])
            return wrapped

        ranks = dist.get_world_size()
        tensor_parallel = mesh["tp"].size() if mesh is not None and plan is not None else 1
        self.fabric = Fabric(
            accelerator="cpu",
            devices=ranks,
            strategy=ModelParallelStrategy(
                parallelize, ranks // tensor_parallel, tensor_parallel, process_group_backend="gloo"
            ),
        )
        self.fabric.launch()
        self.model = self.fabric.setup(model)
        self.optimizer = None
        if make is not None:
            self.optimizer = self.fabric.setup_optimizers(make(self.model.parameters()))

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, limit: float) -> Any:
        return self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.fabric.no_backward_sync(self.model)
        return context


class DeepSpeed(Job):
    """DeepSpeed with ZeRO-3. Its engine owns backward, step and accumulation."""

    def __init__(self, model: nn.Module, make: Make | None = None, **options: Any) -> None:
        import deepspeed  # type: ignore[import-not-found]

        if options:
            raise NotApplicableError
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = make(model.parameters()) if make else None
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()

    def clip(self, limit: float) -> Any:
        raise NotApplicableError  # in its configuration, when it is made

    def unsynchronised(self) -> AbstractContextManager[Any]:
        raise NotApplicableError  # not with ZeRO-3

    def parameters(self) -> dict[str, Tensor]:
        from deepspeed.utils import (  # type: ignore[import-not-found]
            safe_get_full_fp32_param,
        )

        named = self.model.module.named_parameters()
        return {bare(n): safe_get_full_fp32_param(p).clone() for n, p in named}

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {bare(n): safe_get_full_grad(p) for n, p in self.model.module.named_parameters()}
        return {n: g.clone() for n, g in found.items() if g is not None}


@dataclass(frozen=True)
class Engine:
    """A column of the table."""

    name: str
    job: type[Job]
    library: str = "torch"
    """What it is imported from; its version is said."""
    torch_minor: str = ""
    """The torch it is about, where that is not the one of this environment."""

    def prepare(self, model: nn.Module, make: Make | None = None, **options: Any) -> Job:
        """Shard ``model`` as the engine's documentation says."""
        return self.job(model, make, **options)

    def fully_shard(self, module: Any, **options: Any) -> Any:
        """Shard one unit, where the engine does it unit by unit."""
        self.only_units()
        assert issubclass(self.job, Fsdp2)
        return self.job.fully_shard(module, **options)

    def only_units(self) -> None:
        """Leave a case that is about an interface like FSDP2's to those that have one."""
        if not self.job.has_units:
            raise NotApplicableError

    def why_not(self) -> str:
        """Why it cannot run in this environment, if it cannot."""
        if not torch.__version__.startswith(self.torch_minor):
            return f"this is torch {torch.__version__}; give --python '{self.name}=PATH'"
        try:
            importlib.import_module(self.library)
        except ImportError as error:
            return f"{error}; give --python '{self.name}=PATH'"
        return ""

    @property
    def versions(self) -> str:
        """What it was run with."""
        own = "" if self.library == "torch" else f"{self.library} {version(self.library)}, "
        return f"{own}torch {torch.__version__}"


ENGINES: tuple[Engine, ...] = (
    Engine("polyshard", Polyshard, "polyshard"),
    Engine("FSDP2", Fsdp2),
    Engine("FSDP2 of torch 2.15", Fsdp2, torch_minor="2.15"),
    Engine("accelerate", Accelerate, "accelerate"),
    Engine("Lightning", Lightning, "lightning"),
    Engine("DeepSpeed", DeepSpeed, "deepspeed"),
    Engine("FSDP1", Fsdp1),
    Engine("DDP", Job),
)


def as_launched(rank: int, ranks: int) -> None:
    """Set what a launcher sets, which accelerate, Lightning and DeepSpeed read."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "silent",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
    }
