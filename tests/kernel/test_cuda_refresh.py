"""Draft steps of vegas-refresh as the server runs them, against the same policy in PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_vegas.attention.cuda_kernels import CudaKernels, CudaWorkspace
from sgl_vegas.attention.torch_reference import sparse_decode
from sgl_vegas.config import VegasConfig
from sgl_vegas.key_codes.basis import fit_basis
from sgl_vegas.key_codes.moments import Moments
from sgl_vegas.selection.policy import SelectionPolicy, build_policy
from sgl_vegas.tables.request_tables import RequestTables
from tests.kernel.paged_cases import DEVICE, Case, make_case, relative_error

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, QUERIES, LAYERS, STEPS = 8, 2, 128, 7, 3, 3
LENGTHS = [4000, 3000, 100, -1]


@pytest.fixture
def case() -> Case:
    return make_case(LENGTHS, QUERIES, HEADS, KV_HEADS, DIM, torch.bfloat16, sharpness=3.0)


@pytest.fixture
def policy(case: Case, tmp_path: Path) -> SelectionPolicy:
    moments = Moments(LAYERS, KV_HEADS, DIM)
    for layer in range(LAYERS):
        moments.add(layer, case.q.cpu(), case.k_cache[:-1].cpu())
    fit_basis(moments, 64).save(tmp_path / "basis")
    return build_policy(
        VegasConfig(
            num_steps=QUERIES - 1,
            sparsity_ratio=0.05,
            min_tokens=64,
            policy="vegas-refresh",
            key_basis=str(tmp_path / "basis"),
        )
    )


@pytest.mark.parametrize("in_graph", [False, True])
def test_drafts_attend_to_what_the_policy_chooses(
    case: Case, policy: SelectionPolicy, in_graph: bool
) -> None:
    tables = RequestTables(LAYERS, len(LENGTHS) + 3, policy.table_size(max(LENGTHS)), DEVICE)
    layer = SimpleNamespace(tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=DIM)
    num_slots = len(case.k_cache)
    workspace = CudaWorkspace(
        [layer] * LAYERS,
        tables,
        policy.config,
        policy,
        sum(LENGTHS) + 1,
        num_slots,
        case.q.dtype,
    )
    ranking = workspace.ranking
    assert ranking is not None
    kernels = CudaKernels(workspace, policy, tables, case.req_to_token, QUERIES)
    assert kernels.capturable
    caches = case.k_cache, case.v_cache
    # What a prefill wrote. What passes code themselves is for test_refresh_order.py.
    written = [
        case.slots(i)[:length].long() for i, length in enumerate(LENGTHS) if case.rows[i] != 0
    ]
    for i in range(LAYERS):
        kernels.written(i, torch.cat(written), case.k_cache)
    for _ in range(2):  # the second has references
        kernels.begin_verify(case.rows, case.seq_lens)
        for i in range(LAYERS):
            kernels.verify(i, case.q, None, *caches, case.scale)
    for i, length in enumerate(LENGTHS):
        row = int(case.rows[i])
        size = policy.table_size(max(length, 1))
        assert int(tables.counts[row]) == (size if row and size < length else 0)

    generator = torch.Generator(DEVICE).manual_seed(4)
    shape = (STEPS, LAYERS, len(LENGTHS), HEADS, DIM)
    queries = torch.randn(shape, generator=generator, device=DEVICE).mul(3).to(case.q.dtype)
    outputs = torch.zeros_like(queries)
    lists = torch.zeros(
        (STEPS, LAYERS, *ranking.positions.shape[1:]), dtype=torch.int32, device=DEVICE
    )

    def draft() -> None:
        for step in range(STEPS):
            kernels.begin_draft(case.rows, case.seq_lens, step, dense=False)
            for i in range(LAYERS):
                outputs[step, i] = kernels.draft(i, queries[step, i], None, *caches, case.scale)
                lists[step, i] = ranking.positions[0]

    draft()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft()
        outputs.zero_()
        lists.zero_()
        graph.replay()

    chance = []
    for i, length in enumerate(LENGTHS):
        row = int(case.rows[i])
        if row == 0:
            continue
        slots, count = case.slots(i), int(tables.counts[row])
        attended = policy.attended(length) if count else 0
        assert int(ranking.wanted[row]) == attended
        for step in range(STEPS):
            for layer_id in range(LAYERS):
                q = queries[step, layer_id, i]
                positions = torch.arange(length + step + 1, device=DEVICE)
                if count:
                    chosen = lists[step, layer_id, row, :attended].long()
                    candidates = tables.positions[layer_id, row, :count].long()
                    keys = case.k_cache[slots[:length].long()]
                    expected = policy.select_step(
                        *(layer_id, step, q[None], keys[None], (length,), (attended,)),
                        *(candidates[None], case.scale),
                    )
                    assert expected is not None
                    assert len(set(chosen.tolist())) == attended
                    common = set(chosen.tolist()) & set(expected[0].tolist())
                    # Of those near the threshold either may be the better one, by rounding.
                    assert len(common) >= 0.95 * attended
                    chance.append(attended / count)
                    positions = torch.cat([chosen, positions[length:]])
                wanted = sparse_decode(
                    *(q[None].double(), case.k_cache.double(), case.v_cache.double()),
                    [slots[positions].long()],
                    case.scale,
                )
                assert relative_error(outputs[step, layer_id, i], wanted[0]) < 0.01
    assert chance and max(chance) < 0.3
