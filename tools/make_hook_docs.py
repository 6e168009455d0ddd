"""Write docs/reference/hooks.md, seams.md and transport.md from hook specifications and classes.

Usage: python tools/make_hook_docs.py [--check]      (--check: only say whether it is current)
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from generated import write_or_check

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "hooks.md"
SEAMS_PAGE, TRANSPORT_PAGE = PAGE.with_name("seams.md"), PAGE.with_name("transport.md")
HEAD = """# Hooks

Generated from `polyshard/plugins/hookspecs.py` and `polyshard/composition/roles.py` by
`tools/make_hook_docs.py`; edit the specifications and the table.

A plugin implements the hooks it cares about, marked with `@polyshard.hookimpl`, and may take any
subset of a hook's arguments. All hooks are asked while plans are built: a training step asks none.
The functions of the two transforms are frozen into the plan and run on gradients without a hook.
What hooks are given and return is described in [seams](seams.md).

![Hooks are asked once, in fully_shard, from preparing the model to unflattening; a step fetches,
encodes, moves and decodes parameters, computes, reduces and places gradients](../assets/hooks.svg)
"""


def hook_page() -> str:
    """The whole page."""
    from polyshard.plugins import hookspecs
    from polyshard.plugins.validation import hook_arguments

    parts = [HEAD, _role_table()]
    for name, arguments in hook_arguments().items():
        spec = getattr(hookspecs, name)
        parts.append(f"## {name}\n\n`{name}({', '.join(arguments)})`\n\n{_prose(spec)}\n")
    return "\n".join(parts)


ROLES_HEAD = """A group has one of each of these. Where no plugin answers, the engine does; where
two do, it is an error that names both. Every name is part of the plan that ranks compare.

| what | hook | returns | the engine's own |
|---|---|---|---|
"""


def _role_table() -> str:
    """The exclusive hooks about groups."""
    from polyshard.composition.roles import ROLES

    rows = (
        f"| {role.name} | [{role.hook}](#{role.hook}) "
        f"| [{role.seam.__name__}](seams.md#{role.seam.__name__.lower()}) "
        f"| `{role.engine().name}` |\n"
        for role in ROLES
    )
    return ROLES_HEAD + "".join(rows)


SEAMS_HEAD = """# Seams

Generated from `polyshard/seams/` and `polyshard/transport/base.py` by `tools/make_hook_docs.py`;
edit the classes.

What [hooks](hooks.md) are given, what they return, and what the engine calls in every step. `W` is
the number of ranks on the shard axis; a *chunk* is one rank's part of a parameter, padded to equal
size on all ranks. `layout.parameters` are in the order of `group.parameters`, each with `name`,
`shape`, `dim`, `chunk_numel` (elements of a chunk), `shard_offset` (its first element in the shard)
and `local_shape(rank)`. Offsets are aligned: chunks do not touch. In the unit tests of
`polyshard_testing` there are no processes, and `mesh` is `None`.

Those that plugins write are base classes: inherit, write what has no default, and override of the
rest what you need. They are importable from `polyshard`, those about transports from
`polyshard.transport`, the others from `polyshard.seams`. A class that has everything without a
default serves without inheriting too (an observer has to have all its methods then): it is given
the defaults that it lacks, and one that cannot be given any is refused with the name of the base.
Inherit anyway where you can: mypy then sees what you wrote, and Python what you forgot.

A codec in one class is a plugin: `GatherCodecPlugin` or `ReduceCodecPlugin`, which answers its hook
by itself. `GatherCodec` and `ReduceCodec` with what they bind are the long way, for a plugin that
owns several, or the second hop of a reduction.
"""


def seams_page() -> str:
    """The page about the objects that hooks meet."""
    import polyshard
    from polyshard import seams
    from polyshard.plugins import codec_plugins
    from polyshard.transport import base

    parts = [SEAMS_HEAD]
    for name in SEAMS:
        kind: type = next(vars(m)[name] for m in (seams, codec_plugins, base) if name in vars(m))
        home = kind.__module__.rpartition(".")[0]
        home = "polyshard.seams" if name in seams.__all__ else home
        home = "polyshard" if name in polyshard.__all__ else home
        parts.append(f"## {name}\n\n`{home}.{name}`. {inspect.getdoc(kind)}\n")
        parts.extend(_members(kind))
        if issubclass(kind, codec_plugins.CodecPlugin):
            parts.extend(_members(codec_plugins.CodecPlugin))
    parts.append(FUNCTIONS_HEAD)
    parts.append("\n".join(_function(vars(seams)[name]) for name in FUNCTIONS) + "\n")
    return _without_roles("\n".join(parts))


def _without_roles(page: str) -> str:
    """Markdown of what docstrings say in reStructuredText."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", page.replace("``", "`"))


