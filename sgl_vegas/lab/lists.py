"""What each lane's drafts attend to, gathered from its text once a selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.text import Text

if TYPE_CHECKING:
    from sgl_vegas.lab.run import Lane


class AttendedLists:
    """Keys and values of the lanes' lists, in one batch a layer.

    An entry is a recent token's (committed since the table was made, or drafted) in the first
    `num_recent` places, and a selected one's behind them.
    """

    def __init__(self, model: LabModel, lanes: Sequence[Lane], num_steps: int) -> None:
        # At most num_steps + 1 committed since the last table, and the next token and the drafts.
        self.num_recent = 2 * (num_steps + 1)
        most = max(map(width_of, lanes))
        shape = (
            *(model.num_layers, len(lanes), model.num_kv_heads),
            *(self.num_recent + most, model.head_dim),
        )
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self._places = torch.arange(shape[3], device=model.device)
        self._every = torch.arange(len(lanes), device=model.device)
        self._selected = torch.zeros(
            (model.num_layers, len(lanes)), dtype=torch.int64, device=model.device
        )
        self._counts = [0] * len(lanes)
        self._totals = [1] * len(lanes)
        self._recent = [0] * len(lanes)

    def begin(self, lanes: Sequence[Lane], bases: list[int], seq_lens: list[int]) -> None:
        """Start an iteration: the tokens of `[base, seq_len)` are a lane's recent ones."""
        for index, (lane, base, seq_len) in enumerate(zip(lanes, bases, seq_lens, strict=True)):
            recent, text = seq_len - base, lane.text
            self.keys[:, index, :, :recent] = text.keys[:, base:seq_len].transpose(1, 2)
            self.values[:, index, :, :recent] = text.values[:, base:seq_len].transpose(1, 2)
            self._recent[index], self._totals[index] = recent, seq_len
        self._ends = torch.tensor(self._recent, device=self.keys.device)

    def put(self, index: int, layer: int, text: Text, positions: torch.Tensor) -> None:
        """Attend to `positions`, (k,) for all KV heads or (num_kv_heads, k) for each."""
        count, start = positions.shape[-1], self.num_recent
        heads = torch.arange(self.keys.shape[2], device=positions.device)[:, None]
        for ours, theirs in ((self.keys, text.keys), (self.values, text.values)):
            ours[layer, index, :, start : start + count] = theirs[layer, positions, heads]
        self._selected[layer, index] = count
        self._counts[index] = count

    def append(self, layer: int, step: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the tokens of a draft step, (num_lanes, num_kv_heads, head_dim)."""
        self.keys[layer, self._every, :, self._ends + step] = keys
        self.values[layer, self._every, :, self._ends + step] = values

    def attended(self, layer: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values (num_lanes, num_kv_heads, n, head_dim), and which of them count,
        (num_lanes, n) bool."""
        recent = self._places < (self._ends + step + 1)[:, None]
        selected = self._places < (self.num_recent + self._selected[layer])[:, None]
        mask = torch.where(self._places < self.num_recent, recent, selected)
        return self.keys[layer], self.values[layer], mask

    def shares(self, step: int) -> list[float]:
        """Of each lane, the entries that draft `step` attended to as a share of all."""
        return [
            (count + recent + step + 1) / (total + step + 1)
            for count, recent, total in zip(self._counts, self._recent, self._totals, strict=True)
        ]


def width_of(lane: Lane) -> int:
    """Most entries that a lane selects while its text lasts."""
    longest = len(lane.text.ids)
    if not (lane.policy.makes_tables or lane.policy.reselects):
        return longest
    return lane.policy.config.budget(longest)
