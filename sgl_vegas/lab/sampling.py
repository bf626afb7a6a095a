"""How the laboratory's texts and drafts are drawn: greedily, or by temperature and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_vegas.sampling.distribution import SamplingRows, draw, probabilities


@dataclass(frozen=True)
class Sampling:
    """Attributes:
    temperature: 0 for greedy decoding.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, vocab) logits to (n, vocab) float32, as the server samples from."""
        n, device = len(logits), logits.device
        rows = SamplingRows(
            temperatures=torch.full((n, 1), self.temperature, device=device),
            top_ks=torch.full((n,), logits.shape[-1], dtype=torch.int32, device=device),
            top_ps=torch.full((n,), self.top_p, device=device),
            min_ps=torch.zeros(n, device=device),
            is_all_greedy=False,
            need_filter=self.top_p < 1,
            renormalise_between=False,
        )
        return probabilities(logits, rows)

    def next_tokens(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """(n, vocab) logits to (n,) int64."""
        if self.is_greedy:
            return logits.argmax(dim=-1)
        return draw(self.probabilities(logits), generator)

    def couple(
        self,
        draft_logits: torch.Tensor,
        target_logits: torch.Tensor,
        text_tokens: torch.Tensor,
        coins: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """The draft's tokens where the target says `text_tokens`.

        Speculative sampling read backwards. There a draft x of q is accepted as the text's token y
        of p, or y is drawn from the residual; so, given y, the draft was y with probability
        min(1, q(y) / p(y)), and else it was drawn from max(q - p, 0).

        Args:
            draft_logits, target_logits: (n, vocab).
            text_tokens: (n,) int64, y.
            coins: (n,) float32, uniform in [0, 1).

        Returns:
            (n,) int64, x; the draft is accepted where it equals y.
        """
        if self.is_greedy:
            return draft_logits.argmax(dim=-1)
        q, p = self.probabilities(draft_logits), self.probabilities(target_logits)
        index = text_tokens.unsqueeze(1)
        q_y, p_y = q.gather(1, index).squeeze(1), p.gather(1, index).squeeze(1)
        residual = (q - p).clamp_min(0)
        # q = p up to rounding leaves no residual, and no rejection but by rounding.
        empty = residual.sum(dim=-1, keepdim=True) <= 0
        other = draw(torch.where(empty, q, residual), generator)
        return torch.where(coins * p_y < q_y, text_tokens, other)
