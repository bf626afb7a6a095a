"""No sparsity: drafts attend to everything. The upper bound of acceptance, and a debugging aid."""

from __future__ import annotations

from sgl_vegas.selection.policy import SelectionPolicy


class DensePolicy(SelectionPolicy):
    makes_tables = False
