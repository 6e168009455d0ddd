"""The public names of a checkout and how they are called, read from its files by griffe.

Public is what docs/reference/stability.md promises: the modules of :data:`CORE_MODULES`, and what
every other distribution's package exports. Nothing is imported, so torch is not needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import griffe

from workspace import CORE, distributions

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE_MODULES = (
    "polyshard",
    "polyshard.checkpoint",
    "polyshard.errors",
    "polyshard.fsdp1",
    "polyshard.guards",
    "polyshard.safetensors",
    "polyshard.seams",
    "polyshard.testing",
    "polyshard.testing.streams",
    "polyshard.transport",
)
HOOKS = "polyshard.plugins.hookspecs"
CONTRACT = "polyshard.plugins.contract"

# How a parameter may be passed.
POSITION, EITHER, KEYWORD, REST, KEYWORDS = "position", "either", "keyword", "*", "**"
KINDS = {
    griffe.ParameterKind.positional_only: POSITION,
    griffe.ParameterKind.positional_or_keyword: EITHER,
    griffe.ParameterKind.keyword_only: KEYWORD,
    griffe.ParameterKind.var_positional: REST,
    griffe.ParameterKind.var_keyword: KEYWORDS,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter, without ``self``."""

    name: str
    kind: str
    has_default: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.name}{'=' if self.has_default else ''}"

    @classmethod
    def read(cls, text: str) -> Parameter:
        """What ``str`` made."""
        kind, name = text.split(" ")
        return cls(name.removesuffix("="), kind, name.endswith("="))


@dataclass(frozen=True)
class Entry:
    """One public name: what it is, its base classes, and how it is called."""

    kind: str
    bases: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublicApi:
    """Every public name of a checkout, its hooks, and the version of these."""

    names: dict[str, Entry]
    hooks: dict[str, tuple[str, ...]]
    hook_api: tuple[int, int]

    def to_json(self) -> str:
        """One line a name, so that changes can be read in a diff."""
        rows = [f" {json.dumps(name)}: {json.dumps(asdict(e))}" for name, e in self.names.items()]
        names = ",\n".join(rows)
        hooks = ",\n".join(f" {json.dumps(n)}: {json.dumps(a)}" for n, a in self.hooks.items())
        api = json.dumps(self.hook_api)
        return f'{{"hook_api": {api},\n"hooks": {{\n{hooks}\n}},\n"names": {{\n{names}\n}}}}\n'

    @classmethod
    def from_json(cls, text: str) -> PublicApi:
        """What :meth:`to_json` made."""
        found = json.loads(text)
        names = {
            name: Entry(each["kind"], tuple(each["bases"]), tuple(each["parameters"]))
            for name, each in found["names"].items()
        }
        hooks = {name: tuple(arguments) for name, arguments in found["hooks"].items()}
        major, minor = found["hook_api"]
        return cls(names, hooks, (major, minor))


def public_api(root: Path) -> PublicApi:
    """Read the checkout below ``root``."""
    dists = distributions(root)
    loader = griffe.GriffeLoader(search_paths=[str(dist.folder / "src") for dist in dists])
    for dist in dists:
        loader.load(dist.import_name)
    loader.resolve_aliases(implicit=False, external=False)
    modules = [*CORE_MODULES, *(dist.import_name for dist in dists if dist.name != CORE)]
    names: dict[str, Entry] = {}
    for path in modules:
        module = loader.modules_collection[path]
        assert isinstance(module, griffe.Module)
        names |= dict(_exported(module))
    specs = loader.modules_collection[HOOKS]
    hooks = {
        name: tuple(parameter.name for parameter in member.parameters)
        for name, member in specs.members.items()
        if isinstance(member, griffe.Function) and not name.startswith("_")
    }
    version = str(loader.modules_collection[f"{CONTRACT}.HOOK_API"].value)
    major, minor = (int(part) for part in version.strip("()").split(","))
    return PublicApi(dict(sorted(names.items())), hooks, (major, minor))


def _exported(module: griffe.Module) -> Iterator[tuple[str, Entry]]:
    """What ``__all__`` lists; without one, what is defined there and has no underscore."""
    listed = module.exports
    for name, member in module.members.items():
        if listed is not None:
            is_public = name in {str(each) for each in listed}
        else:
            is_public = not name.startswith("_") and not member.is_alias and not member.is_module
        if is_public:
            yield from _entries(f"{module.path}.{name}", member)


def _entries(path: str, member: griffe.Object | griffe.Alias) -> Iterator[tuple[str, Entry]]:
    try:
        found = member.final_target if isinstance(member, griffe.Alias) else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        yield path, Entry("elsewhere", (str(getattr(member, "target_path", "")),))
        return
    if isinstance(found, griffe.Class):
        bases = tuple(str(base) for base in found.bases)
        yield path, Entry("class", bases, _parameters(found.parameters))
        for name, attribute in found.all_members.items():
            if not name.startswith("_"):
                target = (
                    attribute.final_target if isinstance(attribute, griffe.Alias) else attribute
                )
                if isinstance(target, griffe.Function):
                    yield f"{path}.{name}", Entry("function", (), _parameters(target.parameters))
                else:
                    yield f"{path}.{name}", Entry("attribute")
    elif isinstance(found, griffe.Function):
        yield path, Entry("function", (), _parameters(found.parameters))
    else:
        yield path, Entry("attribute")


def _parameters(given: griffe.Parameters) -> tuple[str, ...]:
    found = []
    for number, each in enumerate(given):
        if number == 0 and each.name in {"self", "cls"}:
            continue
        kind = KINDS[each.kind or griffe.ParameterKind.positional_or_keyword]
        has_default = each.default is not None and kind not in {REST, KEYWORDS}
        found.append(str(Parameter(each.name, kind, has_default)))
    return tuple(found)
