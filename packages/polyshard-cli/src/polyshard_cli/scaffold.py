"""A plugin of one's own, rendered from the template that lies in this folder."""

from __future__ import annotations

import difflib
import keyword
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from polyshard.errors import PolyshardError
from polyshard.installed import installed_plugins

TEMPLATE = Path(__file__).parent / "template"
DEFAULT_SEAM = "observer"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""Snake case, and nothing that an index would spell differently (``a__b``, ``a_``)."""


class ScaffoldError(PolyshardError, ValueError):
    """A plugin that cannot be begun as asked; the message says what to pass instead."""


@dataclass(frozen=True)
class Scaffold:
    """What ``polyshard plugins new`` was asked for, checked."""

    plugin: str
    seam: str
    target: Path
    author: str | None = None

    def render(self) -> list[Path]:
        """Write the distribution; its files, relative to ``target``.

        Raises:
            ScaffoldError: where ``target`` cannot be written.
        """
        package = f"polyshard_{self.plugin}"
        files = {
            "LICENSE": "LICENSE.tmpl",
            "README.md": "README.md.tmpl",
            "pyproject.toml": "pyproject.toml.tmpl",
            f"src/{package}/__init__.py": f"seams/{self.seam}.tmpl",
            "tests/test_plugin.py": f"seams/test_{self.seam}.tmpl",
        }
        words = {
            "plugin": self.plugin,
            "package": package,
            "distribution": distribution_of(self.plugin),
            "class_name": class_of(self.plugin),
            "author": self.author or f"the {self.plugin} authors",
            "what": seams()[self.seam],
        }
        try:
            for name, source in files.items():
                text = (TEMPLATE / source).read_text("utf-8")
                text = re.sub(r"\{\{ (\w+) \}\}", lambda found: words[found[1]], text)
                path = self.target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            (self.target / "src" / package / "py.typed").touch()
        except OSError as error:
            raise ScaffoldError(f"{self.target} cannot be written: {error}") from error
        return sorted(Path(name) for name in (*files, f"src/{package}/py.typed"))


def seams() -> dict[str, str]:
    """What the template offers to begin with: each seam, and what a plugin of it does."""
    files = sorted((TEMPLATE / "seams").glob("*.txt"))
    return {path.stem: path.read_text("utf-8").strip() for path in files}


def distribution_of(plugin: str) -> str:
    """The name on the package index, which the folder has too."""
    return f"polyshard-{plugin.replace('_', '-')}"


def _imported() -> set[str]:
    """What the files of any seam import."""
    lines = (
        line
        for path in (TEMPLATE / "seams").glob("*.tmpl")
        for line in path.read_text("utf-8").splitlines()
        if line.startswith(("from ", "import "))
    )
    return {name for line in lines for name in re.findall(r"\w+", line.partition("import ")[2])}


def class_of(plugin: str) -> str:
    """The name of its class."""
    return "".join(word.capitalize() for word in plugin.split("_"))


def checked_plugin(name: str) -> str:
    """``name``, if a new plugin can be called so.

    Raises:
        ScaffoldError: where it is no snake case, a word of Python's, or taken in this environment.
    """
    if not NAME.fullmatch(name) or any(map(keyword.iskeyword, (name, class_of(name)))):
        raise ScaffoldError(
            f"a plugin cannot be called {name!r}: use ASCII snake case and no keyword of Python, "
            f"such as 'byte_counter'{_meant(_snake_case(name))}"
        )
    if class_of(name) in _imported():
        raise ScaffoldError(
            f"a plugin cannot be called {name!r}: its class would be called {class_of(name)}, as "
            f"something that plugins import; 'my_{name}' would do"
        )
    owners = [one.distribution for one in installed_plugins() if one.name == name]
    if owners:
        raise ScaffoldError(
            f"a plugin called {name!r} is already installed (by {', '.join(owners)}); choose "
            "another name"
        )
    package = f"polyshard_{name}"
    if find_spec(package) is not None:
        raise ScaffoldError(
            f"the plugin {name!r} would be imported as {package}, which exists already; choose "
            "another name"
        )
    return name


def checked_seam(name: str) -> str:
    """``name``, if the template has that seam.

    Raises:
        ScaffoldError: listing those there are.
    """
    known = seams()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        lines = "".join(f"\n  {seam}: {text}" for seam, text in known.items())
        raise ScaffoldError(
            f"there is no seam called {name!r}{_meant(*close)}. Seams to start with:{lines}"
        )
    return name


def checked_target(folder: Path) -> Path:
    """``folder``, if a plugin can be written there: it is absent, or empty.

    Raises:
        ScaffoldError: where anything is there already.
    """
    if folder.exists() and not folder.is_dir():
        raise ScaffoldError(f"{folder} is a file; pass another --folder")
    if folder.exists() and any(folder.iterdir()):
        raise ScaffoldError(
            f"{folder} is not empty, and nothing in it is overwritten; pass another --folder"
        )
    return folder


def _snake_case(name: str) -> str:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return "_".join(words).lower()


def _meant(*close: str) -> str:
    good = [word for word in close if NAME.fullmatch(word) and not keyword.iskeyword(word)]
    return f"; did you mean {good[0]!r}?" if good else ""
