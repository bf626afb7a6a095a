"""What the scheduler carries between iterations, and what a draft step's forward reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_vegas.sglang_compat import SpecInput, SpecInputType


@dataclass
class VegasDraftInput(SpecInput):
    """The draft phase's SpecInput.

    Attributes:
        bonus_tokens: (batch_size,) integer, each request's last committed token, whose KV is not
            written yet.
        future_indices: (batch_size,) request-pool rows under overlap scheduling, where the
            scheduler relays `bonus_tokens` through its FutureMap; None otherwise.
        topk_p, topk_index, hidden_states: never set; SGLang's relay reads them.

    Tables do not ride here: they are kept by request-pool row.
    """

    bonus_tokens: torch.Tensor | None = None
    future_indices: torch.Tensor | None = None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)  # SGLang's enum can't be extended
        # One token a request: the width by which SGLang tells a draft step from a verify pass.
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests at `new_indices`."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        elif self.bonus_tokens is not None:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: VegasDraftInput) -> None:
        """Append the requests of `other`."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            assert self.bonus_tokens is not None and other.bonus_tokens is not None
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
