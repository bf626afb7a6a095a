"""Which tables a request drafts by until its own first verify pass."""

from __future__ import annotations

from typing import Any

from sgl_vegas.config import VegasConfig
from sgl_vegas.sglang_compat import ScheduleBatch
from sgl_vegas.tables.prefix_tables import PrefixTables, to_device
from sgl_vegas.tables.request_tables import RequestTables


class FirstTables:
    """Those of the request's cached prefix, or those that the prompt's last query makes."""

    def __init__(
        self, config: VegasConfig, tables: RequestTables, prefixes: PrefixTables | None
    ) -> None:
        """Args:
        prefixes: None where tables aren't reused.
        """
        self._config = config
        self._tables = tables
        self.prefixes = prefixes
        # Whether the prefix cache keeps tables, known once SGLang has built it.
        self.connected = False

    def before_prefill(self, batch: ScheduleBatch) -> list[int]:
        """Set the tables of a prefill batch's requests as far as that can be done now.

        Returns the indices of those that need the prompt's last query.
        """
        seq_lens: Any = batch.seq_lens_cpu
        scored, dense = [], []
        for i, (req, seq_len) in enumerate(zip(batch.reqs, seq_lens.tolist(), strict=True)):
            if req is batch.chunked_req or self._config.first_table == "none":
                dense.append(req.req_pool_idx)  # in the middle of its prompt, or by choice
            elif not (self.connected and self._take(batch.tree_cache, req, seq_len)):
                scored.append(i)
        if dense:
            self._tables.drop(to_device(dense, self._tables.counts.device))
        return scored

    def _take(self, tree: Any, req: Any, seq_len: int) -> bool:
        budget = self._config.budget(seq_len)
        if self.prefixes is None or budget >= seq_len:
            return False
        node = tree.resolve_node_handle(req.last_node)
        length = len(req.prefix_indices)
        if node is None:
            return False
        # What follows the prefix is attended to as a whole, once: not more than tables hold.
        return self.prefixes.take(node, req.req_pool_idx, length, seq_len - budget)
