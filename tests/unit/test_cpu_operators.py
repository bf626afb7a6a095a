"""The torch operators against slow loops written from the operators' descriptions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sgl_vegas.cpu.operators import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

ROWS, WIDTH = 7, 40
SEEDS = range(5)
INDEX_DTYPES = [torch.int32, torch.int64]


def random_ranges(
    generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct pool rows and a range in each, one of them empty: three (4,) tensors."""
    rows = torch.randperm(ROWS, generator=generator)[:4].to(dtype)
    start = torch.randint(0, WIDTH // 2, (4,), generator=generator).to(dtype)
    length = torch.randint(0, WIDTH // 2, (4,), generator=generator).to(dtype)
    length[1] = 0
    return rows, start, start + length


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_assign_req_to_token_pool(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, start, end = random_ranges(generator, dtype)
    pool = torch.randint(0, 999, (ROWS, WIDTH), generator=generator, dtype=torch.int32)
    slots = torch.randint(1000, 9999, (int((end - start).sum()),), generator=generator)

    expected, taken = pool.clone(), 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        for position in range(first, last):
            expected[row, position] = int(slots[taken])
            taken += 1

    assign_req_to_token_pool_cpu(rows, pool, start, end, slots, WIDTH)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_assign_extend_cache_locs(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, start, end = random_ranges(generator, dtype)
    pool = torch.randint(0, 999, (ROWS, WIDTH), generator=generator, dtype=torch.int32)
    out = torch.full((int((end - start).sum()) + 3,), -1, dtype=torch.int64)

    expected = [
        int(pool[row, position])
        for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)
        for position in range(first, last)
    ]

    assign_extend_cache_locs_cpu(rows, pool, start, end, out, WIDTH)
    assert out.tolist() == [*expected, -1, -1, -1]


def test_assign_draft_cache_locs_contiguous() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 999, (ROWS, WIDTH), generator=generator, dtype=torch.int32)
    rows, lengths = torch.tensor([5, 2]), torch.tensor([3, 30])
    out = torch.empty(2 * 2 * 4, dtype=torch.int64)

    assign_draft_cache_locs_contiguous_cpu(rows, pool, lengths, out, WIDTH, 2, 4)
    assert out.tolist() == [int(pool[5, 3 + i]) for i in range(8)] + [
        int(pool[2, 30 + i]) for i in range(8)
    ]


def test_fill_bonus_tokens() -> None:
    tokens = torch.tensor([10, 11, 12, 20, 21, 22, 30, 31, 32], dtype=torch.int32)
    bonus = torch.zeros(3, dtype=torch.int64)
    fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3, 2], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [10, 22, 31]


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_fill_accept_out_cache_loc(shape: tuple[int, ...]) -> None:
    accept_index = torch.tensor([0, 1, -1, 3, -1, -1], dtype=torch.int32).reshape(shape)
    out = torch.zeros(5, dtype=torch.int64)
    fill_accept_out_cache_loc_cpu(accept_index, torch.tensor([50, 51, 52, 53]), out)
    assert out.tolist() == [50, 51, 53, 0, 0]


def random_trees(
    generator: torch.Generator, batch: int, nodes: int, chain: bool
) -> tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]:
    """Random trees on nodes 0..n-1, each node's parent before it.

    Returns:
        next_token, next_sibling: (batch, nodes) int64; and each node's children, in order.
    """
    next_token = torch.full((batch, nodes), -1)
    next_sibling = torch.full((batch, nodes), -1)
    all_children = []
    for row in range(batch):
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node in range(1, nodes):
            low = node - 1 if chain else 0
            parent = int(torch.randint(low, node, (1,), generator=generator))
            children[parent].append(node)
        for parent, family in enumerate(children):
            for node, following in pairwise(family):
                next_sibling[row, node] = following
            next_token[row, parent] = family[0] if family else -1
        all_children.append(children)
    return next_token, next_sibling, all_children


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_verify_tree_greedy(seed: int, chain: bool, depth: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = 5, 8
    next_token, next_sibling, children = random_trees(generator, batch, nodes, chain)
    # Two tokens only, so that long walks and ties between siblings occur.
    candidates = torch.randint(0, 2, (batch, nodes), generator=generator)
    choices = torch.randint(0, 2, (batch, nodes), generator=generator)
    index = torch.arange(batch * nodes).view(batch, nodes)

    predicts = torch.full((batch * nodes,), -7, dtype=torch.int32)
    accept_index = torch.full((batch, depth), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=candidates,
        retrive_index=index.to(dtype),
        retrive_next_token=next_token.to(dtype),
        retrive_next_sibling=next_sibling.to(dtype),
        target_predict=choices,
    )

    expected_predicts = torch.full_like(predicts, -7)
    for row in range(batch):
        node, visited = 0, [0]
        while len(visited) < depth:
            wanted = int(choices[row, node])
            fitting = [c for c in children[row][node] if int(candidates[row, c]) == wanted]
            if not fitting:
                break
            node = fitting[0]
            visited.append(node)
        for node in visited:
            expected_predicts[row * nodes + node] = int(choices[row, node])
        expected = [row * nodes + n for n in visited]
        assert accept_index[row].tolist() == expected + [-1] * (depth - len(expected))
        assert int(accepted[row]) == len(visited) - 1
    assert torch.equal(predicts, expected_predicts)
