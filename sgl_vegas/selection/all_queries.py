"""All queries of the verify pass: PillarAttn of SparseSpec (arXiv 2512.01278)."""

from __future__ import annotations

from sgl_vegas.selection.policy import Collected
from sgl_vegas.selection.ranked import RankedPolicy


class AllQueriesPolicy(RankedPolicy):
    """The mean over all gamma + 1 verified queries, rejected ones too.

    Costs (gamma + 1) / 2 times the scores that vegas collects.
    """

    collects = Collected.ALL
