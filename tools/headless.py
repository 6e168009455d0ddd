"""A headless browser for tests: pages at the width of a phone or a desk, light or dark.

A pytest plugin, loaded by the root's ``conftest.py``. The browser is the system's own, found on
PATH or named by ``POLYSHARD_BROWSER``; playwright (group ``browser``) drives it. Tests that use the
fixtures are marked ``browser``, and skipped where one of the two is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["DESK", "PHONE", "OpenPage", "Tab", "find_browser"]

PHONE, DESK = 375, 1280
"""Widths of a window, in CSS pixels."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DISABLED = ("gpu", "quic", "background-networking", "component-update", "sync")
ARGUMENTS = ["--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in DISABLED)]
LOOK = (Path(__file__).parent / "headless.js").read_text("utf-8")
"""A function that finds what is wrong with a page, as it is shown."""
UNTOLD = """
() => [...document.querySelectorAll("table")]
  .filter((table) => !table.caption?.textContent.trim() || table.querySelector("th:not([scope])"))
  .map((table) => table.textContent.trim().slice(0, 40))
"""


@dataclass(frozen=True)
class Tab:
    """A page that is open, with what it asked for and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    """Addresses of everything that was fetched but files and data."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions of scripts."""

    def faults(self) -> list[str]:
        """What is wrong with the page, as words; nothing if it is sound.

        It scrolls sideways, a picture is not seen, headings skip a level, an id is there twice, a
        link within the page leads nowhere, text is hard to read (WCAG 2, level AA).
        """
        found: list[str] = self.page.evaluate(LOOK)
        found += [f"fetched {address}" for address in self.requests]
        return found + [f"complained: {words}" for words in self.complaints]

    def untold_tables(self) -> list[str]:
        """First words of tables without a caption, or with header cells without a scope."""
        found: list[str] = self.page.evaluate(UNTOLD)
        return found


OpenPage = Callable[..., AbstractContextManager[Tab]]
"""``(address or path, width, *, dark=False)``: see :func:`open_page`."""


def find_browser() -> str | None:
    """The path of a browser that is installed."""
    given = os.environ.get("POLYSHARD_BROWSER")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


def reason_to_skip() -> str:
    """What is missing, and how to get it; empty where nothing is."""
    if find_spec("playwright") is None:
        return "needs playwright: pip install --group browser, or run `nox -s pages`"
    if find_browser() is None:
        return "needs a browser: install chromium, or name one in POLYSHARD_BROWSER"
    return ""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser, with an empty profile."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = find_browser()
        started = playwright.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> OpenPage:
    """Opens a page: ``with open_page(path, PHONE, dark=True) as tab: assert not tab.faults()``."""

    @contextmanager
    def opened(where: str | Path, width: int, *, dark: bool = False) -> Iterator[Tab]:
        scheme: Any = "dark" if dark else "light"
        size: Any = {"width": width, "height": 800}
        context = browser.new_context(viewport=size, color_scheme=scheme)
        try:
            tab = Tab(context.new_page())
            _listen(tab)
            tab.page.goto(where.resolve().as_uri() if isinstance(where, Path) else where)
            yield tab
        finally:
            context.close()

    return opened


def _listen(tab: Tab) -> None:
    def request(found: Any) -> None:
        if not found.url.startswith(("file:", "data:", "blob:")):
            tab.requests.append(found.url)

    def message(found: Any) -> None:
        if found.type in ("error", "warning"):
            tab.complaints.append(found.text)

    tab.page.on("request", request)
    tab.page.on("console", message)
    tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
