"""The accept rule: what is emitted has the target's distribution, whatever the drafts are.

A target and a draft model over a small vocabulary that look one token back. Chains run until each
has emitted three tokens, through as many iterations as that takes, so that rejections, bonus
tokens and iteration borders all fall everywhere. The joint counts of the three tokens are then
compared with the target's by chi-squared, seeds fixed. There are hundreds of such comparisons,
hence the level of 1e-5: at 1e-3 some would fail by chance after a change of PyTorch's generator.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats

from sgl_vegas.sampling.distribution import SamplingRows, draw, probabilities
from sgl_vegas.sampling.rejection import accept_greedy, accept_sampled

torch.set_num_threads(1)

VOCAB = 4
CHAINS = 60_000
LENGTH = 3
LEVEL = 1e-5
Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def random_model(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """(vocab, vocab): row t is the distribution after token t."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(vocab, vocab, generator=generator) * 1.2, dim=-1)


def without(model: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    cut = model.clone()
    cut[:, tokens] = 0
    return cut / cut.sum(-1, keepdim=True)


def multinomial(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """PyTorch's own, so that a fault of draw() can't hide one of the accept rule."""
    return torch.multinomial(weights, 1, generator=generator).squeeze(1)


def emit(
    target: torch.Tensor, draft: torch.Tensor, gamma: int, seed: int, pick: Draw = multinomial
) -> tuple[torch.Tensor, float]:
    """(CHAINS, LENGTH) first tokens of every chain, and the mean number of correct drafts."""
    generator = torch.Generator().manual_seed(seed)
    emitted = torch.full((CHAINS, LENGTH), -1)
    lengths = torch.zeros(CHAINS, dtype=torch.int64)
    last = torch.zeros(CHAINS, dtype=torch.int64)
    correct: list[torch.Tensor] = []
    while True:
        running = (lengths < LENGTH).nonzero().squeeze(1)
        if not len(running):
            break
        prefix = [last[running]]
        for _ in range(gamma):
            prefix.append(pick(draft[prefix[-1]], generator))
        drafts = torch.stack(prefix[1:], dim=1)
        seen = torch.stack(prefix, dim=1)
        num_correct, final = accept_sampled(drafts, draft[seen[:, :-1]], target[seen], generator)
        assert bool(((num_correct >= 0) & (num_correct <= gamma)).all())
        correct.append(num_correct)
        for step in range(gamma + 1):
            token = drafts[:, step] if step < gamma else final
            token = torch.where(num_correct == step, final, token)
            kept = (step <= num_correct) & (lengths[running] + step < LENGTH)
            rows = running[kept]
            emitted[rows, lengths[rows] + step] = token[kept]
        lengths[running] += num_correct + 1
        last[running] = final
    return emitted, float(torch.cat(correct).double().mean())


def check_joint(tokens: torch.Tensor, target: torch.Tensor, length: int = LENGTH) -> None:
    """Chi-squared of the first `length` tokens together against the target's joint law."""
    vocab = target.shape[0]
    joint = target[0].double()
    code = tokens[:, 0]
    for step in range(1, length):
        joint = (joint.view(-1, vocab).unsqueeze(2) * target.double()).flatten()
        code = code * vocab + tokens[:, step]
    counts = torch.bincount(code, minlength=len(joint)).double()
    assert len(counts) == len(joint)
    expected = joint / joint.sum() * len(tokens)
    assert (counts[expected == 0] == 0).all()  # never a token that the target can't emit
    rare = (expected > 0) & (expected < 5)
    common = expected >= 5
    observed, wanted = counts[common].tolist(), expected[common].tolist()
    if rare.any():
        observed.append(float(counts[rare].sum()))
        wanted.append(float(expected[rare].sum()))
    assert len(observed) > 1
    assert stats.chisquare(observed, wanted).pvalue > LEVEL


P = random_model(1)
PAIRS = {
    "unlike": (P, random_model(2)),
    "equal": (P, P),
    "draft lacks tokens": (P, without(random_model(3), [0, 2])),
    "target lacks tokens": (without(P, [1]), random_model(4)),
    "disjoint": (without(P, [0, 1]), without(random_model(5), [2, 3])),
    "draft is certain": (P, torch.eye(VOCAB)[[2, 0, 3, 1]]),
    "target is certain": (torch.eye(VOCAB)[[1, 3, 0, 2]], random_model(6)),
    "far apart": (torch.softmax(P.log() * 3, -1), torch.softmax(-P.log() * 3, -1)),
}


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", [name for name in PAIRS if name != "target is certain"])
def test_the_emitted_tokens_have_the_targets_joint_distribution(pair: str, gamma: int) -> None:
    target, draft = PAIRS[pair]
    tokens, _ = emit(target, draft, gamma, seed=gamma)
    check_joint(tokens, target)
    # Sharper on where errors are likeliest: the first token, and the second given the first.
    check_joint(tokens, target, length=1)
    for first in range(VOCAB):
        following = tokens[tokens[:, 0] == first]
        if len(following) > 1000:
            row = target[first].expand(VOCAB, VOCAB)
            check_joint(following[:, 1:], row, length=1)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_certain_target_is_followed(gamma: int) -> None:
    target, draft = PAIRS["target is certain"]
    tokens, _ = emit(target, draft, gamma, seed=gamma)
    assert tokens.unique(dim=0).tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("gamma", [1, 4])
def test_equal_distributions_accept_everything(gamma: int) -> None:
    assert emit(P, P, gamma, seed=1)[1] == gamma


@pytest.mark.parametrize("gamma", [1, 4])
def test_disjoint_distributions_accept_nothing(gamma: int) -> None:
    assert emit(*PAIRS["disjoint"], gamma, seed=1)[1] == 0


@pytest.mark.parametrize("pair", ["unlike", "draft lacks tokens", "far apart"])
def test_acceptance_is_the_largest_possible(pair: str) -> None:
    """One draft is accepted with probability sum_t min(p_t, q_t); two-sided at level 1e-3."""
    target, draft = PAIRS[pair]
    generator = torch.Generator().manual_seed(8)
    drafts = multinomial(draft[:1].expand(CHAINS, -1), generator).unsqueeze(1)
    num_correct, _ = accept_sampled(
        drafts,
        draft[0].expand(CHAINS, 1, -1),
        target[[0, 0]].expand(CHAINS, 2, -1),
        generator,
    )
    rate = float(torch.minimum(target[0], draft[0]).double().sum())
    assert 0.01 < rate < 0.99
    assert stats.binomtest(int(num_correct.sum()), CHAINS, rate).pvalue > 1e-3


def test_both_models_with_draw_and_gamma_two() -> None:
    """As the worker does it: drafts drawn by draw() too."""
    tokens, _ = emit(*PAIRS["unlike"], 2, seed=5, pick=draw)
    check_joint(tokens, P)


def slow_sampling(logits: torch.Tensor, temperature: float, k: int, p: float) -> torch.Tensor:
    """Temperature, top-k and top-p of one row, in a float64 loop."""
    probs = torch.softmax(logits.double() / temperature, -1).tolist()
    out, mass = torch.zeros(len(probs), dtype=torch.float64), 0.0
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda t: -probs[t])):
        if rank < k and mass <= p:
            out[token] = probs[token]
        mass += probs[token]
    return out / out.sum()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(("k", "p"), [(1 << 30, 1.0), (4, 1.0), (1 << 30, 0.8), (4, 0.85)])
