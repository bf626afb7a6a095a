"""Penalties that count every emitted token, also inside a draft run.

SGLang's speculative path adds one penalty to all rows of a verify pass and counts only the last
token of each run. Here row j sees the tokens of the drafts before it, so that the output is what
one-token-at-a-time decoding gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _OutputCounts:
    """What one request has emitted: counts (vocab,) int32 and their sum, (1,) int32."""

    counts: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class PenaltyRows:
    """Penalty state of a batch, one row a logits row.

    Attributes:
        counts: (n, vocab) float32, times each token was emitted.
        lengths: (n, 1) float32, tokens emitted.
        frequency, presence, repetition: (n, 1) float32.
        min_new_tokens: (n, 1) float32.
        stop_mask: (n, vocab) bool, tokens forbidden before `min_new_tokens`; None if no row has it.
    """

    counts: torch.Tensor
    lengths: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new_tokens: torch.Tensor
    stop_mask: torch.Tensor | None

    def after(self, tokens: torch.Tensor) -> PenaltyRows:
        """The state after each row emits `tokens`, (n,) int64."""
        one = torch.ones_like(self.lengths)
        counts = self.counts.scatter_add(1, tokens.unsqueeze(1), one)
        return self._with(counts, self.lengths + 1)

    def along(self, draft_tokens: torch.Tensor) -> PenaltyRows:
        """The rows of a verify pass: row j of a request has emitted its first j drafts.

        Args:
            draft_tokens: (n, gamma) int64.
        """
        states: list[PenaltyRows] = [self]
        for step in range(draft_tokens.shape[1]):
            states.append(states[-1].after(draft_tokens[:, step]))
        width = len(states)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat_interleave(width, dim=0)

        return PenaltyRows(
            counts=torch.stack([s.counts for s in states], dim=1).flatten(0, 1),
            lengths=torch.stack([s.lengths for s in states], dim=1).flatten(0, 1),
            frequency=spread(self.frequency),
            presence=spread(self.presence),
            repetition=spread(self.repetition),
            min_new_tokens=spread(self.min_new_tokens),
            stop_mask=None if self.stop_mask is None else spread(self.stop_mask),
        )

    def apply_(self, logits: torch.Tensor) -> None:
        """Apply to `logits` (n, vocab) in place: additive ones first, as SGLang does."""
        emitted = self.counts > 0
        logits.sub_(self.counts * self.frequency + emitted * self.presence)
        if self.stop_mask is not None:
            early = self.lengths < self.min_new_tokens
            logits.masked_fill_(self.stop_mask & early, float("-inf"))
        scale = torch.where(emitted, self.repetition, 1.0)
        logits.copy_(torch.where(logits < 0, logits * scale, logits / scale))

    def _with(self, counts: torch.Tensor, lengths: torch.Tensor) -> PenaltyRows:
        return PenaltyRows(
            counts,
            lengths,
            self.frequency,
            self.presence,
            self.repetition,
            self.min_new_tokens,
            self.stop_mask,
        )


class PenaltyTracker:
    """Output counts of the running requests that ask for a penalty.

    Keyed weakly by SGLang's request object: a count lives as long as its request.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._counts: weakref.WeakKeyDictionary[Any, _OutputCounts] = weakref.WeakKeyDictionary()

    def start(self, reqs: Sequence[Any]) -> None:
        """Called before every prefill: counts what a request has emitted, if it was retracted."""
        for req in reqs:
            if _has_penalty(req.sampling_params):
                emitted = torch.tensor(list(req.output_ids), dtype=torch.int64)
                counts = torch.bincount(emitted, minlength=self.vocab_size).int()
                self._counts[req] = _OutputCounts(
                    counts.to(self.device),
                    torch.tensor([len(emitted)], dtype=torch.int32).to(self.device),
                )

    def rows(self, reqs: Sequence[Any], last_tokens: torch.Tensor) -> PenaltyRows | None:
        """The state of a decode batch, None if none of its requests has a penalty.

        Args:
            last_tokens: (batch_size,) int64, each request's last committed token, not counted yet;
                counted here.
        """
        if not any(req in self._counts for req in reqs):
            return None
        params = [req.sampling_params for req in reqs]
        for row, req in enumerate(reqs):
            self._count(req, last_tokens[row : row + 1])
        nothing = torch.zeros(self.vocab_size, dtype=torch.int32, device=self.device)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        states = [self._counts.get(req) or _OutputCounts(nothing, zero) for req in reqs]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32).to(self.device).unsqueeze(1)

        return PenaltyRows(
            counts=torch.stack([s.counts for s in states]).float(),
            lengths=torch.stack([s.length for s in states]).float(),
            frequency=column([p.frequency_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
            min_new_tokens=column([float(p.min_new_tokens) for p in params]),
            stop_mask=self._stop_mask(reqs),
        )

    def commit(
        self, reqs: Sequence[Any], draft_tokens: torch.Tensor, num_correct_drafts: torch.Tensor
    ) -> None:
        """Count the accepted drafts; the token that ends the run is counted by the next `rows`.

        Args:
            draft_tokens: (batch_size, gamma) int64.
            num_correct_drafts: (batch_size,) int64.
        """
        step = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
        accepted = (step < num_correct_drafts.unsqueeze(1)).int()
        for row, req in enumerate(reqs):
            self._count(req, draft_tokens[row], accepted[row])

    def _count(self, req: Any, tokens: torch.Tensor, times: torch.Tensor | None = None) -> None:
        state = self._counts.get(req)
        if state is None:
            return
        times = torch.ones_like(tokens, dtype=torch.int32) if times is None else times
        state.counts.scatter_add_(0, tokens, times)
        state.length += times.sum()

    def _stop_mask(self, reqs: Sequence[Any]) -> torch.Tensor | None:
        if not any(req.sampling_params.min_new_tokens > 0 for req in reqs):
            return None
        mask = torch.zeros((len(reqs), self.vocab_size), dtype=torch.bool)
        for row, req in enumerate(reqs):
            if req.sampling_params.min_new_tokens > 0:
                # SGLang ignores ids outside the vocabulary, such as an added end token.
                stop = [token for token in _stop_tokens(req) if 0 <= token < self.vocab_size]
                mask[row, stop] = True
        return mask.to(self.device)


def _has_penalty(params: Any) -> bool:
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _stop_tokens(req: Any) -> set[int]:
    """The tokens that SGLang's own min-new-tokens penalty forbids."""
    tokens: set[int] = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(req.tokenizer.additional_stop_token_ids or ())
        if req.tokenizer.eos_token_id is not None:
            tokens.add(req.tokenizer.eos_token_id)
    return tokens
