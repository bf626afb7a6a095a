"""The OpenAI endpoints answer under VEGAS as they do under plain SGLang."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.server import traffic
from tests.server.conftest import PlainAnswers
from tests.server_process import Server, chat_body

pytestmark = pytest.mark.server

LOGPROB_TOLERANCE = 1e-3  # float32; a verify pass sums in another order than a decode step


@pytest.fixture(scope="module")
def vegas_calls(plain: PlainAnswers) -> dict[str, Any]:
    """Filled by the first test that has a server: fixtures of a module can't use one."""
    return {}


@pytest.fixture
def calls(vegas_server: Server, vegas_calls: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    if not vegas_calls:
        vegas_calls.update(traffic.openai_calls(vegas_server))
    return vegas_calls


def assert_close(want: Any, got: Any) -> None:
    """Equal but for rounding of numbers, at any depth."""
    if isinstance(want, float) and isinstance(got, float):
        assert got == pytest.approx(want, abs=LOGPROB_TOLERANCE)
    elif isinstance(want, dict) and isinstance(got, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_close(want[key], got[key])
    elif isinstance(want, list) and isinstance(got, list):
        assert len(got) == len(want)
        for expected, actual in zip(want, got, strict=True):
            assert_close(expected, actual)
    else:
        assert got == want


def test_every_call_answers_as_plain(plain: PlainAnswers, calls: dict[str, Any]) -> None:
    assert calls.keys() == plain.openai_calls.keys()
    for name in calls:
        assert_close(plain.openai_calls[name], calls[name])


def test_n(calls: dict[str, Any]) -> None:
    for endpoint in ("chat", "completion"):
        assert [choice["index"] for choice in calls[f"{endpoint}, n=2"]] == [0, 1]


def test_logprobs(calls: dict[str, Any]) -> None:
    content = calls["chat, logprobs"][0]["logprobs"]["content"]
    assert len(content) > 0
    for token in content:
        best = max(candidate["logprob"] for candidate in token["top_logprobs"])
        assert len(token["top_logprobs"]) == 3
        assert token["logprob"] == best <= 0  # greedy takes the likeliest
    assert len(calls["completion, logprobs"][0]["logprobs"]["token_logprobs"]) == 48


def test_stop_strings(calls: dict[str, Any]) -> None:
    chat, completion = calls["chat, stop"][0], calls["completion, stop"][0]
    assert (chat["finish_reason"], completion["finish_reason"]) == ("stop", "stop")
    assert "Paris" not in chat["message"]["content"]
    assert "Paris" in calls["chat"][0]["message"]["content"]  # so the stop string was met
    assert "," not in completion["text"]


def test_json_schema(calls: dict[str, Any]) -> None:
    answer = json.loads(calls["chat, JSON"][0]["message"]["content"])
    jsonschema.validate(answer, traffic.CITY["schema"])


def test_streamed_chat(vegas_server: Server, calls: dict[str, Any]) -> None:
    body = chat_body(traffic.ABOUT_PARIS, temperature=0, max_tokens=48, stream=True)
    chunks = list(vegas_server.events("/v1/chat/completions", body))
    deltas = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert sum(map(bool, deltas)) > 1
    assert "".join(deltas) == calls["chat"][0]["message"]["content"]


def test_streamed_completion(vegas_server: Server, calls: dict[str, Any]) -> None:
    body = {"model": "default", "prompt": "A bread needs flour, salt", "stream": True}
    chunks = list(
        vegas_server.events("/v1/completions", {**body, "temperature": 0, "max_tokens": 48})
    )
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert sum(map(bool, texts)) > 1
    assert "".join(texts) == calls["completion"][0]["text"]
