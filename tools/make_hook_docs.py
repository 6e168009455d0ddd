"""Write docs/reference/hooks.md from the hook specifications.

Usage: python tools/make_hook_docs.py [--check]      (--check: only say whether it is current)
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "hooks.md"
SEAMS_PAGE = PAGE.with_name("seams.md")
HEAD = """# Hooks

Generated from `polyshard/hookspecs.py` by `tools/make_hook_docs.py`; edit the specifications.

A plugin implements the hooks it cares about, marked with `@polyshard.hookimpl`, and may take any
subset of a hook's arguments. All hooks are asked while plans are built: a training step asks none.
The functions of the two transforms are frozen into the plan and run on gradients without a hook.
What hooks are given and return is described in [seams](seams.md).

```mermaid
flowchart LR
    subgraph plan [once, in fully_shard]
        prepare[polyshard_prepare_model] --> flatten[pre_flatten_transform]
        flatten --> facts[polyshard_parameter_facts]
        facts --> layout[polyshard_sharding_constraint]
        layout --> storage[polyshard_shard_storage]
        storage --> backend[polyshard_collectives_backend]
        backend --> codecs[polyshard_gather_codec, polyshard_reduce_codec]
        codecs --> unflatten[post_unflatten_transform]
    end
    subgraph step [every step, plain objects]
        fetch[storage.fetch] --> encode[gather codec.encode] --> move[transport]
        move --> decode[gather codec.decode] --> compute[forward, backward]
        compute --> reduce[reduce codec] --> place[storage.place_gradient]
    end
    plan --> step
```
"""


def hook_page() -> str:
    """The whole page."""
    from polyshard.plugins import hookspecs
    from polyshard.plugins.validation import hook_arguments

    parts = [HEAD]
    for name, arguments in hook_arguments().items():
        spec = getattr(hookspecs, name)
        parts.append(f"## {name}\n\n`{name}({', '.join(arguments)})`\n\n{_prose(spec)}\n")
    return "\n".join(parts)


SEAMS_HEAD = """# Seams

Generated from `polyshard/seams.py` by `tools/make_hook_docs.py`; edit the protocols.

What [hooks](hooks.md) are given, what they return, and what the engine calls in every step. `W` is
the number of ranks on the shard axis; a *chunk* is one rank's part of a parameter, padded to equal
size on all ranks. `layout.parameters` are in the order of `group.parameters`, each with `name`,
`shape`, `dim`, `chunk_numel` (elements of a chunk), `shard_offset` (its first element in the shard)
and `local_shape(rank)`. Offsets are aligned: chunks do not touch. In the unit tests of
`polyshard.testing` there are no processes, and `mesh` is `None`.
"""


def seams_page() -> str:
    """The page about the objects that hooks meet."""
    from polyshard import seams

    parts = [SEAMS_HEAD]
    for name, found in vars(seams).items():
        if isinstance(found, type) and found.__module__ == seams.__name__ and name not in HIDDEN:
            parts.append(f"## {name}\n\n{inspect.getdoc(found)}\n")
            parts.extend(_members(found))
    page = "\n".join(parts)
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", page.replace("``", "`"))


HIDDEN = {"Contributions", "Stack", "Named", "ModelPreparation", "ParameterTransform"}
"""The engine's own side, and what the hooks' page says already."""


def _members(found: type) -> list[str]:
    """Fields and methods of a class, each with its text."""
    fields = [f"- `{name}: {kind}`" for name, kind in inspect.get_annotations(found).items()]
    methods = [
        f"- `{name}{_signature(member)}`: {' '.join((inspect.getdoc(member) or '').split())}"
        for name, member in vars(found).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    if found.__bases__[0].__name__ == "Named":
        fields += ["- `name: str`, `settings: str`: shown in plans, compared across ranks"]
    return ["\n".join([*fields, *methods]) + "\n"] if fields or methods else []


def _signature(member: object) -> str:
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


def main() -> None:
    """Write the pages, or check them."""
    pages = {PAGE: hook_page(), SEAMS_PAGE: seams_page()}
    for path, page in pages.items():
        if "--check" not in sys.argv[1:]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(page, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != page:
            sys.exit(f"{path.name} is out of date: run python tools/make_hook_docs.py")


if __name__ == "__main__":
    main()
