"""Sections to a page: one text, which needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.page.blocks import Section
from polyshard_cli.plan.page.drawing import svgs

__all__ = ["check_extra", "render"]

NEEDED = ("matplotlib", "jinja2")
TEMPLATES = Path(__file__).parent / "templates"


def check_extra() -> None:
    """Refuse where what pages are made with is not installed.

    Raises:
        PlanError: saying what to install.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise PlanError(
            f"a page needs {' and '.join(missing)}, not installed here: "
            "pip install 'polyshard-cli[html]'; --json needs nothing more"
        )


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title: its heading, and the browser's.
        lead: the sentences below it.
        sections: in the order in which they are read.

    Raises:
        PlanError: where the extra ``html`` is not installed.
    """
    check_extra()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((TEMPLATES / "style.css").read_text("utf-8"))
    return environment.get_template("page.html").render(
        title=title,
        lead=lead,
        sections=sections,
        style=style,
        svgs=lambda drawing: Markup(svgs(drawing)),
    )
