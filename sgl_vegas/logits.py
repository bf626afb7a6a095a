"""What a batch's requests ask of the next-token distribution: penalties, bias, sampling filters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_vegas.sampling.distribution import SamplingRows
from sgl_vegas.sampling.penalties import PenaltyRows
from sgl_vegas.sglang_compat import SamplingBatchInfo


@dataclass(frozen=True)
class LogitsRules:
    """The rules of a batch, one row a logits row.

    Attributes:
        rows: temperature and filters.
        penalties: None if no request has one.
        logit_bias: (n, vocab) float32, None if no request has one.
    """

    rows: SamplingRows
    penalties: PenaltyRows | None
    logit_bias: torch.Tensor | None

    @classmethod
    def of_batch(
        cls, info: SamplingBatchInfo, penalties: PenaltyRows | None, renormalise_between: bool
    ) -> LogitsRules:
        """Read SGLang's sampling parameters of a decode batch."""
        return cls(
            rows=SamplingRows(
                temperatures=info.temperatures,
                top_ks=info.top_ks,
                top_ps=info.top_ps,
                min_ps=info.min_ps,
                is_all_greedy=info.is_all_greedy,
                need_filter=info.need_top_p_sampling
                or info.need_top_k_sampling
                or info.need_min_p_sampling,
                renormalise_between=renormalise_between,
            ),
            penalties=penalties,
            logit_bias=info.logit_bias,
        )

    def after(self, tokens: torch.Tensor) -> LogitsRules:
        """The rules once each row has emitted `tokens`, (n,) int64."""
        if self.penalties is None:
            return self
        return replace(self, penalties=self.penalties.after(tokens))

    def along(self, draft_tokens: torch.Tensor) -> LogitsRules:
        """The rules of a verify pass over `draft_tokens`, (n, gamma) int64: gamma + 1 rows each."""
        width = draft_tokens.shape[1] + 1
        return LogitsRules(
            rows=self.rows.expand(width),
            penalties=None if self.penalties is None else self.penalties.along(draft_tokens),
            logit_bias=None
            if self.logit_bias is None
            else self.logit_bias.repeat_interleave(width, dim=0),
        )

    def apply_(self, logits: torch.Tensor) -> None:
        """Apply penalties and bias to `logits` (n, vocab) in place."""
        if self.penalties is not None:
            self.penalties.apply_(logits)
        if self.logit_bias is not None:
            logits.add_(self.logit_bias)
