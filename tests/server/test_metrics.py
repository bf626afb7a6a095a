"""Acceptance is reported where SGLang reports it: meta_info, the decode log line, Prometheus."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.prompts import Prompt
from tests.server_process import Server

pytestmark = pytest.mark.server

GAMMA = 7  # as `vegas_server` is started
ITERATIONS = 9
# One token from the prefill, then full iterations.
NEW_TOKENS = 1 + ITERATIONS * (GAMMA + 1)


def generate_densely(server: Server, prompts: list[Prompt]) -> dict[str, Any]:
    """An answer whose context fits the budget: drafts are the target's own, so all are accepted."""
    ids = list(prompts[0].ids)
    assert len(ids) + NEW_TOKENS < 256
    return server.generate(ids, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def test_meta_info(vegas_server: Server, prompts: list[Prompt]) -> None:
    meta = generate_densely(vegas_server, prompts)["meta_info"]
    assert meta["completion_tokens"] == NEW_TOKENS
    assert meta["spec_verify_ct"] == ITERATIONS
    assert meta["spec_accept_rate"] == 1.0
    assert meta["spec_accept_length"] == pytest.approx(NEW_TOKENS / ITERATIONS)
    assert meta["spec_num_correct_drafts"] == ITERATIONS * GAMMA
    assert meta["spec_num_proposed_drafts"] == ITERATIONS * GAMMA
    assert meta["spec_correct_drafts_histogram"] == [0] * GAMMA + [ITERATIONS]


def test_decode_log_line(vegas_server: Server, prompts: list[Prompt]) -> None:
    seen = len(vegas_server.log())
    generate_densely(vegas_server, prompts)
    lines = re.findall(r"accept len: ([\d.]+), accept rate: ([\d.]+)", vegas_server.log()[seen:])
    assert lines, "the decode log line has no acceptance"
    assert all(1 <= float(length) <= GAMMA + 1 for length, _ in lines)
    assert float(lines[-1][0]) == GAMMA + 1
    assert float(lines[-1][1]) == 1.0


def test_prometheus(vegas_server: Server, prompts: list[Prompt]) -> None:
    generate_densely(vegas_server, prompts)
    before = vegas_server.metrics()
    generate_densely(vegas_server, prompts)
    after = vegas_server.metrics()
    assert 1 < after["sglang:spec_accept_length"] <= GAMMA + 1
    assert 0 < after["sglang:spec_accept_rate"] <= 1
    calls = "sglang:spec_verify_calls_total"
    assert after[calls] - before[calls] == ITERATIONS


def test_server_info(vegas_server: Server, prompts: list[Prompt]) -> None:
    generate_densely(vegas_server, prompts)
    state = vegas_server.get("/server_info").json()["internal_states"][0]
    assert 1 < state["avg_spec_accept_length"] <= GAMMA + 1
    assert state["speculative_num_draft_tokens"] == GAMMA + 1
