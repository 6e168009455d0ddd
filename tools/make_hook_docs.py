"""Write docs/reference/hooks.md from the hook specifications.

Usage: python tools/make_hook_docs.py [--check]      (--check: only say whether it is current)
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "hooks.md"
HEAD = """# Hooks

Generated from `polyshard/hookspecs.py` by `tools/make_hook_docs.py`; edit the specifications.

A plugin implements the hooks it cares about, marked with `@polyshard.hookimpl`, and may take any
subset of a hook's arguments. All hooks are asked while plans are built: a training step asks none.
The functions of the two transforms are frozen into the plan and run on gradients without a hook.
Objects that hooks return are described in `polyshard/seams.py`.

```mermaid
flowchart LR
    subgraph plan [once, in fully_shard]
        prepare[polyshard_prepare_model] --> flatten[pre_flatten_transform]
        flatten --> layout[polyshard_sharding_constraint]
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
    from polyshard import hookspecs
    from polyshard.problems import hook_arguments

    parts = [HEAD]
    for name, arguments in hook_arguments().items():
        spec = getattr(hookspecs, name)
        parts.append(f"## {name}\n\n`{name}({', '.join(arguments)})`\n\n{_prose(spec)}\n")
    return "\n".join(parts)


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
    """Write the page, or check it."""
    page = hook_page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE.name} is out of date: run python tools/make_hook_docs.py")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
