"""Which keys CudaKernels codes and ranks, and when, under vegas-refresh: its ranking is real, the
attention kernels beside it are stood in for, so that this runs in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sgl_vegas_kernels import reference  # pyright: ignore[reportMissingImports]

from sgl_vegas.attention.cuda_kernels import CudaKernels
from sgl_vegas.config import VegasConfig
from sgl_vegas.key_codes.basis import fit_basis
from sgl_vegas.key_codes.moments import Moments
from sgl_vegas.key_codes.step_ranking import StepRanking
from sgl_vegas.key_codes.words import WordCodes, encode_keys
from sgl_vegas.selection.policy import build_policy
from sgl_vegas.selection.refresh import RefreshPolicy
from sgl_vegas.tables.request_tables import RequestTables

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"
)
LAYERS, HEADS, KV_HEADS, DIM, GAMMA = 2, 4, 2, 32, 3
LENGTHS, ROWS, WIDTH = (90, 70), (3, 1), 110
SCALE = DIM**-0.5


class Attention:
    """Writes K and V as the CUDA kernels do, and notes what drafts are given to attend to."""

    def __init__(self, req_to_token: torch.Tensor) -> None:
        self.req_to_token = req_to_token
        self.lists: list[dict[int, list[int]]] = []

    def plan_dense(self, seq_lens: torch.Tensor, rows: torch.Tensor, num_queries: int) -> None:
        self.places = seq_lens[:, None] + torch.arange(num_queries)
        self.rows = rows

    def plan_sparse(
        self, seq_lens: torch.Tensor, rows: torch.Tensor, tables: Any, step: int
    ) -> None:
        self.plan_dense(seq_lens + step, rows, 1)

    def dense(self, q: Any, k_cache: Any, v_cache: Any, *_: Any, new_kv: Any, **__: Any) -> None:
        slots = self.req_to_token[self.rows[:, None], self.places].flatten().long()
        k_cache[slots], v_cache[slots] = new_kv

    def sparse(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        tables: Any,
        layer: int,
        scale: float,
        out: Any,
        new_kv: Any,
    ) -> None:
        counts = tables.counts[self.rows].tolist()
        self.lists.append(
            {
                row: tables.positions[layer, row, :count].tolist()
                for row, count in zip(self.rows.tolist(), counts, strict=True)
            }
        )
        self.dense(q, k_cache, v_cache, new_kv=new_kv)


class World:
    """Two requests whose prompts are written and coded."""

    def __init__(self, folder: Path) -> None:
        self.generator = torch.Generator().manual_seed(0)
        moments = Moments(LAYERS, KV_HEADS, DIM)
        for layer in range(LAYERS):
            moments.add(layer, self.random(500, HEADS), self.random(500, KV_HEADS))
        basis = fit_basis(moments, 64)
        basis.save(folder / "basis")
        self.codes = WordCodes.of(basis)
        policy = build_policy(
            VegasConfig(
                num_steps=GAMMA,
                sparsity_ratio=0.1,
                min_tokens=1,
                policy="vegas-refresh",
                key_basis=str(folder / "basis"),
            )
        )
        assert isinstance(policy, RefreshPolicy)
        self.policy = policy
        num_rows = max(ROWS) + 1
        self.tables = RequestTables(LAYERS, num_rows, policy.table_size(WIDTH), "cpu")
        slots = torch.randperm(num_rows * WIDTH, generator=self.generator) + 1
        self.req_to_token = slots.view(num_rows, WIDTH).int()
        num_slots = num_rows * WIDTH + 1
        self.ranking = StepRanking(
            *(self.codes, self.tables, policy.candidates, HEADS, num_slots, 2),
            reference.score_candidates,
        )
        self.attention = Attention(self.req_to_token)
        workspace: Any = SimpleNamespace(
            decode=self.attention, verify=self.attention, scores=None, ranking=self.ranking
        )
        self.kernels = CudaKernels(workspace, policy, self.tables, self.req_to_token, GAMMA + 1)
        self.k = [torch.full((num_slots, KV_HEADS, DIM), 9.0) for _ in range(LAYERS)]
        self.v = [keys.clone() for keys in self.k]
        self.rows, self.seq_lens = torch.tensor(ROWS), torch.tensor(LENGTHS)
        for layer in range(LAYERS):
            for row, length in zip(ROWS, LENGTHS, strict=True):
                slots = self.req_to_token[row, :length].long()
                self.k[layer][slots] = self.random(length, KV_HEADS)
                self.kernels.written(layer, slots, self.k[layer])

    def random(self, n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, DIM, generator=self.generator) * torch.logspace(0.5, -0.5, DIM)

    def new_kv(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.random(n, KV_HEADS), self.random(n, KV_HEADS)

    def verify(self) -> list[torch.Tensor]:
        """Returns the K of each layer that the pass wrote."""
        self.kernels.begin_verify(self.rows, self.seq_lens)
        written = []
        for layer in range(LAYERS):
            new_kv = self.new_kv(len(ROWS) * (GAMMA + 1))
            q = self.random(len(ROWS) * (GAMMA + 1), HEADS)
            self.kernels.verify(layer, q, new_kv, self.k[layer], self.v[layer], SCALE)
            written.append(new_kv[0].unflatten(0, (len(ROWS), -1)))
        return written

    def coded(self, layer: int, row: int, start: int, end: int) -> torch.Tensor:
        return self.ranking.words[layer][self.req_to_token[row, start:end].long()]

    def draft(self, step: int, dense: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each layer's queries and new K."""
        self.kernels.begin_draft(self.rows, self.seq_lens, step, dense)
        seen = []
        for layer in range(LAYERS):
            q, new_kv = self.random(len(ROWS), HEADS), self.new_kv(len(ROWS))
            self.kernels.draft(layer, q, new_kv, self.k[layer], self.v[layer], SCALE)
            seen.append((q, new_kv[0]))
        return seen


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_verify_passes_code_what_they_write(world: World) -> None:
    world.verify()
    # What drafts leave there goes again.
    for step in range(GAMMA):
        world.draft(step)
    written = world.verify()
    for layer in range(LAYERS):
        for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
            found = world.coded(layer, row, length, length + GAMMA + 1)
            assert torch.equal(found, encode_keys(world.codes, layer, written[layer][i]))


