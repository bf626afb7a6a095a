"""Requests whose answers a grammar constrains, and what such an answer must look like."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema

from tests.server.pair import generate_body

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "kind": {"enum": ["cat", "dog", "cow"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
REGEXES = ("[a-f]{3,20}", "(yes|no|maybe), [0-9]{1,12}\\.", "([A-Z][a-z]{2}-){2}[0-9]+!", "x?y+z")
EBNFS = (
    'root ::= "f(" args ")"\nargs ::= [0-9]+ | [0-9]+ "," args',
    'root ::= ("ab" | "cd") root | "."',
)


def constrained(index: int, ids: Sequence[int], generator: random.Random) -> dict[str, Any]:
    """By one of three kinds; some sampled, some with no room for their end."""
    kind = ("json_schema", "regex", "ebnf")[index % 3]
    if kind == "json_schema":
        constraint = json.dumps(SCHEMA)
    else:
        constraint = generator.choice(REGEXES if kind == "regex" else EBNFS)
    sampling: dict[str, Any] = {kind: constraint, "ignore_eos": False, "max_new_tokens": 100}
    if index % 4 == 3:
        sampling |= {"temperature": 1.0}
    if index % 5 == 4:
        sampling |= {"max_new_tokens": generator.randrange(1, 14)}
    return generate_body(ids, **sampling)


def has_ended(answer: dict[str, Any]) -> bool:
    """Whether its grammar ended it, and not the token limit."""
    return answer["meta_info"]["finish_reason"]["type"] == "stop"


def check_constraint(sampling: dict[str, Any], answer: dict[str, Any]) -> None:
    """A whole sentence of the grammar, or the beginning of one where the limit cut it off."""
    text, ended = answer["text"], has_ended(answer)
    if "json_schema" in sampling:
        if ended:
            jsonschema.validate(json.loads(text), SCHEMA)
        else:
            assert text.startswith("{")
    elif "regex" in sampling:
        if ended:
            assert re.fullmatch(sampling["regex"], text), (sampling, text)
    else:
        whole = {EBNFS[0]: r"f\([0-9]+(,[0-9]+)*\)", EBNFS[1]: r"(ab|cd)*\."}[sampling["ebnf"]]
        beginning = {EBNFS[0]: r"f?\(?[0-9,]*\)?", EBNFS[1]: r"(ab|cd)*[ac]?\.?"}
        pattern = whole if ended else beginning[sampling["ebnf"]]
        assert re.fullmatch(pattern, text), (sampling, text)
