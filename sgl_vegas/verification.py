"""Verification: one full-attention pass over the drafts, and the accept rule (section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_vegas.drafting import Drafts
from sgl_vegas.logits import LogitsRules
from sgl_vegas.sampling.distribution import probabilities
from sgl_vegas.sampling.rejection import accept_greedy, accept_sampled
from sgl_vegas.sglang_compat import (
    SIMULATE_ACC_LEN,
    CaptureHiddenMode,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    GenerationBatchResult,
    GrammarTree,
    ScheduleBatch,
    TpModelWorker,
    build_grammar_vocab_mask,
    compute_spec_v2_logprobs,
    generate_simulated_accept_index,
    record_stream_each,
    record_stream_for_v2_verify,
)


@dataclass(frozen=True)
class Verified:
    """Attributes:
    result: the target's forward result; `logits_output.next_token_logits` is
        (batch_size * (gamma + 1), vocab), penalties and bias applied.
    tokens: (batch_size * (gamma + 1),) int32, emitted tokens at the front of each request's rows.
    accept_lens: (batch_size,) int32, emitted tokens, the corrected or bonus token included.
    bonus_tokens: (batch_size,) int64, the last emitted token.
    keep_alive: what must outlive the iteration under overlap scheduling.
    """

    result: GenerationBatchResult
    tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    keep_alive: list[Any]


def verify(
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    bonus_tokens: torch.Tensor,
    drafts: Drafts,
    cache_locs: torch.Tensor,
    rules: LogitsRules,
    needs_mask: bool,
) -> Verified:
    """Verify the drafts of a decode batch. Mutates `batch`, which the scheduler restores.

    Args:
        bonus_tokens: (batch_size,) int64.
        cache_locs: (batch_size, gamma + 1) int64; the pass writes the true KV of all of them.
        needs_mask: whether the attention backend reads a custom mask.
    """
    candidates = torch.cat([bonus_tokens.unsqueeze(1), drafts.tokens], dim=1)
    forward_batch = _prepare(batch, target_worker, candidates, cache_locs, needs_mask)
    grammar_tree = GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None
    result = target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True
    )
    logits_output: Any = result.logits_output
    logits = logits_output.next_token_logits
    rules.apply_(logits)
    if grammar_tree is not None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=None,
        )
        if mask is not None:
            mask.apply(logits)
    num_correct_drafts, final_tokens = _accept(logits, drafts, rules)
    tokens, accept_index = _lay_out(drafts.tokens, num_correct_drafts, final_tokens)
    if SIMULATE_ACC_LEN > 0:
        width = candidates.shape[1]
        accept_index = generate_simulated_accept_index(
            accept_index=accept_index,
            predict=tokens,
            num_correct_drafts=num_correct_drafts,
            candidates=candidates,
            target_predict=logits.argmax(dim=-1).view(-1, width),
            bs=candidates.shape[0],
            spec_steps=width - 1,
        )
    rows = torch.arange(candidates.shape[0], device=tokens.device)
    emitted_last = tokens.view(candidates.shape)[rows, num_correct_drafts].long()
    if batch.return_logprob:
        compute_spec_v2_logprobs(
            batch, logits_output, tokens, accept_index, candidates.shape[1] - 1
        )
    return Verified(
        result=result,
        tokens=tokens,
        accept_lens=(num_correct_drafts + 1).to(torch.int32),
        bonus_tokens=emitted_last,
        keep_alive=[forward_batch, candidates, drafts],
    )


def _prepare(
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    candidates: torch.Tensor,
    cache_locs: torch.Tensor,
    needs_mask: bool,
) -> ForwardBatch:
    bs, width = candidates.shape
    device = candidates.device
    context_len = target_worker.model_runner.model_config.context_len
    steps = torch.arange(width, device=device)
    next_token = torch.cat([steps[1:], steps.new_full((1,), -1)])
    verify_input = EagleVerifyInput(
        draft_token=candidates.flatten(),
        custom_mask=_chain_mask(batch.seq_lens, width) if needs_mask else None,  # pyright: ignore[reportArgumentType]
        # As in drafting, no position past the model's last.
        positions=(batch.seq_lens.unsqueeze(1) + steps).flatten().clamp(max=context_len - 1),
        retrieve_index=torch.arange(bs * width, device=device).view(bs, width),
        retrieve_next_token=next_token.repeat(bs, 1),
        retrieve_next_sibling=torch.full((bs, width), -1, device=device),
        retrieve_cum_len=None,  # pyright: ignore[reportArgumentType]
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    if batch.seq_lens.is_cuda:
        stream = torch.cuda.current_stream()
        record_stream_for_v2_verify(batch, verify_input, stream)
        record_stream_each((cache_locs,), stream)
    batch.input_ids = verify_input.draft_token
    batch.out_cache_loc = cache_locs.flatten()
    batch.spec_info = verify_input
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    return ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_hidden_states_before_norm=False,
    )


def _chain_mask(seq_lens: torch.Tensor, width: int) -> torch.Tensor:
    """SGLang's flat full mask, one (width, seq_len + width) block a request: causal."""
    causal = torch.ones((width, width), dtype=torch.bool, device=seq_lens.device).tril()
    return torch.cat(
        [
            torch.cat([causal.new_ones((width, seq_len)), causal], dim=1).flatten()
            for seq_len in seq_lens.tolist()
        ]
    )


def _accept(
    logits: torch.Tensor, drafts: Drafts, rules: LogitsRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy rows by argmax, sampled rows by rejection; (batch_size,) int64 both."""
    width = drafts.tokens.shape[1] + 1
    num_correct_drafts, final_tokens = accept_greedy(
        drafts.tokens, logits.argmax(dim=-1).view(-1, width)
    )
    if drafts.probs is None:
        return num_correct_drafts, final_tokens
    target_probs = probabilities(logits, rules.rows).view(-1, width, logits.shape[-1])
    sampled_correct, sampled_final = accept_sampled(drafts.tokens, drafts.probs, target_probs)
    greedy = rules.rows.top_ks.view(-1, width)[:, 0] == 1
    return (
        torch.where(greedy, num_correct_drafts, sampled_correct),
        torch.where(greedy, final_tokens, sampled_final),
    )


def _lay_out(
    draft_tokens: torch.Tensor, num_correct_drafts: torch.Tensor, final_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's layout of a verify result.

    Returns:
        tokens: (batch_size * (gamma + 1),) int32, row j of a request holds the token emitted there.
        accept_index: (batch_size, gamma + 1) int32, flat row of each emitted token, -1 behind.
    """
    bs, gamma = draft_tokens.shape
    width = gamma + 1
    tokens = torch.cat([draft_tokens, final_tokens.unsqueeze(1)], dim=1)
    tokens.scatter_(1, num_correct_drafts.unsqueeze(1), final_tokens.unsqueeze(1))
    flat = torch.arange(bs * width, device=tokens.device).view(bs, width)
    emitted = torch.arange(width, device=tokens.device) <= num_correct_drafts.unsqueeze(1)
    return (
        tokens.flatten().to(torch.int32),
        torch.where(emitted, flat, -1).to(torch.int32),
    )
