"""Drafting: gamma decode steps of the target itself, over selected KV (paper section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.attention.backend import VegasAttentionBackend
from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.logits import LogitsRules
from sgl_vegas.sampling.distribution import draw, probabilities
from sgl_vegas.sglang_compat import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    forward_context,
)


@dataclass(frozen=True)
class Drafts:
    """Attributes:
    tokens: (batch_size, gamma) int64.
    probs: (batch_size, gamma, vocab) float32, the distribution each token was drawn from; None if
        every request is greedy. Rows of greedy requests are not read.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None


class Drafter:
    """Decode steps of the target on the draft path of its attention backend.

    It calls the model itself, not SGLang's runner, whose decode graphs are captures of a verify
    pass. Nothing in it waits for the device or reads a length on the host (if the kernels don't),
    so that its calls can be captured.
    """

    def __init__(self, model_runner: Any, backend: VegasAttentionBackend, num_steps: int) -> None:
        self.model_runner = model_runner
        self.backend = backend
        self.num_steps = num_steps
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        # A run may reach past the context limit, where no token is kept: any position will do
        # there, but it must be one that the model has.
        self.last_position: int = model_runner.model_config.context_len - 1

    def draft(
        self,
        bonus_tokens: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        rules: LogitsRules,
        probs: torch.Tensor | None = None,
    ) -> Drafts:
        """Draft gamma tokens for every request of a decode batch.

        Step i decodes the token at position seq_len + i and writes its KV to the slot that the
        verify pass overwrites.

        Args:
            bonus_tokens: (batch_size,) int64, last committed tokens.
            rows, seq_lens: (batch_size,) int64, request-pool rows and committed lengths.
            rules: what the requests ask of the next-token distribution.
            probs: (batch_size, gamma, vocab) float32, where to put the distributions; new if None.
        """
        forward_batch = self._forward_batch(rows, seq_lens)
        tokens: list[torch.Tensor] = []
        for step in range(self.num_steps):
            token = tokens[-1] if tokens else bonus_tokens
            logits = self._step(forward_batch, token, step, dense=False)
            rules.apply_(logits)
            token = logits.argmax(dim=-1)
            if not rules.rows.is_all_greedy:
                step_probs = probabilities(logits, rules.rows)
                token = torch.where(rules.rows.top_ks == 1, token, draw(step_probs))
                if probs is None:
                    bs, vocab = step_probs.shape
                    probs = step_probs.new_empty((bs, self.num_steps, vocab))
                probs[:, step] = step_probs
            tokens.append(token)
            rules = rules.after(token)
        return Drafts(torch.stack(tokens, dim=1), None if rules.rows.is_all_greedy else probs)

    def plain_step(
        self, bonus_tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """One plain decode step over all KV: logits (batch_size, vocab)."""
        forward_batch = self._forward_batch(rows, seq_lens)
        return self._step(forward_batch, bonus_tokens, 0, dense=True)

    def _forward_batch(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=rows,  # set by each step
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=rows,  # set by each step
            seq_lens_sum=0,
            spec_algorithm=self.model_runner.spec_algorithm,
            spec_info=VegasDraftInput(),  # pyright: ignore[reportArgumentType]
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )

    def _step(
        self, forward_batch: ForwardBatch, tokens: torch.Tensor, step: int, dense: bool
    ) -> torch.Tensor:
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        positions = seq_lens + step
        forward_batch.input_ids = tokens
        forward_batch.out_cache_loc = self.req_to_token[rows, positions].long()
        forward_batch.positions = positions.clamp(max=self.last_position)
        self.backend.kernels.begin_draft(rows, seq_lens, step, dense)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            output = self.model_runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )
        return output.next_token_logits
