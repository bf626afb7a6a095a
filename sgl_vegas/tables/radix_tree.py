"""Has SGLang's radix tree keep a request's tables when it caches the request's KV."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_vegas.config import VegasConfig
from sgl_vegas.sglang_compat import BasePrefixCache, python_tree_problem
from sgl_vegas.tables.prefix_tables import PrefixTables

logger = logging.getLogger(__name__)


class _KeepsTables:
    """Mixed into the class of a tree of SGLang's that is Python."""

    __slots__ = ()  # an object can only become one of a class with its own layout

    _vegas_store: Callable[[Any, Any, int, int], None]
    _vegas_inserted: tuple[Any, int] | None = None

    def insert(self, params: Any) -> Any:
        result = super().insert(params)  # pyright: ignore[reportAttributeAccessIssue]
        self._vegas_inserted = result.last_device_node, len(params.key)
        return result

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        super().cache_unfinished_req(req, chunked=chunked, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if not chunked:
            self._vegas_store(req, req.last_node, req.req_pool_idx, req.cache_protected_len)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        row, node, length = req.req_pool_idx, req.last_node, req.cache_protected_len
        self._vegas_inserted = None
        super().cache_finished_req(req, is_insert, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # Retracted requests leave the tree as it is: what they learnt about their prompt stays.
        node, length = self._vegas_inserted or (node, length)
        self._vegas_store(req, node, row, length)


def warn_not_kept(why: str) -> None:
    logger.warning(
        "VEGAS keeps no tables in the prefix cache (%s): drafts start from the prompt's last "
        "query.",
        why,
    )


def keep_tables(tree: BasePrefixCache, tables: PrefixTables, config: VegasConfig) -> bool:
    """Have `tree` store requests' tables in `tables` from now on.

    Returns False, and says why in the log, where the tree can't: drafts then start from the
    prompt's last query.
    """
    problem = python_tree_problem(tree)
    if problem is not None:
        warn_not_kept(problem)
        return False

    def store(req: Any, handle: Any, row: int, length: int) -> None:
        node = tree.resolve_node_handle(handle)
        # Without output the prefill hasn't come to the end of the prompt, where tables are made.
        if node is None or not req.output_ids or config.budget(length) >= length:
            return
        # Under overlap the tables may be an iteration newer than what is cached.
        tables.store(node, row, length, config.budget(length + config.num_draft_tokens))

    cls = type(tree)
    tree.__class__ = type(f"Vegas{cls.__name__}", (_KeepsTables, cls), {"__slots__": ()})
    tree._vegas_store = store  # pyright: ignore[reportAttributeAccessIssue]
    return True
