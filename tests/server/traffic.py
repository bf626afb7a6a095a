"""Requests whose answers must not depend on speculation, sent alike to plain SGLang and VEGAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.prompts import Prompt, prose
from tests.server_process import Server

NEW_TOKENS = 96
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS}


@dataclass(frozen=True)
class Answer:
    """What a client can see of one greedy answer.

    Attributes:
        cached_tokens: prompt tokens that the server took from its prefix cache.
    """

    ids: tuple[int, ...]
    text: str
    finish: str
    cached_tokens: int

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        meta = body["meta_info"]
        return cls(
            ids=tuple(body["output_ids"]),
            text=body["text"],
            finish=meta["finish_reason"]["type"],
            cached_tokens=meta["cached_tokens"],
        )


def ask(server: Server, ids: Sequence[int], **sampling: Any) -> Answer:
    return Answer.of(server.generate(list(ids), **{**GREEDY, **sampling}))


def ask_together(server: Server, prompts: Sequence[Prompt], **sampling: Any) -> list[Answer]:
    bodies = server.generate([list(p.ids) for p in prompts], **{**GREEDY, **sampling})
    return [Answer.of(body) for body in bodies]


def alone(server: Server, prompts: Sequence[Prompt]) -> dict[str, Answer]:
    """Every prompt by itself, from an empty prefix cache."""
    server.flush_cache()
    return {prompt.name: ask(server, prompt.ids) for prompt in prompts}


def prefix_hits(server: Server, prompts: Sequence[Prompt]) -> dict[str, Answer]:
    """Each prompt cold, then again, then variants that share a part of it or of its answer."""
    server.flush_cache()
    answers = {}
    for prompt, other in zip(prompts, reversed(prompts), strict=True):
        tail = other.ids[-16:]
        cold = ask(server, prompt.ids)
        variants = {
            "again": prompt.ids,
            "follow-up": prompt.ids + cold.ids + tail,
            "half an answer": prompt.ids + cold.ids[: len(cold.ids) // 2] + tail,
            "branch": prompt.ids[: len(prompt.ids) * 2 // 3] + tail,
        }
        answers[f"{prompt.name}, cold"] = cold
        for name, ids in variants.items():
            answers[f"{prompt.name}, {name}"] = ask(server, ids, max_new_tokens=48)
    return answers


def stops_near_the_limit(server: Server, prompt: Prompt) -> dict[str, Answer]:
    """Stops of every kind, met 0 to 7 tokens before the token limit: within one accepted run.

    Here with words of several tokens; test_cases_ends.py has every offset.
    """
    server.flush_cache()
    whole = ask(server, prompt.ids)
    assert whole.finish == "stop"
    word = whole.text.split()[5]
    stops: dict[str, tuple[int, dict[str, Any]]] = {
        "end of text": (len(whole.ids), {}),
        "stop token": (whole.ids.index(whole.ids[10]) + 1, {"stop_token_ids": [whole.ids[10]]}),
        "stop string": (6, {"stop": [word]}),
        "stop regex": (6, {"stop_regex": [word]}),
    }
    return {
        f"{name}, limit {length + room}": ask(
            server, prompt.ids, max_new_tokens=length + room, **sampling
        )
        for name, (length, sampling) in stops.items()
        for room in (0, 2, 7)
    }


@dataclass(frozen=True)
class ChatTurn:
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def chat_turns(server: Server) -> dict[str, ChatTurn]:
    """Conversations of two turns; the second carries the first's answer."""
    server.flush_cache()
    turns = {}
    for name, (first, second) in CONVERSATIONS.items():
        messages = [{"role": "user", "content": first}]
        turns[f"{name}, turn 1"] = opening = _chat_turn(server, messages)
        messages += [
            {"role": "assistant", "content": opening.text},
            {"role": "user", "content": second},
        ]
        turns[f"{name}, turn 2"] = _chat_turn(server, messages)
    return turns


def _chat_turn(server: Server, messages: Sequence[dict[str, str]]) -> ChatTurn:
    body = server.chat(messages, temperature=0, max_tokens=NEW_TOKENS)
    usage = body["usage"]
    return ChatTurn(
        text=body["choices"][0]["message"]["content"],
        finish=body["choices"][0]["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
    )


CONVERSATIONS = {
    "short": (
        "Name three rivers of Europe.",
        "Which of them is the longest? Answer in one sentence.",
    ),
    "long": (
        f"{prose('execmodel')[:5000]}\n\nWhat is this text about?",
        "Now explain what a namespace is.",
    ),
}


def openai_calls(server: Server) -> dict[str, list[dict[str, Any]]]:
    """The choices of the OpenAI endpoints, by what is asked of them."""
    server.flush_cache()
    chats: dict[str, dict[str, Any]] = {
        "chat": {},
        "chat, n=2": {"n": 2},
        "chat, logprobs": {"logprobs": True, "top_logprobs": 3},
        "chat, stop": {"stop": ["Paris"]},
        "chat, JSON": {"response_format": {"type": "json_schema", "json_schema": CITY}},
        "chat, penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        "chat, bias": {"logit_bias": {"28": -100}},
    }
    completions: dict[str, dict[str, Any]] = {
        "completion": {},
        "completion, n=2": {"n": 2},
        "completion, logprobs": {"logprobs": 3},
        "completion, echo": {"echo": True},
        "completion, stop": {"stop": [","]},
    }
    options = {"temperature": 0, "max_tokens": 48}
    return {
        **{name: server.chat(ABOUT_PARIS, **options, **o)["choices"] for name, o in chats.items()},
        **{
            name: server.complete("A bread needs flour, salt", **options, **o)["choices"]
            for name, o in completions.items()
        },
    }


ABOUT_PARIS = [{"role": "user", "content": "Tell me about the capital of France."}]
CITY = {
    "name": "city",
    "schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
            "country": {"enum": ["France", "Italy", "Spain"]},
            "population": {"type": "integer", "minimum": 1, "maximum": 99999999},
        },
        "required": ["city", "country", "population"],
        "additionalProperties": False,
    },
}
