"""Drafting and verifying along common texts: many texts and policies in one batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sgl_vegas.lab.groups import Lane, LaneGroup, grouped
from sgl_vegas.lab.lists import AttendedLists
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.sampling import Sampling
from sgl_vegas.lab.text import attend_along, one_query_attention, text_scores
from sgl_vegas.selection.ranked import RankedPolicy

# Most scores, or numbers of keys, that the lanes of one call have.
MAX_NUMBERS = 2**27


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
        self._stack = lanes[0].text.stack
        # Of each lane what its policy chose, then -1.
        self.tables = torch.full(
            (model.num_layers, len(lanes), max(map(_table_width, lanes))), -1, device=model.device
        )
        num_heads, head_dim = lanes[0].text.last_queries.shape[1:]
        num_keys, num_kv_heads = self._stack.keys.shape[2:4]
        of_query = num_heads * num_keys
        self._all = grouped(self.lanes, lambda _: True, max(MAX_NUMBERS // of_query, 1))
        self._scored = grouped(
            self.lanes,
            lambda lane: _is_ranked(lane) if lane.policy.needs_scores else None,
            max(MAX_NUMBERS // (of_query * (num_steps + 1)), 1),
        )
        self._reselecting = grouped(
            self.lanes, _asked_together, max(MAX_NUMBERS // (num_keys * num_kv_heads * head_dim), 1)
        )
        # Of those that reselect, only who makes tables is asked after a pass.
        self._unscored = grouped(
            self.lanes,
            lambda lane: (not lane.policy.needs_scores and _has_table(lane)) or None,
        )
        for layer in range(model.num_layers):
            self._first_tables(layer)

    @torch.inference_mode()
    def iterate(self, measure_coverage: bool) -> None:
        """One draft and verify round of every lane."""
        self.lists.begin(self.bases, self.seq_lens)
        self._starts = torch.tensor(self.seq_lens, device=self.model.device)
        # The same for all layers and steps: what each reselecting group is asked about.
        self._asked = [self._bases_and_budgets(group) for group in self._reselecting]
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
        self._reselect(layer, step, q[:, 0], scale)
        if coverage is not None:
            coverage.append(self._coverage(layer, q[:, 0], scale))
        lists = self.lists
        of_layer = (lists.keys[layer], lists.values[layer], lists.counts[layer])
        return one_query_attention(q[:, 0], *of_layer, scale)[:, None]

    def _bases_and_budgets(self, group: LaneGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
        bases = tuple(self.bases[index] for index in group.lanes)
        policies = [self.lanes[index].policy for index in group.lanes]
        return bases, tuple(
            policy.attended(base) for policy, base in zip(policies, bases, strict=True)
        )

    def _reselect(self, layer: int, step: int, q: torch.Tensor, scale: float) -> None:
        """Ask who selects at every step; `q` is (num_lanes, num_heads, head_dim)."""
        lanes: list[torch.Tensor] = []
        chosen: list[torch.Tensor] = []
        for group, asked in zip(self._reselecting, self._asked, strict=True):
            positions = self._select_step(group, *asked, layer, step, q[group.index], scale)
            if positions is not None:
                lanes.append(group.index)
                each = (-1, self.model.num_kv_heads, -1)
                chosen.append(
                    positions if positions.dim() == 3 else positions[:, None].expand(each)
                )
        if chosen:
            width = max(positions.shape[-1] for positions in chosen)
            padded = [
                pad(positions, (0, width - positions.shape[-1]), value=-1) for positions in chosen
            ]
            self.lists.put(layer, torch.cat(lanes), torch.cat(padded))

    def _select_step(
        self,
        group: LaneGroup,
        bases: tuple[int, ...],
        budgets: tuple[int, ...],
        layer: int,
        step: int,
        q: torch.Tensor,
        scale: float,
    ) -> torch.Tensor | None:
        policies = [self.lanes[index].policy for index in group.lanes]
        tables = None
        if policies[0].makes_tables:
            sizes = [policy.table_size(base) for policy, base in zip(policies, bases, strict=True)]
            tables = self.tables[layer, group.index, : max(sizes)]
        keys = self._stack.keys[layer, group.texts, : max(bases)]
        if group.per_text > 1:
            keys = keys[:, None].expand(-1, group.per_text, -1, -1, -1).flatten(0, 1)
        return policies[0].select_step(layer, step, q, keys, bases, budgets, tables, scale)

    def _coverage(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """(num_lanes,) float32: mean share of the heads' weight that the attended entries have."""
        listed = self.lists.scores(layer, q, scale)
        before = torch.empty_like(listed[..., 0])
        for group in self._all:
            keys = self._stack.keys[layer, group.texts, : max(self.bases)]
            visible = group.by_text(self.lists.bases[group.index])
            scores = text_scores(group.by_text(q[group.index]), keys, visible, scale)
            before[group.index] = scores.logsumexp(dim=-1).flatten(0, 1)
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
            self._select_unscored(layer, self.seq_lens)
        if not self._scored:
            return
        shares = self._query_shares(drafts.shape[1])
        index = torch.cat([group.index for group in self._scored])
        sizes = [len(group.lanes) for group in self._scored]
        starts = self._starts[index]
        limits = [self._limits(group, self.seq_lens) for group in self._scored]

        def attend(layer, q, k, v, scale) -> torch.Tensor:
            parts = (x.split(sizes) for x in (q, k, v, starts))
            outputs: list[torch.Tensor] = []
            for group, of_group, *part in zip(self._scored, limits, *parts, strict=True):
                output, scores = self._attend_verify(group, layer, *part, scale=scale)
                outputs.append(output)
                self._select_scored(group, layer, scores, shares, of_group)
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
        """The pass of some lanes over all KV, their texts' and that of each one's drafts: output,
        shaped like `q`, and scores, (m, width, num_heads, n)."""
        end = max(self.seq_lens[index] for index in group.lanes) + q.shape[1]
        keys, values = (x[layer, group.texts, :end] for x in (self._stack.keys, self._stack.values))
        q, k, v, starts = (group.by_text(x) for x in (q, k, v, starts))
        output, scores = attend_along(q, k, v, keys, values, starts, scale)
        return output.flatten(0, 1), scores.flatten(0, 1)

    def _query_shares(self, width: int) -> torch.Tensor:
        """(num_lanes, width) float32: what each of a pass's queries counts in its lane's ranking;
        0 if it isn't collected."""
        shares = torch.zeros(len(self.lanes), width)
        for of_lane, lane in zip(shares, self.lanes, strict=True):
            picked = lane.policy.collects.places(width, lane.accepted[-1])
            of_lane[picked] = 1 / max(len(picked), 1)
        return shares.to(self.model.device)

    def _select_scored(
        self,
        group: LaneGroup,
        layer: int,
        scores: torch.Tensor,
        shares: torch.Tensor,
        limits: tuple[torch.Tensor, torch.Tensor, int],
    ) -> None:
        """Make a group's tables from `scores`, (m, width, num_heads, n)."""
        if _is_ranked(self.lanes[group.lanes[0]]):
            self._keep(layer, group, _rank(scores, shares[group.index], *limits))
            return
        width = scores.shape[1]
        collected: list[torch.Tensor | None] = []
        for of_lane, index in zip(scores, group.lanes, strict=True):
            lane = self.lanes[index]
            picked = lane.policy.collects.places(width, lane.accepted[-1])
            # Any kind's are evenly spaced; a list as an index would wait for the device.
            spacing = picked[1] - picked[0] if len(picked) > 1 else 1
            of_queries = of_lane[picked[0] : picked[-1] + 1 : spacing]
            collected.append(of_queries[..., : self.seq_lens[index] + width])
        self._select(layer, group, collected, self.seq_lens, self.model.device)

    def _first_tables(self, layer: int) -> None:
        """As after a prefill: from each prompt's last query."""
        prompt_lens = [lane.text.prompt_len for lane in self.lanes]
        self._select_unscored(layer, prompt_lens)
        for group in self._scored:
            texts = [self.lanes[index].text for index in group.lanes]
            queries = torch.stack([text.last_queries[layer] for text in texts])
            keys = self._stack.keys[layer, group.texts, : max(prompt_lens)]
            limits = self._limits(group, prompt_lens)
            visible = group.by_text(limits[0].squeeze(1))
            scores = text_scores(group.by_text(queries), keys, visible, texts[0].scale)
            scores = scores.flatten(0, 1).unsqueeze(1)
            if _is_ranked(self.lanes[group.lanes[0]]):
                alike = scores.new_ones(len(group.lanes), 1)
                self._keep(layer, group, _rank(scores, alike, *limits))
            else:
                of_lanes = [
                    of_lane[..., : text.prompt_len]
                    for of_lane, text in zip(scores, texts, strict=True)
                ]
                self._select(layer, group, of_lanes, prompt_lens, self.model.device)

    def _select_unscored(self, layer: int, seq_lens: Sequence[int]) -> None:
        """Make the tables that need no scores. On the host: these are many small operations."""
        for group in self._unscored:
            nothing = [None] * len(group.lanes)
            self._select(layer, group, nothing, seq_lens, torch.device("cpu"))

    def _select(
        self,
        layer: int,
        group: LaneGroup,
        scores: Sequence[torch.Tensor | None],
        seq_lens: Sequence[int],
        device: torch.device,
    ) -> None:
        """Have each lane's policy make its table; `scores` are one a lane of the group, `seq_lens`
        of all lanes."""
        tables: list[torch.Tensor] = []
        for index, of_lane in zip(group.lanes, scores, strict=True):
            policy, seq_len = self.lanes[index].policy, seq_lens[index]
            if policy.makes_tables:
                given = None if policy.table_size(seq_len) >= seq_len else of_lane
                tables.append(policy.select(layer, given, seq_len, device).long())
            else:
                tables.append(torch.arange(seq_len, device=device))
        padded = pad_sequence(tables, batch_first=True, padding_value=-1)
        self._keep(layer, group, padded.to(self.model.device))

    def _keep(self, layer: int, group: LaneGroup, positions: torch.Tensor) -> None:
        """Take `positions`, (m, k), as a group's tables; who holds them attends to them."""
        width = self.tables.shape[2] - positions.shape[1]
        self.tables[layer, group.index] = pad(positions, (0, width), value=-1)
        if len(group.held) > 0:
            # The group's widest table may be of a lane that doesn't attend to it as it is.
            held = positions[group.held, : self.lists.num_selected]
            self.lists.put(layer, group.index[group.held], held)

    def _limits(
        self, group: LaneGroup, seq_lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(m, 1) int64 each: of how many positions a lane's table is chosen, and how many they are;
        and the most of these."""
        lens = [seq_lens[index] for index in group.lanes]
        policies = [self.lanes[index].policy for index in group.lanes]
        sizes = [policy.table_size(n) for policy, n in zip(policies, lens, strict=True)]
        of_lens, of_sizes = torch.tensor([lens, sizes], device=self.model.device).unsqueeze(2)
        return of_lens, of_sizes, max(sizes)


def _rank(
    scores: torch.Tensor, shares: torch.Tensor, lens: torch.Tensor, sizes: torch.Tensor, most: int
) -> torch.Tensor:
    """What `RankedPolicy.select` does, for many lanes at once.

    Args:
        scores: (m, width, num_heads, n).
        shares: (m, width), what each query counts in the ranking.
        lens, sizes, most: as of `LabRun._limits`.

    Returns:
        (m, most) int64, -1 behind a lane's own.
    """
    weights = scores.softmax(dim=-1).mean(dim=2)
    values = (shares.to(weights.dtype).unsqueeze(1) @ weights).squeeze(1)
    hidden = torch.arange(values.shape[1], device=values.device) >= lens
    # Below any weight that underflowed to 0.
    best = values.masked_fill(hidden, -1.0).topk(most).indices
    return best.masked_fill(torch.arange(most, device=values.device) >= sizes, -1)


def _is_ranked(lane: Lane) -> bool:
    """Whether `LabRun._rank` can stand for the policy's own `select`."""
    policy = lane.policy
    return (
        isinstance(policy, RankedPolicy)
        and type(policy).select is RankedPolicy.select
        and policy.config.score_mode == "weight"
    )


def _has_table(lane: Lane) -> bool:
    return lane.policy.makes_tables or not lane.policy.reselects


def _table_width(lane: Lane) -> int:
    """Most entries that a lane's table has while its text lasts."""
    if not _has_table(lane):
        return 0
    lens = range(lane.text.prompt_len, len(lane.text) + 1)
    return max(map(lane.policy.table_size, lens)) if lane.policy.makes_tables else lens.stop - 1


def _asked_together(lane: Lane) -> Hashable:
    """Of lanes that select at every step: the same for policies that differ by their ratio only."""
    policy = lane.policy
    if not policy.reselects:
        return None
    return type(policy), replace(policy.config, sparsity_ratio=1.0)


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
