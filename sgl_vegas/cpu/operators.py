"""Operators of `sgl_kernel` that SGLang's CPU path calls, in torch.

Names, argument order and argument names are those of `sgl_kernel`, including its spelling
`retrive`. Results are written into the arguments marked "out".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def _spans(
    rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the cells `[rows[i], start[i]:end[i]]`, one request after the other.

    Args:
        rows, start, end: (bs,), integers, start <= end.

    Returns:
        Row and column of each cell, both (sum(end - start),), int64.
    """
    lengths = (end - start).long()
    first_cell = lengths.cumsum(0) - lengths
    cells = torch.arange(int(lengths.sum()))
    columns = cells + (start.long() - first_cell).repeat_interleave(lengths)
    return rows.long().repeat_interleave(lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Enter new KV slots in the requests' rows, at columns start to end.

    Args:
        req_pool_indices: (bs,) integers, the requests' rows.
        req_to_token: out, (pool_size, pool_len) int32.
        start_offset, end_offset: (bs,) integers.
        out_cache_loc: (>= sum(end - start),) integers, the slots, one request after the other.
        pool_len: unused; the row width, which the tensor knows.
    """
    rows, columns = _spans(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the KV slots in the requests' rows, at columns start to end.

    Args:
        req_pool_indices: (bs,) integers, the requests' rows.
        req_to_token: (pool_size, pool_len) int32.
        start_offset, end_offset: (bs,) integers.
        out_cache_loc: out, (>= sum(end - start),) int64; what lies behind the slots is kept.
        pool_len: unused.
    """
    rows, columns = _spans(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(rows)] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` KV slots that follow each request's sequence.

    Args:
        req_pool_indices, seq_lens: (bs,) integers.
        req_to_token: (pool_size, pool_len) int32.
        out_cache_loc: out, (bs * topk * num_steps,) int64.
        pool_len: unused.
        topk, num_steps: branches and steps of the draft.
    """
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, end, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Pick each request's last accepted token.

    Args:
        accept_tokens: (bs * accept_stride,) or (bs, accept_stride), integers.
        accept_lens: (bs,) integers >= 1, accepted tokens including the bonus token.
        bonus_tokens: out, (bs,) integers.
        accept_stride: tokens kept for each request.
    """
    first = torch.arange(len(accept_lens)) * accept_stride
    picked = accept_tokens.flatten()[first + accept_lens.long() - 1]
    bonus_tokens[: len(picked)] = picked.to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Gather the KV slots of accepted tokens to the front.

    Args:
        accept_index: (n,) or (bs, depth), integers, indices into out_cache_loc; -1 for none.
        out_cache_loc: (bs * draft_tokens,) int64.
        accept_out_cache_loc: out, (n,) int64; what lies behind the slots is kept.
    """
    index = accept_index.flatten().long()
    kept = index[index >= 0]
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept]


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow each request's draft tree as long as a child is the target's own greedy choice.

    Args:
        predicts: out, (bs * draft_tokens,) int32; written at accepted nodes only, with the
            target's choice after the node.
        accept_index: out, (bs, depth) int32; `retrive_index` of the accepted nodes, in order;
            what lies behind them is kept.
        accept_token_num: out, (bs,) int32; accepted nodes without the root.
        candidates: (bs, draft_tokens) integers, the tokens; column 0 is the root.
        retrive_index: (bs, draft_tokens) int64, each node's row in the flat outputs.
        retrive_next_token: (bs, draft_tokens) int64, a node's first child, -1 for none.
        retrive_next_sibling: (bs, draft_tokens) int64, a node's next sibling, -1 for none.
        target_predict: (bs, draft_tokens) integers, the target's choice after each node.
    """
    batch_size, draft_tokens = candidates.shape
    row = torch.arange(batch_size)
    choices = target_predict.flatten()
    last = retrive_index[:, 0].long()
    node = torch.zeros(batch_size, dtype=torch.long)
    following = torch.ones(batch_size, dtype=torch.bool)
    accepted = torch.zeros_like(accept_token_num)

    accept_index[:, 0] = last.to(accept_index.dtype)
    for level in range(1, accept_index.shape[1]):
        wanted = choices[last]
        node = retrive_next_token[row, node].long()
        matched = torch.zeros_like(following)
        # The first sibling with the wanted token is taken, whatever comes after it.
        for _ in range(draft_tokens):
            looking = following & ~matched & (node >= 0)
            if not looking.any():
                break
            here = node.clamp(min=0)
            hit = looking & (candidates[row, here] == wanted)
            predicts[last[hit]] = wanted[hit].to(predicts.dtype)
            reached = retrive_index[row, here].long()
            accept_index[hit, level] = reached[hit].to(accept_index.dtype)
            last = torch.where(hit, reached, last)
            matched |= hit
            node = torch.where(looking & ~hit, retrive_next_sibling[row, here].long(), node)
        following &= matched
        if not following.any():
            break
        accepted += following.to(accepted.dtype)
        # Rows that have ended keep a valid index, which nothing reads any more.
        node = node.clamp(min=0)

    predicts[last] = choices[last].to(predicts.dtype)
    accept_token_num.copy_(accepted)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy KV rows from `src_loc` to `tgt_loc` in every K and V buffer; the two may overlap.

    Args:
        data_ptrs: (num_buffers,) uint64, address of each buffer.
        strides: (num_buffers,) integers, bytes of one row of each buffer.
        tgt_loc, src_loc: (num_locs,) int64, rows.
    """
    pairs = list(zip(tgt_loc.tolist(), src_loc.tolist(), strict=True))
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # All rows are read before any is written, so that overlap does no harm.
        rows = [ctypes.string_at(pointer + source * stride, stride) for _, source in pairs]
        for (target, _), row in zip(pairs, rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


OPERATORS: dict[str, Callable[..., None]] = {
    operator.__name__: operator
    for operator in (
        assign_req_to_token_pool_cpu,
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_bonus_tokens_cpu,
        fill_accept_out_cache_loc_cpu,
        verify_tree_greedy_cpu,
    )
}
