"""Experts of a mixture on an axis of their own: each rank computes its experts for all tokens.

[Note: expert gradients]
The ranks of the axis bring different batches, and an expert sees the tokens of all of them. FSDP
averages over the data mesh of the experts alone, so gradients are divided by the number of batches
on the expert axis where they reach the experts, and multiplied again where they return to tokens.
An expert's gradient is then the mean over all batches, as every other gradient is.

A rank that no token reached computes one row and drops it: its parameters get gradients of zeros,
and every rank takes part in the exchanges of backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from polyshard import ShardPlacement
from polyshard.agreement.meeting import agree, reporting
from polyshard.engine.plans import audiences
from polyshard.errors import MeshError, SettingError
from polyshard.sharding.layout import chunk_bounds
from polyshard_tensor_parallel.forms.axes import check_apart
from polyshard_tensor_parallel.plans.matching import matches, suggestion

TAKES = ("hidden_states", "top_k_index", "top_k_weights")
"""What ``forward`` of an experts module of transformers takes."""


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """Experts divided over a mesh axis, below FSDP over another.

    For modules as transformers 5 has them: parameters ``[experts, ...]``, ``num_experts``, and
    ``forward(hidden_states, top_k_index, top_k_weights)``. Apply it to the whole model, after a
    tensor-parallel plan, then shard::

        mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("efsdp", "ep"))
        experts = ExpertParallel(mesh["ep"], mesh["efsdp"])
        experts.apply(model, "model.layers.*.mlp.experts")
        for layer in model.model.layers:
            fully_shard(layer, shard_placement_fn=experts.placement)
        fully_shard(model)

    Each rank of ``mesh`` has a chunk of the experts, as ``torch.chunk`` cuts them. Tokens travel to
    their experts and back with all-to-all, so all ranks of ``mesh`` run every forward.

    Attributes:
        mesh: 1-D, the axis that divides the experts.
        data_mesh: the ranks that hold the same experts: 1-D (shard) or 2-D (replicate, shard).
            Both are slices of one mesh.
        tensor_parallel: 1-D, ranks that get the same batch; they lie within ``mesh``, and each
            dispatches its share of the tokens.

    Raises:
        MeshError: for meshes that do not fit together.
    """

    mesh: DeviceMesh
    data_mesh: DeviceMesh
    tensor_parallel: DeviceMesh | None = None

    def __post_init__(self) -> None:
        """Check the meshes."""
        tp = self.tensor_parallel
        for name, given in (("mesh", self.mesh), ("tensor_parallel", tp)):
            if given is not None and (given.ndim != 1 or given.mesh_dim_names is None):
                raise MeshError(
                    f"ExpertParallel: {name} must be 1-D with a named axis, got {given}. Pass a "
                    "slice, such as mesh['ep']."
                )
        check_apart(self.data_mesh, self.mesh)
        if tp is not None and not set(_ranks(tp)) <= set(_ranks(self.mesh)):
            raise MeshError(
                f"ExpertParallel: the tensor-parallel ranks {_ranks(tp)} are not within the expert "
                f"axis, ranks {_ranks(self.mesh)}. Make the expert axis a multiple of the "
                "tensor-parallel one, over neighbouring ranks; or of 1, and leave it out."
            )

    @property
    def batches(self) -> int:
        """Different batches that ranks of ``mesh`` bring."""
        tp = self.tensor_parallel
        return self.mesh.size() // (1 if tp is None else tp.size())

    def placement(self, parameter: nn.Parameter) -> ShardPlacement | None:
        """Where ``fully_shard`` puts ``parameter``: pass it as ``shard_placement_fn``.

        Experts go to ``data_mesh``: whole experts if all ranks get as many, else their rows.
        """
        if not (isinstance(parameter, DTensor) and parameter.device_mesh == self.mesh):
            return None
        parts = self.mesh.size() * self.data_mesh.size(self.data_mesh.ndim - 1)
        whole = parameter.shape[0] % parts == 0 or parameter.ndim == 1
        return ShardPlacement(Shard(0 if whole else 1), self.data_mesh)

    def apply(self, model: nn.Module, modules: str) -> tuple[str, ...]:
        """Divide the experts of ``model`` in place; a collective over ``mesh``.

        Values are those of the first rank of ``mesh``. Parameters on the meta device stay there.

        Args:
            model: the whole model.
            modules: pattern of the names of experts modules; parts may hold ``*``, ``**`` is any
                number of parts.

        Returns:
            The names of the modules.

        Raises:
            SettingError: listing all that does not fit; nothing is changed then.
            PlanMismatchError: when ranks of ``mesh`` divide different modules.
        """
        with reporting(partial(audiences, self.mesh)):
            found = _checked(model, modules)
            agree(_ranks(self.mesh), _facts(found), "the application of ExpertParallel")
        made: dict[int, nn.Parameter] = {}
        for module in found.values():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in made:
                    local = distribute_tensor(parameter.detach(), self.mesh, [Shard(0)])
                    made[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
                module.register_parameter(name, made[id(parameter)])
            self._take_over(module)
        return tuple(found)

    def _take_over(self, module: Any) -> None:
        experts = module.num_experts
        bounds = [chunk_bounds(experts, self.mesh.size(), r) for r in range(self.mesh.size())]
        sizes = [stop - start for start, stop in bounds]
        module.num_experts = sizes[self.mesh.get_local_rank()]

        def forward(
            module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            given = hidden_states, top_k_index, top_k_weights
            if self.tensor_parallel is None:
                return self._routed(module, sizes, *given)
            rows = _routed_rows(given, self.tensor_parallel)
            found = self._routed(module, sizes, *rows)
            return _together(found, self.tensor_parallel, hidden_states.shape)

        module.forward = MethodType(forward, module)  # bound, so that a deep copy calls itself

    def _routed(
        self,
        module: nn.Module,
        sizes: list[int],
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """What the chosen experts make of ``hidden [tokens, width]``, weighted and summed.

        Args:
            module: the experts of this rank.
            sizes: experts of each rank.
            hidden: tokens of this rank.
            index: ``[tokens, k]``, experts of each.
            weights: ``[tokens, k]``.
        """
        group, own, k = self.mesh.get_group(), sizes[self.mesh.get_local_rank()], index.shape[-1]
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=sum(sizes))
        arriving = counts.new_empty(len(sizes) * own)
        dist.all_to_all_single(arriving, counts, [own] * len(sizes), sizes, group=group)
        sent = [int(part.sum()) for part in counts.split(sizes)]
        came: list[int] = arriving.view(len(sizes), own).sum(1).tolist()
        rows = _exchange(hidden[order // k], came, sent, group, float(self.batches))
        which = (
            torch.arange(own, device=index.device).repeat(len(sizes)).repeat_interleave(arriving)
        )
        made = _computed(module, own, rows, which)
        back = _exchange(made, sent, came, group, 1 / self.batches)
        placed = back.new_empty(back.shape).index_copy(0, order, back)
        by_token = placed.view(*index.shape, hidden.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)  # weights may be wider


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, and gradients back, times ``scale``. See [Note: expert gradients]."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        came: Sequence[int],
        sent: Sequence[int],
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        ctx.back = sent, came, group, scale
        return _exchanged(rows, came, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, came, group, scale = ctx.back
        return _exchanged(gradients[0], sent, came, group) * scale, None, None, None, None


def _exchange(
    rows: Tensor, came: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup, scale: float
) -> Tensor:
    found: Tensor = _Exchange.apply(rows, came, sent, group, scale)  # type: ignore[no-untyped-call]
    return found


def _exchanged(
    rows: Tensor, came: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    found = rows.new_empty(sum(came), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(came), list(sent), group=group)
    return found


def _computed(module: nn.Module, own: int, rows: Tensor, which: Tensor) -> Tensor:
    """This rank's experts ``which [rows]``, of ``rows [rows, width]``."""
    if not own:  # takes part in the exchange of backward too, as ranks with experts do
        trains = any(p.requires_grad for p in module.parameters()) and torch.is_grad_enabled()
        return rows.detach().requires_grad_() if trains and not rows.requires_grad else rows
    count = rows.shape[0]
    if not count:  # see [Note: expert gradients]
        rows, which = rows.sum(0, keepdim=True), which.new_zeros(1)
    ones = torch.ones_like(which, dtype=rows.dtype)
    with _local_parameters(module):
        made: Tensor = type(module).forward(module, rows, which[:, None], ones[:, None])
    return made[:count]


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Have ``module`` compute with the experts of this rank as plain tensors."""
    held: dict[str, Any] = dict(module._parameters)
    try:
        for name, value in held.items():
            if isinstance(value, DTensor):
                cast("dict[str, Any]", module._parameters)[name] = value.to_local()
        yield
    finally:
        module._parameters.update(held)


def _routed_rows(given: Sequence[Tensor], mesh: DeviceMesh) -> Iterator[Tensor]:
    """This rank's rows of what all ranks of ``mesh`` hold alike; its gradient is gathered."""
    for tensor in given:
        alike = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        yield alike.redistribute(placements=[Shard(0)]).to_local()


