"""Every policy serves, and none changes an output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ServerSlot
from tests.tiny_model import NUM_STEPS, VOCAB_SIZE, check_greedy, make_tiny_model, tiny_server

pytestmark = pytest.mark.server
NEW_TOKENS = 48


# One of each kind of path: `vegas` is served by the other tests, `oracle` goes the way of `quest`,
# and the rest differ in their lists only.
@pytest.mark.parametrize("policy", ["quest", "last-accepted", "all-queries"])
def test_outputs_are_the_targets(policy: str, server_slot: ServerSlot, tmp_path: Path) -> None:
    server_slot.stop()
    model = make_tiny_model(tmp_path)
    prompts = [[(7 * i * i + 3 * i + n) % VOCAB_SIZE for i in range(n)] for n in (20, 90, 150, 190)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    with tiny_server(tmp_path, "--vegas-policy", policy) as server:
        bodies = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        assert f"policy={policy}" in server.log()
    for prompt, body in zip(prompts, bodies, strict=True):
        assert len(body["output_ids"]) == NEW_TOKENS
        check_greedy(model, prompt, body["output_ids"])
    # Until it outgrows the budget, the first prompt drafts densely: most of that is accepted.
    iterations = [body["meta_info"]["spec_verify_ct"] for body in bodies]
    assert iterations[0] < 0.75 * NEW_TOKENS
    assert all(count >= (NEW_TOKENS - 1) / (NUM_STEPS + 1) for count in iterations)
