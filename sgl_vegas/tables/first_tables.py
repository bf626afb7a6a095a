"""Which tables a request drafts by until its own first verify pass."""

from __future__ import annotations

from typing import Any

from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.sglang_compat import ScheduleBatch
from sgl_vegas.tables.prefix_tables import PrefixTables, to_device
from sgl_vegas.tables.request_tables import RequestTables


class FirstTables:
    """Those of the request's cached prefix, or those that the prompt's last query makes."""

    def __init__(
        self, policy: SelectionPolicy, tables: RequestTables, prefixes: PrefixTables | None
    ) -> None:
        """Args:
        prefixes: None where tables aren't reused.
        """
        self._policy, self._config = policy, policy.config
        self._tables = tables
        self.prefixes = prefixes
        # Whether the prefix cache keeps tables, known once SGLang has built it.
        self.connected = False
        # KV lengths of a batch, summed up, that the kernels make tables for; None: any.
        self.score_capacity: int | None = None

    def before_prefill(self, batch: ScheduleBatch) -> list[int]:
        """Set the tables of a prefill batch's requests as far as that can be done now.

        Returns the indices of those that need the prompt's last query.
        """
        seq_lens: Any = batch.seq_lens_cpu
        scored, unfinished, total = [], [], 0
        for i, (req, seq_len) in enumerate(zip(batch.reqs, seq_lens.tolist(), strict=True)):
            if req is batch.chunked_req:  # in the middle of its prompt
                unfinished.append(req.req_pool_idx)
                self._know(req, 0)
            elif not (self.connected and self._take(batch.tree_cache, req, seq_len)):
                scored.append(i)
                total += seq_len
                self._know(req, seq_len if self._makes_table(seq_len, total) else 0)
        if unfinished:
            self._tables.drop(to_device(unfinished, self._tables.counts.device))
        return scored

    def after_prefill(self, batch: ScheduleBatch) -> None:
        if self._config.first_table == "none":
            # Scored all the same: kernels measure the first verify pass's scores against those.
            for req in batch.reqs:
                self._know(req, 0)
            self._tables.drop(batch.req_pool_indices)

    def verified(self, batch: ScheduleBatch) -> None:
        """Called for a verify pass, which makes tables of what is committed before it."""
        total = 0
        for req in batch.reqs:
            # Under overlap the output may be an iteration's tokens short.
            seq_len = len(req.origin_input_ids) + len(req.output_ids) - 1
            total += seq_len + 2 * self._config.num_draft_tokens
            # Where overlap waits for a grammar, a request can have ended, and given its row back,
            # before the last pass that it is in.
            if req.req_pool_idx is not None and self._makes_table(seq_len, total):
                self._know(req, seq_len)

    def _makes_table(self, seq_len: int, total: int) -> bool:
        """Whether a pass makes a table for a request, the lengths of which and of those before it
        in the batch sum up to `total`; if not, the request keeps what it has."""
        fits = self.score_capacity is None or total <= self.score_capacity
        return fits and self._policy.table_size(seq_len) < seq_len

    def _know(self, req: Any, base: int) -> None:
        self._tables.known_bases[req.req_pool_idx] = base

    def _take(self, tree: Any, req: Any, seq_len: int) -> bool:
        budget = self._config.budget(seq_len)
        if self.prefixes is None or self._policy.table_size(seq_len) >= seq_len:
            return False
        node = tree.resolve_node_handle(req.last_node)
        length = len(req.prefix_indices)
        if node is None:
            return False
        # What a table wasn't chosen from is attended to as a whole, once: not more than a budget.
        # Nor is a table worth much that was chosen for another text that far.
        return self.prefixes.take(node, req.req_pool_idx, length, seq_len - budget, length + budget)
