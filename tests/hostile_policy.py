"""A drafting policy that makes wrong tables, of the kind that a file names; for server tests."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import Collected, SelectionPolicy
from sgl_vegas.selection.vegas import VegasPolicy

KIND_FILE = "HOSTILE_TABLES_KIND_FILE"
KINDS = ("right", "random", "empty", "stale", "out of range")


class HostilePolicy(SelectionPolicy):
    """What the file named by the environment says: read at a pass's first layer."""

    collects = Collected.FIRST_AND_LAST

    def __init__(self, config: VegasConfig) -> None:
        super().__init__(config)
        self._right = VegasPolicy(config)
        self._last: dict[int, torch.Tensor] = {}
        self._kind = "right"

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        if layer == 0:
            self._kind = Path(os.environ[KIND_FILE]).read_text()
        budget = self.config.budget(seq_len)
        right = self._right.select(layer, scores, seq_len, device)
        if self._kind == "random":
            return torch.randint(seq_len, (budget,), device=device)
        if self._kind == "empty":
            return torch.empty(0, dtype=torch.int64, device=device)
        if self._kind == "stale":
            # The first table that was ever made, most likely of another request.
            return self._last.setdefault(layer, right)
        if self._kind == "out of range":
            return torch.randint(-(2**31), 2**31 - 1, (budget,), device=device)
        return right
