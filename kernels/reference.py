"""What the kernels compute, in float64 and with plain torch: for tests."""

from __future__ import annotations

import math

import torch

from .ranking import TILE, bit_order, num_parts


def list_positions(
    seq_len: int, step: int, table: torch.Tensor, count: int, base: int
) -> torch.Tensor:
    """Positions that a draft's query at seq_len + step attends to, (n,) int64.

    table: (max_k,), the layer's and row's positions, of which the first `count` count.
    """
    base = min(base, seq_len)
    if base <= 0:
        return torch.arange(seq_len + step + 1, device=table.device)
    recent = torch.arange(base, seq_len + step + 1, device=table.device)
    chosen = table[: max(0, min(count, table.shape[0]))].long().clamp(0, base - 1)
    return torch.cat([chosen, recent])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One request's attention.

    q: (num_queries, num_heads, head_dim); k, v: (n, num_kv_heads, head_dim); visible:
    (num_queries,), how many of the n entries each query sees, or of which it sees the last
    `window` where that isn't 0; sinks: (num_heads,), the score of an entry that all see and that
    has no value. Returns, all float64: outputs (like q; 0 where nothing is visible), log2 of the
    softmax sums (num_queries, num_heads), and the softmax weights (num_queries, num_heads, n).
    """
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,thd->qht", q.double(), k) * scale
    places, visible = torch.arange(k.shape[0], device=q.device), visible.view(-1, 1)
    hidden = places >= visible
    if window:
        hidden |= places < visible - window
    scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double())
    weights = torch.exp(scores - lse.clamp(min=-1e300).unsqueeze(-1))
    return torch.einsum("qht,thd->qhd", weights, v), lse / math.log(2), weights


def dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    seq_len: int,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verification of one request; query i sees positions [0, seq_len + i + 1), or the last
    `window` of them. slots: (width,), its row of req_to_token. Shapes and results as for
    `attend`."""
    kv_len = max(0, seq_len + q.shape[0])
    used = slots[:kv_len].long()
    visible = seq_len + 1 + torch.arange(q.shape[0], device=q.device)
    return attend(q, k_cache[used], v_cache[used], visible, scale, window, sinks)


def sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft's query, (num_heads, head_dim), over `list_positions`. Output and log2 sums."""
    used = slots[positions].long()
    visible = torch.tensor([positions.shape[0]], device=q.device)
    out, lse, _ = attend(q.unsqueeze(0), k_cache[used], v_cache[used], visible, scale, sinks=sinks)
    return out[0], lse[0]


def selection_weights(weights: torch.Tensor, rank_len: int) -> torch.Tensor:
    """Of positions [0, rank_len): the sum over heads and both queries of their softmax weights,
    (rank_len,) float64. weights: as `attend` returns them; a single query counts once."""
    total = weights[0].sum(dim=0)
    if weights.shape[0] > 1:
        total = total + weights[-1].sum(dim=0)
    return total[:rank_len]


def table_size(rank_len: int, ratio: float, min_tokens: int, max_tokens: int) -> int:
    """k, or 0 where the request is too short for a table."""
    k = min(max(math.ceil(ratio * rank_len), min_tokens), max_tokens)
    return k if rank_len > k else 0


def score_candidates(
    words: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    bases: torch.Tensor,
    wanted: torch.Tensor,
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    weights: torch.Tensor,
    scores: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """As `ranking.CandidateScores`, whose arguments these are."""
    (num_kv_heads, num_heads), batch = (words.shape[1], scores.shape[2]), len(rows)
    parts, width = num_parts(batch, num_kv_heads), req_to_token.shape[1]
    of_bits = torch.zeros_like(weights, dtype=torch.float64)
    of_bits[..., bit_order()] = weights.double()
    of_parts = stats[: batch * parts * 2 * num_heads].view(batch, parts, 2, num_heads)
    for index, row in enumerate(rows.tolist()):
        count = min(int(counts[row]), positions.shape[1])
        if int(wanted[row]) == 0 or count == 0:
            continue
        last = max(min(int(bases[row]), width) - 1, 0)
        slots = req_to_token[row, positions[row, :count].long().clamp(0, last)].long()
        places = torch.arange(64, device=words.device)
        bits = (words[slots].unsqueeze(-1) >> places & 1) - 0.5
        own = of_bits[index].unflatten(0, (num_kv_heads, -1))
        found = torch.einsum("nhb,hgb->nhg", bits.double(), own).flatten(1)
        scores[index, :count] = found.half()
        size = -(-count // (parts * TILE)) * TILE
        for part, of_part in enumerate(found.split(size)):
            maxima = of_part.amax(dim=0)
            sums = (of_part - maxima).exp2().sum(dim=0)
            of_parts[index, part] = torch.stack([maxima, sums]).float()
