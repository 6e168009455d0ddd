"""accelerate's ``Accelerator`` with polyshard's engine: its public methods, overridden."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer
from typing_extensions import override

from polyshard import FSDPModule, clip_grad_norm_
from polyshard.errors import LifecycleError, UnsupportedError
from polyshard_accelerate import state
from polyshard_accelerate.parameters import Replaced
from polyshard_accelerate.sharding import Sharding
from polyshard_optimizers import flat

__all__ = ["PolyshardAccelerator"]

RANKS = "WORLD_SIZE"
"""How many a launcher started."""


class PolyshardAccelerator(Accelerator):
    """Shards what is prepared, clips over all ranks, saves and loads each rank's own shards."""

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, sharding: Sharding | None = None, **accelerate: Any) -> None:
        """Nothing is sharded before ``prepare``.

        Args:
            sharding: how.
            accelerate: keywords of ``Accelerator``.

        Raises:
            UnsupportedError: for plugins of other engines, and precisions that scale losses.
        """
        super().__init__(**accelerate)
        self._begin(sharding or Sharding())

    @classmethod
    def of(cls, accelerator: Accelerator, sharding: Sharding) -> PolyshardAccelerator:
        """``accelerator`` itself, made into one of these before it has prepared anything.

        For frameworks that make their accelerator themselves.

        Raises:
            UnsupportedError: as of the constructor, and for subclasses of ``Accelerator``.
        """
        if isinstance(accelerator, cls):
            return accelerator
        if type(accelerator) is not Accelerator:
            raise UnsupportedError(
                f"{type(accelerator).__name__} is a subclass of accelerate's Accelerator, whose "
                "methods polyshard's would hide. Derive it from PolyshardAccelerator."
            )
        made: Any = accelerator
        made.__class__ = cls
        made._begin(sharding)
        found: PolyshardAccelerator = made
        return found

    def _begin(self, sharding: Sharding) -> None:
        _refuse(self)
        self.sharding = sharding
        self._replaced = Replaced()
        self._loads_from: str | None = None
        self.register_load_state_pre_hook(self._remember_folder)

    # Preparing --------------------------------------------------------------------------------

    @override
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in the base; models are sharded first, and optimizers step the sharded parameters."""
        for given in args:
            if isinstance(given, nn.Module):
                self._shard(given)
        return super().prepare(*args, device_placement=device_placement)

    @override
    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """Shard ``model``, for evaluation too; precision and compilation are accelerate's."""
        del device_placement, evaluation_mode  # sharding moves it, and nothing is to wrap it
        self._shard(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    @override
    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Have ``optimizer`` step sharded parameters.

        Raises:
            LifecycleError: when it made steps, or with ``flat`` has a scheduler, already.
        """
        (inner,) = state.plain([optimizer])  # one that was prepared before may come again
        self._replaced.switch([inner])
        if self.sharding.flat:
            _make_flat(inner)
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _shard(self, model: nn.Module) -> None:
        self._replaced.shard(model, self.sharding)
        self._replaced.switch(state.plain(self._optimizers))  # those that were prepared before

    # Steps ------------------------------------------------------------------------------------

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of ``model`` without reducing them."""
        if isinstance(model, FSDPModule):
            with model.no_sync():
                yield
        else:
            with super().no_sync(model):
                yield

    @override
    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """``polyshard.clip_grad_norm_``: over all ranks, whatever meshes parameters are on."""
        return clip_grad_norm_(parameters, max_norm, norm_type)

    # Checkpoints ------------------------------------------------------------------------------

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All weights of ``model`` in the host memory of the first rank; empty on the others."""
        sharded: nn.Module = self.unwrap_model(model, keep_torch_compile=False)
        if not isinstance(sharded, FSDPModule):
            found: dict[str, Any] = super().get_state_dict(model, unwrap)
            return found
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(sharded, options=options))

    @override
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **others: Any
    ) -> str:
        """As in the base, but models and optimizers are saved sharded, in ``polyshard_N`` folders.

        Hooks for saving that were registered are called without models.

        Raises:
            CheckpointError: on every rank alike, when it failed on any.
            UnsupportedError: for an optimizer of several models' parameters; nothing is saved.
        """
        with self._without_engine() as owned:
            place: str = super().save_state(output_dir, safe_serialization, **others)
        state.save(Path(place), owned)
        return place

    @override
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """Load what :meth:`save_state` saved, at any number of ranks.

        Raises:
            CheckpointError: on every rank alike, when it is damaged, or does not fit.
        """
        with self._without_engine() as owned:
            super().load_state(input_dir, load_kwargs, **others)
        # It is in a file of each rank: one that there was not would reduce in other steps.
        (step,) = broadcast_object_list([self.step])
        self.step: int = step
        assert self._loads_from is not None
        state.load(Path(self._loads_from), owned)

    @contextmanager
    def _without_engine(self) -> Iterator[state.Owned]:
        """accelerate saves and loads what is in its lists, as whole tensors of the first rank.

        So those have optimizers of other parameters than the models' alone.
        """
        models, optimizers = self._models, self._optimizers
        owned, others = state.divided(models, optimizers)
        self._models, self._optimizers = [], others
        try:
            yield owned
        finally:
            self._models, self._optimizers = models, optimizers

    def _remember_folder(self, models: list[nn.Module], folder: str) -> None:
        del models
        self._loads_from = folder


def _refuse(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise UnsupportedError(
            f"PolyshardAccelerator: accelerate is set up for {kind}, which would shard as well. "
            "Leave fsdp_plugin, deepspeed_plugin and their like out, and `accelerate config` at "
            "multi-GPU or multi-CPU."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(
            f"PolyshardAccelerator: mixed_precision='{accelerator.mixed_precision}' is not "
            "supported: overflows would be found on each rank for itself. Use 'bf16', or 'no' with "
            "Sharding(mp_policy=...)."
        )
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get(RANKS, "1"))
    if accelerator.num_processes != ranks:
        raise UnsupportedError(
            f"PolyshardAccelerator: accelerate runs {accelerator.num_processes} process, but there "
            f"are {ranks} ranks, each of which would train on all data. On CPUs pass cpu=True "
            "(use_cpu=True to TrainingArguments) or set ACCELERATE_USE_CPU=true, and let "
            "accelerate make the process group."
        )
    if not dist.is_initialized():
        raise UnsupportedError(
            "PolyshardAccelerator: accelerate runs a single process, which has nothing to share. "
            "Start the script with torchrun or `accelerate launch`, on two processes or more; on "
            "CPUs with torchrun, and cpu=True or ACCELERATE_USE_CPU=true."
        )


def _make_flat(optimizer: Optimizer) -> None:
    try:
        flat(optimizer)
    except LifecycleError as error:
        raise LifecycleError(
            f"Sharding(flat=True): a learning rate scheduler was made of this "
            f"{type(optimizer).__name__} before it was prepared. Prepare model and optimizer "
            "first, make the scheduler of the optimizer that prepare returns, and prepare it then."
        ) from error
