"""The last accepted token's query: SpecExtend's guidance (arXiv 2505.20776), a list a layer."""

from __future__ import annotations

from sgl_vegas.selection.policy import Collected
from sgl_vegas.selection.ranked import RankedPolicy


class LastAcceptedPolicy(RankedPolicy):
    """SpecExtend ranks for a separate draft model by the target's last layer; here every layer
    ranks for itself, since the target drafts.

    Which query it is turns out only after the pass: the scores are computed again, of that query
    alone.
    """

    collects = Collected.LAST_ACCEPTED
