"""A verify pass as the server runs it: each layer's selection beside what follows its attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sgl_vegas_kernels import reference  # pyright: ignore[reportMissingImports]

from sgl_vegas.attention.cuda_kernels import CudaKernels, CudaWorkspace
from sgl_vegas.config import VegasConfig
from sgl_vegas.selection.policy import build_policy
from sgl_vegas.tables.request_tables import RequestTables
from tests.kernel.paged_cases import DEVICE, make_case

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, QUERIES, LAYERS = 8, 2, 128, 7, 6
LENGTHS = [4000, 3000, 100, -1]
# About a millisecond: many times what the next layer's attention takes.
SLEEP_CYCLES = 2_000_000
CONFIG = VegasConfig(num_steps=QUERIES - 1, sparsity_ratio=0.05, min_tokens=16)


@pytest.mark.parametrize("in_graph", [False, True])
def test_every_layer_selects_by_its_own_scores(
    in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the selection is."""
    case = make_case(LENGTHS, QUERIES, HEADS, KV_HEADS, DIM, torch.bfloat16)
    policy = build_policy(CONFIG)
    tables = RequestTables(LAYERS, len(LENGTHS) + 3, CONFIG.budget(max(LENGTHS)), DEVICE)
    layer = SimpleNamespace(tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=DIM)
    workspace = CudaWorkspace(
        [layer] * LAYERS, tables, CONFIG, policy, sum(LENGTHS) + 1, 1, case.q.dtype
    )
    scores = workspace.scores
    assert scores is not None
    select = scores.select

    def late_select(*args: Any) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        select(*args)

    monkeypatch.setattr(scores, "select", late_select)
    kernels = CudaKernels(workspace, policy, tables, case.req_to_token, QUERIES)
    generator = torch.Generator(DEVICE).manual_seed(1)
    queries = [
        torch.randn(case.q.shape, generator=generator, device=DEVICE).mul(2).to(case.q.dtype)
        for _ in range(LAYERS)
    ]

    def run() -> None:
        kernels.begin_verify(case.rows, case.seq_lens)
        for i, q in enumerate(queries):
            kernels.verify(i, q, None, case.k_cache, case.v_cache, case.scale)

    run()  # gives references that fit
    again = run
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        again = graph.replay
    tables.positions.fill_(-1)
    again()

    for request, length in enumerate(LENGTHS):
        row = int(case.rows[request])
        k = reference.table_size(length, CONFIG.sparsity_ratio, CONFIG.min_tokens, 1 << 30)
        assert int(tables.counts[row]) == (k if row else 0)
        if row == 0:
            continue
        for i, q in enumerate(queries):
            own = q[request * QUERIES : (request + 1) * QUERIES]
            _, _, weights = reference.dense(
                *(own, case.k_cache, case.v_cache, case.slots(request), length, case.scale)
            )
            weights = reference.selection_weights(weights, length)
            chosen = tables.positions[i, row, :k].long()
            assert chosen.unique().shape[0] == k
            # Another layer's queries would choose about as well as chance, 0.05 of the positions.
            assert weights[chosen].sum() >= 0.96 * weights.topk(k).values.sum()
