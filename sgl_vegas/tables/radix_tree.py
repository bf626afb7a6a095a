"""Has SGLang's radix tree keep a request's tables when it caches the request's KV."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.sglang_compat import BasePrefixCache, python_tree_problem
from sgl_vegas.tables.prefix_tables import PrefixTables

logger = logging.getLogger(__name__)


Store = Callable[[Any, Any, int, int], None]


def _keeping_class(cls: type, store: Store) -> type:
    """A subclass of a tree's class that calls `store(request, node, row, length)` where the tree
    caches KV."""
    base: Any = cls
    # While a request's KV is cached, what is inserted: (node, length). Not longer: whoever holds a
    # node keeps its table.
    inserted: list[tuple[Any, int]] | None = None

    def insert(self: Any, params: Any) -> Any:
        result = base.insert(self, params)
        if inserted is not None:
            inserted.append((result.last_device_node, len(params.key)))
        return result

    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        base.cache_unfinished_req(self, req, chunked=chunked, **kwargs)
        if not chunked:
            store(req, req.last_node, req.req_pool_idx, req.cache_protected_len)

    def cache_finished_req(self: Any, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        nonlocal inserted
        # Retracted requests leave the tree as it is: what they learnt about their prompt stays.
        row, inserted = req.req_pool_idx, [(req.last_node, req.cache_protected_len)]
        try:
            base.cache_finished_req(self, req, is_insert, **kwargs)
            node, length = inserted[-1]
        finally:
            inserted = None
        store(req, node, row, length)

    methods = (insert, cache_unfinished_req, cache_finished_req)
    # No slots, so that an object of the class can become one of this.
    namespace = {"__slots__": (), **{method.__name__: method for method in methods}}
    return type(f"Vegas{cls.__name__}", (cls,), namespace)


def warn_not_kept(why: str) -> None:
    logger.warning(
        "VEGAS keeps no tables in the prefix cache (%s): drafts start from the prompt's last "
        "query.",
        why,
    )


def keep_tables(tree: BasePrefixCache, tables: PrefixTables, policy: SelectionPolicy) -> bool:
    """Have `tree` store requests' tables, which `policy` makes, in `tables` from now on.

    Returns False, and says why in the log, where the tree can't: drafts then start from the
    prompt's last query.
    """
    config = policy.config
    problem = python_tree_problem(tree)
    if problem is not None:
        warn_not_kept(problem)
        return False

    def store(req: Any, handle: Any, row: int, length: int) -> None:
        node = tree.resolve_node_handle(handle)
        if node is None or policy.table_size(length) >= length:
            return
        # Under overlap the tables may be an iteration newer than what is cached.
        tables.store(node, row, length, policy.table_size(length + config.num_draft_tokens))

    tree.__class__ = _keeping_class(type(tree), store)
    return True
