"""Writes down digests of what a run computes, while it does."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from polyshard.engine.initial_values import is_dense
from polyshard.engine.root import ROOT, unit_of
from polyshard.engine.trees import tensors
from polyshard_reproducible.clock import NOBODY, Watcher
from polyshard_reproducible.digests import digest
from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.names import UNSHARDED, groups_by_name, parameters_at_rest
from polyshard_reproducible.parts import Part, part_of
from polyshard_reproducible.plugin import Reproducible
from polyshard_reproducible.ranks import piece_of
from polyshard_reproducible.records import PHASES, Entry, Header, Key, line_of

PARAMETERS, ACTIVATIONS, GRADIENTS, STEPPED, STATE = PHASES


class Recorder(Watcher):
    """Records a run for ``polyshard bisect``; nothing of the run changes, and ranks send nothing.

    In each step it digests the parameters; the inputs of the model and what each sharded module
    returns, slot by slot; gradients when they are summed, and again when the optimizer gets them;
    and the optimizer's state after the step. Every rank writes 64 bits for each to a file of its
    own: the digests of a run do not depend on how many ranks made it. Sparse, nested, quantized and
    meta tensors are left out.

    Example::

        with Recorder("records/two-ranks", reproducible, model, optimizer):
            for step in range(steps):
                for slot in reproducible.each_slot(model, step=step):
                    ...
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        reproducible: Reproducible,
        model: nn.Module,
        *optimizers: Optimizer,
    ) -> None:
        """Record from the next step on, until :meth:`close`.

        Args:
            folder: of this run, for all of its ranks; records of the same first step and number of
                ranks are replaced.
            reproducible: the plugin that ``model`` is sharded with.
            model: the outermost sharded module.
            optimizers: all that step it.

        Raises:
            ReproducibleError: for a model that was not sharded with ``reproducible``, and as
                ``each_slot``.
        """
        self._folder = Path(folder)
        self._plugin = reproducible
        self._model = weakref.ref(model)
        position, mesh = reproducible.watch(model, self)
        self._replica = position.replica
        self._data_ranks = frozenset(mesh.mesh.flatten().tolist())
        self._piece = piece_of(parameters_at_rest(model).values(), mesh)
        self._groups = groups_by_name(model)
        self._names: dict[int, str] = {}
        self._file: TextIOWrapper | None = None
        self._step: int | None = None
        self._slot: int | None = None
        self._entries: list[tuple[Key, bool, Tensor]] = []
        self._calls: dict[str, int] = {}
        self._optimizers = len(optimizers)
        self._stepped = 0
        self._handles = [*self._hooked(model), *self._hooked_steps(optimizers)]

    def _hooked(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield model.register_forward_pre_hook(self._before_model, prepend=True, with_kwargs=True)
        for name, module in model.named_modules():
            if unit_of(module) is not None:
                yield module.register_forward_hook(partial(self._after_unit, name or ROOT))

    def _hooked_steps(self, optimizers: tuple[Optimizer, ...]) -> Iterator[RemovableHandle]:
        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(self._before_step)
            yield optimizer.register_step_post_hook(self._after_step)

    def __enter__(self) -> Self:
        """Nothing more happens."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close; of a step that failed nothing is written."""
        if exception[0] is not None:
            self._entries.clear()
        self.close()

    def close(self) -> None:
        """Write what is left, and record no longer; the weights that were reached are recorded."""
        model = self._model()
        if model is None or not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._plugin.watch(model, NOBODY)
        if self._step is not None and self._is_stepped:
            self.on_step(self._step + 1)
        self._write()
        if self._file is not None:
            self._file.close()

    # --- what it is told ----------------------------------------------------------------------

    @override
    def on_step(self, step: int) -> None:
        if self._step != step:  # else it is made again, and what failed counts no more
            self._write()
        self._step, self._slot, self._stepped = step, None, 0
        self._entries.clear()
        self._open(step)
        parameters = self._parameters()
        self._names = {id(parameter): name for name, parameter in parameters}
        for name, parameter in parameters:
            self._add(PARAMETERS, name, name, parameter)

    @override
    def on_slot(self, slot: int) -> None:
        self._slot = slot
        self._calls.clear()

    @override
    def on_sums(self) -> None:
        for name, parameter in reversed(self._parameters()):  # about as backward computes them
            if parameter.grad is not None:
                self._add(GRADIENTS, name, name, parameter.grad)

    @override
    def on_pause(self) -> None:
        self._slot = None

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        for index, value in enumerate(tensors((args, kwargs))):
            self._add_activation(ROOT, f"input {index}", value)

    def _after_unit(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        call = self._calls[unit] = self._calls.get(unit, 0) + 1
        again = f" of call {call}" if call > 1 else ""
        for index, value in enumerate(tensors(output)):
            self._add_activation(unit, f"output {index}{again}", value)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for parameter in _parameters_of(optimizer):
            if parameter.grad is not None:
                name = self._name(parameter)
                self._add(STEPPED, name, name, parameter.grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        for parameter in _parameters_of(optimizer):
            name = self._name(parameter)
            for entry, value in optimizer.state.get(parameter, {}).items():
                for number, tensor in enumerate(tensors(value)):
                    if not _is_of_owners(parameter, tensor):
                        which = f"{name}: {entry}" + (f" {number}" * (number > 0))
                        self._add(STATE, name, which, tensor)
        self._stepped += 1
        if self._is_stepped:
            self._write()

    # --- what it writes -----------------------------------------------------------------------

    @property
    def _is_stepped(self) -> bool:
        return self._stepped == self._optimizers > 0

    def _parameters(self) -> list[tuple[str, Tensor]]:
        model = self._model()
        return [] if model is None else list(parameters_at_rest(model).items())

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), "a parameter of another model")

    def _add_activation(self, unit: str, name: str, value: Tensor) -> None:
        if self._slot is not None:
            self._put(Key(ACTIVATIONS, unit, name, self._slot), value)

    def _add(self, phase: str, parameter: str, name: str, value: Tensor) -> None:
        if self._step is not None:
            self._put(Key(phase, self._groups.get(parameter, UNSHARDED), name), value)

    def _put(self, key: Key, value: Tensor) -> None:
        if value.is_meta or not is_dense(value):
            return
        part = part_of(value)
        if part is None:
            raise ReproducibleError(
                f"reproducible: the {key.phase} of '{key.name}' are no rows that stay whole at "
                "every world size; only tensors that a data axis divides by Shard(dim), after "
                "tensor parallelism if any, can be recorded."
            )
        if self._piece.count > 1:
            key = key._replace(name=f"{key.name} on tensor-parallel rank {self._piece.index}")
        self._entries.append((key, self._is_cut(part), digest(part)))

    def _is_cut(self, part: Part) -> bool:
        """Whether ranks of this piece have the other rows; tensor-parallel ones digest alone."""
        if part.cut is None:
            return False
        return self._data_ranks.issuperset(dist.get_process_group_ranks(part.cut.axis.group))

    def _write(self) -> None:
        """The step that is over; the only place where the host waits for a device."""
        if self._step is None or not self._entries:
            return
        file = self._open(self._step)
        numbers = torch.stack(
            [d.to(self._entries[0][2].device) for *_, d in self._entries]
        ).tolist()
        entries = [Entry(k, p, n) for (k, p, _), n in zip(self._entries, numbers, strict=True)]
        file.write(line_of(self._step, entries))
        file.flush()
        self._entries.clear()

    def _open(self, step: int) -> TextIOWrapper:
        """Before ranks meet in the first step: see [Note: starts that failed]."""
        if self._file is None:
            header = self._header(step)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / header.file_name).open("w", encoding="utf-8")
            self._file.write(header.line())
            self._file.flush()
        return self._file

    def _header(self, first: int) -> Header:
        return Header(
            slots=self._plugin.slots,
            seed=self._plugin.seed,
            parameters=[
                [self._groups.get(name, UNSHARDED), name, list(p.shape), str(p.dtype)]
                for name, p in self._parameters()
            ],
            first=first,
            started=time.time(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            replica=self._replica,
            pieces=self._piece.count,
            torch=torch.__version__,
            threads=torch.get_num_threads(),
        )


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_of_owners(parameter: Tensor, value: Tensor) -> bool:
    """Whether ``value`` is state of a sharded parameter in a form of the optimizer's own.

    Who steps whole matrices has state where matrices are, of as many as a rank makes updates of:
    neither rows nor the same on all ranks. What is wrong with it shows in the next weights.
    """
    return isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0
