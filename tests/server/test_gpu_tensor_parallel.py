"""Two GPUs, one model: ranks must agree on every draft and every accepted token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import ServerSlot
from tests.server_process import launch_server
from tests.tiny_model import VOCAB_SIZE, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.server]
NEAR_TIE = 0.5  # as in test_gpu_parity.py
NEW_TOKENS = 64
PROMPTS = [[(7 * i * i + 3 * i + n) % VOCAB_SIZE for i in range(n)] for n in range(60, 180, 10)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks(server_slot: ServerSlot, tmp_path: Path) -> None:
    server_slot.stop()
    make_tiny_model(tmp_path)
    flags = (
        *("--tp-size", "2", "--skip-tokenizer-init", "--cuda-graph-backend-prefill", "disabled"),
        # NCCL alone: the others need peer access or multicast, which not every machine has.
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
    )
    env = {"SGLANG_VEGAS_MIN_TOKENS": "32"}
    replies = {}
    for algorithm in (None, "VEGAS"):
        with launch_server(
            tmp_path, algorithm=algorithm, extra_args=flags, env=env, log_path=tmp_path / "log"
        ) as server:
            body = {"input_ids": PROMPTS, "return_logprob": True, "top_logprobs_num": 2}
            sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            replies[algorithm] = server.post(
                "/generate", {**body, "sampling_params": {**sampling, "temperature": 0}}
            )
            # Sampled drafts differ between ranks unless they are shared; the KV would then too,
            # and greedy answers over that cached prefix would be others.
            sampled = server.generate(PROMPTS, **sampling, temperature=1.0)
            replies[algorithm, "again"] = server.post(
                "/generate", {**body, "sampling_params": {**sampling, "temperature": 0}}
            )
            assert all(len(reply["output_ids"]) == NEW_TOKENS for reply in sampled)
            follow_ups = [
                prompt + reply["output_ids"]
                for prompt, reply in zip(PROMPTS, sampled, strict=True)
                if len(prompt) < 120
            ]
            cached = server.generate(follow_ups, **{**sampling, "temperature": 0})
            server.flush_cache()
            fresh = server.generate(follow_ups, **{**sampling, "temperature": 0})
            replies[algorithm, "cached"] = [reply["output_ids"] for reply in cached]
            replies[algorithm, "fresh"] = [reply["output_ids"] for reply in fresh]
    for name in (None, (None, "again")):
        vegas = "VEGAS" if name is None else ("VEGAS", "again")
        for want, got in zip(replies[name], replies[vegas], strict=True):
            assert_equal_or_near_tie(want, got)


def assert_equal_or_near_tie(want: dict, got: dict) -> None:
    for index, (a, b) in enumerate(zip(want["output_ids"], got["output_ids"], strict=True)):
        if a != b:
            best = want["meta_info"]["output_top_logprobs"][index]
            assert best[0][0] - best[1][0] <= NEAR_TIE
            return