def test_requests_filters_hold_over_other_logits(temperature: float, k: int, p: float) -> None:
    """Target and draft logits differ, both go through the request's filters."""
    vocab = 6
    generator = torch.Generator().manual_seed(11)
    target_logits = torch.randn(vocab, vocab, generator=generator) * 0.8
    draft_logits = target_logits + torch.randn(vocab, vocab, generator=generator) * 0.8
    rows = SamplingRows(
        temperatures=torch.full((vocab, 1), temperature),
        top_ks=torch.full((vocab,), k, dtype=torch.int32),
        top_ps=torch.full((vocab,), p),
        min_ps=torch.zeros(vocab),
        is_all_greedy=False,
        need_filter=k < vocab or p < 1,
        renormalise_between=False,
    )
    target, draft = probabilities(target_logits, rows), probabilities(draft_logits, rows)
    tokens, _ = emit(target, draft, gamma=3, seed=2, pick=draw)
    check_joint(tokens, torch.stack([slow_sampling(r, temperature, k, p) for r in target_logits]))


@pytest.mark.parametrize("coin", [0.0, 1 - 2**-24])
def test_extreme_coins(coin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target can't emit is never accepted; what is likelier in the target always is."""
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(tuple(*size), coin))
    target = torch.tensor([[0.0, 0.7, 0.3]] * 4)
    draft = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.7, 0.3], [0.4, 0.6, 0.0]])
    drafts = torch.tensor([[1, 2, 1], [1, 1, 0], [0, 1, 1]])
    num_correct, final = accept_sampled(drafts, draft.expand(3, 3, 3), target.expand(3, 4, 3))
    assert num_correct.tolist() == [3, 2, 0]
    assert (final != 0).all()


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Rounding can reject although q >= p nowhere leaves a residual; the extreme case of it."""
    number = 20_000
    target = torch.tensor([0.5, 0.25, 0.25, 0.0])
    generator = torch.Generator().manual_seed(6)
    num_correct, final = accept_sampled(
        torch.ones(number, 1, dtype=torch.int64),
        torch.ones(number, 1, 4),
        target.expand(number, 2, 4),
        generator,
    )
    rejected = final[num_correct == 0]
    assert len(rejected) > number // 2
    counts = torch.bincount(rejected, minlength=4).tolist()
    assert counts[3] == 0
    expected = [share * len(rejected) for share in (0.5, 0.25, 0.25)]
    assert stats.chisquare(counts[:3], expected).pvalue > 1e-3


def test_the_rows_of_a_batch_are_independent_of_each_other() -> None:
    """Each request has its own number of correct drafts and its own final row."""
    certain = torch.eye(5)
    drafts = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    target = certain[torch.tensor([[0, 1, 2, 3], [4, 1, 2, 3], [0, 4, 2, 3], [0, 1, 4, 3]])]
    num_correct, final = accept_sampled(drafts, certain[drafts], target)
    assert num_correct.tolist() == [3, 0, 1, 2]
    assert final.tolist() == [3, 4, 4, 4]
    assert num_correct.dtype == final.dtype == torch.int64


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_accepts_as_a_loop_does(gamma: int) -> None:
    generator = torch.Generator().manual_seed(gamma)
    drafts = torch.randint(2, (500, gamma), generator=generator)
    target = torch.randint(2, (500, gamma + 1), generator=generator)
    num_correct, final = accept_greedy(drafts, target)
    assert num_correct.dtype == final.dtype == torch.int64
    seen = set()
    for row in range(500):
        count = 0
        while count < gamma and drafts[row, count] == target[row, count]:
            count += 1
        assert int(num_correct[row]) == count
        assert int(final[row]) == int(target[row, count])
        seen.add(count)
    assert seen == set(range(gamma + 1))
