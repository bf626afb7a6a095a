"""CUDA graphs of the draft loop: all gamma steps of a batch in one, and plain decode steps."""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
import tqdm

from sgl_vegas.drafting import Drafter, Drafts
from sgl_vegas.logits import LogitsRules
from sgl_vegas.sampling.distribution import SamplingRows
from sgl_vegas.sglang_compat import graph_capture_session

logger = logging.getLogger(__name__)

WARM_UPS = 2  # the first loads kernels, the second finds all workspaces made


@dataclass(frozen=True)
class _Buffers:
    """What graphs read and write; one row a request, padded rows are request-pool row 0."""

    bonus_tokens: torch.Tensor  # (max_bs,) int64
    rows: torch.Tensor  # (max_bs,) int64
    seq_lens: torch.Tensor  # (max_bs,) int64
    temperatures: torch.Tensor  # (max_bs, 1) float32
    top_ks: torch.Tensor  # (max_bs,) int32
    top_ps: torch.Tensor  # (max_bs,) float32
    min_ps: torch.Tensor  # (max_bs,) float32


class DraftGraphs:
    """One graph a batch size and kind: greedy drafts, sampled drafts, a plain step.

    Drafts in a graph follow temperature, top-k, top-p and min-p; penalties and biases are left to
    the verify pass, where they decide. Padded rows write to the padding slot.
    """

    def __init__(self, drafter: Drafter, batch_sizes: list[int], probs: torch.Tensor) -> None:
        """Args:
        batch_sizes: ascending.
        probs: (batch_sizes[-1], gamma, vocab) float32, which sampled drafts fill.
        """
        self._drafter = drafter
        self.batch_sizes = batch_sizes
        self._probs = probs
        max_bs, device = batch_sizes[-1], probs.device
        self._buffers = _Buffers(
            bonus_tokens=torch.zeros(max_bs, dtype=torch.int64, device=device),
            rows=torch.zeros(max_bs, dtype=torch.int64, device=device),
            seq_lens=torch.ones(max_bs, dtype=torch.int64, device=device),
            temperatures=torch.ones((max_bs, 1), device=device),
            top_ks=torch.ones(max_bs, dtype=torch.int32, device=device),
            top_ps=torch.ones(max_bs, device=device),
            min_ps=torch.zeros(max_bs, device=device),
        )
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Any]] = {}

    def capture(self) -> None:
        """Capture every graph, the largest first, so that the others fit in its memory."""
        start, before = time.perf_counter(), torch.cuda.mem_get_info()[0]
        logger.info("Capture VEGAS draft CUDA graph begin. bs=%s", self.batch_sizes)
        with graph_capture_session(self._drafter.model_runner) as (stream, pool):
            for bs in tqdm.tqdm(self.batch_sizes[::-1], desc="Capturing VEGAS drafts"):
                for kind in ("greedy", "sampled", "plain"):
                    for _ in range(WARM_UPS):
                        self._run(kind, bs)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        output = self._run(kind, bs)
                    self._graphs[kind, bs] = (graph, output)
        logger.info(
            "Capture VEGAS draft CUDA graph end. elapsed=%.2f s, mem usage=%.2f GB.",
            time.perf_counter() - start,
            (before - torch.cuda.mem_get_info()[0]) / 2**30,
        )

    def can_run(self, batch_size: int) -> bool:
        return batch_size <= self.batch_sizes[-1]

    def draft(
        self,
        bonus_tokens: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        sampling: SamplingRows,
    ) -> Drafts:
        """As `Drafter.draft`; the result is overwritten by the next call."""
        bs = len(rows)
        if not sampling.is_all_greedy:
            self._buffers.temperatures[:bs].copy_(sampling.temperatures)
            self._buffers.top_ks[:bs].copy_(sampling.top_ks)
            self._buffers.top_ps[:bs].copy_(sampling.top_ps)
            self._buffers.min_ps[:bs].copy_(sampling.min_ps)
        kind = "greedy" if sampling.is_all_greedy else "sampled"
        drafts: Drafts = self._replay(kind, bonus_tokens, rows, seq_lens)
        return Drafts(drafts.tokens[:bs], None if drafts.probs is None else drafts.probs[:bs])

    def plain_step(
        self, bonus_tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """As `Drafter.plain_step`; the result is overwritten by the next call."""
        return self._replay("plain", bonus_tokens, rows, seq_lens)[: len(rows)]

    def replay_empty(self, kind: str, batch_size: int) -> None:
        """Replay a graph on padded rows only, to time it."""
        self._buffers.rows.zero_()
        self._buffers.seq_lens.fill_(1)
        self._graphs[kind, batch_size][0].replay()

    def _replay(
        self, kind: str, bonus_tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> Any:
        bs = len(rows)
        padded = self.batch_sizes[bisect.bisect_left(self.batch_sizes, bs)]
        buffers = self._buffers
        buffers.bonus_tokens[:bs].copy_(bonus_tokens)
        buffers.rows[:bs].copy_(rows)
        buffers.seq_lens[:bs].copy_(seq_lens)
        if padded > bs:
            buffers.rows[bs:padded].zero_()
            buffers.seq_lens[bs:padded].fill_(1)
        graph, output = self._graphs[kind, padded]
        graph.replay()
        return output

    def _run(self, kind: str, bs: int) -> Any:
        buffers = self._buffers
        inputs = (buffers.bonus_tokens[:bs], buffers.rows[:bs], buffers.seq_lens[:bs])
        if kind == "plain":
            return self._drafter.plain_step(*inputs)
        rules = LogitsRules(
            rows=SamplingRows(
                temperatures=buffers.temperatures[:bs],
                top_ks=buffers.top_ks[:bs],
                top_ps=buffers.top_ps[:bs],
                min_ps=buffers.min_ps[:bs],
                is_all_greedy=kind == "greedy",
                need_filter=True,
                renormalise_between=True,
            ),
            penalties=None,
            logit_bias=None,
        )
        return self._drafter.draft(*inputs, rules, probs=self._probs[:bs])
