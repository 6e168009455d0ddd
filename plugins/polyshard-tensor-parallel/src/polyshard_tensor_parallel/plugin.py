"""The plugin: applies a plan, and takes parameters through FSDP with their placements intact."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from polyshard import Plugin, hookimpl
from polyshard.agreement.meeting import agree, reporting
from polyshard.engine.plans import audiences
from polyshard.errors import LifecycleError, MeshError, SettingError
from polyshard.plugins.seams import ParamInfo
from polyshard_tensor_parallel.__about__ import __version__
from polyshard_tensor_parallel._torch_private import root_mesh, waited
from polyshard_tensor_parallel.alike import Alike
from polyshard_tensor_parallel.forms import chunks, sharded_tensors, transform
from polyshard_tensor_parallel.forms.axes import check_apart
from polyshard_tensor_parallel.plans import application
from polyshard_tensor_parallel.plans.checking import Checked, check
from polyshard_tensor_parallel.plans.plan import Plan, Styles, as_plan
from polyshard_tensor_parallel.report import Report

ALIKE = transform.Alike()


class _Applied:
    """Modules of the models a plan was applied to; weakly, because users own them."""

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.alike = Alike()


@dataclass(frozen=True, eq=False)
class TensorParallel(Plugin):
    """Tensor parallelism below FSDP.

    Apply the plan to the whole model first, then shard it bottom-up with the same object::

        tp = TensorParallel(plan, mesh=mesh["tp"])
        tp.apply(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], plugins=[tp])
        fully_shard(model, mesh=mesh["dp"], plugins=[tp])

    Attributes:
        plan: names or patterns of modules → styles, a :class:`Plan`, or one style for the whole
            model. ``None`` for a model that something else parallelized: its ``DTensor``
            parameters are taken as they are.
        mesh: 1-D, the tensor-parallel slice of a mesh whose other slice ``fully_shard`` gets. With
            it, parameters outside the plan become ``DTensor`` s on both axes too, replicated over
            this one, so that all parameters share a mesh.

    Raises:
        SettingError: for a plan without a mesh, or one that is none.
        MeshError: for a mesh of another shape.
    """

    name = "tensor_parallel"
    version = __version__
    provides = ("tensor-parallel",)

    plan: Plan | Styles | ParallelStyle | None = None
    mesh: DeviceMesh | None = field(default=None, repr=False)  # its ranks differ between ranks
    _applied: _Applied = field(default_factory=_Applied, init=False, repr=False)

    def __post_init__(self) -> None:
        """Bring the plan into one form."""
        if self.plan is not None:
            if self.mesh is None:
                raise SettingError(
                    "TensorParallel has a plan but no mesh; pass the tensor-parallel slice of the "
                    "mesh, as in TensorParallel(plan, mesh=mesh['tp'])."
                )
            object.__setattr__(self, "plan", as_plan(self.plan))
        mesh: object = self.mesh
        if mesh is None:
            return
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(f"TensorParallel: mesh must be a DeviceMesh, got {mesh!r}.")
        if mesh.ndim != 1 or mesh.mesh_dim_names is None:
            raise MeshError(
                f"TensorParallel takes a 1-D mesh with a named axis, got {mesh}. Pass a slice: "
                "mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')) and "
                "mesh['tp']."
            )

    def for_dtensors(self) -> TensorParallel:
        """What ``fully_shard`` takes ``DTensor`` parameters with that no plugin was given for."""
        return self

    # Applying ---------------------------------------------------------------------------------

    def apply(self, model: nn.Module) -> Report:
        """Apply the plan to ``model`` in place; a collective over the mesh.

        The plan is checked first: what is wrong with it is raised on every rank before anything
        is moved, and so is a difference between the plans or models of ranks.

        Raises:
            SettingError: listing everything that does not fit the model.
            LifecycleError: when the plan was applied to the model before.
            PlanMismatchError: when another rank of the mesh applies another plan, or refused its.
        """
        plan, mesh = self._needed()
        with reporting(partial(audiences, mesh)):
            checked = self._check(plan, model, mesh)
        report = application.apply(checked, model, mesh)
        self._applied.modules.update(model.modules())
        return report

    def _check(self, plan: Plan, model: nn.Module, mesh: DeviceMesh) -> Checked:
        if model in self._applied.modules:
            raise LifecycleError(
                f"this TensorParallel was applied to the {type(model).__name__} already; apply it "
                "once, to the whole model."
            )
        checked = check(plan, model, mesh.size())
        parameters = (
            f"parameter {n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters()
        )
        ranks = sorted(mesh.mesh.flatten().tolist())
        first = f"applies a plan of tensor_parallel {__version__} over {mesh.size()} ranks"
        agree(ranks, [first, *plan.lines, *parameters], "the application of a tensor-parallel plan")
        return checked

    def synchronize(self, model: nn.Module) -> None:
        """Make equal on all tensor-parallel ranks what they must hold alike; a collective.

        Needed where a model was built on the meta device and each rank drew values of its own:
        call it after initialization. Takes the values of the mesh's first rank.

        Raises:
            SettingError: without a mesh.
        """
        if self.mesh is None:
            raise SettingError("synchronize() needs a mesh: TensorParallel(plan, mesh=mesh['tp']).")
        application.synchronize(model, self.mesh)

    def _needed(self) -> tuple[Plan, DeviceMesh]:
        if self.plan is None or self.mesh is None:
            raise SettingError(
                "apply() needs a plan and a mesh: TensorParallel(plan, mesh=mesh['tp']). Without a "
                "plan the plugin takes a model that was parallelized before."
            )
        return as_plan(self.plan), self.mesh

    @hookimpl
    def polyshard_prepare_model(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Make sure that the plan was applied; apply it if ``module`` is a whole model.

        Its first forward in training compares inputs. See [Note: alike].

        Raises:
            LifecycleError: for a part of a model the plan was not applied to.
            MeshError: for a data-parallel mesh that covers the model axis.
        """
        if self.mesh is None:
            return
        check_apart(mesh, self.mesh)
        if self.plan is None:
            return
        if module not in self._applied.modules:
            self._apply_to_whole(module)
        self._applied.alike.watch(module, sorted(self.mesh.mesh.flatten().tolist()))

    def _apply_to_whole(self, module: nn.Module) -> None:
        try:
            self.apply(module)
        except SettingError as error:
            raise LifecycleError(
                f"fully_shard got a {type(module).__name__} that the tensor-parallel plan was not "
                "applied to. If it is part of a model, call apply(model) on the TensorParallel "
                f"before the first fully_shard. If it is the whole model: {error}"
            ) from error

    # Parameters -------------------------------------------------------------------------------

    @hookimpl
    def pre_flatten_transform(
        self, tensor: Tensor, param: ParamInfo | None
    ) -> tuple[Tensor, Any] | None:
        """``DTensor`` s as their local tensors; see ``forms.transform``."""
        if isinstance(tensor, DTensor):
            return transform.flatten(tensor, param)
        if self.mesh is None or param is None:
            return None
        return waited(tensor), ALIKE

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """A ``DTensor`` around the unsharded local tensor itself."""
        if isinstance(param_extension, transform.Alike):
            return tensor
        return transform.unflatten(tensor, param_extension)

    @hookimpl
    def chunk_dtensor(
        self, tensor: Tensor, rank: int, device_mesh: DeviceMesh, param: ParamInfo | None
    ) -> DTensor | None:
        """Rank ``rank``'s chunk on the mesh of all axes; see :func:`chunks.chunk`."""
        mesh = self._model_mesh(device_mesh)
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            mesh = tensor.device_mesh  # equal ones may have other groups
        if mesh is None:
            return None
        name = "a parameter" if param is None else param.fqn
        dim = (0 if tensor.ndim else None) if param is None else param.shard_dim
        whole = chunks.whole_of(name, tensor, mesh, device_mesh)
        return chunks.chunk(whole, rank, device_mesh, dim)

    def _model_mesh(self, data_mesh: DeviceMesh) -> DeviceMesh | None:
        """The model axes beside ``data_mesh``: ours, else the rest of the mesh it is a slice of."""
        if self.mesh is not None:
            return self.mesh
        root, own = root_mesh(data_mesh), data_mesh.mesh_dim_names or ()
        names = tuple(name for name in root.mesh_dim_names or () if name not in own)
        return root[names] if names and own else None

    @hookimpl
    def all_gather_dtensor(self, tensor: DTensor) -> Tensor:
        """The tensor-parallel part, gathered over every data axis."""
        return chunks.gather(tensor, min(1, tensor.device_mesh.ndim - 1))

    @hookimpl
    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
    ) -> Tensor | None:
        """A nested ``ShardedTensor`` for what tensor parallelism cut; others are left alone."""
        return sharded_tensors.chunk(tensor, rank, world_size, num_devices_per_node, pg)

    @hookimpl
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]] | None:
        """The inner ``ShardedTensor`` of a nested one."""
        return sharded_tensors.inner_shards(tensor)
