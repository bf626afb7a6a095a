"""Requests that run into the context limit end there, and leave their neighbours alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server_process import Server
from tests.tiny_model import CONTEXT_LEN, NUM_STEPS, VOCAB_SIZE, check_greedy

pytestmark = pytest.mark.server


def test_limit_is_reached_side_by_side(tiny: tuple[Server, Any]) -> None:
    server, model = tiny
    # Every distance to the limit that one draft run can have, twice over, all at once: a slot
    # written past a request's row would land in its neighbour's. 7: the server takes no longer
    # prompt.
    lengths = [CONTEXT_LEN - 7 - distance for distance in range(2 * (NUM_STEPS + 1))]
    prompts = [[(5 * i * i + 11 * i + n) % VOCAB_SIZE for i in range(n)] for n in lengths]
    # Without max_new_tokens the server caps the answer at what the context has left.
    sampling = {"temperature": 0, "ignore_eos": True}
    for _ in range(2):
        bodies = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        for prompt, body in zip(prompts, bodies, strict=True):
            ids, meta = body["output_ids"], body["meta_info"]
            assert meta["finish_reason"]["type"] == "length"
            assert 0 < len(ids) <= CONTEXT_LEN - len(prompt)
            check_greedy(model, prompt, ids)
