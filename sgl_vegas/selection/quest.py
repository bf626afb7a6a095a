"""Quest (arXiv 2406.10774) as MagicDec drafts with it: page bounds, ranked at every draft step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import SelectionPolicy

PAGE_SIZE = 16


class Layout(NamedTuple):
    """What the selections of some requests look like, before it is known which pages they have.

    Entry j of a request is `page[rank[j]] * stride[j] + offset[j]`, the pages in order of their
    bounds: a page's tokens have stride PAGE_SIZE, those of the tail 0, and padding is 0 * page - 1.

    Attributes:
        most_pages: that any request selects.
        num_pages: (batch_size, 1, 1) int64, whole pages of each request.
        rank, stride, offset: (batch_size, 1, k) int64.
    """

    most_pages: int
    num_pages: torch.Tensor
    rank: torch.Tensor
    stride: torch.Tensor
    offset: torch.Tensor


class QuestPolicy(SelectionPolicy):
    """A list of pages a KV head, by an upper bound of the step's query times the page's keys.

    The bound of a page is `sum_d max(q_d min_d, q_d max_d)` over its keys' elementwise minimum and
    maximum, averaged over the query heads that share the KV head. The tokens behind the last whole
    page are always attended to and count towards the budget.

    A draft step reads two vectors a page: as much as `seq_len / PAGE_SIZE` KV entries, beside the
    budget.
    """

    makes_tables = False
    reselects = True

    def __init__(self, config: VegasConfig) -> None:
        super().__init__(config)
        # The same for all layers and steps of a round of drafts.
        self._layout_of = functools.lru_cache(maxsize=1)(self._layout)

    def extra_reads(self, seq_len: int) -> float:
        return seq_len / PAGE_SIZE

    def select_step(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        seq_lens: tuple[int, ...],
        budgets: tuple[int, ...],
        tables: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        layout = self._layout_of(seq_lens, budgets, q.device)
        if not layout.most_pages:
            return layout.offset.squeeze(1)
        num_pages = max(seq_lens) // PAGE_SIZE
        pages = keys[:, : num_pages * PAGE_SIZE].unflatten(1, (num_pages, PAGE_SIZE))
        low, high = (
            bound.permute(0, 2, 3, 1).float() for bound in (pages.amin(dim=2), pages.amax(dim=2))
        )
        queries = q.float().unflatten(1, (keys.shape[2], -1))
        # The larger of the two products: the maximum's where q is positive, else the minimum's.
        bounds = queries.clamp(min=0) @ high + queries.clamp(max=0) @ low
        # A page that isn't whole is tail, or another request's length.
        partial = torch.arange(num_pages, device=q.device) >= layout.num_pages
        bounds = bounds.mean(dim=2).masked_fill_(partial, float("-inf"))
        chosen = bounds.topk(layout.most_pages).indices
        of_entries = chosen.gather(2, layout.rank.expand(-1, chosen.shape[1], -1))
        return of_entries * layout.stride + layout.offset

    def _layout(
        self, seq_lens: tuple[int, ...], budgets: tuple[int, ...], device: torch.device
    ) -> Layout:
        wanted, offsets, strides = [], [], []
        for seq_len, budget in zip(seq_lens, budgets, strict=True):
            num_pages, rest = divmod(seq_len, PAGE_SIZE)
            wanted.append(min(max(budget - rest, 0) // PAGE_SIZE, num_pages))
            in_pages = torch.arange(wanted[-1] * PAGE_SIZE)
            tail = torch.arange(seq_len - min(rest, budget), seq_len)
            offsets.append(torch.cat([in_pages % PAGE_SIZE, tail]))
            strides.append(torch.full_like(offsets[-1], PAGE_SIZE))
            strides[-1][len(in_pages) :] = 0
        offset = pad_sequence(offsets, batch_first=True, padding_value=-1)
        stride = pad_sequence(strides, batch_first=True)
        rank = (torch.arange(offset.shape[1]) // PAGE_SIZE).clamp(max=max(*wanted, 1) - 1)
        tensors = (rank.expand_as(offset), stride, offset)
        num_pages = torch.tensor([seq_len // PAGE_SIZE for seq_len in seq_lens], device=device)
        return Layout(
            max(wanted), num_pages[:, None, None], *(x[:, None].to(device) for x in tensors)
        )
