"""probabilities() against a slow filter and SGLang's own sampler; draw() against its weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from scipy import stats

from sgl_vegas.sampling.distribution import SamplingRows, draw, probabilities

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported
torch.set_num_threads(1)

VOCAB = 40
TOP_K_ALL = 1 << 30  # what SGLang writes for "no top-k"
# temperature, top-k, top-p, min-p
NOTHING = (1.0, TOP_K_ALL, 1.0, 0.0)
REQUESTS = [
    NOTHING,
    (0.6, TOP_K_ALL, 1.0, 0.0),
    (1.7, 5, 1.0, 0.0),
    (1.0, TOP_K_ALL, 0.8, 0.0),
    (0.8, TOP_K_ALL, 1.0, 0.2),
    (0.6, 8, 0.9, 0.0),
    (1.3, 12, 0.7, 0.05),
    (1.0, 20, 0.5, 0.3),
    (1.0, 3, 0.99, 0.01),
    (0.1, TOP_K_ALL, 0.95, 0.0),
    (1.0, VOCAB + 5, 0.0, 0.0),
]


def sampling_rows(requests: list, renormalise_between: bool, **changes: Any) -> SamplingRows:
    columns = list(zip(*requests, strict=True))
    values: dict[str, Any] = {
        "temperatures": torch.tensor(columns[0]).unsqueeze(1),
        "top_ks": torch.tensor(columns[1], dtype=torch.int32),
        "top_ps": torch.tensor(columns[2]),
        "min_ps": torch.tensor(columns[3]),
        "is_all_greedy": False,
        "need_filter": True,
        "renormalise_between": renormalise_between,
    }
    return SamplingRows(**{**values, **changes})


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def softmax(logits: torch.Tensor, temperature: float) -> dict[int, float]:
    scaled = logits.double() / temperature
    weights = (scaled - scaled.max()).exp()
    return dict(enumerate((weights / weights.sum()).tolist()))


def renormalised(probs: dict[int, float]) -> dict[int, float]:
    total = sum(probs.values())
    return {token: p / total for token, p in probs.items()}


def top_k(probs: dict[int, float], k: int) -> dict[int, float]:
    best = sorted(probs, key=lambda token: -probs[token])[:k]
    return {token: probs[token] for token in best}


def top_p(probs: dict[int, float], limit: float) -> dict[int, float]:
    """The smallest set of largest tokens whose mass passes `limit`; the largest always stays."""
    kept, mass = {}, 0.0
    for token in sorted(probs, key=lambda token: -probs[token]):
        if mass > limit:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept


def min_p(probs: dict[int, float], share: float) -> dict[int, float]:
    threshold = max(probs.values()) * share
    return {token: p for token, p in probs.items() if p >= threshold}


def slow_filter(
    logits: torch.Tensor, request: tuple[float, int, float, float], sequential: bool
) -> torch.Tensor:
    temperature, k, p, share = request
    probs = softmax(logits, temperature)
    if sequential and share > 0:  # FlashInfer: each filter on what the one before left
        probs = renormalised(top_k(probs, k))
        probs = renormalised(top_p(probs, p))
        probs = renormalised(min_p(probs, share))
    else:  # each filter on the whole softmax
        kept = top_k(probs, k).keys() & top_p(probs, p).keys() & min_p(probs, share).keys()
        probs = renormalised({token: probs[token] for token in kept})
    out = torch.zeros(len(logits), dtype=torch.float64)
    for token, value in probs.items():
        out[token] = value
    return out


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_of_different_requests(sequential: bool, seed: int) -> None:
    logits = random_logits(len(REQUESTS), seed)
    before = logits.clone()
    got = probabilities(logits, sampling_rows(REQUESTS, sequential))
    assert torch.equal(logits, before)
    assert got.dtype == torch.float32
    for row, request in enumerate(REQUESTS):
        expected = slow_filter(logits[row], request, sequential)
        # The support has to be exact: a token more or less is another distribution.
        assert ((got[row] > 0) == (expected > 0)).all(), request
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_top_p_of_one_cuts_no_tail(sequential: bool) -> None:
    """Some of so many rows have a float32 mass that passes 1 before their last tokens."""
    rows = 4000
    requests = [(0.6, TOP_K_ALL, 1.0, 1e-30 if sequential else 0.0)] * rows
    got = probabilities(random_logits(rows, seed=9), sampling_rows(requests, sequential))
    assert (got > 0).all()


def test_the_two_orders_differ_where_min_p_and_top_k_meet() -> None:
    """Guards the test above: its two modes are not the same thing."""
    request = (1.3, 12, 0.7, 0.05)
    differ = 0
    for seed in range(8):
        logits = random_logits(1, seed)
        slow = [slow_filter(logits[0], request, sequential) for sequential in (False, True)]
        differ += int(not torch.equal(slow[0] > 0, slow[1] > 0))
    assert differ > 0


@pytest.mark.parametrize("seed", range(4))
def test_sglangs_torch_sampler_draws_from_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    logits = random_logits(len(REQUESTS), seed + 100)
    rows = sampling_rows(REQUESTS, renormalise_between=False)
    weights: list[torch.Tensor] = []

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        weights.append(probs.clone())
        return torch.zeros(len(probs), num_samples, dtype=torch.int64)

    probs = torch.softmax(logits / rows.temperatures, dim=-1)
    order = probs.sort(dim=-1, descending=True).indices
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        top_k_top_p_min_p_sampling_from_probs_torch(
            probs, rows.top_ks, rows.top_ps, rows.min_ps, True, None, torch.zeros(0)
        )
    expected = torch.zeros_like(probs).scatter_(
        1, order, weights[0] / weights[0].sum(-1, keepdim=True)
    )
    torch.testing.assert_close(probabilities(logits, rows), expected, rtol=1e-5, atol=1e-7)


def test_without_filters_only_the_temperature_counts() -> None:
    requests = [NOTHING, (0.6, 3, 0.2, 0.5)]
    logits = random_logits(2, seed=5)
    rows = sampling_rows(requests, renormalise_between=False, need_filter=False)
    got = probabilities(logits, rows)
    for row, temperature in enumerate((1.0, 0.6)):
        expected = torch.tensor(list(softmax(logits[row], temperature).values()))
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-7)


def test_half_precision_logits_are_not_rounded_further() -> None:
    logits = random_logits(len(REQUESTS), seed=6).bfloat16()
    got = probabilities(logits, sampling_rows(REQUESTS, renormalise_between=False))
    assert got.dtype == torch.float32
    expected = torch.tensor(list(softmax(logits[1], 0.6).values()))
    torch.testing.assert_close(got[1], expected, rtol=1e-5, atol=1e-7)


def test_forbidden_tokens_get_nothing() -> None:
    logits = random_logits(len(REQUESTS), seed=7)
    logits[:, 5:] = float("-inf")  # what a grammar or a stop-token penalty leaves
    got = probabilities(logits, sampling_rows(REQUESTS, renormalise_between=True))
    assert (got[:, 5:] == 0).all()
    torch.testing.assert_close(got.sum(-1), torch.ones(len(REQUESTS)))


def test_expanded_rows_lie_as_a_verify_pass_does() -> None:
    """Row r * width + j belongs to request r."""
    width = 3
    rows = sampling_rows(REQUESTS, renormalise_between=True, need_filter=True)
    expanded = rows.expand(width)
    logits = random_logits(len(REQUESTS) * width, seed=8)
    got = probabilities(logits, expanded)
    for i in range(len(REQUESTS) * width):
        expected = slow_filter(logits[i], REQUESTS[i // width], sequential=True)
        torch.testing.assert_close(got[i].double(), expected, rtol=1e-5, atol=1e-7)
    for flag in ("is_all_greedy", "need_filter", "renormalise_between"):
        assert getattr(expanded, flag) == getattr(rows, flag)


@pytest.mark.parametrize(
    "weights",
    [
        [0.25, 0.25, 0.25, 0.25],
        [0.5, 0.0, 0.3, 0.0, 0.2],
        [1e-3, 0.9, 0.099],
        [6.0, 1.0, 0.0, 3.0],  # a residual is not normalised
        [2e-9, 1e-9, 0.0, 5e-9],  # nor large
    ],
)
def test_draws_follow_the_weights(weights: list[float]) -> None:
    """Chi-squared over 40,000 draws at level 1e-3."""
    number = 40_000
    generator = torch.Generator().manual_seed(17)
    tokens = draw(torch.tensor(weights).repeat(number, 1), generator)
    assert tokens.dtype == torch.int64
    counts = torch.bincount(tokens, minlength=len(weights)).tolist()
    support = [i for i, w in enumerate(weights) if w > 0]
    assert all(counts[i] == 0 for i in range(len(weights)) if i not in support)
    expected = [number * weights[i] / sum(weights) for i in support]
    assert min(expected) >= 5
    assert stats.chisquare([counts[i] for i in support], expected).pvalue > 1e-3


def test_rows_are_drawn_apart() -> None:
    """Two rows of one call are independent: chi-squared of their joint counts at level 1e-3."""
    number = 40_000
    weights = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.1, 0.3]])
    tokens = draw(weights.expand(number, 2, 3).contiguous(), torch.Generator().manual_seed(3))
    assert tokens.shape == (number, 2)
    counts = torch.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9).tolist()
    expected = (weights[0].double().outer(weights[1].double()).flatten() * number).tolist()
    scale = number / sum(expected)
    assert stats.chisquare(counts, [e * scale for e in expected]).pvalue > 1e-3


def test_the_generator_decides() -> None:
    weights = torch.rand(500, 7, generator=torch.Generator().manual_seed(1))

    def drawn(seed: int) -> list[int]:
        return draw(weights, torch.Generator().manual_seed(seed)).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_one_possible_token_is_always_drawn() -> None:
    weights = torch.zeros(3000, 1000)
    only = torch.randint(1000, (3000,), generator=torch.Generator().manual_seed(2))
    weights[torch.arange(3000), only] = 1e-6
    assert torch.equal(draw(weights, torch.Generator().manual_seed(4)), only)


def test_a_zero_draw_of_the_noise_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators may return exactly 0, which must not make a forbidden token win."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda noise, **_: noise.zero_())
    weights = torch.tensor([[0.0, 0.0, 0.7, 0.3], [0.0, 1.0, 0.0, 0.0]])
    assert draw(weights).tolist() == [2, 1]
