"""The site as a browser shows it: on a phone and a desk, light and dark, with its search."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from build_site import version
from headless import DESK, PHONE, OpenPage, Tab

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site" / "html"
PAGES = (
    "docs/index.html",
    "README.html",
    "docs/faq.html",
    "docs/reference/hooks.html",
    "docs/reference/support.html",
    "docs/reference/benchmarks.html",
    "docs/reference/api/polyshard.plugins.seams.html",
    "docs/explanation/architecture.html",
    "docs/explanation/zero-copy.html",
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (SITE / version(ROOT)).is_dir(), reason="no site is built: run nox -s site"
    ),
]


class _Quiet(SimpleHTTPRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        """It is not read."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the site is served from: its search reads pages, which files may not."""
    handler = partial(_Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{version(ROOT)}/"
        server.shutdown()


def elsewhere(tab: Tab, address: str) -> list[str]:
    return [asked for asked in tab.requests if not asked.startswith(address.rsplit("/", 2)[0])]


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_and_complain_of_nothing(
    open_page: OpenPage, address: str, page: str, width: int
) -> None:
    with open_page(address + page, width) as tab:
        wide = tab.page.evaluate("document.scrollingElement.scrollWidth")
        unseen = tab.page.evaluate(
            "[...document.images].filter(i => i.loading !== 'lazy' && !i.naturalWidth)"
            ".map(i => i.src)"
        )
        assert wide <= width
        assert unseen == []
        assert tab.complaints == []
        assert elsewhere(tab, address) == []


def test_dark_pages_are_dark(open_page: OpenPage, address: str) -> None:
    def lightness(*, dark: bool) -> float:
        with open_page(address + "docs/index.html", DESK, dark=dark) as tab:
            colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert tab.complaints == []
        red, green, blue = (float(part) for part in colour[4:-1].split(",")[:3])
        return (red + green + blue) / 3

    assert lightness(dark=True) < 60
    assert lightness(dark=False) > 200


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_search_finds_fully_shard(open_page: OpenPage, address: str, width: int) -> None:
    with open_page(address + "search.html?q=fully_shard", width) as tab:
        tab.page.wait_for_selector("#search-results li a")
        found = tab.page.eval_on_selector_all(
            "#search-results li a", "links => links.map(link => link.getAttribute('href'))"
        )
        assert any(
            "docs/reference/api/polyshard.html#polyshard.fully_shard" in link for link in found
        )
        assert tab.complaints == []
        assert elsewhere(tab, address) == []


def test_the_version_is_listed(open_page: OpenPage, address: str) -> None:
    with open_page(address + "docs/how-to/guards.html", DESK) as tab:
        shown = tab.page.eval_on_selector_all(
            "#site-version option", "options => options.map(option => option.value)"
        )
        assert version(ROOT) in shown


def test_the_front_leads_to_the_newest(open_page: OpenPage, address: str) -> None:
    with open_page(address.rsplit("/", 2)[0] + "/", DESK) as tab:
        tab.page.wait_for_url("**/docs/index.html")
        assert tab.page.title() == "polyshard"
