"""When speculation pays, against arithmetic by hand."""

from __future__ import annotations

import dataclasses

import pytest

from sgl_vegas.config import VegasConfig
from sgl_vegas.payoff import IterationCosts, Payoff
from sgl_vegas.selection.policy import SelectionPolicy, build_policy

# An 8B model on one GPU: 4 ms of weights a step; a million tokens of KV take 35 ms.
COSTS = IterationCosts(
    batch_sizes=[1, 4, 64],
    plain_ms=[4.0, 4.1, 5.0],
    drafts_ms=[24.0, 24.6, 30.0],
    verify_ms=[4.2, 4.6, 14.0],
    kv_ms_per_token=35e-6,
)
POLICY = build_policy(VegasConfig(num_steps=6, sparsity_ratio=0.1, min_tokens=100))


def test_speedup_is_tokens_times_plain_over_iteration() -> None:
    context = 4 * 100_000
    plain = 4.1 + 14.0
    iteration = 24.6 + 6 * 1.4 + 4.6 + 14.0
    got = COSTS.speedup(4, context, POLICY, 6.0)
    assert got == pytest.approx(6.0 * plain / iteration)


def test_ranking_again_costs_by_candidates() -> None:
    """Of contexts longer than their candidates; others are attended to as a whole."""

    class Ranking(SelectionPolicy):
        makes_tables = False

        def table_size(self, seq_len: int) -> int:
            return min(seq_len, 1000)

        def attended(self, seq_len: int) -> int:
            return 250 if seq_len > 1000 else seq_len

    policy = Ranking(POLICY.config)
    costs = dataclasses.replace(COSTS, candidate_ms=1e-3)
    full = 2000 * 35e-6
    assert costs.speedup(1, 2000, policy, 5) == pytest.approx(
        5 * (4.0 + full) / (24.0 + 6 * (250 * 35e-6 + 1000 * 1e-3) + 4.2 + full)
    )
    full = 900 * 35e-6
    assert costs.speedup(1, 900, policy, 5) == pytest.approx(
        5 * (4.0 + full) / (24.0 + 6 * full + 4.2 + full)
    )


def test_a_batch_between_two_sizes_pays_the_larger_ones_price() -> None:
    assert COSTS.speedup(2, 1000, POLICY, 5) == pytest.approx(
        5 * (4.1 + 0.035) / (24.6 + 6 * 200 * 35e-6 + 4.6 + 0.035)
    )


def test_a_batch_above_the_largest_size_is_taken_as_that() -> None:
    assert COSTS.speedup(100, 100_000, POLICY, 5) > 0


def test_short_contexts_decode_plainly_and_long_ones_draft() -> None:
    payoff = Payoff(POLICY, COSTS)
    assert not payoff.drafts(64, 64 * 500)
    assert payoff.drafts(64, 64 * 50_000)
    assert payoff.drafts(1, 120_000)


def test_bad_acceptance_stops_drafting_and_time_tries_it_again() -> None:
    payoff = Payoff(POLICY, COSTS)
    assert payoff.drafts(4, 100_000)
    payoff.saw([6, 6, 6, 6])
    iterations = 0
    while payoff.drafts(4, 100_000):
        payoff.saw([0, 0, 0, 0])
        iterations += 1
        assert iterations < 500
    payoff.saw([0, 0, 0, 0])
    assert iterations > 3  # one bad run is no reason
    for _ in range(5000):
        if payoff.drafts(4, 100_000):
            break
        payoff.saw([0, 0, 0, 0])  # plain steps say nothing about acceptance
    else:
        pytest.fail("never tried again")


@pytest.mark.parametrize(("above", "context", "drafts"), [
    (0, 1, True), (1000, 999, False), (1000, 1000, True),
])  # fmt: skip
def test_a_set_threshold_decides_alone(above: int, context: int, drafts: bool) -> None:
    for costs in (None, COSTS):
        assert (
            Payoff(build_policy(VegasConfig(speculate_above=above)), costs).drafts(1, context)
            is drafts
        )


def test_without_measured_costs_it_always_drafts() -> None:
    assert Payoff(POLICY, None).drafts(64, 64)
