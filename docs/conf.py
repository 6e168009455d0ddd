"""How Sphinx renders the site from the root of the repository; `tools/build_site.py` runs it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from polyshard import __version__

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from workspace import public_modules  # noqa: E402

project = "polyshard"
author = "the polyshard authors"
copyright = "the polyshard authors, BSD-3-Clause"
release = __version__
version = ".".join(__version__.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "packages/*/README.md", "plugins/*/README.md"]
include_patterns += ["examples/*/README.md"]
exclude_patterns = [".*", "build", "**/src", "**/tests", "integration_tests", "runs"]
suppress_warnings = ["ref.python"]  # a name that two modules offer: either page will do
nitpicky = False  # names of torch are not described here, and other sites are not asked

myst_heading_anchors = 4
myst_links_external_new_tab = False

default_role = "code"
autodoc_member_order = "bysource"
autosummary_generate = False
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = "polyshard"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_js_files = [("switch.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_last_updated_fmt = None
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/version.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f8b", "color-brand-content": "#1f6f8b"},
    "dark_css_variables": {"color-brand-primary": "#6cc4de", "color-brand-content": "#6cc4de"},
}

LINK = re.compile(r"(?<!!)\[(?P<label>[^\[\]]*)\]\((?P<page>[\w./-]+\.md)(?:#[\w-]*)?\)")
REFERENCE = "docs/reference/api"


def setup(app: Any) -> None:
    """Hang pages under index pages by their links, and make the pages of public names."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_contents)


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Add tables of contents: a part a section on the first page, one on other index pages."""
    if name == root_doc:
        taken = {name}
        for section in re.split(r"^## +", source[0], flags=re.MULTILINE):
            caption = section.partition("\n")[0] if taken != {name} else ""
            source[0] += toctree(name, section, taken, caption)
    elif name.endswith("/index"):
        taken = {name}
        toctree(root_doc, (ROOT / f"{root_doc}.md").read_text("utf-8"), taken)
        source[0] += toctree(name, source[0], taken)
    elif name == REFERENCE:
        entries = [f"api/{module}" for module in public_modules(ROOT)]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def toctree(name: str, text: str, taken: set[str], caption: str = "") -> str:
    """The directive for the pages that ``text`` links; each hangs where it is linked first."""
    entries = []
    for link in LINK.finditer(text):
        page = os.path.normpath(os.path.join(os.path.dirname(name), link["page"]))[:-3]
        if page not in taken:
            taken.add(page)
            entries.append(f"{' '.join(link['label'].split()).replace('`', '')} </{page}>")
    head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", *head, "", *entries, "```", ""]) if entries else ""


def write_reference(app: Any) -> None:
    """Write a page a public module: a table of its names, then each where it comes first."""
    folder = ROOT / REFERENCE
    folder.mkdir(exist_ok=True)
    known: dict[int, str] = {}
    for path in public_modules(ROOT):
        module = importlib.import_module(path)
        described, others = [], {}
        for name in getattr(module, "__all__", ()):
            if name.startswith("__"):
                continue
            says = ""
            try:
                value = getattr(module, name)
            except ImportError as error:  # it needs what is not installed
                says = str(error)
            else:
                described.append(name)
                vars(module).setdefault(name, value)  # autodoc sees nothing that is yet to load
                first = known.setdefault(id(value), f"{path}.{name}")
                if str(getattr(value, "__module__", "")).startswith("torch."):
                    says = "torch's own class."
                elif not (inspect.isclass(value) or inspect.isroutine(value)):
                    others[name] = f".. autodata:: {path}.{name}\n   :no-value:\n"
                elif first != f"{path}.{name}":
                    says = f"The same as :py:obj:`{first}`."
            if says:
                others[name] = f".. py:class:: {name}\n   :module: {path}\n\n   {says}\n"
        text = [path, "=" * len(path), ""]
        rows = [f"   ~{path}.{name}" for name in described]
        text += [".. autosummary::", "   :nosignatures:", "", *rows, ""] if rows else []
        own = ", ".join(name for name in described if name not in others)
        text += [f".. automodule:: {path}", f"   :members: {own}", "   :show-inheritance:"]
        text += ["", *others.values()]
        (folder / f"{path}.rst").write_text("\n".join(text), "utf-8")
