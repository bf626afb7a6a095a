"""Requests of any kind to every endpoint: refused or answered rightly, and the server lives on.

    HOSTILE_REQUESTS=5000 python -m pytest tests/server/test_cases_hostile.py

sends the whole number; the numbers of cases are those of docs/cases.md.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.server import hostile
from tests.server.idle import assert_nothing_is_held
from tests.server.pair import Pair, generate_body, prompt
from tests.server_process import Server
from tests.tiny_model import VOCAB_SIZE, check_greedy

pytestmark = pytest.mark.server

NUM_REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", "600"))
CHECK_EVERY = 50
ANSWER_WITHIN_S = 60
SERVER_ERROR = 500
# What plain SGLang may let through: messages of sgl_vegas/request_check.py, and one of SGLang's own
# scheduler beside any speculative decoding.
REFUSED_HERE = re.compile(
    r"positional_embed_overrides can't be sent as JSON\.|The prompt has no tokens\."
    r"|input_ids contains -?\d+, which is not in the vocabulary|sampling_params must be an object\."
    r"|sampling_params has no .|sampling_params, \w+: .|logit_bias of \S+ is not within .* of 0\."
    r"|return_sampling_mask is not supported with speculative decoding\."
)


def send(server: Server, path: str, body: Any) -> tuple[int, Any]:
    """Status and answer; the answer is None unless it is one of JSON.

    An error of SGLang's front in the middle of a stream breaks the connection, and counts as a
    server error.
    """
    try:
        response = requests.post(
            server.url + path,
            data=json.dumps(body),  # NaN and Infinity too, which `requests` would refuse to send
            headers={"content-type": "application/json"},
            timeout=ANSWER_WITHIN_S,
        )
    except requests.exceptions.ChunkedEncodingError:
        return SERVER_ERROR, None
    is_json = response.headers.get("content-type", "").startswith("application/json")
    return response.status_code, response.json() if is_json else None


def is_greedy(body: Any) -> bool:
    """Whether `body` leaves no choice to chance, so that two servers must answer alike."""
    sampling = body.get("sampling_params") if isinstance(body, dict) else None
    return isinstance(sampling, dict) and sampling.get("temperature") == 0


def is_plain_refusal(status: int, answer: Any) -> bool:
    """Whether nothing stands behind a refusal but the request, so that plain SGLang must agree."""
    return status == requests.codes.bad_request and not REFUSED_HERE.search(json.dumps(answer))


def emitted(answer: Any) -> list[list[int]]:
    return [one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])]


def check_answer(body: Any, answer: Any) -> None:
    """Ids of the vocabulary, as many as counted, no more than asked."""
    for one in answer if isinstance(answer, list) else [answer]:
        assert one["meta_info"]["completion_tokens"] == len(one["output_ids"])
        assert all(0 <= token < VOCAB_SIZE for token in one["output_ids"])
        sampling = body.get("sampling_params")
        limit = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
        if isinstance(limit, int):
            assert len(one["output_ids"]) <= limit


def test_case_23_any_request_leaves_the_server_alive(
    tiny: tuple[Server, Any], tiny_pair: Pair
) -> None:
    """What plain SGLang says is asked where it matters: of greedy answers, and of errors and
    refusals that speculation has no part in."""
    server, model = tiny
    statuses: Counter[tuple[str, int]] = Counter()
    alike: Counter[str] = Counter()
    usual = prompt(90)

    @seed(23)
    @settings(
        max_examples=NUM_REQUESTS,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a dead server can't tell which part of a request it was
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(hostile.REQUESTS)
    def attack(request: tuple[str, Any]) -> None:
        path, body = request
        try:
            status, answer = send(server, path, body)
        except requests.exceptions.ConnectionError:
            pytest.fail(f"no answer to {path} {body}")
        statuses[path, status] += 1
        if status >= SERVER_ERROR or is_plain_refusal(status, answer):
            # A server error is raised by SGLang's front: nothing reaches a scheduler.
            alike["refused"] += 1
            assert send(tiny_pair.plain, path, body)[0] == status, (path, body, answer)
        elif path == "/generate" and status == requests.codes.ok and answer is not None:
            check_answer(body, answer)
            if is_greedy(body):
                alike["answered"] += 1
                expected = send(tiny_pair.plain, path, body)[1]
                assert emitted(answer) == emitted(expected), body
        if sum(statuses.values()) % CHECK_EVERY == 0 or status >= SERVER_ERROR:
            again = server.post("/generate", generate_body(usual, max_new_tokens=16))
            check_greedy(model, usual, again["output_ids"])

    attack()
    print({f"{path} {status}": count for (path, status), count in sorted(statuses.items())}, alike)
    assert_nothing_is_held(server)
    for count in (statuses["/generate", 200], alike["answered"], alike["refused"]):
        assert count > NUM_REQUESTS // 50
