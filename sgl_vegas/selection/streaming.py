"""Sinks and a sliding window: StreamingLLM as MagicDec drafts with it (arXiv 2408.11049)."""

from __future__ import annotations

import torch

from sgl_vegas.selection.policy import SelectionPolicy

NUM_SINKS = 4


class StreamingPolicy(SelectionPolicy):
    """The first `NUM_SINKS` positions and the last ones, at the same budget as `vegas`."""

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        budget = self.config.budget(seq_len)
        sinks = min(NUM_SINKS, budget)
        window = budget - sinks
        return torch.cat(
            [
                torch.arange(sinks, device=device),
                torch.arange(seq_len - window, seq_len, device=device),
            ]
        )
