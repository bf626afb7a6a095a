"""`sglang.Engine(..., speculative_algorithm="VEGAS")` drafts, and answers as the model does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ServerSlot
from tests.server.engine import engine_answers
from tests.server_process import CPU_ENV
from tests.tiny_model import VOCAB_SIZE, check_greedy, make_tiny_model

pytestmark = pytest.mark.server
NEW_TOKENS = 24


def test_engine(server_slot: ServerSlot, tmp_path: Path) -> None:
    server_slot.stop()
    model = make_tiny_model(tmp_path)
    prompts = [[(7 * i * i + 3 * i + n) % VOCAB_SIZE for i in range(n)] for n in (60, 90, 120)]
    answers = engine_answers(
        {
            "model_path": str(tmp_path),
            "speculative_algorithm": "VEGAS",
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "max_running_requests": 4,
        },
        {
            "input_ids": prompts,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": NEW_TOKENS,
                "ignore_eos": True,
            },
        },
        {**CPU_ENV, "OMP_NUM_THREADS": "1", "SGLANG_VEGAS_MIN_TOKENS": "32"},
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["ids"]) == NEW_TOKENS
        check_greedy(model, prompt, answer["ids"])
        # Fewer passes than tokens: it did speculate.
        assert 0 < answer["meta"]["spec_verify_ct"] < NEW_TOKENS
