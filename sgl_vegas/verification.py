"""Verification: one full-attention pass over the drafts, and the accept rule (section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sgl_vegas.logits import LogitsRules
from sgl_vegas.sampling.distribution import draw, probabilities
from sgl_vegas.sampling.grammar_guard import for_masks
from sgl_vegas.sampling.rejection import accept_greedy, accept_sampled
from sgl_vegas.sglang_compat import (
    SIMULATE_ACC_LEN,
    CaptureHiddenMode,
    EagleVerifyInput,
    ForwardBatch,
    ForwardMode,
    GrammarTree,
    Req,
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
    tokens: (batch_size * width,) int32, emitted tokens at the front of each request's rows.
    accept_lens: (batch_size,) int32, emitted tokens, the corrected or bonus token included.
    bonus_tokens: (batch_size,) int64, the last emitted token.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus_tokens: torch.Tensor


def verify_batch(
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    candidates: torch.Tensor,
    cache_locs: torch.Tensor,
) -> ForwardBatch:
    """The verify pass's batch. Mutates `batch`, which the scheduler restores.

    Args:
        candidates: (batch_size, gamma + 1) int64, each request's last committed token, its drafts.
        cache_locs: (batch_size, gamma + 1) int64; the pass writes the true KV of all of them.
    """
    bs, width = candidates.shape
    device = candidates.device
    context_len = target_worker.model_runner.model_config.context_len
    steps = torch.arange(width, device=device)
    next_token = torch.cat([steps[1:], steps.new_full((1,), -1)])
    verify_input = EagleVerifyInput(
        draft_token=candidates.flatten(),
        custom_mask=None,  # pyright: ignore[reportArgumentType]
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


def accept(
    batch: ScheduleBatch,
    candidates: torch.Tensor,
    probs: torch.Tensor | None,
    logits_output: Any,
    rules: LogitsRules,
) -> Verified:
    """Accept drafts by the target's logits, and end each run with a token of the target's own.

    Without drafts (width 1) this is plain sampling.

    Args:
        candidates: (batch_size, width) int64, each request's last committed token, its drafts.
        probs: (batch_size, width - 1, vocab) float32, the drafts' distributions; None if all
            requests are greedy.
        logits_output: the target's; `next_token_logits` (batch_size * width, vocab) is changed in
            place by what the requests ask for.
        rules: one row a logits row.
    """
    logits = logits_output.next_token_logits
    drafts = candidates[:, 1:]
    rules.apply_(logits)
    if batch.has_grammar:
        mask = build_grammar_vocab_mask(
            reqs=_with_walks(batch.reqs),
            tree=GrammarTree.from_linear_chain(candidates),
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=None,
        )
        if mask is not None:
            mask.apply(logits)
    num_correct_drafts, final_tokens = _accept(logits, drafts, probs, rules)
    tokens, accept_index = _lay_out(drafts, num_correct_drafts, final_tokens)
    bs, width = candidates.shape
    if SIMULATE_ACC_LEN > 0 and width > 1:
        accept_index = generate_simulated_accept_index(
            accept_index=accept_index,
            predict=tokens,
            num_correct_drafts=num_correct_drafts,
            candidates=candidates,
            target_predict=logits.argmax(dim=-1).view(-1, width),
            bs=bs,
            spec_steps=width - 1,
        )
    last = tokens.view(bs, width).gather(1, num_correct_drafts.unsqueeze(1))
    if batch.return_logprob:
        compute_spec_v2_logprobs(batch, logits_output, tokens, accept_index, width - 1)
    return Verified(
        tokens=tokens,
        accept_lens=(num_correct_drafts + 1).to(torch.int32),
        bonus_tokens=last.squeeze(1).long(),
    )


def _with_walks(reqs: list[Req]) -> Any:
    """All that is read of `reqs` where masks are made."""
    return [SimpleNamespace(grammar=for_masks(req.grammar)) for req in reqs]


def _accept(
    logits: torch.Tensor, drafts: torch.Tensor, probs: torch.Tensor | None, rules: LogitsRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy rows by argmax, sampled rows by rejection; (batch_size,) int64 both."""
    width = drafts.shape[1] + 1
    num_correct_drafts, final_tokens = accept_greedy(drafts, logits.argmax(dim=-1).view(-1, width))
    if rules.rows.is_all_greedy:
        return num_correct_drafts, final_tokens
    target_probs = probabilities(logits, rules.rows).view(-1, width, logits.shape[-1])
    if width == 1:
        sampled_correct, sampled_final = num_correct_drafts, draw(target_probs[:, 0])
    else:
        assert probs is not None
        sampled_correct, sampled_final = accept_sampled(drafts, probs, target_probs)
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
