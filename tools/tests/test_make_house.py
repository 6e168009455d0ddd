"""The picture and the page of the house are what the imports and the contract say."""

from __future__ import annotations

import make_house


def test_picture_and_page_are_current() -> None:
    house = make_house.floors()
    assert make_house.PICTURE.read_text("utf-8") == make_house.picture(house)
    text = make_house.PAGE.read_text("utf-8")
    assert text == make_house.page(text, make_house.table(house))


def test_every_room_is_on_a_floor_and_imports_go_down() -> None:
    house = make_house.floors()
    level = {room.name: row for row, rooms in enumerate(house) for room in rooms}
    files = {path.stem for path in make_house.SOURCE.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in make_house.SOURCE.glob("*/__init__.py")}
    assert set(level) == files | folders
    for rooms in house:
        for room in rooms:
            for target in make_house.imports(room):
                assert level[target] > level[room.name], f"{room.name} imports {target}"


def test_twelve_changes_and_more_have_a_place() -> None:
    text = make_house.PAGE.read_text("utf-8").partition("## Where do I go")[2]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 12
