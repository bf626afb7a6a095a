"""Drafting and verifying along common texts: many texts and policies in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_vegas.attention.torch_reference import query_scores
from sgl_vegas.lab.lists import AttendedLists
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.sampling import Sampling
from sgl_vegas.lab.text import Text
from sgl_vegas.selection.policy import SelectionPolicy


@dataclass
class Lane:
    """One policy drafting along one text, and what was seen of it.

    Attributes:
    accepted: of each iteration, how many of its drafts were accepted.
    read_shares: of each iteration, the KV entries that a draft step reads, for choosing too, as a
        share of all; the mean over its steps.
    covered: of some draft steps, (step, share of attention weight that lay in what was attended
        to), the mean over layers and heads.
    """

    text: Text
    policy: SelectionPolicy
    accepted: list[int] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    covered: list[tuple[int, float]] = field(default_factory=list)


class LabRun:
    """Runs lanes in step, each at its own place in its text.

    A lane's state between iterations is what the server keeps of a request: `seq_len` committed
    tokens, the next token (at position seq_len, not processed yet), and tables made at `base`.
    """

    def __init__(
        self,
        model: LabModel,
        lanes: Sequence[Lane],
        num_steps: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.model, self.lanes = model, list(lanes)
        self.num_steps, self.sampling = num_steps, sampling
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.seq_lens = [lane.text.prompt_len for lane in lanes]
        self.bases = list(self.seq_lens)
        self.lists = AttendedLists(model, lanes, num_steps)
        self.tables: list[list[torch.Tensor | None]] = [
            [None] * model.num_layers for _ in self.lanes
        ]
        for index, lane in enumerate(self.lanes):
            for layer in range(model.num_layers):
                self._first_table(index, lane, layer)

    @torch.inference_mode()
    def iterate(self, measure_coverage: bool) -> None:
        """One draft and verify round of every lane."""
        self.lists.begin(self.lanes, self.bases, self.seq_lens)
        wanted = self._text_tokens()
        drafts = self._draft(wanted, measure_coverage)
        accepted = (drafts[:, 1:] == wanted).long().cumprod(dim=1).sum(dim=1)
        for lane, count in zip(self.lanes, accepted.tolist(), strict=True):
            lane.accepted.append(count)
        self._verify(drafts)
        for index, lane in enumerate(self.lanes):
            verified_from = self.seq_lens[index]
            self.seq_lens[index] += lane.accepted[-1] + 1
            # Without a table, there is all that is committed to select from.
            only_steps = lane.policy.reselects and not lane.policy.makes_tables
            self.bases[index] = self.seq_lens[index] if only_steps else verified_from

    # ---- drafts ----

    def _draft(self, wanted: torch.Tensor, measure_coverage: bool) -> torch.Tensor:
        """(num_lanes, num_steps + 1) int64: the last committed tokens and the drafts, where the
        texts have `wanted`, (num_lanes, num_steps)."""
        device = self.model.device
        tokens = [
            torch.stack(
                [lane.text.ids[at] for lane, at in zip(self.lanes, self.seq_lens, strict=True)]
            )
        ]
        on_text = torch.ones(len(self.lanes), dtype=torch.bool, device=device)
        reads = [0.0] * len(self.lanes)
        for step in range(self.num_steps):
            coverage: list[torch.Tensor] = []
            positions = torch.tensor(self.seq_lens, device=device) + step

            def attend(layer, q, k, v, scale, step=step, coverage=coverage) -> torch.Tensor:
                return self._attend_draft(
                    layer, step, q, k, v, scale, coverage if measure_coverage else None
                )

            logits = self.model.forward(tokens[-1][:, None], positions[:, None], attend)[:, -1]
            tokens.append(self._next_drafts(logits, wanted[:, step], step, on_text))
            on_text &= tokens[-1] == wanted[:, step]
            for index, share in enumerate(self.lists.shares(step)):
                reads[index] += share / self.num_steps
            if coverage:
                for lane, mean in zip(
                    self.lanes, torch.stack(coverage).mean(dim=0).tolist(), strict=True
                ):
                    lane.covered.append((step, mean))
        for lane, share, seq_len in zip(self.lanes, reads, self.seq_lens, strict=True):
            lane.read_shares.append(share + lane.policy.extra_reads(seq_len) / seq_len)
        return torch.stack(tokens, dim=1)

    def _attend_draft(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        coverage: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        self.lists.append(layer, step, k[:, 0], v[:, 0])
        for index, lane in enumerate(self.lanes):
            if not lane.policy.reselects:
                continue
            base = self.bases[index]
            positions = lane.policy.select_step(
                layer,
                step,
                q[index, 0],
                lane.text.keys[layer, :base],
                self.tables[index][layer],
                scale,
            )
            if positions is not None:
                self.lists.put(index, layer, lane.text, positions)
        keys, values, mask = self.lists.attended(layer, step)
        if coverage is not None:
            coverage.append(self._coverage(layer, q[:, 0], keys, mask, scale))
        output = scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask[:, None, None],
            scale=scale,
            enable_gqa=True,
        )
        return output.transpose(1, 2)

    def _coverage(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """(num_lanes,) float32: mean share of the heads' weight that the attended entries have."""
        shares = []
        recent = self.lists.num_recent
        for index, lane in enumerate(self.lanes):
            own = keys[index].transpose(0, 1)
            visible = torch.tensor([len(own)], device=q.device)
            listed = query_scores(q[index, None], own, visible, scale)[0]
            listed = listed.masked_fill(~mask[index], float("-inf"))
            base = self.bases[index]
            before = query_scores(
                q[index, None],
                lane.text.keys[layer, :base],
                torch.tensor([base], device=q.device),
                scale,
            )[0]
            # Recent tokens are in the list only, those before them in both.
            every = torch.cat([before, listed[:, :recent]], dim=1)
            shares.append((listed.logsumexp(dim=1) - every.logsumexp(dim=1)).exp().mean())
        return torch.stack(shares)

    def _next_drafts(
        self, logits: torch.Tensor, wanted: torch.Tensor, step: int, on_text: torch.Tensor
    ) -> torch.Tensor:
        """(num_lanes,) int64. Behind its first rejection a lane drafts on by itself, for what the
        pass's last query will be."""
        at = [
            seq_len + step + 1 - lane.text.prompt_len
            for lane, seq_len in zip(self.lanes, self.seq_lens, strict=True)
        ]
        target = torch.stack([lane.text.logits[i] for lane, i in zip(self.lanes, at, strict=True)])
        coins = torch.stack([lane.text.coins[i] for lane, i in zip(self.lanes, at, strict=True)])
        coupled = self.sampling.couple(logits, target, wanted, coins, self.generator)
        if self.sampling.is_greedy:
            return coupled
        return torch.where(on_text, coupled, self.sampling.next_tokens(logits, self.generator))

    def _text_tokens(self) -> torch.Tensor:
        """(num_lanes, num_steps) int64: what the texts say where this iteration drafts."""
        return torch.stack(
            [
                lane.text.ids[seq_len + 1 : seq_len + 1 + self.num_steps]
                for lane, seq_len in zip(self.lanes, self.seq_lens, strict=True)
            ]
        )

    # ---- verification ----

    def _verify(self, drafts: torch.Tensor) -> None:
        """Make the next tables: from a pass over the drafts where a policy wants scores."""
        for index, lane in enumerate(self.lanes):
            if not lane.policy.needs_scores:
                for layer in range(self.model.num_layers):
                    self._select(index, layer, None, self.seq_lens[index])
        scored = [i for i, lane in enumerate(self.lanes) if lane.policy.needs_scores]
        if not scored:
            return

        def attend(layer, q, k, v, scale) -> torch.Tensor:
            outputs = [
                self._attend_verify(index, layer, q[i], k[i], v[i], scale)
                for i, index in enumerate(scored)
            ]
            return torch.stack(outputs)

        starts = torch.tensor([self.seq_lens[i] for i in scored], device=drafts.device)
        positions = starts[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        self.model.forward(drafts[scored], positions, attend)

    def _attend_verify(
        self,
        index: int,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """One lane's pass over all KV: the text's, and that of its drafts."""
        lane, seq_len, width = self.lanes[index], self.seq_lens[index], len(q)
        device = q.device
        before = query_scores(
            q,
            lane.text.keys[layer, :seq_len],
            torch.full((width,), seq_len, device=device),
            scale,
        )
        own = query_scores(q, k, torch.arange(1, width + 1, device=device), scale)
        scores = torch.cat([before, own], dim=-1)
        picked = lane.policy.collects.places(width, lane.accepted[-1])
        self._select(index, layer, scores[picked], seq_len)
        weights = scores.softmax(dim=-1).to(v.dtype)
        values = torch.cat([lane.text.values[layer, :seq_len], v])
        group = q.shape[1] // v.shape[1]
        by_head = weights.unflatten(1, (-1, group)).permute(1, 0, 2, 3).flatten(1, 2)
        output = by_head @ values.transpose(0, 1)  # (kv_heads, width * group, head_dim)
        return output.unflatten(1, (width, group)).transpose(0, 1).flatten(1, 2)

    def _first_table(self, index: int, lane: Lane, layer: int) -> None:
        """As after a prefill: from the prompt's last query."""
        scores, prompt_len = None, lane.text.prompt_len
        if lane.policy.needs_scores:
            scores = query_scores(
                lane.text.last_queries[None, layer],
                lane.text.keys[layer, :prompt_len],
                torch.tensor([prompt_len], device=self.model.device),
                lane.text.scale,
            )
        self._select(index, layer, scores, prompt_len)

    def _select(self, index: int, layer: int, scores: torch.Tensor | None, seq_len: int) -> None:
        policy, text = self.lanes[index].policy, self.lanes[index].text
        if policy.makes_tables:
            if policy.config.budget(seq_len) >= seq_len:
                scores = None
            positions = policy.select(layer, scores, seq_len, self.model.device)
            self.tables[index][layer] = positions
        else:
            positions = torch.arange(seq_len, device=self.model.device)
        if not policy.reselects:
            self.lists.put(index, layer, text, positions)


def run_lanes(
    model: LabModel,
    lanes: Sequence[Lane],
    num_steps: int,
    iterations: int,
    sampling: Sampling,
    seed: int,
    coverage_every: int,
    progress: Callable[[int, int], None],
) -> None:
    """Run `iterations` of every lane; results are in the lanes.

    Texts must have `iterations * (num_steps + 1) + 1` tokens behind the prompt.

    Args:
        coverage_every: iterations between two that measure coverage; 0 for never.
    """
    run = LabRun(model, lanes, num_steps, sampling, seed)
    for iteration in range(iterations):
        run.iterate(coverage_every > 0 and iteration % coverage_every == 0)
        progress(iteration + 1, iterations)