SEAMS = (
    *("ParamInfo", "GroupIdentity", "GroupInfo"),
    *("GatherCodecPlugin", "ReduceCodecPlugin", "CodecGroup", "Around", "Stateful"),
    *("GatherCodec", "BoundGatherCodec", "ReduceCodec", "BoundReduceCodec", "BoundReplicaCodec"),
    *("StorageFactory", "ShardStorage", "CollectivesBackend", "Transport", "GatherRoute"),
    *("ReduceRoute", "OwnerRoute", "GradientLanding", "OwnedParameter", "Rows"),
    *("ShardingConstraint", "StateDictAdapter", "Observer", "StepObserver"),
    *("OptimizerKeeper", "Lent", "Stepper", "Twins", "SteppedOptimizer"),
)
"""What hooks meet, codecs in one class first; the engine's own side is left out."""

GIVEN = (
    "Stepper",
    "Twins",
    "GatherPiece",
    "Pending",
    "WrappedTransport",
    "MeshRoles",
    "ParameterLayout",
)
"""Given to plugins, or used as they are."""

FUNCTIONS_HEAD = """## Functions

For plugins that step optimizers; in `polyshard.seams`.
"""
FUNCTIONS = ("check_takeable", "like", "local_of", "repointed", "spec_of")


NOTICES = "what `describe()` says of the group"


def _members(found: type) -> list[str]:
    """Fields, properties and methods of a class, each with its text."""
    from polyshard.seams import Named

    lines = []
    if issubclass(found, Named):
        lines.append('- `name: str`, `settings: str = ""`: shown in plans, compared across ranks')
        lines.append(f"- `notices: tuple[str, ...] = ()`: {NOTICES}; read after it was bound")
    said = attribute_texts(found)
    for name, kind in inspect.get_annotations(found).items():
        if not name.startswith("_"):
            default = f" = {vars(found)[name]!r}" if name in vars(found) else ""
            text = said.get(name, NOTICES if name == "notices" else "")
            lines.append(f"- `{name}: {kind}{default}`{text and f': {text}'}")
    for name, member in vars(found).items():
        function: Any = getattr(member, "fget", None) or getattr(member, "func", None)
        if name.startswith(("_", "polyshard_")):
            continue
        if isinstance(member, property | cached_property):
            lines.append(f"- `{name}: {function.__annotations__['return']}`: {_text(function)}")
        elif inspect.isfunction(member):
            is_needed = found.__name__ in GIVEN or getattr(member, "__isabstractmethod__", False)
            needed = "" if is_needed else " (has a default)"
            lines.append(f"- `{name}{signature_of(member)}`{needed}: {_text(member)}")
    return ["\n".join(lines) + "\n"] if lines else []


def _text(member: object) -> str:
    return " ".join((inspect.getdoc(member) or "as the base says.").split())


def _function(found: Callable[..., object]) -> str:
    """One line of the list of functions."""
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    return f"- `{found.__name__}{signature_of(found)}`: {text}"


def attribute_texts(found: type) -> dict[str, str]:
    """The strings behind attributes of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for one, after in itertools.pairwise(body.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    texts[one.target.id] = " ".join(text.split())
    return texts


def signature_of(member: object) -> str:
    """The signature of a method as pages show it: without ``self`` and quotes."""
    signature = inspect.signature(member)  # type: ignore[arg-type]
    given = [p for name, p in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=given)).replace("'", "")


def _prose(spec: object) -> str:
    """The docstring with its four terms as a list."""
    lines: list[str] = []
    for line in (inspect.getdoc(spec) or "").splitlines():
        term, colon, rest = line.partition(":")
        if colon and term in {"When", "Return", "Combine", "Ranks"}:
            lines.append(f"- **{term}:**{rest}")
        elif line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines)


TRANSPORT_HEAD = """# Transports, meshes and defaults

Generated from `polyshard/transport/`, `polyshard/sharding/` and `polyshard/plugins/builtin.py` by
`tools/make_hook_docs.py`; edit the classes.

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


def transport_page() -> str:
    """The page about how bytes move, and what the engine answers by itself."""
    from polyshard import seams, transport

    parts = [TRANSPORT_HEAD]
    for home, names in ((transport, TRANSPORTS), (seams, LAYOUTS)):
        for name in names:
            kind = getattr(home, name)
            parts.append(f"## {name}\n\n`{home.__name__}.{name}`. {inspect.getdoc(kind)}\n")
            parts.extend(_members(kind))
    parts.append(DEFAULTS_HEAD + "".join(_default_rows()))
    return _without_roles("\n".join(parts))


def _default_rows() -> Iterator[str]:
    """A row of the table for each part that the engine has of its own."""
    from polyshard.composition.roles import ROLES
    from polyshard.plugins import builtin

    rows: list[tuple[str, Any, str]] = [
        (role.name, role.engine, f" `{role.engine().name}`") for role in ROLES
    ]
    rows += [("one shard", builtin.DeviceStorage, ""), ("other hooks", builtin.EnginePlugin, "")]
    for what, kind, name in rows:
        first = (inspect.getdoc(kind) or "").partition("\n")[0]
        yield f"| {what} | `{kind.__name__}` |{name} | {first} |\n"


def files() -> dict[Path, str]:
    """The three pages."""
    return {PAGE: hook_page(), SEAMS_PAGE: seams_page(), TRANSPORT_PAGE: transport_page()}


if __name__ == "__main__":
    write_or_check(files(), "make_hook_docs.py")
