"""The strategy: when Lightning's Trainer shards, steps, clips, saves and resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from polyshard import FSDPModule, MixedPrecisionPolicy
from polyshard.errors import LifecycleError, MeshError, PeerError, UnsupportedError
from polyshard_checkpoint.together import Ranks
from polyshard_lightning import file, folder
from polyshard_lightning.precision import clipping
from polyshard_lightning.sharding import Sharding, watch_steps

__all__ = ["PolyshardStrategy"]

NAME = "polyshard"


class PolyshardStrategy(ModelParallelStrategy):
    """Shards the LightningModule with polyshard; ``Trainer(strategy=PolyshardStrategy(...))``.

    That happens between ``configure_model``, which need not be there, and ``configure_optimizers``.
    What ``configure_model`` shards with ``polyshard.fully_shard`` stays as it is, and the rest of
    the LightningModule becomes the outermost unit.
    """

    def __init__(
        self,
        plugins: Sequence[object | str] = (),
        units: Sequence[str] = (),
        mesh: tuple[int, int] | None = None,
        *,
        mp_policy: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool | int | None = None,
        pretrained: str | os.PathLike[str] | None = None,
        **lightning: Any,
    ) -> None:
        """Nothing is sharded or communicated yet.

        Args:
            plugins: of polyshard, for every unit.
            units: patterns of names of modules that become units (``model.blocks.*``), as
                ``polyshard plan --units`` has them; none: members of every outermost
                ``nn.ModuleList``.
            mesh: ``(replicas, ranks of a shard)`` (HSDP); by default all ranks share one shard.
            mp_policy: what polyshard's units compute and reduce in; by default that is left to
                Lightning's ``precision``.
            reshard_after_forward: as of ``polyshard.fully_shard``, but for the outermost unit.
            pretrained: a folder to fill the model of transformers, or of peft, within the module
                from (``polyshard_checkpoint.load_pretrained``), once it is sharded: build it under
                ``torch.device("meta")``, and no rank ever holds it whole.
            lightning: keywords of Lightning's own ``ModelParallelStrategy``:
                ``save_distributed_checkpoint`` (``False``: a single file with everything, gathered
                on the first rank), ``process_group_backend``, ``timeout``.

        Raises:
            UnsupportedError: for sizes of tensor parallelism.
        """
        taken = {"data_parallel_size", "tensor_parallel_size"} & lightning.keys()
        if taken:
            raise UnsupportedError(
                f"PolyshardStrategy does not take {', '.join(sorted(taken))}: it is data-parallel "
                "over all ranks. Pass mesh=(replicas, ranks of a shard) for HSDP; for tensor "
                "parallelism, use ModelParallelStrategy with polyshard's fully_shard in "
                "configure_model."
            )
        super().__init__(**lightning)
        self._sharding = Sharding(plugins, units, mp_policy, reshard_after_forward, pretrained)
        self._mesh_shape = mesh
        self._shard_mesh: DeviceMesh | None = None

    # Processes --------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Process group and meshes; ``self.device_mesh`` of the module is one axis of all ranks.

        Raises:
            MeshError: when ``mesh`` is not made of all ranks.
        """
        world = self.num_nodes * self.num_processes
        shape = self._mesh_shape
        if shape is not None and shape[0] * shape[1] != world:
            raise MeshError(
                f"PolyshardStrategy(mesh={shape}): {shape[0]} replicas of {shape[1]} ranks are "
                f"{shape[0] * shape[1]}, but the Trainer has {world} "
                f"(num_nodes={self.num_nodes}, devices={self.num_processes})."
            )
        self._data_parallel_size, self._tensor_parallel_size = world, 1  # "auto" means others
        super().setup_environment()
        if shape is not None:
            kind, names = self.root_device.type, ("replicate", "shard")
            self._shard_mesh = init_device_mesh(kind, shape, mesh_dim_names=names)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """What modules are sharded over: axes ``replicate`` and ``shard``, or all ranks."""
        return self._shard_mesh or self.device_mesh["data_parallel"]

    # Model and optimizers ---------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then make its optimizers.

        Raises:
            ModuleError, SettingError: see :meth:`Sharding.apply`.
            UnsupportedError: for ``sync_batchnorm=True`` and precisions that scale losses.
        """
        if self._layer_sync is not None:
            raise UnsupportedError(
                "PolyshardStrategy: sync_batchnorm=True is not supported. Convert the module in "
                "configure_model, by torch.nn.SyncBatchNorm.convert_sync_batchnorm."
            )
        clipping(self.precision_plugin)
        # Of all strategies, not that of ModelParallelStrategy, which wants a configure_model.
        super(ModelParallelStrategy, self).setup(trainer)

    @override
    def model_to_device(self) -> None:
        """Nothing yet: sharding moves what a rank keeps, and buffers."""

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        self._sharding.apply(model, self.shard_mesh)
        assert self.lightning_module is not None
        watch_steps(model, is_automatic=self.lightning_module.automatic_optimization)
        return model

    @override
    def on_validation_end(self) -> None:
        """Free what evaluation left gathered."""
        self._reshard()

    @override
    def on_test_end(self) -> None:
        """As after validation."""
        self._reshard()

    @override
    def on_predict_end(self) -> None:
        """As after validation."""
        self._reshard()

    def _reshard(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated none is reduced."""
        sharded = self._sharded
        with nullcontext() if sharded is None else sharded.no_sync():
            yield

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Drop the step that was lost, so that the module can be used again."""
        super().on_exception(exception)
        if self._sharded is not None:
            with suppress(LifecycleError, PeerError):  # before a forward; with a rank that is gone
                self._sharded.reset_iter_state()

    @property
    def _sharded(self) -> FSDPModule | None:
        model: Any = self.model
        return model if isinstance(model, FSDPModule) else None

    # Checkpoints ------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State for a checkpoint in one file; folders are filled from the optimizers themselves."""
        if self._save_distributed_checkpoint:
            return {}
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return found

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Save as a folder, each rank its own shards; or as one file, see ``__init__``.

        Raises:
            CheckpointError: on every rank alike, when it failed on any.
            UnsupportedError: when a hook has changed which weights are to be saved.
        """
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        self._refuse_changed(checkpoint.pop("state_dict"))
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        checkpoint.pop("optimizer_states", None)
        assert self.model is not None
        folder.save(path, self.model, optimizers, checkpoint)

    def _refuse_changed(self, weights: dict[str, Any]) -> None:
        own = self.lightning_module_state_dict()
        changed = weights.keys() ^ own.keys()
        changed |= {n for n in weights.keys() & own.keys() if not _is_same(weights[n], own[n])}
        with Ranks() as ranks:  # a hook may differ between them, and shards do
            found = {name for names in ranks.gathered(sorted(changed)) for name in names}
        if found:
            raise UnsupportedError(
                f"PolyshardStrategy: on_save_checkpoint changed the weights: '{min(found)}' for "
                "one. Folders have all weights of the module as they are, and no other: put other "
                "values under a key of their own, or pass save_distributed_checkpoint=False."
            )

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill module and optimizers from a folder, at any number of ranks; or from one file.

        Files of Lightning's own strategies are taken as well.

        Raises:
            CheckpointError: on every rank alike, when it is damaged, or does not fit.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        assert self.lightning_module is not None
        only, strict = bool(weights_only), self.lightning_module.strict_loading
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else []  # evaluation has those of fit still
        if path.is_file():
            return file.load(path, self.model, optimizers, strict=strict, weights_only=only)
        return folder.load(path, self.model, optimizers, weights_only=only)


def _is_same(given: Any, own: Any) -> bool:
    """Whether this rank's part of a weight has the same bits."""
    if not (isinstance(given, Tensor) and isinstance(own, Tensor)):
        return type(given) is type(own)
    if (given.shape, given.dtype) != (own.shape, own.dtype):
        return False
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in (given, own)]
    one, other = (part.detach().cpu().flatten().view(torch.uint8) for part in parts)
    return torch.equal(one, other)


if NAME not in StrategyRegistry:
    StrategyRegistry.register(
        NAME, PolyshardStrategy, description="polyshard: fully-sharded data parallelism"
    )
