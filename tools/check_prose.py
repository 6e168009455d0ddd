"""Check the prose of pages: sentence length, house words, and how a page begins.

Usage: python tools/check_prose.py [PAGE ...]      (default: README files, docs/ and the like)

Of Python files, which are sources by default, docstrings and comments are checked for house words.
markdown-it-py finds the prose of pages, so code is never judged. proselint has none of these
checks, and its own checks found one word in all pages.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PATTERNS = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md"),
    *("packages/*/README.md", "plugins/*/README.md", "examples/*/README.md"),
    *("packages/*/src/**/*.py", "plugins/*/src/**/*.py"),
)
EXEMPT = ("docs/reference/api/*",)
"""Pages that autodoc makes."""
MAX_WORDS = 35
"""Of a sentence; inline code counts as one word."""
HOUSE_WORDS = {
    r"nobody|somebody|whoever": "the rank, the user, the engine, ...",
    r"mend(s|ed|ing)?": "fix, repair, rebuild",
    r"go(es|ing)? on|went on": "continue",
    r"go(es|ing)? around": "wrap",
    r"to the last bit|bit (by|for) bit": "bitwise",
    r"hear(s|d)? of": "learn of",
    r"(is|are|was) said": "is described, is stated",
    r"what (is|was) said": "the statement, the setting, ...",
    r"stands? (in|below|above|there)": "is in, is below",
    r"all alike": "equally",
    r"in place of": "instead of",
    r"onion|courier|vouch(es)?|passages?": "the field's term",
}
"""What is not written here, and what to write."""
HOUSE_WORD = re.compile(
    "|".join(rf"\b(?P<w{i}>{words})\b" for i, words in enumerate(HOUSE_WORDS)), re.IGNORECASE
)
INLINE_CODE = re.compile(r"``[^`]+``|`[^`]+`")
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"”]?\s+(?=[\"“(]?[A-Z0-9`]|code\b)")


@dataclass(frozen=True)
class Prose:
    """Text of one block without markup, where it starts, and the kind of block (``p``, ``td``)."""

    line: int
    text: str
    kind: str


def prose_of(page: str) -> Iterator[Prose]:
    """The prose of a page in Markdown, block by block; inline code is the word `code`."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    for before, token in itertools.pairwise(tokens):
        if token.type == "inline" and token.map:
            yield Prose(token.map[0] + 1, _text(token), before.tag)


def _text(inline: Token) -> str:
    words = {"code_inline": "code", "softbreak": " ", "hardbreak": " "}
    parts = (words.get(child.type, child.content) for child in inline.children or ())
    return " ".join("".join(parts).split())


def prose_of_code(source: str) -> Iterator[Prose]:
    """The comments and docstrings of a Python file, line by line, with inline code as the word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or token.string.startswith('"""'):
            for line, text in enumerate(token.string.splitlines(), start=token.start[0]):
                yield Prose(line, INLINE_CODE.sub("code", text), "code")


def problems(page: str, *, is_code: bool = False) -> Iterator[str]:
    """What is wrong with the prose of a page or a Python file, each with its line."""
    found = list(prose_of_code(page) if is_code else prose_of(page))
    kinds = [prose.kind for prose in found[:2]]
    if kinds != ["h1", "p"] and not is_code:
        yield "1: begin with a title and a sentence that says what the page is for"
    for prose in found:
        for match in HOUSE_WORD.finditer(prose.text):
            (group,) = (name for name, text in match.groupdict().items() if text)
            instead = list(HOUSE_WORDS.values())[int(group[1:])]
            yield f"{prose.line}: '{match[0]}': write {instead}"
        if prose.kind == "p":
            yield from _long_sentences(prose)


def _long_sentences(prose: Prose) -> Iterator[str]:
    for sentence in END_OF_SENTENCE.split(prose.text):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > MAX_WORDS:
            start = " ".join(words[:6])
            yield f"{prose.line}: {len(words)} words in a sentence (at most {MAX_WORDS}): {start}"


def default_pages(root: Path) -> list[Path]:
    """Every page that is judged."""
    found = [page for pattern in PATTERNS for page in sorted(root.glob(pattern))]
    return [
        page for page in found if not any(page.relative_to(root).match(name) for name in EXEMPT)
    ]


def main(arguments: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    pages = [Path(argument) for argument in arguments] or default_pages(ROOT)
    wrong = [
        f"{page}:{text}"
        for page in pages
        for text in problems(page.read_text("utf-8"), is_code=page.suffix == ".py")
    ]
    print("\n".join([*wrong, f"prose: {len(pages)} files, {len(wrong)} problems"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