def _together(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """The rows of all ranks of ``mesh``, in order."""
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )
    return cut.full_tensor()


def _ranks(mesh: DeviceMesh) -> list[int]:
    found: list[int] = sorted(mesh.mesh.flatten().tolist())
    return found


def _checked(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Experts modules by name.

    Raises:
        SettingError: listing all that does not fit.
    """
    modules = dict(model.named_modules())
    names = matches(pattern, modules)
    problems = [problem for name in names for problem in _problems(name, modules[name])]
    if not names:
        meant = suggestion(pattern, modules)
        problems = [f"no module is called '{pattern}'" + (f"; '{meant}'?" if meant else "")]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise SettingError(
            f"ExpertParallel does not fit {type(model).__name__}; nothing was changed:{listed}"
        )
    return {name: modules[name] for name in names}


def _problems(name: str, module: nn.Module) -> Iterator[str]:
    if "forward" in module.__dict__:
        yield f"'{name}' has a forward of its own (applied already, or wrapped); apply it once."
    takes = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if takes != TAKES:
        yield f"'{name}' takes {takes}; forward of experts takes {TAKES}."
    experts = getattr(module, "num_experts", None)
    parameters = dict(module.named_parameters(recurse=False))
    if not isinstance(experts, int) or not parameters:
        yield (
            f"'{name}' ({type(module).__name__}) has no num_experts, or no parameters of its own: "
            "experts are stacked in one module."
        )
        return
    for key, value in module.named_parameters():
        if isinstance(value, DTensor):
            yield f"'{name}.{key}' is a DTensor already; leave experts out of other plans."
        elif key not in parameters or not value.ndim or value.shape[0] != experts:
            yield f"'{name}.{key}' {tuple(value.shape)} is not stacked [{experts}, ...]."


def _facts(modules: dict[str, nn.Module]) -> list[str]:
    return [
        f"experts {name}.{key} {tuple(value.shape)} {value.dtype}"
        for name, module in modules.items()
        for key, value in module.named_parameters(recurse=False)
    ]
