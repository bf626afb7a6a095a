"""What one client can learn of another or do without a key: nothing.

The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import ServerSlot
from tests.server.pair import Pair, generate_body, prompt
from tests.server_process import Server
from tests.tiny_model import check_greedy, make_tiny_model, tiny_server

pytestmark = pytest.mark.server

KEY, ADMIN_KEY = "a-users-key", "the-admins-key"
# Answered to anybody, as SGLang documents: probes and metrics.
OPEN = ("/health", "/metrics")
SECRET = "Xq7Zk"


@pytest.fixture(scope="module")
def locked(
    server_slot: ServerSlot, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Any]]:
    """A server with both keys, and a parser that takes all text for reasoning."""
    server_slot.stop()
    folder = tmp_path_factory.mktemp("locked")
    model = make_tiny_model(folder)
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--enable-metrics")
    with tiny_server(folder, *keys, "--reasoning-parser", "deepseek-r1") as server:
        yield server, model


def with_key(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"headers": {"Authorization": f"Bearer {key}"}}


def endpoints(server: Server) -> list[tuple[str, str]]:
    """Method and path of all that the server says it has, and of what it doesn't list."""
    schema = server.request("GET", "/openapi.json", **with_key(KEY)).json()
    listed = [
        (method.upper(), re.sub(r"\{.*?\}", "x", path))
        for path, methods in schema["paths"].items()
        for method in methods
    ]
    assert len(listed) > 60
    return [*listed, ("GET", "/v1/loads"), ("GET", "/openapi.json"), ("GET", "/docs")]


def admin_functions() -> set[str]:
    """Paths that plain SGLang's own source marks as an administrator's."""
    import sglang.srt.entrypoints as entrypoints

    source = (Path(entrypoints.__path__[0]) / "http_server.py").read_text()
    marked = re.findall(
        r'((?:@app\.\w+\(\s*"[^"]+"[^)]*\)\n)+)@auth_level\(AuthLevel\.ADMIN', source
    )
    return {path for block in marked for path in re.findall(r'\(\s*"([^"]+)"', block)}


def test_keys_every_endpoint_asks_for_one(locked: tuple[Server, Any]) -> None:
    server, model = locked
    admins = admin_functions()
    assert {"/flush_cache", "/abort_request", "/update_weights_from_disk"} <= admins
    for method, path in endpoints(server):
        for key in (None, "wrong", KEY if path in admins else None):
            response = server.request(method, path, {}, **with_key(key))
            if not path.startswith(OPEN):
                assert response.status_code == 401, (method, path, key)
    ids = prompt(90)
    answer = server.request("POST", "/generate", generate_body(ids), **with_key(KEY))
    check_greedy(model, ids, answer.json()["output_ids"])
    flushed = server.request("POST", "/flush_cache?timeout=30", **with_key(ADMIN_KEY))
    assert flushed.status_code == 200


def test_isolation_endpoints_tell_nothing_of_others(locked: tuple[Server, Any]) -> None:
    """While a request runs and after it, no endpoint that reads shows its text or its tokens."""
    server, _ = locked
    text = SECRET * 20
    body = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True},
        "stream": True,
        "rid": "their-request",
    }
    headers = with_key(KEY)["headers"]
    reads = [
        path for method, path in endpoints(server) if method == "GET" and "openapi" not in path
    ]
    with requests.post(
        server.url + "/generate", json=body, headers=headers, stream=True, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line)
        during = [server.request("GET", path, **with_key(KEY)).text for path in reads]
        rest = [line for line in lines if line]
    after = [server.request("GET", path, **with_key(KEY)).text for path in reads]
    assert first and rest
    import json

    answer = json.loads(rest[-2].removeprefix(b"data:"))
    emitted = answer["output_ids"]
    for shown in (*during, *after):
        assert SECRET not in shown
        assert answer["text"][:12] not in shown
        numbers = ", ".join(map(str, emitted[:6]))
        assert numbers not in shown and numbers.replace(" ", "") not in shown


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
    "reasoning": {},
    "one run": {"max_tokens": 7},
    "stopped": {"stop": ["a", "B", "8"]},
    "apart": {"stream_reasoning": False},
}


@pytest.mark.parametrize("case", REASONED)
def test_case_12_reasoning(locked: tuple[Server, Any], tiny_pair: Pair, case: str) -> None:
    """All text is reasoning; it is plain SGLang's text, counted and streamed alike."""
    server, _ = locked
    messages = [{"role": "user", "content": "Why?"}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 60}
    body |= REASONED[case]
    expected = tiny_pair.plain.post("/v1/chat/completions", body)
    answer = server.request("POST", "/v1/chat/completions", body, **with_key(KEY)).json()
    text = expected["choices"][0]["message"]["content"]
    assert answer["choices"][0]["message"]["reasoning_content"].strip() == text.strip()
    assert answer["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    used = answer["usage"]
    assert used["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert (used.get("reasoning_tokens") or 0) <= used["completion_tokens"]
