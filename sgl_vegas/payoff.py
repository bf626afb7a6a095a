"""When speculation pays: a roofline whose fixed part is measured at start."""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sgl_vegas.draft_graphs import DraftGraphs
from sgl_vegas.selection.policy import SelectionPolicy
from sgl_vegas.sglang_compat import replay_verify_graph
from sgl_vegas.tables.request_tables import RequestTables

logger = logging.getLogger(__name__)

# Before any run has been seen, and what estimates drift back to while plain decoding hides the
# true value, so that speculation is tried again.
PRIOR_SHARE = 0.85  # of gamma
DRIFT = 1 / 512  # an iteration; about 350 plain steps halve the distance
SMOOTHING = 1 / 32  # an iteration
MARGIN = 1.03  # speculate only if the estimate wins by more than its error


@dataclass(frozen=True)
class IterationCosts:
    """Milliseconds of a step without KV, by batch size, and what KV adds.

    Attributes:
        batch_sizes: ascending, those that were measured.
        plain_ms, drafts_ms, verify_ms: one a batch size: a plain step, all gamma draft steps, a
            verify pass.
        kv_ms_per_token: time to read one token's KV of all layers.
        candidate_ms: time that a draft step of all layers takes to rank one entry of a table again;
            0 where none does.
    """

    batch_sizes: list[int]
    plain_ms: list[float]
    drafts_ms: list[float]
    verify_ms: list[float]
    kv_ms_per_token: float
    candidate_ms: float = 0.0

    def speedup(
        self, batch: int, context: int, policy: SelectionPolicy, tokens_per_iteration: float
    ) -> float:
        """Estimated speed-up of drafting and verifying over plain steps.

        Args:
            context: KV tokens of all requests together.
        """
        index = min(bisect.bisect_left(self.batch_sizes, batch), len(self.batch_sizes) - 1)
        full = context * self.kv_ms_per_token
        each = context // batch
        step = batch * policy.attended(each) * self.kv_ms_per_token
        if policy.table_size(each) < each:
            step += batch * policy.table_size(each) * self.candidate_ms
        plain = self.plain_ms[index] + full
        drafts = self.drafts_ms[index] + policy.config.num_steps * step
        iteration = drafts + self.verify_ms[index] + full
        return tokens_per_iteration * plain / iteration


@dataclass
class Payoff:
    """Decides, an iteration at a time, whether to draft.

    Attributes:
        costs: None: always draft.
    """

    policy: SelectionPolicy
    costs: IterationCosts | None
    tokens_per_iteration: float = field(init=False)
    _in_flight: deque[bool] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._prior = 1 + PRIOR_SHARE * self.policy.config.num_steps
        self.tokens_per_iteration = self._prior

    def drafts(self, batch: int, context: int) -> bool:
        """Whether the next iteration of `batch` requests over `context` KV tokens should draft."""
        above = self.policy.config.speculate_above
        if above is not None:
            pays = context >= above
        elif self.costs is None:
            pays = True
        else:
            speedup = self.costs.speedup(batch, context, self.policy, self.tokens_per_iteration)
            pays = speedup > MARGIN
        self._in_flight.append(pays)
        return pays

    def saw(self, num_correct_drafts: list[int]) -> None:
        """Called once an iteration, in order, when its accepted drafts are known on the host."""
        if not self._in_flight.popleft():
            self.tokens_per_iteration += (self._prior - self.tokens_per_iteration) * DRIFT
        elif num_correct_drafts:
            mean = 1 + sum(num_correct_drafts) / len(num_correct_drafts)
            self.tokens_per_iteration += (mean - self.tokens_per_iteration) * SMOOTHING


def gpu_ms(run: Callable[[], object], repeats: int = 3) -> float:
    """Fastest of a few runs, in milliseconds of GPU time."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def read_bandwidth(device: torch.device | str) -> float:
    """Bytes a millisecond of a large device-to-device copy, reads and writes counted."""
    source = torch.empty(1 << 26, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_ms(lambda: target.copy_(source), repeats=5)


def measure_costs(
    graphs: DraftGraphs,
    model_runner: Any,
    kv_bytes: int,
    policy: SelectionPolicy,
    tables: RequestTables,
) -> IterationCosts:
    """Time every captured graph on padded rows, and what a token's KV of `kv_bytes` takes to
    read."""
    sizes = graphs.batch_sizes

    def times(kind: str) -> list[float]:
        return [gpu_ms(partial(graphs.replay_empty, kind, bs)) for bs in sizes]

    drafts_ms = times("greedy")
    costs = IterationCosts(
        batch_sizes=sizes,
        plain_ms=times("plain"),
        drafts_ms=drafts_ms,
        verify_ms=[gpu_ms(partial(replay_verify_graph, model_runner, bs)) for bs in sizes],
        kv_ms_per_token=kv_bytes / read_bandwidth(model_runner.device),
        candidate_ms=_candidate_ms(graphs, policy, tables, drafts_ms[-1]),
    )
    logger.info(
        "VEGAS step times without KV, ms, by batch size: plain %s, drafts %s, verify %s; "
        "KV %.1f ms and ranking %.1f ms a million tokens",
        *(
            {bs: round(ms, 2) for bs, ms in zip(sizes, values, strict=True)}
            for values in (costs.plain_ms, costs.drafts_ms, costs.verify_ms)
        ),
        costs.kv_ms_per_token * 1e6,
        costs.candidate_ms * 1e6,
    )
    return costs


def _candidate_ms(
    graphs: DraftGraphs, policy: SelectionPolicy, tables: RequestTables, without_ms: float
) -> float:
    """As `IterationCosts.candidate_ms`: the largest graph on padded rows again, that time with a
    full table, of position 0 only."""
    if not policy.reselects:
        return 0.0
    bs, count = graphs.batch_sizes[-1], tables.positions.shape[2]
    tables.counts[0], tables.bases[0] = count, 1
    with_ms = gpu_ms(partial(graphs.replay_empty, "greedy", bs))
    tables.counts[0], tables.bases[0] = 0, 0
    return max(with_ms - without_ms, 0.0) / (policy.config.num_steps * bs * count)
