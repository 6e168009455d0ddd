"""How each parameter of a group travels, and why: chosen from the layout and measured costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from polyshard.sharding.layout import GroupLayout, ParameterLayout
from polyshard.transport.base import Transport


@dataclass(frozen=True)
class Way:
    """How one parameter travels.

    ``kind`` is ``"direct"`` (a transfer of its own, from where it rests to where it is used),
    ``"coalesced"`` (the same, launched together with the group's others), ``"packed"`` (copied into
    one transfer with other staged parameters), ``"payload"`` (inside a codec's payload) or
    ``"in place"`` (nothing moves).
    """

    kind: str
    reason: str
    is_weighed: bool = False
    """Whether its chunk was weighed against the transport's threshold."""


def ways_of(layout: GroupLayout, transport: Transport, *, has_codec: bool) -> tuple[Way, ...]:
    """One way a parameter, in the layout's order."""
    if has_codec:
        return (Way("payload", "the gather codec sends one payload a rank"),) * len(
            layout.parameters
        )
    if layout.world_size == 1:
        return (Way("in place", "one rank shares it"),) * len(layout.parameters)
    return tuple(_way(placed, layout.itemsize, transport) for placed in layout.parameters)


def _way(placed: ParameterLayout, itemsize: int, transport: Transport) -> Way:
    threshold = readable(transport.staging_bytes)
    if not placed.staged:
        kind = "coalesced" if transport.coalesces else "direct"
        return Way(kind, f"chunks of {threshold} or more", is_weighed=True)
    if placed.dim is None:
        return Way("packed", "every rank holds it whole")
    if placed.dim != 0:
        return Way("packed", f"sharded on dim {placed.dim}, where chunks interleave")
    assert placed.chunk_numel * itemsize < transport.staging_bytes
    return Way("packed", f"chunks below {threshold}", is_weighed=True)


def summary(ways: tuple[Way, ...], transport: Transport) -> str:
    """How many parameters travel which way, why, and where the threshold comes from."""
    counts = Counter(ways)
    said = "; ".join(f"{n} {way.kind} ({way.reason})" for way, n in counts.items())
    if not any(way.is_weighed for way in counts):
        return said
    return f"{said}; threshold {transport.staging_reason}"


def readable(nbytes: int) -> str:
    """A size in bytes for a person, in binary units."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
