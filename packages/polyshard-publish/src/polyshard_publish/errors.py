"""What can go wrong when weights are published; each says what the receiver serves afterwards."""

from __future__ import annotations

from polyshard.errors import PolyshardError


class PublishError(PolyshardError, RuntimeError):
    """Weights that did not arrive, or were not taken. The receiver serves what it served before."""


class VersionError(PublishError):
    """A version that is late, repeated, or made from another one than the receiver has."""


class CatalogueError(PublishError):
    """Tensors that the receiver does not know, or knows with another shape or dtype."""


class ProofError(PublishError):
    """Digests of sender and receiver that differ; the message names the tensors."""


class GoneError(PublishError):
    """A receiver or a sender that does not answer any more."""


KINDS = {
    kind.__name__: kind
    for kind in (PublishError, VersionError, CatalogueError, ProofError, GoneError)
}
"""By name, as they travel."""


def as_publish_error(error: Exception, *, of_link: bool = False) -> PublishError:
    """``error`` if it is one of these, else one that quotes it; :class:`GoneError` of a link."""
    if isinstance(error, PublishError):
        return error
    said = f"{type(error).__name__}: {error}"
    is_gone = of_link and isinstance(error, OSError)
    made = GoneError(f"it does not answer ({said})") if is_gone else PublishError(said)
    made.__cause__ = error
    return made
