"""rank_values against the paper's formula, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from sgl_vegas.selection.scoring import rank_values


def masked_scores(num_queries: int, heads: int, seq_len: int, extra: int) -> torch.Tensor:
    """Random logits of wide range; query i also sees some of the `extra` entries behind."""
    generator = torch.Generator().manual_seed(seq_len * 31 + heads)
    scores = torch.randn(num_queries, heads, seq_len + extra, generator=generator) * 4
    for i in range(num_queries):
        visible = seq_len + (extra if i == num_queries - 1 else min(extra, i + 1))
        scores[i, :, visible:] = float("-inf")
    return scores


@pytest.mark.parametrize(("num_queries", "extra"), [(1, 0), (2, 7), (2, 2)])
@pytest.mark.parametrize(("heads", "seq_len"), [(1, 1), (4, 50), (32, 17)])
def test_weight_is_the_mean_softmax_weight(
    num_queries: int, extra: int, heads: int, seq_len: int
) -> None:
    scores = masked_scores(num_queries, heads, seq_len, extra)
    expected = [0.0] * seq_len
    for i in range(num_queries):
        for h in range(heads):
            row = [float(s) for s in scores[i, h]]
            top = max(row)
            lse = top + math.log(sum(math.exp(s - top) for s in row))
            for t in range(seq_len):
                expected[t] += math.exp(row[t] - lse) / (num_queries * heads)
    got = rank_values(scores, seq_len, "weight")
    assert got.shape == (seq_len,)
    torch.testing.assert_close(
        got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9
    )


def test_weight_counts_the_mass_on_entries_that_are_not_ranked() -> None:
    """Query 0 looks at itself only, so its weights must not be renormalised over the rest."""
    scores = torch.zeros(2, 1, 4)
    scores[0] = torch.tensor([0.0, 1.0, 20.0, float("-inf")])
    scores[1] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    values = rank_values(scores, 2, "weight")
    assert values[0] > values[1]  # query 0 alone would say the opposite


@pytest.mark.parametrize(("num_queries", "extra"), [(1, 0), (2, 7)])
def test_logit_is_the_mean_score(num_queries: int, extra: int) -> None:
    heads, seq_len = 6, 40
    scores = masked_scores(num_queries, heads, seq_len, extra)
    got = rank_values(scores, seq_len, "logit")
    assert got.shape == (seq_len,)
    for t in range(seq_len):
        rows = [float(scores[i, h, t]) for i in range(num_queries) for h in range(heads)]
        assert float(got[t]) == pytest.approx(sum(rows) / len(rows), abs=1e-5)


def test_the_modes_disagree_where_they_should() -> None:
    """A head whose large logits are flat decides by logit, a peaked head decides by weight."""
    scores = torch.zeros(1, 2, 3)
    scores[0, 0] = torch.tensor([0.0, 8.0, 9.0])
    scores[0, 1] = torch.tensor([50.0, 3.0, 0.0])
    # Softmax: head 0 about (0, .27, .73), head 1 about (1, 0, 0). Means: 25, 5.5, 4.5.
    assert rank_values(scores, 3, "weight").argsort(descending=True).tolist() == [0, 2, 1]
    assert rank_values(scores, 3, "logit").argsort(descending=True).tolist() == [0, 1, 2]
