"""What the code says in hooks.md, seams.md, experts.md and transport.md of docs/reference."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from write_pages import page_with, table

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "hooks.md"
SEAMS_PAGE, EXPERTS_PAGE = PAGE.with_name("seams.md"), PAGE.with_name("experts.md")
TRANSPORT_PAGE = PAGE.with_name("transport.md")


def _hooks() -> Iterator[str]:
    """A section for each hook."""
    from polyshard.plugins import hookspecs
    from polyshard.plugins.validation import hook_arguments

    for name, arguments in hook_arguments().items():
        spec = getattr(hookspecs, name)
        yield f"## {name}\n\n`{name}({', '.join(arguments)})`\n\n{_prose(spec)}\n"


def _role_table() -> str:
    """The exclusive hooks about groups."""
    from polyshard.plugins.contributions import ROLES

    rows = (
        (
            role.name,
            f"[{role.hook}](#{role.hook})",
            f"[{role.seam.__name__}](experts.md#{role.seam.__name__.lower()})",
            f"`{role.engine().name}`",
        )
        for role in ROLES
    )
    return table(("part", "hook", "returns", "the engine's own"), rows)


def _seams() -> Iterator[str]:
    """The sections for most authors."""
    without = frozenset({"setup", "bind", "payload_bytes"})
    for name, bases in ONE_CLASS.items():
        yield _heading(name)
        for base in bases:
            yield from _members(_kind(base), without)
    yield from _classes(("GroupInfo", "ParamInfo"))


def _classes(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield _heading(name)
        yield from _members(_kind(name))


def _kind(name: str) -> type:
    from polyshard.plugins import one_class, seams

    kind: type = next(vars(m)[name] for m in (seams, one_class) if name in vars(m))
    return kind


def _heading(name: str) -> str:
    import polyshard

    home = "polyshard" if name in polyshard.__all__ else "polyshard.plugins.seams"
    return f"## {name}\n\n`{home}.{name}`. {inspect.getdoc(_kind(name))}\n"


def _without_roles(page: str) -> str:
    """Markdown of what docstrings say in reStructuredText."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", page.replace("``", "`"))


ONE_CLASS = {
    "GatherCodecPlugin": ("CodecPlugin", "BoundGatherCodec", "Measured"),
    "ReduceCodecPlugin": ("CodecPlugin", "BoundReduceCodec", "Measured"),
    "StoragePlugin": ("ShardStorage",),
    "BackendPlugin": ("BackendPlugin",),
    "ObserverPlugin": ("HasNotices", "Observer"),
}
"""Plugins in one class, and the bases that declare their members."""

EXPERTS = (
    *("GroupIdentity", "Around", "Stateful", "Spec"),
    *("GatherCodec", "ReduceCodec", "BoundReplicaCodec", "StorageFactory", "CollectivesBackend"),
    *("GradientLanding", "OwnedParameter"),
    *("ShardingConstraint", "StateDictAdapter"),
)
"""Other classes that hooks receive and return; transports are on another page."""

GIVEN = ("GatherPiece", "Pending", "WrappedTransport", "MeshRoles", "ParameterLayout")
"""Classes that the engine provides; their members have no "(default)"."""

NOTICES = "lines for `describe()` about the group"
NAMED = "`name`, `settings`, `notices`: as above"


def _first_sentence(text: str) -> str:
    """``text`` up to the end of its first sentence."""
    return re.split(r"(?<=[\w)`\]]\.)\s(?=[A-Z`\[])", text, maxsplit=1)[0]


def _members(found: type, without: frozenset[str] = frozenset()) -> list[str]:
    """Fields, properties and methods of a class, each with a sentence, ``without`` some."""
    from polyshard.plugins.seams import Named

    lines: list[str] = []
    bare: list[str] = []  # fields that their names and types explain
    if issubclass(found, Named):
        lines.append(f"- {NAMED}")
    said = attribute_texts(found)
    for name, kind in inspect.get_annotations(found).items():
        if not name.startswith("_") and name not in without:
            default = f" = {vars(found)[name]!r}" if name in vars(found) else ""
            text = _first_sentence(said.get(name, NOTICES if name == "notices" else ""))
            if text:
                lines.append(f"- `{name}: {kind}{default}`: {text}")
            else:
                bare.append(f"`{name}: {kind}{default}`")
    if bare:
        lines.insert(0, f"- {', '.join(bare)}")
    for name, member in vars(found).items():
        function: Any = getattr(member, "fget", None) or getattr(member, "func", None)
        if name.startswith(("_", "polyshard_")) or name in without:
            continue
        if isinstance(member, property | cached_property):
            kind = function.__annotations__["return"]
            lines.append(f"- `{name}: {kind}`: {_text(function)}")
        elif inspect.isfunction(member):
            is_needed = found.__name__ in GIVEN or getattr(member, "__isabstractmethod__", False)
            needed = "" if is_needed else " (default)"
            lines.append(f"- `{name}{signature_of(member)}`{needed}: {_text(member)}")
    return ["\n".join(lines) + "\n"] if lines else []


def _text(member: object) -> str:
    return _first_sentence(" ".join((inspect.getdoc(member) or "as the base says.").split()))


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
    """The docstring with its terms as a list."""
    summary, _, rest = (inspect.getdoc(spec) or "").partition("\n\n")
    terms = re.sub(r"\n +", " ", rest)  # one line a term
    lines = re.sub(r"^(When|Return|Combine|Ranks):", r"- **\1:**", terms, flags=re.MULTILINE)
    return f"{summary}\n\n{lines}"


TRANSPORTS = (
    *("Transport", "WrappedTransport", "GatherPiece", "Extents"),
    *("GatherRoute", "ReduceRoute", "OwnerRoute", "Pending", "MeshRoles"),
)
LAYOUTS = ("GroupLayout", "ParameterLayout")


def _transports() -> Iterator[str]:
    """How bytes move."""
    from polyshard import transport
    from polyshard.plugins import seams

    for home, names in ((transport, TRANSPORTS), (seams, LAYOUTS)):
        for name in names:
            kind = getattr(home, name)
            yield f"## {name}\n\n`{home.__name__}.{name}`. {inspect.getdoc(kind)}\n"
            yield from _members(kind, _described_before(kind))


def _described_before(kind: type) -> frozenset[str]:
    """Members that the page describes with a base class of ``kind``."""
    bases = (base for base in kind.__mro__[1:] if base.__name__ in TRANSPORTS)
    return frozenset(name for base in bases for name in (*vars(base), *base.__annotations__))


def _defaults() -> str:
    """The parts that the engine has of its own."""
    from polyshard.plugins import builtin
    from polyshard.plugins.contributions import ROLES

    found: list[tuple[str, Any, str]] = [
        (role.name, role.engine, f"`{role.engine().name}`") for role in ROLES
    ]
    found += [("one shard", builtin.DeviceStorage, "")]
    rows = (
        (what, f"`{kind.__name__}`", name, (inspect.getdoc(kind) or "").partition("\n")[0])
        for what, kind, name in found
    )
    return table(("seam", "class", "name in plans", "what it does"), rows)


def files() -> dict[Path, str]:
    """The four pages."""
    return {
        **page_with(PAGE, roles=_role_table(), hooks=_sections(_hooks())),
        **page_with(SEAMS_PAGE, classes=_sections(_seams())),
        **page_with(EXPERTS_PAGE, classes=_sections(_classes(EXPERTS))),
        **page_with(
            TRANSPORT_PAGE, classes=_sections(_transports()), defaults=_sections([_defaults()])
        ),
    }


def _sections(parts: Iterable[str]) -> str:
    return _without_roles("\n".join(parts))
