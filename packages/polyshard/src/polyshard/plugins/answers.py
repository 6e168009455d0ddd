"""What the parts of a plan say of one group, checked once when they are bound to it.

A part that answers something else than its seam asks for would not fail here but give wrong
results, or differ between ranks; so each answer is looked at before anything is computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from polyshard.errors import PluginError
from polyshard.plugins.validation import fitting
from polyshard.seams import BoundGatherCodec, BoundReduceCodec, BoundReplicaCodec, ShardStorage
from polyshard.transport.base import Transport

if TYPE_CHECKING:
    from polyshard.plugins.roles import Contributions
    from polyshard.seams import GroupInfo, ParamInfo, ShardingConstraint
    from polyshard.sharding.layout import GroupLayout
    from polyshard.sharding.mesh import MeshRoles


@dataclass(frozen=True)
class Binding:
    """The parts of one group, for answers that errors are to name by plugin and group."""

    contributions: Contributions
    group: str

    def refuse(self, factory: object, call: str, problem: str) -> NoReturn:
        """Raise, naming the plugin of ``factory``, the call and the group."""
        plugin = self.contributions.plugin_of(factory)
        raise PluginError(f"{plugin}: {call} for group '{self.group}' {problem}")

    # Codecs -----------------------------------------------------------------------------------

    def gather_codec(self, info: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        """The gather codec of the group as it is now.

        Raises:
            PluginError: when what the factory makes does not fit its seam.
        """
        factory = self.contributions.gather_codec
        bound = fitting(factory.bind(info, layout), BoundGatherCodec, factory, "bind")
        if bound is not None:
            self._check_payload(factory, bound)
        return bound

    def reduce_codec(self, info: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        """The reduce codec of the group as it is now.

        Raises:
            PluginError: when what the factory makes does not fit its seam.
        """
        factory = self.contributions.reduce_codec
        bound = fitting(factory.bind(info, layout), BoundReduceCodec, factory, "bind")
        if bound is not None:
            self._check_payload(factory, bound)
            if bound.replicas is not None:
                fitting(bound.replicas, BoundReplicaCodec, factory, "bind(...).replicas")
                self._check_payload(factory, bound.replicas)
        return bound

    def _check_payload(
        self, factory: object, bound: BoundGatherCodec | BoundReduceCodec | BoundReplicaCodec
    ) -> None:
        nbytes: object = bound.payload_bytes
        if not _is_count(nbytes):
            self.refuse(
                factory,
                f"{type(bound).__name__}.payload_bytes",
                f"is {nbytes!r}; give a whole number of bytes, equal on all ranks.",
            )

    # Storage ----------------------------------------------------------------------------------

    def rested(self, storage: ShardStorage, shard: Tensor) -> Tensor:
        """What ``storage`` keeps of a freshly cut ``shard``.

        Raises:
            PluginError: when it is not the shard's values in the shard's form.
        """
        resting: object = storage.rest(shard)
        call, factory = f"{type(storage).__name__}.rest", self.contributions.storage
        problem = _unlike(resting, shard)
        if problem or not isinstance(resting, Tensor):
            self.refuse(factory, call, f"returned {problem}; return the shard, where it rests.")
        if not _holds(resting, shard):
            self.refuse(factory, call, "returned a tensor of other values; copy the shard into it.")
        return resting

    def check_view(
        self, storage: ShardStorage, resting: Tensor, device: torch.device, *, may_cross: bool
    ) -> None:
        """Refuse a view that transfers cannot be bound to once.

        With ``may_cross`` a codec reads it, on the compute ``device`` or on the host.

        Raises:
            PluginError: saying what is wrong with it.
        """
        if resting.is_meta:
            return
        view: object = storage.view()
        call, factory = f"{type(storage).__name__}.view", self.contributions.storage
        problem = _unlike(view, resting)
        if problem or not isinstance(view, Tensor):
            self.refuse(
                factory, call, f"returned {problem}; return what fetch() fills with the shard."
            )
        if view.device.type != device.type and not (may_cross and view.device.type == "cpu"):
            self.refuse(factory, call, f"returned a tensor on {view.device}, not on {device}.")
        if not _is_same_memory(view, storage.view()):
            self.refuse(
                factory,
                call,
                "returned another tensor when called again; transfers are bound to it once: "
                "always return the same one, and have fetch() fill it.",
            )

    def check_placed(self, storage: ShardStorage, given: Tensor, found: object) -> None:
        """Refuse what ``place_gradient`` made of a gradient ``given`` to it.

        Raises:
            PluginError: saying what is wrong with it.
        """
        problem = _unlike(found, given)
        if problem:
            self.refuse(
                self.contributions.storage,
                f"{type(storage).__name__}.place_gradient",
                f"returned {problem}; return the gradient, next to the resting shard.",
            )

    # Constraints and transports ---------------------------------------------------------------

    def block_elements(self, constraint: ShardingConstraint, param: ParamInfo) -> int:
        """What ``constraint`` keeps together of ``param``.

        Raises:
            PluginError: when it is not a positive whole number.
        """
        block: object = constraint.block_elements(param)
        if not isinstance(block, int) or not _is_count(block) or block < 1:
            self.refuse(
                constraint,
                f"{type(constraint).__name__}.block_elements",
                f"returned {block!r} for '{param.fqn}'; return a whole number of elements, 1 when "
                "anything goes.",
            )
        return block

    def transport(self, roles: MeshRoles, device: torch.device) -> Transport:
        """What the backend of the group moves bytes with.

        Raises:
            PluginError: when it belongs to other ranks than the shard axis, or lacks members.
        """
        backend = self.contributions.backend
        made = fitting(backend.connect(roles, device), Transport, backend, "connect")
        if (made.rank, made.size) != (roles.shard_rank, roles.shard_size):
            self.refuse(
                backend,
                f"{type(backend).__name__}.connect",
                f"returned a transport of rank {made.rank} of {made.size}; the shard axis has "
                f"rank {roles.shard_rank} of {roles.shard_size}.",
            )
        if not _is_count(made.staging_bytes):
            self.refuse(
                backend,
                f"{type(made).__name__}.staging_bytes",
                f"is {made.staging_bytes!r}; give a whole number of bytes.",
            )
        return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unlike(found: object, model: Tensor) -> str | None:
    """What keeps ``found`` from standing for the flat tensor ``model``; to read after "returned".

    Its device is left open: storages move what they are given.
    """
    if not isinstance(found, Tensor):
        return "None" if found is None else f"a {type(found).__name__}"
    if found.dtype != model.dtype:
        return f"{found.dtype} elements, not {model.dtype}"
    if found.shape != model.shape:
        return f"a tensor of shape {tuple(found.shape)}, not {tuple(model.shape)}"
    return None if found.is_contiguous() else "a tensor that is not contiguous"


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same_storage and one.storage_offset() == other.storage_offset()


def _holds(resting: Tensor, shard: Tensor) -> bool:
    """Whether both hold the same bits, where that is cheap to see."""
    if resting is shard or resting.is_meta or resting.device != shard.device:
        return True
    if shard.untyped_storage().nbytes() < shard.nbytes:  # taken over, and given up since
        return True
    return torch.equal(resting.view(torch.uint8), shard.view(torch.uint8))
