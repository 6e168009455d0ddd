from pathlib import Path

import pytest

import check_docs


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def test_blocks_of_a_page_run_in_order_and_share_names(page: Path) -> None:
    page.write_text("```python run\nx = 1\n```\ntext\n```python run\nassert x == 1\n```\n")
    assert check_docs.run_page(page) is None


def test_a_failure_carries_the_line_number_of_the_page(page: Path) -> None:
    page.write_text("# Title\n\n```python run\nx = 1\n```\n\n```python run\nassert x == 2\n```\n")
    failure = check_docs.run_page(page)
    assert failure is not None
    assert "line 8" in failure
    assert "AssertionError" in failure


def test_a_block_that_neither_runs_nor_says_why_is_an_error(page: Path) -> None:
    page.write_text("text\n```python\nx = 1\n```\n")
    assert check_docs.run_page(page) == (
        f"{page}: line 2: say either ```python run or <!-- not run: reason -->"
    )


@pytest.mark.parametrize("comment", ["<!-- not run: -->", "<!-- not run -->", "text"])
def test_an_excuse_needs_a_reason(page: Path, comment: str) -> None:
    page.write_text(f"{comment}\n\n```python\nx = 1\n```\n")
    assert check_docs.run_page(page) is not None


def test_an_excused_block_is_not_run(page: Path) -> None:
    page.write_text("<!-- not run: needs a cluster -->\n\n```python\nraise OSError\n```\n")
    assert check_docs.run_page(page) is None


def test_a_block_cannot_be_both_run_and_excused(page: Path) -> None:
    page.write_text("<!-- not run: because -->\n```python run\nx = 1\n```\n")
    assert check_docs.run_page(page) is not None


def test_other_languages_and_nested_fences_are_left_alone(page: Path) -> None:
    page.write_text("```console\n$ false\n```\n````text\n```python\nx\n```\n````\n")
    assert list(check_docs.python_blocks(page.read_text())) == []


def test_indented_and_unclosed_blocks_are_found() -> None:
    indented, unclosed = check_docs.python_blocks(
        "1. item\n\n   ```python run\n   x = 1\n   ```\n\n```py run\ny = 2\n"
    )
    assert (indented.line, indented.code) == (4, ("x = 1",))
    assert (unclosed.line, unclosed.code) == (8, ("y = 2",))


def test_a_page_may_ask_for_ranks(page: Path) -> None:
    page.write_text(
        "<!-- ranks: 2 -->\n```python run\nimport os\nassert os.environ['WORLD_SIZE'] == '2'\n```\n"
    )
    assert check_docs.run_page(page) is None


def test_a_page_of_ranks_makes_one_process_group(page: Path) -> None:
    block = "```python run\ntorch.distributed.init_process_group()\n```\n"
    page.write_text(f"<!-- ranks: 2 -->\n{block}{block}")
    failure = check_docs.run_page(page)
    assert failure is not None
    assert "makes 2 process groups" in failure
