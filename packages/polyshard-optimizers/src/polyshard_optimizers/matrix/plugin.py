"""The plugin: gradients of matrices land whole on owners, and an optimizer that steps there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

import polyshard
from polyshard.errors import warn
from polyshard.plugins.contract import Contract, Plugin, hookimpl
from polyshard.plugins.seams import (
    GradientLanding,
    GroupIdentity,
    GroupInfo,
    OwnedParameter,
    ParamInfo,
)
from polyshard.sharding.layout import chunk_bounds
from polyshard_optimizers.matrix.choosing import (
    Balance,
    Chooses,
    Counts,
    Cut,
    hidden_matrices,
    one_block,
    stays_in_rows,
)
from polyshard_optimizers.matrix.errors import MatrixError
from polyshard_optimizers.matrix.optimizer import MatrixSteps, settings_of
from polyshard_optimizers.matrix.recipes import recipe_for
from polyshard_optimizers.matrix.sites import Chosen

Gradients = Literal["whole", "rows"]


@dataclass
class _Group:
    """One group, from when its plan is made."""

    cuts: list[Cut | None]
    owners: list[int | None]
    chosen: dict[int, Chosen] = field(default_factory=dict)
    """By the identity of parameters, as they are now."""


@dataclass
class _Known:
    """What the plugin has learned of the groups that it serves, for as long as these live."""

    balance: Balance = field(default_factory=Balance)
    groups: WeakValueDictionary[GroupIdentity, _Group] = field(default_factory=WeakValueDictionary)
    """Each is kept by its landing, which the group keeps: they lead to parameters."""
    steps: WeakSet[MatrixSteps] = field(default_factory=WeakSet)


class OwnerLanding(GradientLanding):
    """Gradients of chosen matrices land on owners, by work and memory."""

    name = "owners"
    takes_parts = True

    def __init__(self, plugin: MatrixOptimizer) -> None:
        """``plugin`` says which are matrices."""
        self._plugin = plugin
        self._group: _Group | None = None
        self.lands = plugin.gradients == "whole"

    @override
    def owners(self, group: GroupInfo) -> Sequence[int | None]:
        known, cuts = self._plugin._known, self._plugin.cuts(group)
        moving = [
            None if cut is None or stays_in_rows(info, cut, group) else cut
            for info, cut in zip(group.parameters, cuts, strict=True)
        ]
        owners = known.balance.owners(group, moving)
        known.groups[group.identity] = self._group = _Group(cuts, owners)
        return owners

    @override
    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        known = self._plugin._known.groups[group.identity]
        known.chosen.clear()
        axes = group.mesh.ndim
        for info, parameter, cut in zip(group.parameters, parameters, known.cuts, strict=True):
            if cut is not None:
                rows = chunk_bounds(info.shape[0], group.world_size, group.rank)
                known.chosen[id(parameter)] = Chosen(info.fqn, parameter, cut, rows, axes)

    @override
    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        chosen = self._plugin._known.groups[group.identity].chosen
        for owned in parameters:
            key = id(owned.parameter)
            chosen[key] = replace(chosen[key], owned=owned)

    @override
    def landed(self, parameter: OwnedParameter) -> None:
        if self._plugin.early:
            for steps in self._plugin._known.steps:
                steps.begin(parameter)


@dataclass(frozen=True, eq=False, init=False)
class MatrixOptimizer(Plugin):
    """A plugin: optimizers that need whole matrices, each computed once, on the rank that owns it.

    Example::

        muon = MatrixOptimizer(torch.optim.Muon, lr=0.02)
        for block in model.layers:
            fully_shard(block, mesh=mesh, plugins=[muon])
        fully_shard(model, mesh=mesh, plugins=[muon])
        matrices = muon.optimizer(model)
        rest = torch.optim.AdamW(muon.rest(model), lr=3e-4)
    """

    name = "matrix"
    provides = ("gradient-landing",)

    made_by: type[Optimizer]
    given: Mapping[str, Any]
    matrices: Chooses
    blocks: Counts
    early: bool
    gradients: Gradients
    _known: _Known = field(repr=False)

    def __init__(
        self,
        made_by: type[Optimizer],
        *,
        matrices: Chooses = hidden_matrices,
        blocks: Counts = one_block,
        early: bool = False,
        gradients: Gradients = "whole",
        **given: Any,
    ) -> None:
        """Have ``made_by`` step whole matrices.

        Args:
            made_by: a class of optimizers that takes 2-D parameters, such as ``torch.optim.Muon``.
            matrices: whether a parameter is one, by its name within its unit and its shape: 2-D, or
                3-D for stacked ones.
            blocks: how many equal blocks of rows are matrices of their own, such as heads.
            early: begin an update when its gradient has landed, beside the rest of the backward.
                Nothing may change gradients then: no clipping, no second backward into ``.grad``.
            gradients: ``"whole"`` has them land on owners. ``"rows"`` leaves them on shards, for
                plugins that sum or encode them there; the step gathers them.
            given: settings of the optimizer.

        Raises:
            MatrixError: when ``made_by`` is no class of optimizers, or cannot begin early; for
                other words.
        """
        given_class: object = made_by
        if not (isinstance(given_class, type) and issubclass(given_class, Optimizer)):
            raise MatrixError(f"MatrixOptimizer takes a class of optimizers, got {made_by!r}.")
        if gradients not in get_args(Gradients):
            raise MatrixError(
                f"MatrixOptimizer takes gradients='whole' or 'rows', not {gradients!r}."
            )
        recipe = recipe_for(made_by, given)
        if early and gradients == "rows":
            raise MatrixError(
                "early=True: an update is begun when its gradient has landed whole, and with "
                "gradients='rows' none does before the step. Leave out one of the two."
            )
        if early and recipe.needs_weights:
            raise MatrixError(
                f"early=True: {made_by.__name__} needs the weights for its update, which travel in "
                "its step. Only torch.optim.Muon can begin early."
            )
        values = {"made_by": made_by, "given": dict(given), "matrices": matrices, "blocks": blocks}
        values |= {"early": early, "gradients": gradients, "_known": _Known()}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.defaults()  # settings that the class refuses are refused here

    @property
    @override
    def polyshard_contract(self) -> Contract:
        """Gradients in rows conflict with no other plugin."""
        contract = super().polyshard_contract
        return contract if self.gradients == "whole" else replace(contract, provides=frozenset())

    def defaults(self) -> dict[str, Any]:
        """Settings of a group of the optimizer."""
        return settings_of(self.given, self.made_by)

    # What the engine asks ---------------------------------------------------------------------

    @hookimpl
    def polyshard_gradient_landing(self, group: GroupInfo) -> GradientLanding | None:
        """Owners, where the group has a matrix."""
        return OwnerLanding(self) if any(self.cuts(group)) else None

    @hookimpl
    def polyshard_teardown(self, group: GroupInfo) -> None:
        """Forget the group."""
        self._known.groups.pop(group.identity, None)

    def cuts(self, group: GroupInfo) -> list[Cut | None]:
        """How each parameter of ``group`` holds matrices, if it does."""
        return [self.cut(p.fqn, p.shape) if self._chooses(p) else None for p in group.parameters]

    def _chooses(self, parameter: ParamInfo) -> bool:
        if self.matrices is hidden_matrices and issubclass(parameter.module_class, nn.Embedding):
            return False  # one that is a unit by itself is called "weight"
        return self.matrices(parameter.fqn, parameter.shape)

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut:
        """How one parameter does.

        Raises:
            MatrixError: when it cannot be cut so.
        """
        return Cut.of(name, shape, self.blocks(name, shape))

    # What the user asks -----------------------------------------------------------------------

    def optimizer(self, model: nn.Module) -> MatrixSteps:
        """The optimizer of the matrices of ``model``, which was sharded with this plugin.

        Raises:
            MatrixError: when it has none.
        """
        chosen = self._chosen(model)
        if not chosen:
            raise MatrixError(
                "no parameter of this model lands on an owner: pass the plugin to fully_shard, and "
                "choose parameters with matrices=."
            )
        recipe = recipe_for(self.made_by, self.given)
        # GradScaler adds up what ranks have found over the axes that shard the first gradient.
        chosen.sort(key=self._repeating_axes)
        steps = MatrixSteps(self, recipe, chosen, self.defaults())
        steps.agree()
        if self.early:
            warn(steps.notices())
        self._known.steps.add(steps)
        return steps

    def rest(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of ``model`` that are for another optimizer."""
        chosen = {id(p) for p in self._chosen(model)}
        return [p for p in model.parameters() if id(p) not in chosen]

    def _chosen(self, model: nn.Module) -> list[nn.Parameter]:
        polyshard.describe(model)  # makes all plans, so that every group has been shown
        chosen = {key for group in self._known.groups.values() for key in group.chosen}
        return [p for p in model.parameters() if id(p) in chosen]

    def _repeating_axes(self, parameter: nn.Parameter) -> int:
        """How many axes beyond those of data parallelism repeat it."""
        if not isinstance(parameter, DTensor):
            return 0
        beyond = parameter.placements[self.chosen(parameter).data_axes :]
        return sum(placement.is_replicate() for placement in beyond)

    def chosen(self, parameter: Tensor) -> Chosen:
        """How ``parameter`` holds matrices, and what moves it.

        Raises:
            MatrixError: when its model was closed.
        """
        for group in self._known.groups.values():
            if (found := group.chosen.get(id(parameter))) is not None:
                return found
        raise MatrixError(
            f"a parameter {tuple(parameter.shape)} has no owner any more: its model was closed, or "
            "the parameter replaced. Make the optimizer after that."
        )
