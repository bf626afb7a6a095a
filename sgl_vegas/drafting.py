"""Drafting: gamma decode steps of the target itself, over selected KV (paper section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.draft_input import VegasDraftInput
from sgl_vegas.logits import LogitsRules
from sgl_vegas.sampling.distribution import draw, probabilities
from sgl_vegas.sglang_compat import (
    CaptureHiddenMode,
    ForwardBatch,
    ScheduleBatch,
    TpModelWorker,
)
from sgl_vegas.tables.draft_indices import DraftIndices


@dataclass(frozen=True)
class Drafts:
    """Attributes:
    tokens: (batch_size, gamma) int64.
    probs: (batch_size, gamma, vocab) float32, the distribution each token was drawn from; None if
        every request is greedy. Rows of greedy requests are not read.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None


def draft(
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    bonus_tokens: torch.Tensor,
    cache_locs: torch.Tensor,
    indices: DraftIndices,
    rules: LogitsRules,
) -> Drafts:
    """Draft gamma tokens for every request of a decode batch.

    Step i decodes the token at position seq_len + i and writes its KV to the slot that the verify
    pass overwrites. Mutates `batch`, which the scheduler restores.

    Args:
        bonus_tokens: (batch_size,) int64, last committed tokens.
        cache_locs: (batch_size, gamma + 1) int64, KV slots of the positions from seq_len on.
        indices: what the drafts attend to.
        rules: what the requests ask of the next-token distribution.
    """
    num_steps = cache_locs.shape[1] - 1
    draft_input = VegasDraftInput(positions=batch.seq_lens)
    batch.input_ids = bonus_tokens
    batch.out_cache_loc = cache_locs[:, 0].contiguous()
    batch.spec_info = draft_input  # pyright: ignore[reportAttributeAccessIssue]
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )
    # A run may reach past the context limit, where no token is kept: any position will do there,
    # but it must be one that the model has.
    last_position = target_worker.model_runner.model_config.context_len - 1
    tokens: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    for step in range(num_steps):
        forward_batch.input_ids = tokens[-1] if tokens else bonus_tokens
        forward_batch.out_cache_loc = cache_locs[:, step].contiguous()
        forward_batch.positions = (batch.seq_lens + step).clamp(max=last_position)
        draft_input.step_indices = indices.at_step(step)
        output: Any = target_worker.model_runner.forward(forward_batch).logits_output
        logits = output.next_token_logits
        rules.apply_(logits)
        token = logits.argmax(dim=-1)
        if not rules.rows.is_all_greedy:
            probs.append(probabilities(logits, rules.rows))
            token = torch.where(rules.rows.top_ks == 1, token, draw(probs[-1]))
        tokens.append(token)
        rules = rules.after(token)
    return Drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)
