"""The shipped policies against sorting, and loading policies by name."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import SelectionPolicy, build_policy

CPU = torch.device("cpu")


class LastOnes(SelectionPolicy):
    """A user's policy, as `package.module:Class` finds it."""

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        return torch.arange(seq_len - self.config.budget(seq_len), seq_len, device=device)


class NotAPolicy:
    def __init__(self, config: VegasConfig) -> None:
        raise AssertionError("must not be built")


class Unfinished(SelectionPolicy):
    """Lacks `select`."""


def not_a_class(config: VegasConfig) -> None:
    raise AssertionError("must not be called")


def two_queries(seq_len: int, extra: int, heads: int, seed: int) -> torch.Tensor:
    """Scores after a verify pass: query 0 sees one entry of its own, query 1 sees all."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, heads, seq_len + extra, generator=generator) * 3
    scores[0, :, seq_len + 1 :] = float("-inf")
    return scores


def ranks(scores: torch.Tensor, seq_len: int, mode: str) -> list[float]:
    """Slow float64 rank values."""
    total = [0.0] * seq_len
    for row in scores.flatten(0, 1).tolist():
        lse = math.log(sum(math.exp(s) for s in row))
        for t in range(seq_len):
            total[t] += math.exp(row[t] - lse) if mode == "weight" else row[t]
    return [value / len(scores.flatten(0, 1)) for value in total]


@pytest.mark.parametrize("mode", ["weight", "logit"])
@pytest.mark.parametrize(("seq_len", "budget"), [(390, 28), (295, 21), (50, 10), (11, 10)])
def test_vegas_takes_the_largest(mode: str, seq_len: int, budget: int) -> None:
    config = VegasConfig(min_tokens=10, score_mode=mode)
    scores = two_queries(seq_len, 7, heads=6, seed=seq_len)
    values = ranks(scores, seq_len, mode)
    order = sorted(range(seq_len), key=lambda t: -values[t])
    # The set is only determined up to float32 rounding; make sure that this does not matter here.
    gap = values[order[budget - 1]] - values[order[budget]]
    assert gap > 1e-6 * abs(values[order[budget - 1]])
    got = build_policy(config).select(3, scores, seq_len, CPU)
    assert got.shape == (budget,)
    assert sorted(got.tolist()) == sorted(order[:budget])


def test_vegas_after_prefill_ranks_by_the_only_query() -> None:
    seq_len, heads = 100, 4
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, heads, seq_len, generator=generator) * 3
    values = ranks(scores, seq_len, "weight")
    best = sorted(range(seq_len), key=lambda t: -values[t])[:12]
    got = build_policy(VegasConfig(sparsity_ratio=0.12, min_tokens=1)).select(
        0, scores, seq_len, CPU
    )
    assert sorted(got.tolist()) == sorted(best)


def test_vegas_never_selects_what_was_verified() -> None:
    """Entries from `seq_len` on are recent anyway, however large their weight."""
    scores = two_queries(40, 7, heads=2, seed=5)
    scores[1, :, 40:] = 30.0
    scores[0, :, 40] = 30.0
    got = build_policy(VegasConfig(min_tokens=8)).select(0, scores, 40, CPU)
    assert len(set(got.tolist())) == 8
    assert int(got.max()) < 40


@pytest.mark.parametrize("policy", ["vegas", "all-queries", "last-accepted", "streaming"])
@pytest.mark.parametrize("seq_len", [1, 3, 255, 256])
def test_contexts_within_the_budget_are_selected_whole(policy: str, seq_len: int) -> None:
    # The collector passes no scores for these.
    got = build_policy(VegasConfig(policy=policy)).select(0, None, seq_len, CPU)
    assert sorted(got.tolist()) == list(range(seq_len))


def test_dense_asks_for_nothing() -> None:
    policy = build_policy(VegasConfig(policy="dense", min_tokens=1))
    assert not policy.makes_tables
    assert not policy.reselects
    assert not policy.needs_scores


@pytest.mark.parametrize(
    ("seq_len", "low", "expected"),
    [
        (1000, 10, [0, 1, 2, 3, *range(1000 - 66, 1000)]),
        (100, 10, [0, 1, 2, 3, *range(94, 100)]),
        (9, 8, [0, 1, 2, 3, 5, 6, 7, 8]),
        (5, 4, [0, 1, 2, 3]),
        (5, 2, [0, 1]),
    ],
)
def test_streaming_takes_sinks_and_window(seq_len: int, low: int, expected: list[int]) -> None:
    policy = build_policy(VegasConfig(policy="streaming", min_tokens=low))
    assert not policy.needs_scores
    assert policy.makes_tables
    assert policy.select(0, None, seq_len, CPU).tolist() == expected


def test_a_users_policy_is_loaded_with_the_config() -> None:
    config = VegasConfig(policy=f"{__name__}:LastOnes", min_tokens=3)
    policy = build_policy(config)
    assert type(policy) is LastOnes
    assert policy.config is config
    assert policy.select(0, None, 10, CPU).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "name",
    [
        "vega",
        "Vegas",
        "",
        "no_such_package_of_ours:Policy",
        f"{__name__}:NoSuchClass",
        f"{__name__}:NotAPolicy",
        f"{__name__}:not_a_class",
        f"{__name__}:",
        ":LastOnes",
    ],
)
def test_bad_policies_are_refused_by_flag(name: str) -> None:
    with pytest.raises(ValueError, match="--vegas-policy"):
        build_policy(VegasConfig(policy=name))


def test_an_unfinished_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="select"):
        build_policy(VegasConfig(policy=f"{__name__}:Unfinished"))
