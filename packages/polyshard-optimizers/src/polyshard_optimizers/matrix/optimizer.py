"""The optimizer of all matrices of a model, each of which one rank makes the update of.

[Note: rounds]
Matrices are taken in rounds, one of every owner in each: weights that owners need travel, then all
owners compute at once, then rows of the updates leave, which arrive while the next round computes.
All ranks go through the same rounds, so that collectives pair. Matrices that need no journey come
last, while rows of the others arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from polyshard.agreement.meeting import agree
from polyshard.failures import Part
from polyshard.memory.streams import streams_of
from polyshard.plugins.seams import OwnedParameter, local_of
from polyshard_optimizers.matrix.choosing import Cut, Leads
from polyshard_optimizers.matrix.errors import MatrixError
from polyshard_optimizers.matrix.parts import Parts
from polyshard_optimizers.matrix.recipes import Recipe, Settings, State
from polyshard_optimizers.matrix.saving import Saved, from_saved, to_saved
from polyshard_optimizers.matrix.sites import Chosen, Site, site_of


class Owners(Protocol):
    """The plugin, which says how a parameter holds matrices, and what moves it."""

    def chosen(self, parameter: Tensor) -> Chosen:
        """What is known of it now."""
        ...


@dataclass
class _Begun:
    """An update that was begun when its gradient landed."""

    update: Callable[[], Tensor]
    """Waits for it."""
    state: State
    """What follows from it: the step may be left out, and then nothing has changed."""
    gradient: Tensor
    writes: int


@dataclass
class Matrix:
    """One parameter of the optimizer; ``state`` and what was begun are of who makes its update."""

    chosen: Chosen
    site: Site
    settings: dict[str, Any]
    state: State
    begun: _Begun | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter."""
        return self.site.parameter

    @property
    def cut(self) -> Cut:
        """What this rank makes updates of."""
        return self.site.cut


