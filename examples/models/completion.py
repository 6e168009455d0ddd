"""Continue with a text, by a model that was exported: ``transformers`` alone, in one process.

python examples/models/completion.py FOLDER TEXT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import corpus
from transformers import AutoModelForCausalLM


def complete(folder: Path, text: str, tokens: int = 60) -> str:
    """The text, and the likeliest ``tokens`` bytes after it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    found = model.generate(corpus.tokens_of(text), max_new_tokens=tokens, do_sample=False)
    return corpus.text_of(found)


if __name__ == "__main__":
    print(complete(Path(sys.argv[1]), sys.argv[2]))
