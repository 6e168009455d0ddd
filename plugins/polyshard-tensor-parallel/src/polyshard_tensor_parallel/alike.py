"""Whether tensor-parallel ranks compute with the same batch and the same dropout, told once.

[Note: alike]
Every rank of a tensor-parallel group computes its part of one result, so all of them need the same
inputs, and the same masks where dropout acts on what they hold alike. If they are seeded or fed as
data-parallel ranks are, nothing fails: sums over the group mix what belongs to different batches.
So the first forward in training compares what the outermost module is given, and the state of the
random numbers if anything drops out. Sparse, nested and quantized tensors are left out. Later
forwards are not compared: a data loader that takes the wrong rank does so from the first batch on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from polyshard.agreement.meeting import agree
from polyshard.engine.initial_values import checksum, in_hex, is_dense
from polyshard.errors import DifferentValuesWarning

RANDOM = "random numbers, though modules drop out"


class Alike:
    """Compares the first forward of each model whose modules it was shown."""

    def __init__(self) -> None:
        """No module was shown yet."""
        self._hooks: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self, module: nn.Module, ranks: Sequence[int]) -> None:
        """Have the first forward of ``module``, or of one that contains it, compare ``ranks``."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            for inner in module.modules():
                if hook := self._hooks.pop(inner, None):
                    hook.remove()
            _compare(module, (args, kwargs), ranks)

        if module not in self._hooks:
            self._hooks[module] = module.register_forward_pre_hook(begin, with_kwargs=True)


@torch.no_grad()
def _compare(module: nn.Module, given: Any, ranks: Sequence[int]) -> None:
    notes = dict(_notes(module, given))
    differing = agree(ranks, (), "the first forward of a tensor-parallel model", notes)
    if not differing:
        return
    named = sorted({rank for each in differing.values() for rank in each})
    warnings.warn(
        f"tensor-parallel ranks {named} begin with different {', '.join(differing)}: each computes "
        "a part of one result, which needs the same on all. Give ranks of a tensor-parallel group "
        "the same batches (take samples by mesh['dp'].get_local_rank()), and the same seed before "
        "they train (torch.manual_seed(seed + mesh['dp'].get_local_rank())). If it is meant, "
        "filter polyshard.errors.DifferentValuesWarning.",
        DifferentValuesWarning,
        stacklevel=2,
    )


def _notes(module: nn.Module, given: Any) -> Iterator[tuple[str, str]]:
    """Checksums of the data among ``given``, and of the random state if it counts."""
    tensors = [t for t in tree_leaves(given) if type(t) is Tensor]
    for index, tensor in enumerate(tensors):
        # What a pipeline hands on needs a gradient, and may be divided.
        if is_dense(tensor) and not (tensor.requires_grad or tensor.is_meta):
            yield f"inputs (tensor {index} of the batch)", in_hex(checksum(tensor))
    if module.training and any(_drops(m) for m in module.modules()):
        yield RANDOM, in_hex(checksum(_random_state(tensors)))


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def _random_state(tensors: Sequence[Tensor]) -> Tensor:
    devices = {t.device.type for t in tensors} - {"cpu", "meta"}
    if not devices:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(devices.pop()).get_rng_state()
    return state
