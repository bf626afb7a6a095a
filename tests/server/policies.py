"""What a server of any policy must do: answer as its model does, and draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from sgl_vegas.key_codes.basis import fit_basis
from sgl_vegas.key_codes.moments import Moments
from tests.server.pair import generate_body, prompt
from tests.server_process import Server
from tests.tiny_model import MIN_TOKENS, NUM_STEPS, check_greedy

LENGTHS = (20, 90, 150, 190)
NEW_TOKENS = 48


def policy_flags(policy: str, model: LlamaForCausalLM, folder: Path) -> tuple[str, ...]:
    """Flags for `policy`. What else it needs is written to `folder`."""
    flags = ("--vegas-policy", policy)
    if policy != "vegas-refresh":
        return flags
    random_basis(folder / "basis", model)
    return (*flags, "--vegas-key-basis", str(folder / "basis"))


def random_basis(path: Path, model: LlamaForCausalLM) -> None:
    """A key basis of other keys than the model's: that costs acceptance and nothing else."""
    config: Any = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    moments = Moments(config.num_hidden_layers, kv_heads, dim)
    for layer in range(config.num_hidden_layers):
        moments.add(layer, torch.randn(99, heads, dim), torch.randn(99, kv_heads, dim))
    fit_basis(moments, 2 * dim).save(path)


def check_outputs(server: Server, model: LlamaForCausalLM, policy: str) -> None:
    assert f"policy={policy}" in server.log()
    prompts = [prompt(n, salt=n) for n in LENGTHS]
    sampling = generate_body([], max_new_tokens=NEW_TOKENS)["sampling_params"]
    bodies = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    for ids, body in zip(prompts, bodies, strict=True):
        assert len(body["output_ids"]) == NEW_TOKENS
        check_greedy(model, ids, body["output_ids"])
    # Until it outgrows the budget, the first prompt drafts densely: most of that is accepted.
    assert LENGTHS[0] < MIN_TOKENS
    iterations = [body["meta_info"]["spec_verify_ct"] for body in bodies]
    assert iterations[0] < 0.75 * NEW_TOKENS
    assert all(count >= (NEW_TOKENS - 1) / (NUM_STEPS + 1) for count in iterations)
