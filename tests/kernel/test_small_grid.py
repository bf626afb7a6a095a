"""Every kernel, and instances of every kind, once, on little data: for compute-sanitizer
(kernels/README.md)."""

from __future__ import annotations

import pytest
import torch

from tests.kernel.paged_cases import DEVICE, POISON, make_case
from tests.kernel.test_paged_attention import (
    BF16,
    FP8,
    FP16,
    INSTANCES,
    attention_for,
    check_dense,
    check_sparse,
    own_slots,
    random_tables,
    run_dense,
    take_out_new,
)
from tests.kernel.test_selection import Setup

pytestmark = pytest.mark.gpu

LENGTHS = [1, 63, 300, 65, -1, 0]


@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group", "num_queries"), INSTANCES)
def test_verification_and_selection(head_dim, num_kv_heads, group, num_queries):
    check_verification_and_selection(head_dim, num_kv_heads, group, num_queries, BF16)


def test_half_precision():
    check_verification_and_selection(128, 2, 4, 7, FP16)


def check_verification_and_selection(head_dim, num_kv_heads, group, num_queries, dtype):
    torch.manual_seed(5)
    num_heads = num_kv_heads * group
    case = make_case(LENGTHS, num_queries, num_heads, num_kv_heads, head_dim, dtype)
    own_slots(case)
    attention = attention_for(case)
    new = take_out_new(case, LENGTHS)
    sinks = torch.randn(num_heads, device=DEVICE)
    run_dense(attention, case, 40, sinks=sinks, new_kv=new)
    check_dense(attention, case, 40, sinks)
    setup = Setup(case)
    for _ in range(2):
        setup.begin()
        setup.verify(0)
    setup.check(0)


@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group"), [(128, 2, 4), (64, 2, 8)])
def test_kv_of_8_bits(head_dim, num_kv_heads, group):
    case = make_case(LENGTHS, 7, 2 * group, num_kv_heads, head_dim, BF16, kv_dtype=FP8)
    attention = attention_for(case)
    run_dense(attention, case)
    check_dense(attention, case)
    case = make_case(LENGTHS, 1, 2 * group, num_kv_heads, head_dim, BF16, kv_dtype=FP8)
    draft(case)


def test_prefill():
    case = make_case(LENGTHS, 1, 8, 2, 128, BF16, sharpness=3.0)
    setup = Setup(case)
    setup.prefill(0)
    setup.check(0, prefill=True)


def draft(case, new_kv=None):
    tables = random_tables(case, num_layers=1, max_k=100)
    attention = attention_for(case)
    attention.plan_sparse(case.seq_lens, case.rows, tables, 2)
    case.out.fill_(POISON)
    attention.sparse(
        *(case.q, case.k_cache, case.v_cache, case.req_to_token, tables, 0, case.scale, case.out),
        new_kv=new_kv,
    )
    check_sparse(case, tables, 0, 2)


@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group"), [(128, 2, 4), (64, 2, 8)])
def test_drafts(head_dim, num_kv_heads, group):
    torch.manual_seed(6)
    case = make_case(LENGTHS, 1, 2 * group, num_kv_heads, head_dim, BF16)
    own_slots(case)
    draft(case, take_out_new(case, [length + 2 for length in LENGTHS]))
