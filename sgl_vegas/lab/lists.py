"""What each lane's drafts attend to: gathered from its text once a selection."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_vegas.lab.groups import Lane
from sgl_vegas.lab.model import LabModel


class AttendedLists:
    """Keys and values of the lanes' lists, in one batch a layer.

    An entry is a recent token's (committed since the table was made, or drafted) in the first
    `num_recent` places, and a selected one's in the `num_selected` behind them. Nothing here but
    `begin` waits for the device.

    Attributes:
        keys, values: (num_layers, num_lanes, num_kv_heads, n, head_dim).
        counts: (num_layers, num_lanes, num_kv_heads, n) bool, which of them are entries.
        bases: (num_lanes,) int64, where each lane's recent tokens begin.
        texts: (num_lanes,) int64, the index of each lane's text.
    """

    def __init__(self, model: LabModel, lanes: Sequence[Lane], num_steps: int) -> None:
        # At most num_steps + 1 committed since the last table, and the next token and the drafts.
        self.num_recent = 2 * (num_steps + 1)
        self._most_committed = num_steps + 1
        self._stack, device = lanes[0].text.stack, model.device
        self.num_selected = max(map(width_of, lanes))
        width = self.num_recent + self.num_selected
        shape = (model.num_layers, len(lanes), model.num_kv_heads, width)
        self.keys = torch.zeros((*shape, model.head_dim), dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.counts = torch.zeros(shape, dtype=torch.bool, device=device)
        self.texts = torch.tensor([lane.text.index for lane in lanes], device=device)
        self._every = torch.arange(len(lanes), device=device)
        self._heads = torch.arange(model.num_kv_heads, device=device)[:, None]

    def begin(self, bases: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Start an iteration: the tokens of `[base, seq_len)` are a lane's recent ones."""
        self.bases, self._totals = torch.tensor([bases, seq_lens], device=self.keys.device)
        self._ends = self._totals - self.bases
        within = torch.arange(self._most_committed, device=self.keys.device)
        # What lies behind seq_len doesn't count yet, whatever it is.
        positions = (self.bases[:, None] + within).clamp(max=self._stack.keys.shape[2] - 1)
        texts = self.texts[:, None]
        for ours, theirs in ((self.keys, self._stack.keys), (self.values, self._stack.values)):
            ours[:, :, :, : len(within)] = theirs[:, texts, positions].transpose(2, 3)
        places = torch.arange(self.num_recent, device=self.keys.device)
        self.counts[..., : self.num_recent] = (places < self._ends[:, None])[:, None]

    def put(self, layer: int, lanes: torch.Tensor, positions: torch.Tensor) -> None:
        """Attend to `positions`, those that aren't negative.

        Args:
            lanes: (m,) int64, which lanes they are of.
            positions: (m, k) integer for all KV heads, or (m, num_kv_heads, k) for each.
        """
        if positions.dim() == 2:
            positions = positions[:, None].expand(-1, len(self._heads), -1)
        at = positions.clamp(min=0)
        texts = self.texts[lanes][:, None, None]
        start, end = self.num_recent, self.num_recent + positions.shape[-1]
        for ours, theirs in ((self.keys, self._stack.keys), (self.values, self._stack.values)):
            ours[layer, :, :, start:end][lanes] = theirs[layer][texts, at, self._heads]
        self.counts[layer, :, :, start:end][lanes] = positions >= 0
        self.counts[layer, :, :, end:].index_fill_(0, lanes, False)

    def append(self, layer: int, step: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the tokens of a draft step, (num_lanes, num_kv_heads, head_dim)."""
        ends = self._ends + step
        self.keys[layer, self._every, :, ends] = keys
        self.values[layer, self._every, :, ends] = values
        self.counts[layer].scatter_(2, ends[:, None, None].expand(-1, len(self._heads), 1), True)

    def scores(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Scaled logits of one query a lane, (num_lanes, num_heads, head_dim): (num_lanes,
        num_heads, n) float32 (float64 if q is), `-inf` where there is no entry."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        queries = q.to(dtype).unflatten(1, (len(self._heads), -1))
        scores = queries @ self.keys[layer].to(dtype).transpose(2, 3) * scale
        return scores.masked_fill_(~self.counts[layer].unsqueeze(2), float("-inf")).flatten(1, 2)

    def shares(self, step: int) -> torch.Tensor:
        """(num_lanes,) float32: the entries that draft `step` attended to as a share of all, the
        last layer's for every layer's and the mean over its heads."""
        entries = self.counts[-1].sum(dim=-1).float().mean(dim=-1)
        return entries / (self._totals + step + 1)


def width_of(lane: Lane) -> int:
    """Most entries that a lane selects while its text lasts."""
    return max(map(lane.policy.attended, range(lane.text.prompt_len, len(lane.text) + 1)))
