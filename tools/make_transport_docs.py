"""Write docs/reference/transport.md: how bytes move, and what the engine answers by itself.

Usage: python tools/make_transport_docs.py [--check]      (--check: only say whether it is current)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import make_hook_docs
from generated import write_or_check

PAGE = make_hook_docs.PAGE.with_name("transport.md")
HEAD = """# Transports, meshes and defaults

Generated from `polyshard/transport/`, `polyshard/sharding/` and `polyshard/plugins/builtin.py` by
`tools/make_transport_docs.py`; edit the classes.

A backend's `connect(roles, device)` makes a *transport* between the ranks of a shard axis. The
engine asks it for a *route* for each group, once: a route binds the *pieces* of the group to
memory, so that a step only starts it and waits for what is *pending*. Examples:
[how to write a transport](../how-to/write-a-transport.md).

`choose_transport(roles, device)` makes the engine's own, and `WrappedTransport` goes around any.
`owner_route_over(group, device, dtype, tag)` is a way for whole tensors among ranks of any group.
`backend_for(group, device)` says what `torch.distributed` uses there: `"gloo"`, `"nccl"`, ...
"""
DEFAULTS_HEAD = """## The engine's own answers

`polyshard.plugins.builtin` holds what counts where no plugin answers. The classes go through the
same seams as a plugin's; inherit from one, or make one, where yours differs in a part only.

| seam | class | name in plans | what it does |
|---|---|---|---|
"""
TRANSPORTS = (
    *("Transport", "WrappedTransport", "GatherPiece", "Extents"),
    *("GatherRoute", "ReduceRoute", "OwnerRoute", "Pending", "MeshRoles"),
)
LAYOUTS = ("GroupLayout", "ParameterLayout")


def page() -> str:
    """The whole page."""
    from polyshard import seams, transport

    parts = [HEAD]
    for home, names in ((transport, TRANSPORTS), (seams, LAYOUTS)):
        for name in names:
            kind = getattr(home, name)
            parts.append(f"## {name}\n\n`{home.__name__}.{name}`. {inspect.getdoc(kind)}\n")
            parts.append("\n".join(lines_of(kind)) + "\n")
    parts.append(DEFAULTS_HEAD + "".join(default_rows()))
    text = "\n".join(parts)
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))


def lines_of(kind: type) -> Iterator[str]:
    """Fields, properties and methods of a class, each with its text."""
    said = make_hook_docs.attribute_texts(kind)
    for name, annotation in inspect.get_annotations(kind).items():
        default = f" = {vars(kind)[name]!r}" if name in vars(kind) else ""
        text = f": {said[name]}" if name in said else ""
        yield f"- `{name}: {annotation}{default}`{text}"
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        function: Any = getattr(member, "fget", None) or getattr(member, "func", None)
        if isinstance(member, property | cached_property):
            yield f"- `{name}: {function.__annotations__['return']}`: {_text(function)}"
        elif inspect.isfunction(member):
            needed = "" if getattr(member, "__isabstractmethod__", False) else _default_of(kind)
            signature = make_hook_docs.signature_of(member)
            yield f"- `{name}{signature}`{needed}: {_text(member)}"


def default_rows() -> Iterator[str]:
    """A row of the table for each part that the engine has of its own."""
    from polyshard.composition.roles import ROLES
    from polyshard.plugins import builtin

    for role in ROLES:
        engine: Any = role.engine
        yield f"| {role.name} | `{engine.__name__}` | `{engine().name}` | {_first_line(engine)} |\n"
    for kind, seam in ((builtin.DeviceStorage, "one shard"), (builtin.EnginePlugin, "other hooks")):
        yield f"| {seam} | `{kind.__name__}` | | {_first_line(kind)} |\n"


def _default_of(kind: type) -> str:
    return " (has a default)" if inspect.isabstract(kind) else ""


def _text(member: object) -> str:
    found = inspect.getdoc(member)
    return " ".join((found or "as the base says.").split())


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


if __name__ == "__main__":
    write_or_check({PAGE: page()}, "make_transport_docs.py")
