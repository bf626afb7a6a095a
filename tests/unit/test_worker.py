"""The worker's view of a batch."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_vegas.worker import VegasWorker, _validate_kv_dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_narrow_kv_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16"):
        _validate_kv_dtype(dtype, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_kv_is_taken(dtype: torch.dtype) -> None:
    _validate_kv_dtype(dtype, dtype)


def test_a_kv_cache_of_another_type_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="auto"):
        _validate_kv_dtype(torch.bfloat16, torch.float16)


def released(finished_len: int | None) -> SimpleNamespace:
    """A request with 10 prompt tokens and 7 answered, a run of 5 behind 2, after its release."""
    worker: Any = SimpleNamespace()
    req = SimpleNamespace(
        req_pool_idx=0,
        origin_input_ids=[1] * 10,
        output_ids=array("q", range(7)),
        finished_len=finished_len,
        kv_committed_len=16,
        reasoning_tokens=7,
    )
    VegasWorker.prepare_for_kv_cache_release(worker, req)
    return req


def test_nothing_past_the_end_is_kept() -> None:
    req = released(finished_len=5)
    assert (req.kv_committed_len, req.reasoning_tokens) == (15, 5)
    assert list(req.output_ids) == [0, 1, 2, 3, 4]


def test_an_aborted_request_keeps_what_it_has() -> None:
    req = released(finished_len=None)
    assert (req.kv_committed_len, len(req.output_ids)) == (16, 7)
