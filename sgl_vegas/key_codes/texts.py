"""What a basis is fitted to where a user names no texts: none of the laboratory's prompts."""

from __future__ import annotations

import inspect
from typing import Any

from sgl_vegas.lab.prompts import Prompts, asked_ids, code, plain_ids

NUM_TOKENS = 3000


def calibration_prompts(tokenizer: Any) -> Prompts:
    """Code, documentation, a chat about it, and a table of numbers, of the Python that runs."""
    manual = _documentation()
    question = "Summarise the following documentation."
    return [
        ("code", plain_ids(tokenizer, code("difflib"), NUM_TOKENS)),
        ("documentation", plain_ids(tokenizer, manual, NUM_TOKENS)),
        ("chat", asked_ids(tokenizer, question, manual[len(manual) // 2 :], NUM_TOKENS)),
        ("numbers", plain_ids(tokenizer, _numbers(), NUM_TOKENS)),
    ]


def _documentation() -> str:
    """Docstrings of some standard modules and of what is in them."""
    import collections
    import datetime
    import decimal
    import pathlib

    parts = []
    for module in (decimal, datetime, collections, pathlib):
        for name, member in sorted(vars(module).items()):
            if inspect.isclass(member):
                parts += [f"{name}: {inspect.getdoc(member)}"]
                parts += [
                    f"{name}.{method}: {inspect.getdoc(function)}"
                    for method, function in sorted(vars(member).items())
                    if callable(function) and not method.startswith("_")
                ]
    return "\n\n".join(parts)


def _numbers() -> str:
    return "\n".join(f"{n} squared is {n * n}; {n} cubed is {n**3}." for n in range(1, 2001))
