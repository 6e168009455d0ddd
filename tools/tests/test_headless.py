"""What looks at pages sees what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headless import DESK, PHONE, OpenPage, find_browser

SOUND = "<h1>One</h1><h2 id='two'>Two</h2><a href='#two'>there</a>"
FAULTS = {
    "a wide block": ("<h1>One</h1><div style='width: 500px'>wide</div>", "is 5"),
    "a skipped level": ("<h1>One</h1><h3>Three</h3>", 'heading "Three" skips a level'),
    "no heading": ("<p>words</p>", "has 0 headings of the first level"),
    "an empty picture": ("<h1>One</h1><svg id='s' width='0' height='0'></svg>", "picture s is not"),
    "a lost picture": (
        "<h1>One</h1><img alt='i' src='data:image/png;base64,xx'>",
        "was not loaded",
    ),
    "pale words": ("<h1>One</h1><p style='color: #ccc'>pale</p>", '"pale" has a contrast of 1.6'),
    "a lost link": ("<h1>One</h1><a href='#gone'>gone</a>", "link to gone leads nowhere"),
    "a doubled id": ("<h1 id='a'>One</h1><p id='a'>two</p>", "id a is there twice"),
    "an exception": ("<h1>One</h1><script>throw Error('boom')</script>", "complained: boom"),
    "a request": (
        "<h1>One</h1><img alt='i' src='http://localhost:9/a.png'>",
        "fetched http://local",
    ),
}


@pytest.mark.browser
def test_a_sound_page_has_no_fault(tmp_path: Path, open_page: OpenPage) -> None:
    for width in (PHONE, DESK):
        with open_page(written(tmp_path, SOUND), width) as tab:
            assert tab.faults() == []
            assert tab.page.viewport_size == {"width": width, "height": 800}


@pytest.mark.browser
def test_every_fault_is_seen(tmp_path: Path, open_page: OpenPage) -> None:
    for name, (body, expected) in FAULTS.items():
        with open_page(written(tmp_path, body), PHONE) as tab:
            faults = tab.faults()
            assert any(expected in fault for fault in faults), (name, faults)


@pytest.mark.browser
def test_tables_are_asked_for_captions_and_scopes(tmp_path: Path, open_page: OpenPage) -> None:
    body = (
        "<h1>One</h1><table><caption>Said</caption><tr><th scope='row'>sound</th></tr></table>"
        "<table><tr><td>without</td></tr></table>"
        "<table><caption>Said</caption><tr><th>scopeless</th></tr></table>"
    )
    with open_page(written(tmp_path, body), PHONE) as tab:
        assert tab.untold_tables() == ["without", "Saidscopeless"]


def test_a_browser_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSHARD_BROWSER", "/opt/browser")
    assert find_browser() == "/opt/browser"
    monkeypatch.delenv("POLYSHARD_BROWSER")
    monkeypatch.setenv("PATH", "")
    assert find_browser() is None


def written(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    head = (
        "<meta charset='utf-8'><title>T</title><meta name='viewport' content='width=device-width'>"
    )
    path.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>")
    return path
