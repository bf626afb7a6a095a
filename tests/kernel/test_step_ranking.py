"""Codes and the choice of a draft step against the basis, in float64.

On the GPU, or without one in Triton's interpreter (`make test-unit`), which must be asked for
before Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch
from sgl_vegas_kernels import reference  # pyright: ignore[reportMissingImports]
from sgl_vegas_kernels.ranking import (  # pyright: ignore[reportMissingImports]
    CandidateScores,
    num_parts,
    stats_size,
)

from sgl_vegas.key_codes.basis import KeyBasis, fit_basis
from sgl_vegas.key_codes.moments import Moments
from sgl_vegas.key_codes.step_ranking import StepRanking
from sgl_vegas.key_codes.words import WordCodes, encode_keys, score_words
from sgl_vegas.tables.request_tables import RequestTables

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS, CANDIDATES = 2, 4
# heads, KV heads, head dim
SHAPES = ((6, 2, 64), (3, 1, 32), (16, 1, 128), (14, 2, 80), (8, 8, 96))
# The interpreter is slow.
TRIED = SHAPES if ON_GPU else SHAPES[:3]
# On the GPU more than the kernels merge or count at a time.
LONG = 20_000 if ON_GPU else 150
# What scores is CUDA.
SCORE = None if ON_GPU else reference.score_candidates
in_triton = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED),
    reason="no GPU; set TRITON_INTERPRET=1",
)


def fitted(shape: tuple[int, int, int], bits: int = 64) -> KeyBasis:
    """Of keys and queries whose directions count unlike."""
    _, kv_heads, dim = shape
    moments = Moments(LAYERS, kv_heads, dim)
    for layer in range(LAYERS):
        q, k = samples(shape, layer)
        moments.add(layer, q, k)
    return fit_basis(moments, bits)


def samples(shape: tuple[int, int, int], seed: int, n: int = 2000) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0.5, -1, dim)
    q = torch.randn(n, heads, dim, generator=generator) * spread.flip(0)
    k = torch.randn(n, kv_heads, dim, generator=generator) * spread.roll(dim // 2) * 3 + 1.0
    return q, k


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_stand_for_the_components(shape: tuple[int, int, int]) -> None:
    _, kv_heads, _ = shape
    basis = fitted(shape)
    codes = WordCodes.of(basis)
    q, k = samples(shape, 9, 300)
    for layer in range(LAYERS):
        words = encode_keys(codes, layer, k)
        components = basis.components(layer, k).double()
        projected = basis.project(layer, q[0].unflatten(0, (kv_heads, -1))).double()
        wanted = torch.einsum("hgd,nhd->hgn", projected, components).flatten(0, 1) * 0.3
        found = score_words(codes, layer, q[0], words, 0.3).double()
        wanted, found = (x - x.mean(dim=-1, keepdim=True) for x in (wanted, found))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_other_codes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"32 bits a key; on a GPU it must have 64"):
        WordCodes.of(fitted(SHAPES[0], 32))


def made(
    shape: tuple[int, int, int], bases: list[int], counts: list[int], rows: int, width: int
) -> tuple[StepRanking, RequestTables, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A ranking, its tables of random candidates, rows of them from 1 on, req_to_token, caches."""
    heads, _, _ = shape
    generator = torch.Generator().manual_seed(5)
    tables = RequestTables(LAYERS, rows, max(*counts, 1), DEVICE)
    num_slots = rows * width + 1
    slots = torch.randperm(num_slots - 1, generator=generator)[: rows * width] + 1
    req_to_token = slots.view(rows, width).to(DEVICE, torch.int32)
    picked = torch.arange(1, len(bases) + 1, device=DEVICE)
    for i, (base, count) in enumerate(zip(bases, counts, strict=True)):
        for layer in range(LAYERS):
            found = torch.randperm(max(base, 1), generator=generator)[:count].sort().values
            tables.put(layer, i + 1, base, found.to(DEVICE))
    ranking = StepRanking(
        WordCodes.of(fitted(shape)), tables, CANDIDATES, heads, num_slots, len(bases), SCORE
    )
    caches = []
    for layer in range(LAYERS):
        _, k = samples(shape, 20 + layer, num_slots)
        caches.append(k.to(DEVICE, torch.bfloat16))
        every = torch.arange(num_slots, device=DEVICE)
        for part in every.split(1000):
            ranking.encode(layer, part, caches[layer])
    return ranking, tables, picked, req_to_token, caches


@in_triton
@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_encoded_as_in_pytorch(shape: tuple[int, int, int]) -> None:
    ranking, *_, caches = made(shape, [30], [8], rows=2, width=40)
    codes = WordCodes.of(fitted(shape))
    for layer in range(LAYERS):
        # In float64: whether a level near the edge of its interval is rounded up or down is open.
        exact = torch.einsum(
            "nhd,hdc->nhc", caches[layer].double().cpu(), codes.encode[layer].double()
        )
        exact = exact + codes.shift[layer].double()
        near_edge = (exact - exact.round()).abs() < 2e-4
        near_edge = (near_edge & (codes.most[layer] > 0)).any(dim=-1)
        assert near_edge.float().mean() < 0.2
        wanted = encode_keys(codes, layer, caches[layer].cpu())
        found = ranking.words[layer].cpu()
        assert torch.equal(found[~near_edge], wanted[~near_edge])


