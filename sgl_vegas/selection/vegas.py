"""Vegas: rank by the attention of the verify pass's first and last query (paper section 3.2)."""

from __future__ import annotations

from sgl_vegas.selection.policy import Collected
from sgl_vegas.selection.ranked import RankedPolicy


class VegasPolicy(RankedPolicy):
    """Collect-2-Query. The only policy whose tables CUDA kernels make beside verification."""

    collects = Collected.FIRST_AND_LAST
