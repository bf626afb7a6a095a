"""Every policy serves, and none changes an output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sgl_vegas.key_codes.basis import fit_basis
from sgl_vegas.key_codes.moments import Moments
from tests.conftest import ServerSlot
from tests.tiny_model import NUM_STEPS, VOCAB_SIZE, check_greedy, make_tiny_model, tiny_server

pytestmark = pytest.mark.server
NEW_TOKENS = 48


def random_basis(path: Path, model: LlamaForCausalLM) -> None:
    """A key basis of other keys than the model's: that costs acceptance and nothing else."""
    config: Any = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    moments = Moments(config.num_hidden_layers, kv_heads, dim)
    for layer in range(config.num_hidden_layers):
        moments.add(layer, torch.randn(99, heads, dim), torch.randn(99, kv_heads, dim))
    fit_basis(moments, 2 * dim).save(path)


# One of each kind of path: `vegas` is served by the other tests, `oracle` goes the way of `quest`,
# and the rest differ in their lists only, so that a server for each of them is for who changes one.
POLICIES = ["quest", "last-accepted", "vegas-refresh"]
if os.environ.get("VEGAS_TEST_EVERY_POLICY"):
    POLICIES += ["vegas", "streaming", "all-queries", "oracle", "dense"]


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_the_targets(policy: str, server_slot: ServerSlot, tmp_path: Path) -> None:
    server_slot.stop()
    model = make_tiny_model(tmp_path)
    prompts = [[(7 * i * i + 3 * i + n) % VOCAB_SIZE for i in range(n)] for n in (20, 90, 150, 190)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
    flags = ["--vegas-policy", policy]
    if policy == "vegas-refresh":
        random_basis(tmp_path / "basis", model)
        flags += ["--vegas-key-basis", str(tmp_path / "basis")]
    with tiny_server(tmp_path, *flags) as server:
        bodies = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        assert f"policy={policy}" in server.log()
    for prompt, body in zip(prompts, bodies, strict=True):
        assert len(body["output_ids"]) == NEW_TOKENS
        check_greedy(model, prompt, body["output_ids"])
    # Until it outgrows the budget, the first prompt drafts densely: most of that is accepted.
    iterations = [body["meta_info"]["spec_verify_ct"] for body in bodies]
    assert iterations[0] < 0.75 * NEW_TOKENS
    assert all(count >= (NEW_TOKENS - 1) / (NUM_STEPS + 1) for count in iterations)
