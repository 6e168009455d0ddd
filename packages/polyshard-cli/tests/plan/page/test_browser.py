"""Pages as a browser shows them: on a phone and on a desk, light and dark."""

from __future__ import annotations

from pathlib import Path

import plan_pages
import pytest

from headless import DESK, PHONE, OpenPage

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = []
    for name, page in plan_pages.pages().items():
        found.append(folder / f"{name}.html")
        found[-1].write_text(page, "utf-8")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_pages_are_sound(files: list[Path], open_page: OpenPage, width: int, dark: bool) -> None:
    for file in files:
        with open_page(file, width, dark=dark) as tab:
            assert tab.faults() == [], file.name
            assert tab.untold_tables() == [], file.name


def test_a_drawing_is_made_for_the_width(files: list[Path], open_page: OpenPage) -> None:
    """One of the two is shown, and its words can be read."""
    for width, shown in ((PHONE, "narrow"), (DESK, "wide")):
        with open_page(files[0], width) as tab:
            pictures = tab.page.locator("figure svg:visible")
            assert pictures.count() == tab.page.locator("figure").count() > 0
            for index in range(pictures.count()):
                assert pictures.nth(index).get_attribute("class") == shown
            sizes = tab.page.locator("figure svg:visible text").evaluate_all(
                "(all) => all.map((one) => one.getBoundingClientRect().height)"
            )
            assert min(sizes) >= 9


def test_colours_follow_the_scheme(files: list[Path], open_page: OpenPage) -> None:
    inks = []
    for dark in (False, True):
        with open_page(files[0], DESK, dark=dark) as tab:
            text = tab.page.locator("figure svg:visible text").first
            inks.append(text.evaluate("(one) => getComputedStyle(one).fill"))
    assert inks[0] != inks[1]


def test_wide_tables_scroll_in_their_box(files: list[Path], open_page: OpenPage) -> None:
    with open_page(files[0], PHONE) as tab:
        box = tab.page.get_by_role("region", name="Every transfer of a step")
        assert box.evaluate("(one) => one.scrollWidth > one.clientWidth")
        box.focus()
        assert tab.page.evaluate("() => document.activeElement.getAttribute('aria-label')")