class MatrixSteps(Optimizer):
    """What :meth:`MatrixOptimizer.optimizer` returns: a ``torch.optim.Optimizer``.

    Its groups have the settings of the class that was asked for. State lives with owners;
    ``state_dict()`` and ``load_state_dict()``, which all ranks call, have it in the form of the
    sharded parameters, as the class alone would.
    """

    sees_shards = False
    """For plugins that ask: an update is made of a whole matrix, however that is sharded."""

    def __init__(
        self,
        owners: Owners,
        recipe: Recipe,
        parameters: Iterable[nn.Parameter],
        settings: dict[str, Any],
    ) -> None:
        """Made by the plugin; ``parameters`` have owners."""
        self._owners = owners
        self._recipe = recipe
        self._matrices: dict[int, Matrix] = {}
        self._leads = Leads()
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(list(parameters), settings)

    def _matrix(self, parameter: nn.Parameter, settings: dict[str, Any]) -> Matrix:
        chosen, matrix = self._owners.chosen(parameter), self._matrices.get(id(parameter))
        if matrix is None or matrix.chosen is not chosen:  # what moves it may have been made anew
            site = site_of(chosen, self._lead)
            begun = None if matrix is None else matrix.begun
            matrix = Matrix(chosen, site, settings, {}, begun)
            self._matrices[id(parameter)] = matrix
        matrix.settings = settings
        matrix.state = self.state.get(parameter, {})  # which an attempt may have put back
        return matrix

    def _lead(self, owned: OwnedParameter, cut: Cut, parts: Parts) -> tuple[int, ...]:
        sizes = tuple(axis.size for axis in parts.axes)
        return parts.leads(self._leads.of(owned.parameter, owned.owner, sizes, cut))

    def _every(self) -> list[Matrix]:
        return [self._matrix(p, group) for group in self.param_groups for p in group["params"]]

    def agree(self) -> None:
        """Compare who makes what among all ranks of meshes that have more axes than plans cover.

        Raises:
            PlanMismatchError: on every rank, where they differ.
        """
        lines: dict[DeviceMesh, list[str]] = {}
        for matrix in self._every():
            parameter, site = matrix.parameter, matrix.site
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                if mesh.ndim > matrix.chosen.data_axes:
                    who = f"rank {site.who}" if site.who else "every rank, in rows"
                    line = f"'{site.name}' {matrix.chosen.cut}: updates are made by {who}"
                    lines.setdefault(mesh, []).append(line)
        for mesh, told in lines.items():
            agree(sorted(mesh.mesh.flatten().tolist()), told, "the making of a matrix optimizer")

    def notices(self) -> list[str]:
        """What ``early=True`` changes nothing for."""
        late = [m.site.name for m in self._every() if not m.site.begins_early]
        text = (
            f"early=True changes nothing for {late}: their parts are put together in the step, or "
            "they stay in rows."
        )
        return [text] if late else []

    # Steps ------------------------------------------------------------------------------------

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient. All ranks call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), Part("(optimizer)"):  # whose failures are told to ranks that wait
            self._step()
        return loss

    def _step(self) -> None:
        every = []
        for matrix in self._every():
            if matrix.parameter.grad is None:
                matrix.begun = None  # of a step that was left out
            else:
                every.append(matrix)
        for matrix in every:
            _check_unchanged(matrix)  # before anything is sent
        returning: list[tuple[Matrix, Callable[[], Tensor]]] = []
        for together in _rounds(every):
            gathered = [(m, *self._inputs(m)) for m in together]
            updates = [
                self._update(m, gradient, weights) if m.site.makes else None
                for m, gradient, weights in gathered
            ]
            dtypes = [self._recipe.returns(m.parameter) for m in together]
            returning += [
                (m, m.site.scatter(update, dtype))
                for m, update, dtype in zip(together, updates, dtypes, strict=True)
            ]
        for matrix, rows in returning:
            local = local_of(matrix.parameter)
            self._recipe.apply(local, rows(), matrix.cut, matrix.settings)
            self.state.setdefault(matrix.parameter, matrix.state)

    def _inputs(self, matrix: Matrix) -> tuple[Tensor | None, Tensor | None]:
        """Gradient and weights, as far as needed, where the update is made."""
        site, weights = matrix.site, None
        gradient = site.gradient()
        if self._recipe.needs_weights:
            weights = site.gather(local_of(matrix.parameter))
        return gradient, weights

    def _update(self, matrix: Matrix, gradient: Tensor | None, weights: Tensor | None) -> Tensor:
        assert gradient is not None
        begun, matrix.begun = matrix.begun, None
        if begun is None:
            settings = matrix.settings
            return self._recipe.update(gradient, weights, matrix.cut, matrix.state, settings)
        update = begun.update()
        matrix.state.clear()
        matrix.state.update(begun.state)
        return update

    def begin(self, owned: OwnedParameter) -> None:
        """Compute an update beside the backward: nothing will change its gradient."""
        matrix = self._matrices.get(id(owned.parameter))
        if matrix is None:
            for known in self._every():
                if known.parameter is owned.parameter:
                    matrix = known
        if matrix is None or matrix.site.begins_at is None or self._recipe.needs_weights:
            return
        gradient = owned.gradient()
        assert gradient is not None
        state = _copied(self.state.get(owned.parameter, {}))
        work = partial(
            _without_grad, self._recipe, (gradient, None, matrix.cut, state, matrix.settings)
        )
        matrix.begun = _Begun(self._start(work, gradient), state, gradient, owned.writes)

    def _start(self, work: Callable[[], Tensor], gradient: Tensor) -> Callable[[], Tensor]:
        """Begin ``work``; what waits for its result, on the stream that is current then.

        An accelerator computes beside the host, so there it is launched where the gradient was
        written. A thread would launch it on a stream of its own, which nothing orders.
        """
        streams = streams_of(gradient.device)
        if streams is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "polyshard-optimizers")
            return self._pool.submit(work).result
        update, end = work(), streams.mark()

        def joined() -> Tensor:
            streams.current().wait_event(end)
            return update

        return joined

    # Checkpoints ------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """State in rows, as the sharded parameters have it. All ranks call it."""
        every = self._every()
        with torch.no_grad():
            saved = to_saved([Saved(m.site, m.state) for m in every])
        try:
            for matrix, state in zip(every, saved, strict=True):
                if state:
                    self.state[matrix.parameter] = state
            return super().state_dict()
        finally:
            for matrix in every:
                if matrix.parameter in self.state:
                    self.state[matrix.parameter] = matrix.state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state to owners. All ranks call it."""
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    saved = self.state.pop(parameter, {})
                    matrix = self._matrix(parameter, group)
                    matrix.begun = None
                    matrix.state = from_saved(matrix.site, matrix.chosen.cut, saved)
                    if saved:
                        self.state[parameter] = matrix.state


def _check_unchanged(matrix: Matrix) -> None:
    begun, owned = matrix.begun, matrix.site.begins_at
    if begun is None or owned is None:
        return
    landed = owned.has_landed()
    if not landed or owned.gradient() is not begun.gradient or owned.writes != begun.writes:
        raise MatrixError(
            f"the gradient of '{matrix.site.name}' was changed after its update had begun "
            "(early=True). Clip and accumulate without early=True, or call "
            "set_is_last_backward(False) before all backwards but the last."
        )


def _without_grad(recipe: Recipe, arguments: tuple[Tensor, None, Cut, State, Settings]) -> Tensor:
    with torch.no_grad():
        return recipe.update(*arguments)


def _copied(state: State) -> State:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}


def _rounds(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """See [Note: rounds]."""
    by_owner: dict[tuple[int, ...], list[Matrix]] = {}
    for matrix in matrices:
        by_owner.setdefault(matrix.site.who, []).append(matrix)
    stay = by_owner.pop((), [])
    columns = [by_owner[owner] for owner in sorted(by_owner)]
    rounds = [[m for m in row if m is not None] for row in zip_longest(*columns)]
    return [*rounds, *([matrix] for matrix in stay)]


def settings_of(given: Mapping[str, Any], made_by: type[Optimizer]) -> dict[str, Any]:
    """Everything that groups of ``made_by`` hold when it is made with what was ``given``."""
    probe = made_by([nn.Parameter(torch.zeros(2, 2, device="cpu"))], **given)
    return {name: value for name, value in probe.param_groups[0].items() if name != "params"}
