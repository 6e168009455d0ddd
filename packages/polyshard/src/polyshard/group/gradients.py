"""A group's gradients on their way out of autograd: flattened, accumulated, reduced.

[Note: gradients of autograd]
Autograd may give one tensor to two leaves (two views of one gradient), and what it gives to a leaf
may be what a user's hook has kept. So its memory is read, never written: what is added to is a sum
that belongs to the group alone. torch itself adds in place, and counts such gradients twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyshard._torch.newer import rounds_before_adding
from polyshard._torch.private import storage_holders
from polyshard.errors import PluginError, SettingError
from polyshard.group.generation import Generation
from polyshard.params.sharded import Shards
from polyshard.plugins.transforms import TransformStack
from polyshard.program.accumulation import Accumulation


class Gradients:
    """Unsharded gradients of one group, from the leaves to the reducer.

    The generation is passed in, because a conversion of the parameters makes a new one, and then
    :meth:`carry` moves what was accumulated.
    """

    def __init__(self, shards: Shards, transforms: TransformStack) -> None:
        """``transforms`` flattens gradients as it did the parameters."""
        self._shards = shards
        self._transforms = transforms
        self.waiting = Accumulation()
        self.has_unreduced = False
        """Whether backwards reduced nothing since the last reduction; the same on all ranks."""
        self._flattens = [any(e is not None for e in p.extensions) for p in shards.parameters]

    def accumulate(self, generation: Generation) -> None:
        """Keep this backward's gradients unsharded, in the reduce dtype, for a later reduction."""
        self.has_unreduced = True
        self._add(self._given_up(generation), generation.gradients.kept)

    def lend(self, generation: Generation) -> None:
        """Have the backward that begins add to what waits, which is the group's own memory.

        Without a second gradient beside each sum; where autograd adds in another dtype, not.
        """
        waiting = self.waiting.unsharded
        for index in list(waiting):
            leaf = generation.leaves[index]
            same = leaf.requires_grad and leaf.dtype is waiting[index].dtype
            if same and leaf.grad is None and not self._flattens[index]:
                leaf.grad = waiting.pop(index)

    def carry(self, before: Generation, after: Generation) -> None:
        """Take what was accumulated along, in the dtypes that hold from now on."""
        device, dtypes = after.buffer.tensor.device, after.dtypes
        self.waiting.convert(device, after.gradients.kept, dtypes.reduce, dtypes.orig)
        if before.leaves is not after.leaves:
            left = {i: g.to(device) for i, g in self._given_up(before).items()}
            self._add(left, after.gradients.kept)

    def take(self, generation: Generation, *, with_zeros: bool) -> dict[int, Tensor]:
        """Unsharded gradients by parameter index; the leaves give them up.

        ``with_zeros``: for every trainable parameter, zeros where backward left none.
        """
        taken = self._given_up(generation)
        waiting = self.waiting.unsharded
        if waiting:
            self._add(taken, generation.gradients.kept)
            taken = dict(waiting)
            waiting.clear()
        if with_zeros:
            self._add_zeros(taken, generation)
        return taken

    def are_expected(self, generation: Generation, *, all_reduces: bool) -> bool:
        """Whether a reduction follows though there are none here.

        Other ranks may have some, and partial sums may wait for it.
        """
        if generation.reducer.expects_nothing(all_reduces=all_reduces):
            return False
        may_come = any(p.parameter.requires_grad for p in self._shards.parameters)
        return self.waiting.awaits_replicas or may_come

    def _given_up(self, generation: Generation) -> dict[int, Tensor]:
        """Take the gradients that autograd wrote to the leaves in this backward."""
        given: dict[int, Tensor] = {}
        for index, leaf in enumerate(generation.leaves):
            gradient = leaf.grad
            if gradient is not None:
                leaf.grad = None
                is_flat = not self._flattens[index]
                given[index] = gradient if is_flat else self._flattened(index, gradient)
        return given

    def _add_zeros(self, taken: dict[int, Tensor], generation: Generation) -> None:
        """Add zeros for trainable parameters that have no gradient.

        Raises:
            SettingError: on every rank, where ranks could not know of which dtype.
        """
        if generation.gradients.is_told:
            self._check_zeros(generation)
        device = generation.buffer.tensor.device
        for index, leaf in enumerate(generation.leaves):
            if leaf.requires_grad and index not in taken:
                placed = self._shards.layout.parameters[index]
                taken[index] = torch.zeros(
                    placed.shape, dtype=generation.dtypes.param, device=device
                )

    def _check_zeros(self, generation: Generation) -> None:
        trainable = [i for i, leaf in enumerate(generation.leaves) if leaf.requires_grad]
        unsettled = generation.gradients.open_among(trainable)
        if unsettled:
            raise SettingError(
                f"set_reduce_scatter_unused_params needs zeros for {self._names(unsettled)}, whose "
                "grad_dtype is None. Give a MixedPrecisionPolicy with the reduce_dtype that their "
                "gradients have, so that every rank makes the same zeros."
            )

    def _flattened(self, index: int, gradient: Tensor) -> Tensor:
        parameter = self._shards.parameters[index]
        with torch.no_grad():
            flat = self._transforms.flatten(gradient, parameter.info)[0]
        expected = self._shards.layout.parameters[index].shape
        if flat.shape != expected:
            layers = ", ".join(f"'{n}'" for n in self._transforms.layers_of(parameter.extensions))
            raise PluginError(
                f"plugins {layers}: pre_flatten_transform returned {tuple(flat.shape)} for the "
                f"gradient of '{parameter.info.fqn}', but {expected} for the parameter. Flatten "
                "both the same way."
            )
        return flat

    def _add(self, gradients: dict[int, Tensor], dtypes: Sequence[torch.dtype | None]) -> None:
        """Add to what waits. See [Note: gradients of autograd]."""
        waiting = self.waiting.unsharded
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for index in list(gradients):
            gradient = gradients.pop(index)
            held = waiting.get(index)
            if held is not None:
                sums.append(held)
                terms.append(_rounded(gradient, held.dtype))
            else:
                waiting[index] = _own(gradient, dtypes[index] or gradient.dtype)
        if sums:
            with torch.no_grad():
                torch._foreach_add_(sums, terms)

    def reducing(self, generation: Generation, gradients: dict[int, Tensor]) -> torch.dtype:
        """The dtype that what :meth:`take` returned travels in, from settings alone.

        See [Note: reduction]. It is reduced now.

        Raises:
            SettingError: see :meth:`_check_open`.
        """
        if generation.gradients.is_told:
            self._check_open(generation, gradients)
        has_unreduced, self.has_unreduced = self.has_unreduced, False
        return generation.dtypes.reduce if has_unreduced else generation.wire

    def _check_open(self, generation: Generation, gradients: dict[int, Tensor]) -> None:
        """Refuse to round gradients that no setting allows to be rounded.

        Raises:
            SettingError: naming the parameters.
        """
        reduce = generation.dtypes.reduce
        wider = [
            index
            for index in generation.gradients.open_among(list(gradients))
            if torch.promote_types(gradients[index].dtype, reduce) is not reduce
        ]
        if wider:
            raise SettingError(
                f"gradients of {self._names(wider)} (grad_dtype=None) are wider than {reduce}, in "
                "which their group is reduced. Give a MixedPrecisionPolicy with a reduce_dtype."
            )

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [self._shards.parameters[i].info.fqn for i in indices]

    def remember(self) -> Callable[[], None]:
        """What puts back everything that waits now."""
        has_unreduced, waiting = self.has_unreduced, self.waiting.copy()

        def put_back() -> None:
            self.has_unreduced = has_unreduced
            self.waiting.take_over(waiting)

        return put_back

    def discard(self, generation: Generation) -> None:
        """Forget everything a failed step left behind."""
        self._given_up(generation)
        self.has_unreduced = False
        self.waiting.clear()


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient`` as the installed torch adds it to a sum of ``dtype``."""
    is_wider = gradient.dtype is not dtype and gradient.itemsize >= dtype.itemsize
    return gradient.to(dtype) if is_wider and rounds_before_adding() else gradient


def _own(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient`` in memory that can be added to: its own, if nothing else looks at it."""
    plain = type(gradient) is Tensor and gradient.is_contiguous()
    if plain and gradient.dtype == dtype and storage_holders(gradient) == 1:
        return gradient
    return gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
