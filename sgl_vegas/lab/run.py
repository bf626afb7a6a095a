"""Drafting and verifying along common texts: many texts and policies in one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from sgl_vegas.attention.torch_reference import query_scores
from sgl_vegas.lab.lists import AttendedLists, Lane, LaneGroup, grouped
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.sampling import Sampling
from sgl_vegas.lab.text import attend_along, one_query_attention
from sgl_vegas.selection.ranked import RankedPolicy

# Most scores that a text's lanes have at a time in a verify pass.
MAX_SCORES = 2**26


class LabRun:
    """Runs lanes in step, each at its own place in its text; all texts are of one stack.

    A lane's state between iterations is what the server keeps of a request: `seq_len` committed
    tokens, the next token (at position seq_len, not processed yet), and tables made at `base`.
    Lengths are kept on the host too, so that an iteration waits for the device only at its ends.
    """

    @torch.inference_mode()
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
        # Of a group that reselects by tables, by its first lane and the layer.
        self._padded_tables: dict[tuple[int, int], torch.Tensor] = {}
        self._stack = lanes[0].text.stack
        most = MAX_SCORES // (
            (num_steps + 1) * lanes[0].text.last_queries.shape[1] * self._stack.keys.shape[2]
        )
        self._by_text = grouped(self.lanes, lambda lane: lane.text.index)
        self._scored = grouped(
            self.lanes,
            lambda lane: (lane.text.index, _is_ranked(lane)) if lane.policy.needs_scores else None,
            max(most, 1),
        )
        self._reselecting = grouped(
            self.lanes, lambda lane: id(lane.policy) if lane.policy.reselects else None
        )
        # Of those that reselect, only who makes tables is asked after a pass.
        self._unscored = [
            index
            for index, lane in enumerate(lanes)
            if not lane.policy.needs_scores
            and (lane.policy.makes_tables or not lane.policy.reselects)
        ]
        # The same for all layers of a pass.
        self._lens_of = functools.lru_cache(maxsize=len(self._scored) or 1)(self._device_lens)
        for layer in range(model.num_layers):
            self._first_tables(layer)

    @torch.inference_mode()
    def iterate(self, measure_coverage: bool) -> None:
        """One draft and verify round of every lane."""
        self.lists.begin(self.bases, self.seq_lens)
        self._starts = torch.tensor(self.seq_lens, device=self.model.device)
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
        tokens = [self._stack.ids[self.lists.texts, self._starts]]
        on_text = torch.ones_like(tokens[0], dtype=torch.bool)
        shares: list[torch.Tensor] = []
        coverage: list[torch.Tensor] = []
        for step in range(self.num_steps):
            of_layers: list[torch.Tensor] | None = [] if measure_coverage else None

            def attend(layer, q, k, v, scale, step=step, of_layers=of_layers) -> torch.Tensor:
                return self._attend_draft(layer, step, q, k, v, scale, of_layers)

            positions = self._starts + step
            logits = self.model.forward(tokens[-1][:, None], positions[:, None], attend)[:, -1]
            tokens.append(self._next_drafts(logits, wanted[:, step], step, on_text))
            on_text &= tokens[-1] == wanted[:, step]
            shares.append(self.lists.shares(step))
            if of_layers:
                coverage.append(torch.stack(of_layers).mean(dim=0))
        self._note(torch.stack(shares, dim=1).mean(dim=1).tolist(), coverage)
        return torch.stack(tokens, dim=1)

    def _note(self, reads: list[float], coverage: list[torch.Tensor]) -> None:
        """Keep what was seen of an iteration's drafts; `coverage` are (num_lanes,), one a step."""
        for lane, share, seq_len in zip(self.lanes, reads, self.seq_lens, strict=True):
            lane.read_shares.append(share + lane.policy.extra_reads(seq_len) / seq_len)
        if coverage:
            of_lanes = torch.stack(coverage, dim=1).tolist()
            for lane, of_steps in zip(self.lanes, of_lanes, strict=True):
                lane.covered.extend(enumerate(of_steps))

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
        for group in self._reselecting:
            self._reselect(group, layer, step, q[:, 0], scale)
        if coverage is not None:
            coverage.append(self._coverage(layer, q[:, 0], scale))
        lists = self.lists
        of_layer = (lists.keys[layer], lists.values[layer], lists.counts[layer])
        return one_query_attention(q[:, 0], *of_layer, scale)[:, None]

    def _reselect(
        self, group: LaneGroup, layer: int, step: int, q: torch.Tensor, scale: float
    ) -> None:
        policy = self.lanes[group.lanes[0]].policy
        bases = tuple(self.bases[index] for index in group.lanes)
        if step == 0 and policy.makes_tables:
            of_lanes = (self.tables[index][layer] for index in group.lanes)
            made = [table for table in of_lanes if table is not None]
            padded = pad_sequence(made, batch_first=True, padding_value=-1).long()
            self._padded_tables[group.lanes[0], layer] = padded
        tables = self._padded_tables.get((group.lanes[0], layer))
        keys = self._stack.keys[layer, group.texts, : max(bases)]
        positions = policy.select_step(layer, step, q[group.index], keys, bases, tables, scale)
        if positions is not None:
            self.lists.put(layer, group.index, positions)

    def _coverage(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """(num_lanes,) float32: mean share of the heads' weight that the attended entries have."""
        listed = self.lists.scores(layer, q, scale)
        before = torch.empty_like(listed[..., 0])
        for group in self._by_text:
            text = self.lanes[group.lanes[0]].text
            keys = text.keys[layer, : max(self.bases[index] for index in group.lanes)]
            visible = self.lists.bases[group.index]
            scores = query_scores(q[group.index], keys, visible, scale)
            before[group.index] = scores.logsumexp(dim=-1)
        # Recent tokens are in the list only, those before them in both.
        recent = listed[..., : self.lists.num_recent].logsumexp(dim=-1)
        every = torch.logaddexp(before, recent)
        return (listed.logsumexp(dim=-1) - every).exp().mean(dim=1)

    def _next_drafts(
        self, logits: torch.Tensor, wanted: torch.Tensor, step: int, on_text: torch.Tensor
    ) -> torch.Tensor:
        """(num_lanes,) int64. Behind its first rejection a lane drafts on by itself, for what the
        pass's last query will be."""
        at = self._starts + step + 1 - self._stack.prompt_lens[self.lists.texts]
        target, coins = (x[self.lists.texts, at] for x in (self._stack.logits, self._stack.coins))
        coupled = self.sampling.couple(logits, target, wanted, coins, self.generator)
        if self.sampling.is_greedy:
            return coupled
        return torch.where(on_text, coupled, self.sampling.next_tokens(logits, self.generator))

    def _text_tokens(self) -> torch.Tensor:
        """(num_lanes, num_steps) int64: what the texts say where this iteration drafts."""
        behind = torch.arange(1, self.num_steps + 1, device=self.model.device)
        return self._stack.ids[self.lists.texts[:, None], self._starts[:, None] + behind]

    # ---- verification ----

    def _verify(self, drafts: torch.Tensor) -> None:
        """Make the next tables: from a pass over the drafts where a policy wants scores."""
        for layer in range(self.model.num_layers):
            self._list(layer, self._select_unscored(layer, self.seq_lens))
        if not self._scored:
            return
        shares = self._query_shares(drafts.shape[1])
        index = torch.cat([group.index for group in self._scored])
        sizes = [len(group.lanes) for group in self._scored]
        starts = self._starts[index]

        def attend(layer, q, k, v, scale) -> torch.Tensor:
            parts = (x.split(sizes) for x in (q, k, v, starts))
            outputs: list[torch.Tensor] = []
            listed: dict[int, torch.Tensor] = {}
            for group, *part in zip(self._scored, *parts, strict=True):
                output, scores = self._attend_verify(group, layer, *part, scale=scale)
                outputs.append(output)
                listed |= self._select_scored(group, layer, scores, shares)
            self._list(layer, listed)
            return torch.cat(outputs)

        positions = starts[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        self.model.forward(drafts[index], positions, attend)

    def _attend_verify(
        self,
        group: LaneGroup,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pass of one text's lanes over all KV, the text's and that of each one's drafts:
        output and scores, as `attend_along` has them."""
        text, width = self.lanes[group.lanes[0]].text, q.shape[1]
        end = max(self.seq_lens[index] for index in group.lanes) + width
        keys, values = text.keys[layer, :end], text.values[layer, :end]
        return attend_along(q, k, v, keys, values, starts, scale)

    def _query_shares(self, width: int) -> torch.Tensor:
        """(num_lanes, width) float32: what each of a pass's queries counts in its lane's ranking;
        0 if it isn't collected."""
        shares = torch.zeros(len(self.lanes), width)
        for of_lane, lane in zip(shares, self.lanes, strict=True):
            picked = lane.policy.collects.places(width, lane.accepted[-1])
            of_lane[picked] = 1 / max(len(picked), 1)
        return shares.to(self.model.device)

    def _select_scored(
        self, group: LaneGroup, layer: int, scores: torch.Tensor, shares: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """As `_select`, of a group's `scores`, (m, width, num_heads, n)."""
        if _is_ranked(self.lanes[group.lanes[0]]):
            return self._rank(group, layer, scores, shares[group.index], self.seq_lens)
        width = scores.shape[1]
        collected = []
        for of_lane, index in zip(scores, group.lanes, strict=True):
            lane = self.lanes[index]
            picked = lane.policy.collects.places(width, lane.accepted[-1])
            # Any kind's are evenly spaced; a list as an index would wait for the device.
            spacing = picked[1] - picked[0] if len(picked) > 1 else 1
            of_queries = of_lane[picked[0] : picked[-1] + 1 : spacing]
            collected.append(of_queries[..., : self.seq_lens[index] + width])
        return self._select(layer, group.lanes, collected, self.seq_lens)

    def _rank(
        self,
        group: LaneGroup,
        layer: int,
        scores: torch.Tensor,
        shares: torch.Tensor,
        seq_lens: Sequence[int],
    ) -> dict[int, torch.Tensor]:
        """What `RankedPolicy.select` does, for a group at once: of `scores`, (m or 1, width,
        num_heads, n), by the `shares`, (m, width), that the queries have in the ranking."""
        weights = scores.softmax(dim=-1).mean(dim=2)
        values = (shares.to(weights.dtype).unsqueeze(1) @ weights).squeeze(1)
        lens = self._lens_of(tuple(seq_lens[index] for index in group.lanes))
        hidden = torch.arange(values.shape[1], device=lens.device) >= lens
        sizes = [self.lanes[i].policy.table_size(seq_lens[i]) for i in group.lanes]
        # Below any weight that underflowed to 0.
        best = values.masked_fill_(hidden, -1.0).topk(max(sizes)).indices
        listed: dict[int, torch.Tensor] = {}
        for index, size, of_lane in zip(group.lanes, sizes, best, strict=True):
            self.tables[index][layer] = of_lane[:size]
            if not self.lanes[index].policy.reselects:
                listed[index] = of_lane[:size]
        return listed

    def _first_tables(self, layer: int) -> None:
        """As after a prefill: from each prompt's last query."""
        prompt_lens = [lane.text.prompt_len for lane in self.lanes]
        listed = self._select_unscored(layer, prompt_lens)
        for group in self._scored:
            text = self.lanes[group.lanes[0]].text
            visible = text.stack.prompt_lens[text.index, None]
            keys = text.keys[layer, : text.prompt_len]
            scores = query_scores(text.last_queries[None, layer], keys, visible, text.scale)
            if _is_ranked(self.lanes[group.lanes[0]]):
                alike = scores.new_ones(len(group.lanes), 1)
                listed |= self._rank(group, layer, scores[None], alike, prompt_lens)
            else:
                of_lanes = [scores] * len(group.lanes)
                listed |= self._select(layer, group.lanes, of_lanes, prompt_lens)
        self._list(layer, listed)

    def _select_unscored(self, layer: int, seq_lens: Sequence[int]) -> dict[int, torch.Tensor]:
        return self._select(layer, self._unscored, [None] * len(self._unscored), seq_lens)

    def _select(
        self,
        layer: int,
        lanes: Sequence[int],
        scores: Sequence[torch.Tensor | None],
        seq_lens: Sequence[int],
    ) -> dict[int, torch.Tensor]:
        """Make the tables of `lanes`; `scores` are one a lane, `seq_lens` of all lanes.

        Returns:
            Of each lane that attends to them until the next pass, (k,) positions.
        """
        listed: dict[int, torch.Tensor] = {}
        for index, of_lane in zip(lanes, scores, strict=True):
            policy, seq_len = self.lanes[index].policy, seq_lens[index]
            if policy.makes_tables:
                within = policy.table_size(seq_len) >= seq_len
                positions = policy.select(
                    layer, None if within else of_lane, seq_len, self.model.device
                )
                self.tables[index][layer] = positions
            else:
                positions = torch.arange(seq_len, device=self.model.device)
            if not policy.reselects:
                listed[index] = positions
        return listed

    def _device_lens(self, seq_lens: tuple[int, ...]) -> torch.Tensor:
        """(m, 1) int64."""
        return torch.tensor(seq_lens, device=self.model.device).unsqueeze(1)

    def _list(self, layer: int, listed: dict[int, torch.Tensor]) -> None:
        if listed:
            self.lists.put_each(layer, [*listed], [*listed.values()])


def _is_ranked(lane: Lane) -> bool:
    """Whether `LabRun._rank` can stand for the policy's own `select`."""
    policy = lane.policy
    return (
        isinstance(policy, RankedPolicy)
        and type(policy).select is RankedPolicy.select
        and policy.config.score_mode == "weight"
    )


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
