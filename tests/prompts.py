"""Prompts for the server tests and benchmarks: the same ids in every run on one Python version.

Prose and code come from the standard library (PSF licence); logs and needles are generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sgl_vegas.lab.prompts import asked_ids, chat_ids, code, needle_ids, plain_ids, prose

MEDIUM_TOKENS = 1000
LONG_TOKENS = 4000
ACCEPTANCE_TOKENS = (4096, 4500, 4900, 5300, 5700, 6100)


@dataclass(frozen=True)
class Prompt:
    """Attributes:
    name: unique, `kind-size-subject`.
    ids: what the server is sent.
    """

    name: str
    ids: tuple[int, ...]


@lru_cache
def load_tokenizer(model_path: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_path))


def parity_prompts(tokenizer: Any) -> list[Prompt]:
    """Twelve short prompts, nine of about 1K tokens, three of about 4K tokens."""
    return [
        *(Prompt(f"short-{n}", tuple(tokenizer.encode(text))) for n, text in enumerate(_SHORT)),
        *(Prompt(f"chat-{n}", _chat(tokenizer, text)) for n, text in enumerate(_QUESTIONS)),
        _plain(tokenizer, "code-1k-heapq", code("heapq"), MEDIUM_TOKENS),
        _plain(tokenizer, "prose-1k-import", prose("import"), MEDIUM_TOKENS),
        _plain(tokenizer, "log-1k", "\n".join(_log_lines(200)), MEDIUM_TOKENS),
        _asked(tokenizer, "summary-1k-try", _SUMMARISE, prose("try"), MEDIUM_TOKENS),
        _plain(tokenizer, "prose-1k-execmodel", prose("execmodel"), MEDIUM_TOKENS),
        _plain(tokenizer, "code-1k-fractions", code("fractions"), MEDIUM_TOKENS),
        needle_prompt(tokenizer, "needle-1k-early", 0.2, prose("assignment"), MEDIUM_TOKENS),
        needle_prompt(tokenizer, "needle-1k-late", 0.8, prose("customization"), MEDIUM_TOKENS),
        _asked(tokenizer, "explain-1k-calls", _EXPLAIN, prose("calls"), MEDIUM_TOKENS),
        _plain(tokenizer, "code-4k-statistics", code("statistics"), LONG_TOKENS),
        _asked(tokenizer, "summary-4k-debugger", _SUMMARISE, prose("debugger"), LONG_TOKENS),
        needle_prompt(tokenizer, "needle-4k-middle", 0.5, prose("compound"), LONG_TOKENS),
    ]


def acceptance_prompts(tokenizer: Any) -> list[Prompt]:
    """Six prompts of 4-6K tokens: prose, code, and questions about long texts."""
    sizes = iter(ACCEPTANCE_TOKENS)
    return [
        _plain(tokenizer, "prose-specialnames", prose("specialnames"), next(sizes)),
        _plain(tokenizer, "code-ast", code("ast"), next(sizes)),
        _asked(tokenizer, "summary-compound", _SUMMARISE, prose("compound"), next(sizes)),
        _plain(tokenizer, "code-argparse", code("argparse"), next(sizes)),
        _asked(tokenizer, "explain-types", _EXPLAIN, prose("types"), next(sizes)),
        needle_prompt(tokenizer, "needle-formats", 0.4, prose("formatstrings"), next(sizes)),
    ]


def needle_prompt(
    tokenizer: Any, name: str, depth: float, haystack: str, num_tokens: int
) -> Prompt:
    """A fact at `depth` (0 to 1) of a long text, and a question for it at the end."""
    return Prompt(name, tuple(needle_ids(tokenizer, depth, haystack, num_tokens)))


def _asked(tokenizer: Any, name: str, question: str, text: str, num_tokens: int) -> Prompt:
    return Prompt(name, tuple(asked_ids(tokenizer, question, text, num_tokens)))


def _plain(tokenizer: Any, name: str, text: str, num_tokens: int) -> Prompt:
    return Prompt(name, tuple(plain_ids(tokenizer, text, num_tokens)))


def _chat(tokenizer: Any, question: str) -> tuple[int, ...]:
    return tuple(chat_ids(tokenizer, [{"role": "user", "content": question}]))


def _log_lines(count: int) -> Iterator[str]:
    """A service log from a linear congruential generator: regular, but not repeating."""
    state = 12345
    for second in range(count):
        state = (1103515245 * state + 12345) % 2**31
        user, size, status = state % 97, state // 97 % 5000, (200, 200, 404, 500)[state // 7 % 4]
        clock = f"{second // 60:02d}:{second % 60:02d}"
        yield f"12:{clock} GET /users/{user}/files status={status} bytes={size}"


_SUMMARISE = "Summarise the following text in a few paragraphs."
_EXPLAIN = "Explain the most important ideas of the following text, with an example for each."

_SHORT = (
    "The history of the lighthouse begins in the year",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on high mountains because",
    "Ingredients for a simple bread: flour, water, salt and",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam, I am writing to",
)
_QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a linked list.",
    "Explain photosynthesis to a child in three sentences.",
    "List five animals that live in the sea.",
    "Write a short poem about the autumn wind.",
    "What is 12 plus 30?",
)
