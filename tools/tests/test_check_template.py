"""What the template's check calls a leftover, and that every seam is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_template import TEMPLATE, leftovers, seams


@pytest.mark.parametrize(
    "said",
    ["byte_counter", "polyshard-byte-counter", "ByteCounter", "byte counter", "{{ plugin }}"],
)
def test_the_examples_name_is_found(tmp_path: Path, said: str) -> None:
    (tmp_path / "README.md").write_text(f"fine\nsee {said} there\n", encoding="utf-8")
    (found,) = leftovers(tmp_path)[:1]
    assert found.startswith("README.md:2: ")


def test_it_is_found_in_paths(tmp_path: Path) -> None:
    (tmp_path / "polyshard_byte_counter").mkdir()
    (tmp_path / "polyshard_byte_counter" / "__init__.py").touch()
    assert leftovers(tmp_path)


def test_other_words_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("sent_bytes = {payload_bytes: 1}\n", encoding="utf-8")
    assert leftovers(tmp_path) == []


def test_every_seam_is_a_choice_and_has_its_files() -> None:
    choices = (TEMPLATE / "copier.yml").read_text("utf-8")
    for seam in seams():
        assert f'": {seam}\n' in choices
        assert (TEMPLATE / "seams" / f"{seam}.py.jinja").is_file()
        assert (TEMPLATE / "seams" / f"test_{seam}.py.jinja").is_file()
    assert choices.count('": ') == len(seams())
