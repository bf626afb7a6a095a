"""Sparse drafts are good: tokens an iteration on long prompts, from the server's own counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.prompts import acceptance_prompts
from tests.server_process import Server

pytestmark = pytest.mark.server

GAMMA = 7  # as `vegas_server` is started
NEW_TOKENS = 264
MIN_ITERATIONS = 30
MIN_TOKENS_PER_ITERATION = 6.0


def test_tokens_per_iteration(vegas_server: Server, tokenizer: Any) -> None:
    prompts = acceptance_prompts(tokenizer)
    assert all(4000 <= len(prompt.ids) <= 6200 for prompt in prompts)
    bodies = vegas_server.generate(
        [list(prompt.ids) for prompt in prompts],
        temperature=0,
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
    )
    measured = {}
    for prompt, body in zip(prompts, bodies, strict=True):
        meta = body["meta_info"]
        iterations = meta["spec_verify_ct"]
        assert iterations >= MIN_ITERATIONS
        assert meta["completion_tokens"] == len(body["output_ids"]) == NEW_TOKENS
        assert meta["spec_accept_length"] == pytest.approx(NEW_TOKENS / iterations)
        # SGLang's figure counts the prefill's token too; this one doesn't.
        measured[prompt.name] = (len(body["output_ids"]) - 1) / iterations
        assert measured[prompt.name] <= GAMMA + 1
    mean = sum(measured.values()) / len(measured)
    print(f"tokens an iteration: {mean:.2f}; {measured}")
    assert mean >= MIN_TOKENS_PER_ITERATION, measured
