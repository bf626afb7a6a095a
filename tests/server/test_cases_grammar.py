"""Constrained answers and tool calls, beside requests that ask for none of them.

On a CPU the grammar backend is llguidance. The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.server.constraints import check_constraint, constrained, has_ended
from tests.server.pair import Pair, generate_body, prompt

pytestmark = pytest.mark.server

NUM_CONSTRAINED = 200


def test_case_13_constraints_in_mixed_batches(tiny_pair: Pair) -> None:
    """Valid all of them; the greedy ones, and those without a constraint, as plain SGLang's."""
    generator = random.Random(13)
    bodies = [
        constrained(index, prompt(generator.randrange(5, 90), salt=index), generator)
        for index in range(NUM_CONSTRAINED)
    ]
    free = [generate_body(prompt(20 + n, salt=n)) for n in range(NUM_CONSTRAINED // 5)]
    greedy = [body for body in bodies if body["sampling_params"]["temperature"] == 0] + free
    generator.shuffle(greedy)
    ended = 0
    for body, answer in zip(greedy, tiny_pair.check(greedy), strict=True):
        if body not in free:
            check_constraint(body["sampling_params"], answer)
            ended += has_ended(answer)
    assert ended > NUM_CONSTRAINED // 3  # most of them end by their grammar
    sampled = [body for body in bodies if body["sampling_params"]["temperature"] > 0]
    answers = tiny_pair.vegas.post(
        "/generate",
        {key: [body[key] for body in sampled] for key in ("input_ids", "sampling_params")},
    )
    for body, answer in zip(sampled, answers, strict=True):
        check_constraint(body["sampling_params"], answer)


def test_case_13_constraint_with_penalties_and_logprobs(tiny_pair: Pair) -> None:
    shape: dict[str, Any] = {"regex": "[a-f]{20,40}", "ignore_eos": False}
    bodies = [
        {**generate_body(prompt(n), **shape, **more), "return_logprob": True, "top_logprobs_num": 2}
        for n in (10, 60)
        for more in ({}, {"frequency_penalty": 1.0}, {"logit_bias": {"70": -100}}, {"n": 2})
    ]
    for answer in tiny_pair.check(bodies):
        for one in answer if isinstance(answer, list) else [answer]:
            assert re.fullmatch("[a-f]{20,40}", one["text"])


# Nothing can be said by them, from the start or from some token on.
DEAD_ENDS = (
    "root ::= root",
    'root ::= "a" more\nmore ::= more',
    'root ::= [a-f] root | "z" root',
    "root ::= [a-f] [a-f] [a-f] more\nmore ::= more",
    # Dead on one way of two, which drafts may go without the request.
    "root ::= [a-f] ([a-c] more | [d-f] [a-f]{4})\nmore ::= more",
    "root ::= [a-f]{2} ([d-f] [a-f] more | [a-c] [a-f]{9})\nmore ::= more",
)


def test_case_13_grammars_without_an_end(tiny_pair: Pair) -> None:
    """Such a request ends by the end token, and the others of its batch don't notice."""
    dead = [
        generate_body(prompt(n, salt=n), ebnf=ebnf, max_new_tokens=40, ignore_eos=False)
        for ebnf in DEAD_ENDS
        for n in (10, 60)
    ]
    free = [generate_body(prompt(30 + n, salt=n)) for n in range(6)]
    answers = tiny_pair.check([*dead, *free])
    assert all(len(answer["output_ids"]) == 48 for answer in answers[len(dead) :])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "pattern": "^[a-z]{2,6}$"}},
                "required": ["key"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get", "put")
]
# What the parser of the server's --tool-call-parser looks for.
CALL = (
    '<tool_call>\\n\\{"name": "(get|put)", "arguments": \\{"key": "[a-z]{2,6}"\\}\\}\\n</tool_call>'
)
CHAT = {"model": "default", "temperature": 0, "max_tokens": 100}
ASKED = [{"role": "user", "content": "Get me something."}]
CHATS: dict[str, dict[str, Any]] = {
    "called": {"tools": TOOLS, "regex": CALL},
    "called after a text": {"tools": TOOLS, "regex": "[a-z]{5,9}\\n" + CALL},
    "call cut off": {"tools": TOOLS, "regex": CALL, "max_tokens": 43},
    "not called": {"tools": TOOLS},
    "forbidden": {"tools": TOOLS, "tool_choice": "none", "regex": CALL},
    "stopped": {"tools": TOOLS, "stop": ["a", "B", "8"]},
}


@pytest.mark.parametrize("case", CHATS)
def test_case_12_tool_calls(tiny_pair: Pair, case: str) -> None:
    """The calls, the text around them and the usage of a chat; and the same streamed."""
    body = {**CHAT, "messages": ASKED, **CHATS[case]}
    whole = tiny_pair.check([body], "/v1/chat/completions")[0]
    message = whole["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == case.startswith("called")
    content, name, arguments, usage = "", "", "", {}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in tiny_pair.vegas.events("/v1/chat/completions", streamed):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    for call in message.get("tool_calls") or ():
        assert name == call["function"]["name"]
        assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    if case != "call cut off":  # streamed piecemeal, otherwise given as text
        assert content.strip() == (message["content"] or "").strip()
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] <= body["max_tokens"]
