"""The accept rule: speculative rejection sampling over a chain (Leviathan et al., 2211.17192).

Lossless for any draft distribution: the emitted tokens have the target's distribution.
"""

from __future__ import annotations

import torch

from sgl_vegas.sampling.distribution import draw


def accept_greedy(
    draft_tokens: torch.Tensor, target_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts as long as they are the target's argmax.

    Args:
        draft_tokens: (batch_size, gamma) int64.
        target_tokens: (batch_size, gamma + 1) int64, the target's argmax after each prefix.

    Returns:
        num_correct_drafts: (batch_size,) int64, in [0, gamma].
        final_tokens: (batch_size,) int64, the corrected or bonus token that ends the run.
    """
    correct = draft_tokens == target_tokens[:, :-1]
    num_correct_drafts = correct.long().cumprod(dim=1).sum(dim=1)
    final_tokens = target_tokens.gather(1, num_correct_drafts.unsqueeze(1)).squeeze(1)
    return num_correct_drafts, final_tokens


def accept_sampled(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept draft i with probability min(1, p_i / q_i); end with a draw from the residual.

    Args:
        draft_tokens: (batch_size, gamma) int64, token i drawn from draft_probs[:, i].
        draft_probs: (batch_size, gamma, vocab) float32, q.
        target_probs: (batch_size, gamma + 1, vocab) float32, p.

    Returns:
        num_correct_drafts, final_tokens: as of `accept_greedy`.
    """
    batch_size, gamma = draft_tokens.shape
    index = draft_tokens.unsqueeze(-1)
    p = target_probs[:, :-1].gather(-1, index).squeeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1)
    coins = torch.rand(p.shape, dtype=p.dtype, device=p.device, generator=generator)
    accepted = coins * q < p
    num_correct_drafts = accepted.long().cumprod(dim=1).sum(dim=1)

    every = torch.arange(batch_size, device=draft_tokens.device)
    final_p = target_probs[every, num_correct_drafts]
    final_q = draft_probs[every, num_correct_drafts.clamp(max=gamma - 1)]
    rejected = (num_correct_drafts < gamma).unsqueeze(-1)
    residual = torch.where(rejected, (final_p - final_q).clamp_min(0), final_p)
    # p = q up to rounding leaves no residual; what was rejected then was rounding too.
    empty = residual.sum(dim=-1, keepdim=True) <= 0
    return num_correct_drafts, draw(torch.where(empty, final_p, residual), generator)
