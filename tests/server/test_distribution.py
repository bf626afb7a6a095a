"""Sampled output through the whole worker has the target's distribution.

A tiny model's next-token distributions are computed in float64; thousands of sampled answers of a
running server are compared with them by chi-square tests. Draft distributions differ a lot from the
target's here: the drafts attend to a handful of positions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from tests.server_process import Server
from tests.tiny_model import BATCH, VOCAB_SIZE, check_greedy

pytestmark = pytest.mark.server

NUM_DRAWS = 3072
NEW_TOKENS = 5
# Some thirty tests a run: less than one false alarm in thirty thousand runs.
LEVEL = 1e-6
MIN_EXPECTED = 5
MIN_GROUP = 400
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(120)]

Exact = Any


@torch.no_grad()
def next_distribution(model: Exact, ids: list[int], sampling: dict[str, float]) -> torch.Tensor:
    """(vocab,) float64: softmax, then top-k, top-p and min-p, all judged on it."""
    logits = model(torch.tensor([ids])).logits[0, -1]
    probs = torch.softmax(logits / sampling.get("temperature", 1.0), dim=-1)
    kept, mass = [], 0.0
    for rank, token in enumerate(probs.argsort(descending=True).tolist()):
        if (
            rank < sampling.get("top_k", VOCAB_SIZE)
            and mass <= sampling.get("top_p", 1.0)
            and probs[token] >= sampling.get("min_p", 0.0) * probs.max()
        ):
            kept.append(token)
        mass += probs[token].item()
    result = torch.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def check_counts(counts: Counter[int], expected: torch.Tensor, what: str) -> None:
    """Chi-square of token counts; rare tokens are pooled, impossible ones must not occur."""
    total = sum(counts.values())
    impossible = [token for token in counts if expected[token] == 0]
    assert not impossible, f"{what}: tokens {impossible} can't be sampled"
    common = [t for t in range(VOCAB_SIZE) if expected[t] * total >= MIN_EXPECTED]
    observed = [float(counts[t]) for t in common]
    wanted = [expected[t].item() * total for t in common]
    rest = total - sum(wanted)
    if rest >= MIN_EXPECTED:
        observed.append(total - sum(observed))
        wanted.append(rest)
    else:  # too few to test: compare shares among the common ones
        wanted = [w * sum(observed) / sum(wanted) for w in wanted]
    if len(wanted) > 1:
        p_value = chisquare(observed, wanted).pvalue
        assert p_value > LEVEL, f"{what}: p = {p_value:.2e}, {observed} against {wanted}"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.3},
    ],
    ids=str,
)
def test_tokens_have_the_targets_distribution(
    tiny: tuple[Server, Exact], sampling: dict[str, float]
) -> None:
    server, model = tiny
    answers: list[list[int]] = []
    greedy_answers: list[list[int]] = []
    accept_lengths = []
    for _ in range(NUM_DRAWS // BATCH):
        # A greedy request in every batch: mixed batches draft and verify row by row.
        params = [{**sampling, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}] * BATCH
        params[0] = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        bodies = server.post(
            "/generate", {"input_ids": [PROMPT] * BATCH, "sampling_params": params}
        )
        greedy_answers.append(bodies[0]["output_ids"])
        answers += [body["output_ids"] for body in bodies[1:]]
        accept_lengths += [body["meta_info"]["spec_accept_length"] for body in bodies[1:]]
    # The test is about rejection: some drafts must have been accepted, and some not.
    assert 1.0 < sum(accept_lengths) / len(accept_lengths) < NEW_TOKENS - 1

    for answer in {tuple(answer) for answer in greedy_answers}:
        check_greedy(model, PROMPT, list(answer))

    groups: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for answer in answers:
        for position in range(NEW_TOKENS):
            groups[tuple(answer[:position])][answer[position]] += 1
    tested = {prefix: c for prefix, c in groups.items() if sum(c.values()) >= MIN_GROUP}
    # The first token comes from the prefill; at least two groups must come from VEGAS.
    assert sum(len(prefix) > 0 for prefix in tested) >= 2
    for prefix, counts in tested.items():
        expected = next_distribution(model, PROMPT + list(prefix), sampling)
        check_counts(counts, expected, f"after {prefix}")
