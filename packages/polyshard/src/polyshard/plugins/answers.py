"""What the parts of a plan say of one group, checked once when they are bound to it.

A part that answers something else than its seam asks for would not fail here but give wrong
results, or differ between ranks; so each answer is looked at before anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from polyshard.plugins.roles import COLLECTIVES, Contributions
from polyshard.errors import PluginError, warn
from polyshard.plugins.validation import misfit
from polyshard.plugins.seams import BoundGatherCodec, BoundReduceCodec, BoundReplicaCodec, ShardStorage
from polyshard.transport.base import Transport

if TYPE_CHECKING:
    from polyshard.plugins.seams import GroupInfo, OwnedParameter, ParamInfo, ShardingConstraint
    from polyshard.sharding.layout import GroupLayout
    from polyshard.sharding.mesh import MeshRoles

T = TypeVar("T")


@dataclass(frozen=True)
class Binding:
    """The parts of one group, for answers that errors are to name by plugin and group."""

    contributions: Contributions
    group: str

    def refuse(self, factory: object, call: str, problem: str) -> NoReturn:
        """Raise, naming the plugin of ``factory``, the call and the group."""
        plugin = self.contributions.plugin_of(factory)
        raise PluginError(f"{plugin}: {call} for group '{self.group}' {problem}")

    def _made(self, factory: Any, method: str, seam: type, *given: object) -> Any:
        """What ``factory.method(*given)`` returned, which fits ``seam`` if it is anything.

        Raises:
            PluginError: when it does not fit.
        """
        made: object = self._call(factory, getattr(factory, method), *given)
        if made is not None and (problem := misfit(made, seam)):
            self.refuse(factory, f"{type(factory).__name__}.{method}", f"returned {problem}")
        return made

    def _call(self, part: object, function: Callable[..., T], *given: object) -> T:
        """``function(*given)``; an exception is noted to be that of the plugin of ``part``."""
        try:
            return function(*given)
        except Exception as error:
            plugin, called = self.contributions.plugin_of(part), function.__name__
            owner = type(getattr(function, "__self__", part)).__name__
            seam = self.contributions.seam_of(part)
            error.add_note(
                f"raised by {plugin} in {owner}.{called}, its {seam} for group '{self.group}'"
            )
            raise

    # Codecs -----------------------------------------------------------------------------------

    def gather_codec(self, info: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        """The gather codec of the group as it is now.

        Raises:
            PluginError: when what the factory makes does not fit its seam.
        """
        factory = self.contributions.gather_codec
        bound: BoundGatherCodec | None = self._made(factory, "bind", BoundGatherCodec, info, layout)
        if bound is not None:
            self._check_payload(factory, bound)
        return bound

    def reduce_codec(self, info: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        """The reduce codec of the group as it is now.

        Raises:
            PluginError: when what the factory makes does not fit its seam.
        """
        factory = self.contributions.reduce_codec
        bound: BoundReduceCodec | None = self._made(factory, "bind", BoundReduceCodec, info, layout)
        if bound is not None:
            self._check_payload(factory, bound)
            if bound.replicas is not None:
                if problem := misfit(bound.replicas, BoundReplicaCodec):
                    call = f"{type(factory).__name__}.bind(...).replicas"
                    self.refuse(factory, call, f"returned {problem}")
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

    def storage(self, info: GroupInfo, layout: GroupLayout) -> ShardStorage:
        """Where the shard of the group rests.

        Raises:
            PluginError: when what the factory makes does not fit its seam.
        """
        factory = self.contributions.storage
        made: ShardStorage | None = self._made(factory, "create", ShardStorage, info, layout)
        if made is None:
            self.refuse(factory, f"{type(factory).__name__}.create", "returned None")
        return made

    def rested(self, storage: ShardStorage, shard: Tensor) -> Tensor:
        """What ``storage`` keeps of a freshly cut ``shard``.

        Raises:
            PluginError: when it is not the shard's values in the shard's form.
        """
        call, factory = f"{type(storage).__name__}.rest", self.contributions.storage
        resting: object = self._call(factory, storage.rest, shard)
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

    # Landing ----------------------------------------------------------------------------------

    def owners(self, info: GroupInfo) -> tuple[int | None, ...]:
        """The rank on which the gradient of each parameter lands whole, if it does.

        Raises:
            PluginError: when the answer names no ranks of the mesh.
        """
        landing = self.contributions.landing
        found: Any = self._call(landing, landing.owners, info)
        count, ranks = len(info.parameters), info.mesh.size()
        is_list = isinstance(found, Sequence) and len(found) == count
        if not is_list or not all(o is None or (_is_count(o) and o < ranks) for o in found):
            self.refuse(
                landing,
                f"{type(landing).__name__}.owners",
                f"returned {found!r}; return, for each of {count} parameters, a position among the "
                f"{ranks} ranks of its mesh, or None.",
            )
        return tuple(found)

    def show(self, info: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        """Show the landing of the group all parameters."""
        landing = self.contributions.landing
        self._call(landing, landing.show, info, parameters)

    def hold(self, info: GroupInfo, owned: Sequence[OwnedParameter]) -> None:
        """Show the landing of the group what moves its parameters."""
        landing = self.contributions.landing
        self._call(landing, landing.hold, info, owned)

    # Constraints and transports ---------------------------------------------------------------

    def block_elements(self, constraint: ShardingConstraint, param: ParamInfo) -> int:
        """What ``constraint`` keeps together of ``param``.

        Raises:
            PluginError: when it is not a positive whole number.
        """
        block: object = self._call(constraint, constraint.block_elements, param)
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
        made: Transport | None = self._made(backend, "connect", Transport, roles, device)
        if made is None:
            self.refuse(backend, f"{type(backend).__name__}.connect", "returned None")
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
        warn([n for part in self.contributions.layers[COLLECTIVES] for n in part.notices])
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
