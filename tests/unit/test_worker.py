"""The worker's view of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sgl_vegas.worker import _refuse_narrow_kv, _rows


def test_rows_of_a_request_that_ended_after_the_batch_was_built() -> None:
    """SGLang frees a row by setting `req.req_pool_idx` to None; the batch still carries it."""
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(req_pool_idx=3), SimpleNamespace(req_pool_idx=None)],
        req_pool_indices_cpu=torch.tensor([3, 5]),
    )
    assert _rows(cast(Any, batch)) == [3, 5]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_narrow_kv_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype bfloat16"):
        _refuse_narrow_kv(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_kv_is_taken(dtype: torch.dtype) -> None:
    _refuse_narrow_kv(dtype)