@in_triton
@pytest.mark.parametrize("shape", TRIED, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_chooses_the_heaviest(shape: tuple[int, int, int], strided: bool) -> None:
    heads, _, dim = shape
    bases, counts = [LONG, 64, 37, LONG // 2, LONG + 5], [LONG - 20, 64, 3, 0, LONG // 2]
    ranking, tables, rows, req_to_token, _ = made(shape, bases, counts, len(bases) + 1, LONG + 9)
    q = samples(shape, 77, len(rows))[0].to(DEVICE, torch.bfloat16)
    if strided:
        q = torch.cat([q, q + 1], dim=1)[:, :heads]
    rows = rows.flip(0)
    scale = dim**-0.5
    ranking.begin(rows)
    # A group's heads as the basis has them, in float64.
    basis = fitted(shape)
    for layer in (1, 0):
        before = ranking.positions.clone()
        ranking.choose(layer, q, rows, req_to_token, scale)
        for i, row in enumerate(rows.tolist()):
            count = counts[row - 1]
            wanted = max(count // CANDIDATES, 1) if count else 0
            assert int(ranking.wanted[row]) == wanted
            if not count:
                assert torch.equal(ranking.positions[0, row], before[0, row])
                continue
            candidates = tables.positions[layer, row, :count].long()
            words = ranking.words[layer][req_to_token[row, candidates].long()].cpu()
            scores = score_words(WordCodes.of(basis), layer, q[i].float().cpu(), words, scale)
            weights = scores.double().softmax(dim=-1).mean(dim=0)
            chosen = ranking.positions[0, row, :wanted].cpu()
            places = {int(position): place for place, position in enumerate(candidates.tolist())}
            picked = [places[int(position)] for position in chosen]
            assert len(set(picked)) == wanted
            least = weights.sort(descending=True).values[wanted - 1]
            # A bin of the histogram is 2^(1/32) wide; products are of float16.
            assert weights[picked].min() >= least * 2 ** (-1.5 / 32)
            left = torch.ones(count, dtype=torch.bool)
            left[picked] = False
            if left.any():
                assert weights[left].max() <= least * 2 ** (1.5 / 32)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("shape", [*SHAPES, (32, 8, 128), (24, 6, 64), (15, 5, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_scores_as_in_pytorch(shape: tuple[int, int, int], batch: int) -> None:
    """What the next kernel reads: scores, and each part's softmax sums."""
    heads, kv_heads, _ = shape
    generator = torch.Generator(DEVICE).manual_seed(3)
    counts = [0, 3000, 1, 31, 32, 33, 700, 2049][:batch] if batch > 1 else [3000]
    counts = [counts[i % len(counts)] for i in range(batch)]
    width, max_count, num_slots = 4000, 3000, 9000

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, device=DEVICE)

    def on_device(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    weights = torch.randn(batch, heads, 64, generator=generator, device=DEVICE).half()
    given = (
        integers(-(2**63), 2**63 - 1, num_slots, kv_heads),
        integers(-9, width + 9, batch + 1, max_count).int(),
        on_device([7, *counts]),
        on_device([5, *([width] * batch)]),
        on_device([1, *(min(count, 1) for count in counts)]),
        torch.arange(1, batch + 1, device=DEVICE).flip(0),
        integers(0, num_slots, batch + 1, width).int(),
        weights,
    )
    results = []
    cuda = CandidateScores(heads, kv_heads, torch.device(DEVICE, 0))
    for score in (reference.score_candidates, cuda):
        scores = torch.zeros(batch, max_count, heads, dtype=torch.float16, device=DEVICE)
        stats = torch.zeros(stats_size(batch, heads), device=DEVICE)
        score(*given, scores, stats)
        used = stats[: batch * num_parts(batch, kv_heads) * 2 * heads]
        references, sums = used.view(batch, -1, 2, heads).unbind(2)
        results.append((scores, references + sums.log2()))
    (scores, sums), (found_scores, found_sums) = results
    torch.testing.assert_close(found_scores, scores, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(found_sums, sums, rtol=1e-4, atol=2e-3)


@in_triton
def test_padding_and_wrong_tables_are_harmless() -> None:
    """Rows 0 have no table, and positions outside of the request are cut to it."""
    shape = SHAPES[0]
    ranking, tables, rows, req_to_token, _ = made(shape, [100], [64], rows=3, width=110)
    tables.positions[:, 1, :3] = torch.tensor([-5, 2**30, 100], device=DEVICE)
    padded = torch.cat([rows, torch.zeros_like(rows)])
    q = samples(shape, 1, 2)[0].to(DEVICE, torch.bfloat16)
    ranking.begin(padded)
    ranking.choose(0, q, padded, req_to_token, 0.1)
    assert ranking.wanted.tolist() == [0, 16, 0]
    assert not ranking.positions[0, 0].any()
    # Nor does a base or a count, however wrong.
    tables.bases[1], tables.counts[1] = 2**31 - 1, 2**31 - 1
    ranking.choose(0, q, padded, req_to_token, 0.1)
    tables.bases[1] = 0
    ranking.choose(0, q, padded, req_to_token, 0.1)
