"""Engines by name: ``polyshard+int8+offload-optimizer``, ``fsdp2+bf16``, ``ddp``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from polyshard_cli.compare.errors import CompareError

__all__ = ["KINDS", "Spec", "parse"]

OFFLOAD = "offload-"
TIERS = ("params", "grads", "optimizer", "fraction")
OFFLOADS = tuple(f"{OFFLOAD}{tier}" for tier in TIERS)

KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "polyshard": ("bf16", "keep", "hsdp", "flat", "weights", "gradients", *OFFLOADS),
        "fsdp2": ("bf16", "keep", "hsdp", "offload-params"),
        "fsdp1": ("bf16", "keep"),
        "ddp": (),
        "single": (),
    }
)
"""Engines, and the options of each; what else polyshard is given are formats and plugins."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One engine with its options.

    Attributes:
        name: as the user wrote it.
        kind: one of :data:`KINDS`.
        bf16: gather and compute in bfloat16, reduce in float32.
        keep: units stay gathered from forward to backward.
        replicas: copies of the model (HSDP), which share the ranks.
        flat: polyshard's flat optimizer step.
        formats: of weights and of gradients on the wire; empty: their own dtype.
        offload: tiers, by what rests there.
        plugins: formats without a direction, installed plugins, and ``module:object``.
        keywords: more of ``fully_shard``'s, which no name says; ``plugins`` join the others.
    """

    name: str
    kind: str
    bf16: bool = False
    keep: bool = False
    replicas: int = 1
    flat: bool = False
    formats: tuple[str, str] = ("", "")
    offload: tuple[tuple[str, str], ...] = ()
    plugins: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict, hash=False)


def parse(names: Sequence[str], ranks: int) -> tuple[Spec, ...]:
    """Read the engines of a comparison over so many ranks.

    Raises:
        CompareError: for an engine or option that is not known, or does not fit, with the nearest
            that does.
    """
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise CompareError(f"--engines names {twice[0]!r} twice; name each once")
    return tuple(_parsed(name, ranks) for name in names)


def _parsed(name: str, ranks: int) -> Spec:
    kind, *options = (part.strip() for part in name.split("+"))
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise CompareError(
            f"engine {name!r}: there is no {kind!r}; {hint}Known: {', '.join(KINDS)}; options "
            "follow with +, as polyshard+int8+offload-optimizer"
        )
    spec = Spec(name=name, kind=kind)
    for option in options:
        spec = _with(spec, option, ranks)
    return spec


def _with(spec: Spec, option: str, ranks: int) -> Spec:
    """``spec`` with one option more."""
    key, equals, value = option.partition("=")
    known = KINDS[spec.kind]
    if key not in known:
        return _with_plugin(spec, option)
    if key in ("bf16", "keep", "flat"):
        if equals:
            raise CompareError(f"engine {spec.name!r}: {key} takes no value; write +{key}")
        if key == "bf16":
            return replace(spec, bf16=True)
        return replace(spec, keep=True) if key == "keep" else replace(spec, flat=True)
    if key == "hsdp":
        return replace(spec, replicas=_replicas(spec.name, value, ranks))
    if key in ("weights", "gradients"):
        if not value:
            raise CompareError(f"engine {spec.name!r}: write +{key}=FORMAT, as +{key}=int8")
        weights, gradients = spec.formats
        return replace(spec, formats=(value, gradients) if key == "weights" else (weights, value))
    tier = key.removeprefix(OFFLOAD)
    if tier == "fraction" and not value:
        raise CompareError(f"engine {spec.name!r}: write +{key}=0.5")
    if spec.kind == "fsdp2" and value not in ("", "host"):
        raise CompareError(f"engine {spec.name!r}: torch offloads to the host only; write +{key}")
    return replace(spec, offload=(*spec.offload, (tier, value or "host")))


def _with_plugin(spec: Spec, option: str) -> Spec:
    """A format or a plugin, which polyshard alone takes; its name is looked up later."""
    if spec.kind == "polyshard" and option and "=" not in option:
        if option in spec.plugins:
            raise CompareError(f"engine {spec.name!r} names {option!r} twice; name it once")
        return replace(spec, plugins=(*spec.plugins, option))
    options = list(_shown(KINDS[spec.kind]))
    more = [", formats and plugins" if spec.kind == "polyshard" else ""]
    takes = f"it takes {', '.join(options)}{more[0]}" if options else "it takes none"
    raise CompareError(f"engine {spec.name!r}: {spec.kind} has no option {option!r}; {takes}")


def _shown(options: Sequence[str]) -> Iterator[str]:
    values = {"hsdp": "N", "weights": "FORMAT", "gradients": "FORMAT", "offload-fraction": "0.5"}
    return (f"{one}={values[one]}" if one in values else one for one in options)


def _replicas(name: str, text: str, ranks: int) -> int:
    found = int(text) if text.isdecimal() else 0
    if found > 1 and ranks % found == 0 and found < ranks:
        return found
    fits = [str(n) for n in range(2, ranks) if ranks % n == 0]
    raise CompareError(
        f"engine {name!r}: hsdp=N makes N copies that share the ranks evenly; of {ranks} ranks "
        f"{'N may be ' + ', '.join(fits) if fits else 'none can be made: give --ranks 4'}"
    )
