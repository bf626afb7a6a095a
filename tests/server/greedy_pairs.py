"""Greedy answers of two servers side by side, and how near a tie they were where they part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.prompts import Prompt
from tests.server_process import Server

NEW_TOKENS = 128
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
# bfloat16 logits of the test model are multiples of up to 1/8; its rounding can move two of them
# apart by a few such steps.
NEAR_TIE = 0.5


def answers(server: Server, prompts: Sequence[Prompt], batch_size: int) -> list[dict[str, Any]]:
    """Greedy answers with each token's two best log-probabilities, `batch_size` at a time."""
    results = []
    for start in range(0, len(prompts), batch_size):
        ids = [list(prompt.ids) for prompt in prompts[start : start + batch_size]]
        reply = server.post(
            "/generate",
            {
                "input_ids": ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
                **LOGPROBS,
            },
        )
        results += reply
        print(f"\r  {len(results)}/{len(prompts)} answers, {batch_size} at a time", end="")
    print()
    return [answer_of(reply) for reply in results]


def answer_of(reply: dict[str, Any]) -> dict[str, Any]:
    """What `compare` reads of a reply to a request with `LOGPROBS`."""
    meta = reply["meta_info"]
    return {
        "ids": reply["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "gaps": [_gap(*best) for best in meta["output_top_logprobs"]],
        "accept_length": meta.get("spec_accept_length"),  # plain, and answers of one token: None
    }


def _gap(best: list[Any], second: list[Any]) -> float:
    # A grammar may leave no second token; JSON has no -inf for its log-probability.
    return math.inf if second[0] is None else best[0] - second[0]


def compare(plain: dict, vegas: dict, name: str) -> dict[str, Any]:
    """Where two answers part, and how near a tie plain SGLang was there."""
    length = min(len(plain["ids"]), len(vegas["ids"]))
    first = next((i for i in range(length) if plain["ids"][i] != vegas["ids"][i]), None)
    same = length if first is None else first
    return {
        "prompt": name,
        "tokens": length,
        "same_tokens": same,
        "first_difference": first,
        "gap_at_first_difference": None if first is None else plain["gaps"][first],
        "max_logprob_difference_before": max(
            (
                abs(a - b)
                for a, b in zip(plain["logprobs"][:same], vegas["logprobs"][:same], strict=True)
            ),
            default=0.0,
        ),
        "same_length": len(plain["ids"]) == len(vegas["ids"]),
        "accept_length": vegas["accept_length"],
    }


def check_near_tie(case: dict[str, Any]) -> None:
    """Assert that two answers part nowhere, or where the two best tokens nearly tied."""
    gap = case["gap_at_first_difference"]
    assert gap is not None or case["same_length"], case
    assert gap is None or gap <= NEAR_TIE, case
