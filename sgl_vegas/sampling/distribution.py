"""The next-token distribution that plain SGLang samples from, as probabilities.

Drafts (q) and verification (p) share it, so that q follows p in everything a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters, one row a logits row.

    Attributes:
        temperatures: (n, 1) float32.
        top_ks: (n,) int32; 1 means greedy.
        top_ps, min_ps: (n,) float32.
        is_all_greedy: whether every row is greedy.
        need_filter: whether any row filters by top-k, top-p or min-p.
        renormalise_between: rows with min-p apply top-k, top-p and min-p one after the other, each
            on renormalised probabilities, as SGLang's FlashInfer sampler does. Otherwise all three
            look at the unfiltered softmax, as its PyTorch sampler (and FlashInfer's joint
            top-k/top-p sampler) does.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    is_all_greedy: bool
    need_filter: bool
    renormalise_between: bool

    def expand(self, repeats: int) -> SamplingRows:
        """Each row `repeats` times, as the rows of a verify pass lie."""
        return SamplingRows(
            temperatures=self.temperatures.repeat_interleave(repeats, dim=0),
            top_ks=self.top_ks.repeat_interleave(repeats),
            top_ps=self.top_ps.repeat_interleave(repeats),
            min_ps=self.min_ps.repeat_interleave(repeats),
            is_all_greedy=self.is_all_greedy,
            need_filter=self.need_filter,
            renormalise_between=self.renormalise_between,
        )


def probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Probabilities after temperature, top-k, top-p and min-p.

    Args:
        logits: (n, vocab) float, penalties and biases applied; not modified.

    Returns:
        (n, vocab) float32, rows sum to 1. Greedy rows are left to the caller's argmax.
    """
    probs = torch.softmax(logits.float() / rows.temperatures, dim=-1)
    if not rows.need_filter:
        return probs
    kept = (
        _filter_with_flashinfer(probs, rows) if probs.is_cuda else _filter_by_sorting(probs, rows)
    )
    return kept.div_(kept.sum(dim=-1, keepdim=True))


def _filter_by_sorting(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """(n, vocab) float32: `probs` where the row's filters keep them, 0 elsewhere."""
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = rank < rows.top_ks.unsqueeze(1)
    mass_before = ordered.cumsum(dim=-1) - ordered
    scale = torch.ones_like(rows.min_ps)
    if rows.renormalise_between:
        kept_mass = (ordered * keep).sum(dim=-1)
        scale = torch.where(rows.min_ps > 0, kept_mass, scale)
    # Rounded up, the mass before a tail can pass 1, which must not cut it off.
    keep &= (mass_before <= (rows.top_ps * scale).unsqueeze(1)) | (rows.top_ps >= 1).unsqueeze(1)
    # The largest probability is the first, and renormalising keeps the ratio to it.
    keep &= ordered >= ordered[:, :1] * rows.min_ps.unsqueeze(1)
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)


def _filter_with_flashinfer(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """As `_filter_by_sorting`, with FlashInfer's selection kernels, which don't sort a vocabulary.

    Of tokens equally probable at a cut they keep all, as plain SGLang's sampler does there.
    """
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs

    among_top_k = top_k_renorm_probs(probs, rows.top_ks)
    source = probs
    if rows.renormalise_between:
        source = torch.where((rows.min_ps > 0).unsqueeze(1), among_top_k, probs)
    keep = top_p_renorm_probs(source, rows.top_ps) > 0
    keep |= (rows.top_ps >= 1).unsqueeze(1)
    keep &= among_top_k > 0
    keep &= probs >= probs.amax(dim=-1, keepdim=True) * rows.min_ps.unsqueeze(1)
    return probs * keep


def draw(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw one index a row with probability proportional to `weights`, without a host sync.

    Uses the exponential race: argmax of w / Exp(1).

    Args:
        weights: (..., vocab) float32, non-negative, not all zero in a row.

    Returns:
        (...) int64.
    """
    noise = torch.empty_like(weights).exponential_(generator=generator)
    # A zero draw would turn weight 0 into 0/0.
    return (weights / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(dim=-1)
