"""Whether gradients of a group may land whole on owners, and what brings them there."""

from __future__ import annotations

from polyshard.composition.answers import Binding
from polyshard.composition.roles import REDUCE_CODEC, STORAGE
from polyshard.errors import UnsupportedError
from polyshard.exchange.gather import Line
from polyshard.exchange.landing import Landing
from polyshard.exchange.owned import Axes, Owned
from polyshard.exchange.placing import Placing
from polyshard.group.parts import Parts
from polyshard.seams import BoundReduceCodec, ShardStorage, overrides


def landing_of(
    parts: Parts, line: Line, binding: Binding, placing: Placing, codec: BoundReduceCodec | None
) -> Landing | None:
    """What brings gradients of the group to their owners; ``None`` where they land on shards.

    What owners of those may gather them with is shown to the plugin all the same.

    Raises:
        UnsupportedError: where another part of the group needs them in rows.
    """
    binding.show(parts.info, [p.parameter for p in parts.shards.parameters])
    layout = parts.shards.layout
    if not layout.with_owner:
        return None
    _check(parts, binding, codec)
    dtype = parts.dtypes.reduce
    axes = Axes.of(parts.roles, line, dtype)
    owned = {
        i: Owned(i, layout.owners[i] or 0, parts.shards.parameters[i], layout.parameters[i], axes)
        for i in layout.with_owner
    }
    landing = None
    if layout.lands:
        landing = Landing(owned, parts.waiting, placing, dtype, parts.pool)
        landing.tells = parts.contributions.landing.landed
    binding.hold(parts.info, tuple(owned.values()))
    return landing


def _check(parts: Parts, binding: Binding, codec: BoundReduceCodec | None) -> None:
    shards, contributions = parts.shards, parts.contributions
    layout, world = shards.layout, parts.roles.shard_size
    infos = {i: shards.parameters[i].info for i in layout.with_owner}
    kept = [p.fqn for i, p in infos.items() if layout.parameters[i].dim is None and world > 1]
    changed = {i: p.fqn for i, p in infos.items() if p.part_shape is None}
    divided = [p.fqn for p in infos.values() if p.part_shape != p.shape]
    problem = ""
    if kept:
        problem = f"every rank holds {kept} whole"
    elif changed:
        layers = parts.onion.layers_of(shards.parameters[next(iter(changed))].extensions)
        names = list(changed.values())
        problem = f"plugins {', '.join(layers)} change {names} before they are sharded"
    elif divided and not contributions.landing.takes_parts:
        problem = f"other axes of their meshes divide {divided}, and it takes whole matrices alone"
    elif codec is not None and layout.lands:
        plugin = contributions.plugin_of(contributions[REDUCE_CODEC])
        problem = f"{plugin} encodes the gradients of all ranks in rows"
    elif overrides(shards.storage.place_gradient, ShardStorage.place_gradient):
        plugin = contributions.plugin_of(contributions[STORAGE])
        problem = f"{plugin} moves gradients to where shards rest, in rows"
    if problem:
        plugin = contributions.plugin_of(contributions.landing)
        chosen = [p.fqn for p in infos.values()]
        raise UnsupportedError(
            f"{plugin}: gradients of {chosen} of group '{binding.group}' are to land whole on "
            f"owners, but {problem}. Leave these parameters out of one of the two."
        )
