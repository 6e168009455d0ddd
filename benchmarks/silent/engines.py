"""The engines, each used as its documentation says, behind the few verbs that the cases need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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


def is_one_unit(model: nn.Module) -> bool:
    """Whether nothing below the model is sharded on its own, as tied parameters need it."""
    return getattr(model, "one_unit", False)


class Job:
    """A model, prepared by DDP, and its optimizer. Other engines override what differs."""

    name = "DDP"
    library = "torch"
    """What it is imported from; results name its version."""
    environment = ""
    """Which of ``ENVIRONMENTS`` it needs, if not this one."""
    has_units = False
    """Whether the engine shards module by module, with FSDP2's interface."""
    gathers_by_tensor = False
    """Whether it documents FSDP2's protocol, by which a tensor says how it is gathered."""

    def __init__(
        self, model: nn.Module, make: Make | None = None, clip: float = 0.0, **options: Any
    ) -> None:
        """``clip`` is the norm of :meth:`clipped_step`; for the rest see :meth:`prepare`."""
        self.limit = clip
        self.optimizer: Any = None
        self.prepare(model, make, **options)

    def prepare(self, model: nn.Module, make: Make | None, **options: Any) -> None:
        """Prepare ``model``, and the optimizer that ``make`` gives for its parameters.

        Options are ``mesh`` (replicate, shard) and, for tensor parallelism, ``plan`` with a mesh
        (dp, tp).
        """
        self.model: Any = self.wrap(model, **options)
        if make is not None:
            self.take(make(self.model.parameters()))

    @classmethod
    def versions(cls) -> str:
        """What it is run with, here."""
        importlib.import_module(cls.library)
        own = "" if cls.library == "torch" else f"{cls.library} {version(cls.library)}, "
        return f"{own}torch {torch.__version__}"

    @classmethod
    def only_units(cls) -> None:
        """Leave a case that is about an interface like FSDP2's to those that have one."""
        if not cls.has_units:
            raise NotApplicableError

    @staticmethod
    def fully_shard(module: Any, **options: Any) -> Any:
        """Shard one unit, where the engine does it unit by unit."""
        raise NotApplicableError

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        """The module to call."""
        if plan is not None:
            raise NotApplicableError
        return nn.parallel.DistributedDataParallel(model)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Use this optimizer from now on."""
        self.optimizer = optimizer

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

    def clipped_step(self) -> Any:
        """A step after clipping; the norm that the engine reports."""
        norm = self.clip(self.limit)
        self.step()
        return norm

    def scaler(self) -> Any:
        """The gradient scaler that the engine's documentation names, with a scale of 4."""
        return torch.amp.GradScaler("cpu", init_scale=4.0)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        """A block whose backwards accumulate only."""
        return cast("AbstractContextManager[Any]", self.model.no_sync())

    def save(self, folder: str) -> None:
        """Save model and optimizer."""
        torch.distributed.checkpoint.save(self._state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Load what :meth:`save` wrote into a job that has made no step."""
        state = self._state()
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.plain_optimizer(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.plain_optimizer())
        return {"model": model, "optimizer": optimizer}

    def plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without the engine's wrapper."""
        return cast("torch.optim.Optimizer", getattr(self.optimizer, "optimizer", self.optimizer))

    def parameters(self) -> dict[str, Tensor]:
        """Full values by name."""
        return {bare(n): whole(p) for n, p in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients by name."""
        found = {bare(n): p.grad for n, p in self.model.named_parameters()}
        return {n: whole(g) for n, g in found.items() if g is not None}


class Fsdp1(Job):
    """FSDP1 with ``use_orig_params``, one unit a linear layer."""

    name = "FSDP1"

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if plan is not None:
            raise NotApplicableError
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=None if is_one_unit(model) else ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=None if mesh is None else ShardingStrategy.HYBRID_SHARD,
        )

    def _summoned(self, **options: Any) -> Any:
        return type(self.model).summon_full_params(self.model, **options)

    def parameters(self) -> dict[str, Tensor]:
        with self._summoned():
            return super().parameters()

    def gradients(self) -> dict[str, Tensor]:
        with self._summoned(with_grads=True):
            return super().gradients()

    def clip(self, limit: float) -> Any:
        return self.model.clip_grad_norm_(limit)

    def scaler(self) -> Any:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler("cpu", init_scale=4.0)


@contextmanager
def _accumulating(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


class Fsdp2(Job):
    """FSDP2 and what has its interface: a unit for each child, and the root."""

    name = "FSDP2"
    has_units = gathers_by_tensor = True

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None = None, plan: Any = None) -> Any:
        options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        if plan is not None:
            assert mesh is not None
            options = {"mesh": mesh["dp"], **self.parallelize(model, mesh["tp"], plan)}
        if not is_one_unit(model):
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
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, **options)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        return _accumulating(self.model)


class Fsdp2OfNextTorch(Fsdp2):
    """The same, of another torch."""

    name, environment = "FSDP2 of torch 2.15", "torch-2.15"


class Polyshard(Fsdp2):
    """polyshard with its own clipping, and with ``enable()`` first, as in the README."""

    name = library = "polyshard"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh, plan: Any) -> dict[str, Any]:
        import polyshard_resilience
        from polyshard_tensor_parallel import Plan, TensorParallel

        polyshard_resilience.enable()  # ranks compare plans of tensor parallelism, too
        plugin = TensorParallel(Plan(plan), mesh=mesh)
        plugin.apply(model)
        return {"plugins": [plugin]}

    @staticmethod
    def fully_shard(module: Any, **options: Any) -> Any:
        import polyshard
        import polyshard_resilience

        polyshard_resilience.enable()
        return polyshard.fully_shard(module, **options)

    def clip(self, limit: float) -> Any:
        import polyshard

        return polyshard.clip_grad_norm_(self.model.parameters(), limit)


class Accelerate(Fsdp2):
    """accelerate with ``fsdp_version=2``: model and optimizer are prepared together.

    accelerate uses FSDP on accelerators only, and DDP on the CPU without a word. So its state is
    told that this is an FSDP job, as it would be on an accelerator.
    """

    name = library = "accelerate"
    environment = "libraries"
    has_units = False

    def prepare(self, model: nn.Module, make: Make | None, **options: Any) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        if options:
            raise NotApplicableError  # it takes replicas on accelerators alone
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap" if is_one_unit(model) else "transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        state = self.accelerator.state
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        if make is None:
            self.model = self.accelerator.prepare(model)
        else:
            optimizer = make(model.parameters())
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> Any:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), limit)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        return cast("AbstractContextManager[Any]", self.accelerator.no_sync(self.model))


class Lightning(Fsdp2):
    """Lightning's Fabric with ``ModelParallelStrategy``, whose function is FSDP2's wrapping."""

    name, library, environment = "Lightning", "lightning", "libraries"
    has_units = False

    def prepare(self, model: nn.Module, make: Make | None, **options: Any) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        mesh, plan = options.get("mesh"), options.get("plan")
        if mesh is not None and plan is None:
            raise NotApplicableError  # it makes a mesh of its own, without replicas

        def parallelize(module: nn.Module, made: DeviceMesh) -> nn.Module:
            if plan is not None:
                Fsdp2.parallelize(self, module, made["tensor_parallel"], plan)
            return cast("nn.Module", Fsdp2.wrap(self, module, mesh=made["data_parallel"]))

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
        if make is not None:
            self.take(make(self.model.parameters()))

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = self.fabric.setup_optimizers(optimizer)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, limit: float) -> Any:
        return self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit)

    def unsynchronised(self) -> AbstractContextManager[Any]:
        return cast("AbstractContextManager[Any]", self.fabric.no_backward_sync(self.model))


class DeepSpeed(Job):
    """DeepSpeed with ZeRO-3. Its engine owns backward, step, clipping and accumulation."""

    name, library, environment = "DeepSpeed", "deepspeed", "libraries"

    def prepare(self, model: nn.Module, make: Make | None, **options: Any) -> None:
        import deepspeed  # type: ignore[import-not-found]

        if options:
            raise NotApplicableError
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": self.limit,  # by default it clips to a norm of 1
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

    def clipped_step(self) -> Any:
        self.model.step()
        return self.model.get_global_grad_norm()

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotApplicableError  # it takes one when it is made

    def scaler(self) -> Any:
        raise NotApplicableError  # it scales losses itself, in fp16

    def unsynchronised(self) -> AbstractContextManager[Any]:
        raise NotApplicableError  # not with ZeRO-3

    def save(self, folder: str) -> None:
        self.model.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.model.load_checkpoint(folder)

    def parameters(self) -> dict[str, Tensor]:
        import deepspeed

        found = {}
        for name, p in self.model.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                found[bare(name)] = p.detach().clone()
        return found

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad  # type: ignore[import-not-found]

        found = {bare(n): safe_get_full_grad(p) for n, p in self.model.module.named_parameters()}
        return {n: g.clone() for n, g in found.items() if g is not None}


ENVIRONMENTS = {
    "libraries": ("torch==2.13.0", "numpy", "accelerate", "lightning", "deepspeed", "setuptools"),
    "torch-2.15": ("torch==2.15.0", "numpy"),
}
"""What is installed where this environment does not have it."""


Engine = type[Job]
ENGINES: tuple[Engine, ...] = (
    *(Polyshard, Fsdp2, Fsdp2OfNextTorch, Accelerate, Lightning, DeepSpeed, Fsdp1, Job),
)
NOT_RUN = {
    "Megatron-FSDP": "megatron-fsdp 0.6.1 calls `torch.cuda.current_device()` while it shards: "
    "`AssertionError: Torch not compiled with CUDA enabled`",
}


def as_launched(rank: int, ranks: int) -> None:
    """Set what a launcher sets, which accelerate, Lightning and DeepSpeed read."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "silent"}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
