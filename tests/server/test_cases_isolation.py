"""What one client can learn of another or do without a key: nothing.

The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.server.pair import (
    CACHED,
    GREEDY,
    Pair,
    assert_same,
    generate_body,
    prompt,
    seen,
    start_pair,
)
from tests.server_process import Server
from tests.tiny_model import check_greedy, tiny_server

pytestmark = pytest.mark.server

KEY, ADMIN_KEY = "a-users-key", "the-admins-key"
# Answered to anybody, as SGLang documents: probes and metrics.
OPEN = ("/health", "/metrics")
UNLISTED = ("/v1/loads", "/metrics", "/openapi.json", "/docs")
CHAT = "/v1/chat/completions"
SECRET = "Xq7Zk"


@pytest.fixture(scope="module")
def told_plainly(server_slot: ServerSlot, tiny_model: tuple[Path, Any]) -> dict[str, Any]:
    """What plain SGLang answers to the chats of `REASONED`: its text, told by no parser."""
    pair = server_slot.hold("tiny_pair", lambda: start_pair(tiny_model[0]))
    told = {case: pair.plain.post(CHAT, reasoned_body(case)) for case in REASONED}
    for answer in told.values():  # the parser takes every token for reasoning
        answer["usage"]["reasoning_tokens"] = answer["usage"]["completion_tokens"]
    return told


@pytest.fixture(scope="module")
def locked(
    told_plainly: dict[str, Any], server_slot: ServerSlot, tiny_model: tuple[Path, Any]
) -> Iterator[Server]:
    """A server with both keys, and a parser that takes all text for reasoning.

    Not the pair's: with a reasoning parser, SGLang 0.5.17 compiles no grammar by llguidance.
    """
    server_slot.stop()
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--enable-metrics")
    with tiny_server(tiny_model[0], *keys, "--reasoning-parser", "deepseek-r1") as server:
        yield server


def with_key(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"headers": {"Authorization": f"Bearer {key}"}}


def endpoints(server: Server, key: str | None = None) -> list[tuple[str, str]]:
    """Method and path of all that the server says it has, and of what it doesn't list."""
    schema = server.request("GET", "/openapi.json", **with_key(key)).json()
    listed = [
        (method.upper(), re.sub(r"\{.*?\}", "x", path))
        for path, methods in schema["paths"].items()
        for method in methods
    ]
    assert len(listed) > 60
    return [*listed, *(("GET", path) for path in UNLISTED)]


def admin_functions() -> set[str]:
    """Paths that plain SGLang's own source marks as an administrator's."""
    import sglang.srt.entrypoints as entrypoints

    source = (Path(entrypoints.__path__[0]) / "http_server.py").read_text()
    marked = re.findall(
        r'((?:@app\.\w+\(\s*"[^"]+"[^)]*\)\n)+)@auth_level\(AuthLevel\.ADMIN', source
    )
    return {path for block in marked for path in re.findall(r'\(\s*"([^"]+)"', block)}


def test_keys_every_endpoint_asks_for_one(locked: Server, tiny_model: tuple[Path, Any]) -> None:
    admins = admin_functions()
    assert {"/flush_cache", "/abort_request", "/update_weights_from_disk"} <= admins
    for method, path in endpoints(locked, KEY):
        for key in (None, "wrong", KEY if path in admins else None):
            response = locked.request(method, path, {}, **with_key(key))
            if not path.startswith(OPEN):
                assert response.status_code == 401, (method, path, key)
    ids = prompt(90)
    answer = locked.request("POST", "/generate", generate_body(ids), **with_key(KEY))
    check_greedy(tiny_model[1], ids, answer.json()["output_ids"])
    flushed = locked.request("POST", "/flush_cache?timeout=30", **with_key(ADMIN_KEY))
    assert flushed.status_code == 200


def test_isolation_endpoints_tell_nothing_of_others(tiny: tuple[Server, Any]) -> None:
    """While a request runs and after it, no endpoint that reads shows its text or its tokens."""
    server, _ = tiny
    body = {
        "text": SECRET * 20,
        "sampling_params": {**GREEDY, "max_new_tokens": 100},
        "stream": True,
        "rid": "their-request",
    }
    # What an administrator's do to a server would disturb other tests.
    left_out = {"/openapi.json", *admin_functions()}
    reads = [path for method, path in endpoints(server) if method == "GET" and path not in left_out]
    assert {"/server_info", "/v1/loads", "/metrics"} <= {*reads}
    shown: list[str] = []

    def read_all() -> None:
        shown.extend(server.request("GET", path).text for path in reads)

    stream = server.events("/generate", body)
    answer = next(stream)
    read_all()
    for chunk in stream:
        answer = chunk
    read_all()
    assert answer["meta_info"]["completion_tokens"] == 100  # it ran to its end beside the readers
    numbers = ", ".join(map(str, answer["output_ids"][:6]))
    for text in shown:
        for secret in (SECRET, answer["text"][:12], numbers, numbers.replace(" ", "")):
            assert secret not in text


def test_isolation_same_prompt_in_another_namespace(tiny_pair: Pair) -> None:
    """`cached_tokens` and acceptance tell nobody what another namespace has asked."""
    ids = prompt(120)
    tiny_pair.flush()
    cold = tiny_pair.vegas.post("/generate", {**generate_body(ids), "extra_key": "mine"})
    other = tiny_pair.vegas.post("/generate", {**generate_body(ids), "extra_key": "theirs"})
    assert other["meta_info"]["cached_tokens"] == cold["meta_info"]["cached_tokens"] == 0
    assert other["meta_info"]["spec_verify_ct"] == cold["meta_info"]["spec_verify_ct"]
    assert other["output_ids"] == cold["output_ids"]


REASONED: dict[str, dict[str, Any]] = {
    "to the limit": {},
    "one run": {"max_tokens": 7},
    "stopped": {"stop": ["a", "B", "8"]},
    "apart": {"stream_reasoning": False},
}


def reasoned_body(case: str) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0}
    return {**body, "max_tokens": 60, **REASONED[case]}


@pytest.mark.parametrize("case", REASONED)
def test_case_12_reasoning(locked: Server, told_plainly: dict[str, Any], case: str) -> None:
    """Whole and streamed, what is told as reasoning is what plain SGLang tells as text."""
    key, body, plain = with_key(KEY), reasoned_body(case), told_plainly[case]
    plainly = {**body, "separate_reasoning": False}
    apart = locked.request("POST", CHAT, plainly, **key).json()
    assert_same(seen(plain, CACHED), seen(apart, CACHED), case)
    whole = locked.request("POST", CHAT, body, **key).json()
    text, message = (
        plain["choices"][0]["message"]["content"].strip(),
        whole["choices"][0]["message"],
    )
    assert text and message["reasoning_content"].strip() == text
    assert not message["content"]
    assert whole["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    tokens = plain["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens"] == tokens <= body["max_tokens"]
    assert whole["usage"]["reasoning_tokens"] == tokens
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    thought, usage = "", {}
    for chunk in locked.events(CHAT, streamed, **key):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            thought += choice["delta"].get("reasoning_content") or ""
            assert not choice["delta"].get("content")
    assert usage["completion_tokens"] == tokens
    if case != "apart":  # told only once it has ended, which here it never does
        assert thought.strip() == text
