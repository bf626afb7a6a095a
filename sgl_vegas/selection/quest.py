"""Quest (arXiv 2406.10774) as MagicDec drafts with it: page bounds, ranked at every draft step."""

from __future__ import annotations

import torch

from sgl_vegas.selection.policy import SelectionPolicy

PAGE_SIZE = 16


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

    def extra_reads(self, seq_len: int) -> float:
        return seq_len / PAGE_SIZE

    def select_step(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        table: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        kv_len, num_kv_heads, head_dim = keys.shape
        num_pages, rest = divmod(kv_len, PAGE_SIZE)
        pages = keys[: kv_len - rest].view(num_pages, PAGE_SIZE, num_kv_heads, head_dim)
        low, high = (
            bound.permute(1, 2, 0).float() for bound in (pages.amin(dim=1), pages.amax(dim=1))
        )
        queries = q.float().view(num_kv_heads, -1, head_dim)
        # The larger of the two products: the maximum's where q is positive, else the minimum's.
        bounds = queries.clamp(min=0) @ high + queries.clamp(max=0) @ low
        budget = self.config.budget(kv_len)
        wanted = min(max(budget - rest, 0) // PAGE_SIZE, num_pages)
        chosen = bounds.mean(dim=1).topk(wanted, sorted=False).indices
        within = torch.arange(PAGE_SIZE, device=keys.device)
        positions = (chosen.unsqueeze(-1) * PAGE_SIZE + within).flatten(1)
        tail = torch.arange(kv_len - min(rest, budget), kv_len, device=keys.device)
        return torch.cat([positions, tail.expand(num_kv_heads, -1)], dim=1)