def test_plain_steps_code_what_they_write(world: World) -> None:
    seen = world.draft(0, dense=True)
    assert all(chosen == [] for of_rows in world.attention.lists for chosen in of_rows.values())
    for layer, (_, new_k) in enumerate(seen):
        for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
            found = world.coded(layer, row, length, length + 1)
            assert torch.equal(found[0], encode_keys(world.codes, layer, new_k)[i])


def test_every_step_attends_to_what_the_policy_chooses(world: World) -> None:
    world.verify()
    for step in range(GAMMA):
        seen = world.draft(step)
        for layer, (q, _) in enumerate(seen):
            of_rows = world.attention.lists[step * LAYERS + layer]
            for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
                count = int(world.tables.counts[row])
                table = world.tables.positions[layer, row, :count].long()
                keys = world.k[layer][world.req_to_token[row, :length].long()]
                chosen = world.policy.select_step(
                    *(layer, step, q[i : i + 1], keys[None], (length,)),
                    *((world.policy.attended(length),), table[None], SCALE),
                )
                assert chosen is not None
                attended = world.policy.attended(length)
                assert len(of_rows[row]) == len(set(of_rows[row])) == attended < count
                # One may differ at the threshold, by rounding.
                assert len(set(of_rows[row]) & set(chosen[0].tolist())) >= attended - 1


def test_requests_without_a_table_draft_densely(world: World) -> None:
    world.verify()
    world.tables.drop(torch.tensor([ROWS[0]]))
    world.draft(0)
    for of_rows in world.attention.lists:
        assert of_rows[ROWS[0]] == []
        assert len(of_rows[ROWS[1]]) == world.policy.attended(LENGTHS[1])
