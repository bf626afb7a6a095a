"""What the CUDA kernels refuse, and how a missing compiler is reported. Needs no GPU."""

from __future__ import annotations

import pytest
import torch
from sgl_vegas_kernels import build  # pyright: ignore[reportMissingImports]
from sgl_vegas_kernels.paged_attention import (  # pyright: ignore[reportMissingImports]
    PagedAttention,
)

HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)


@pytest.fixture
def fresh_compiler_search():
    build.find_nvcc.cache_clear()
    build._nvcc_version.cache_clear()
    yield
    build.find_nvcc.cache_clear()
    build._nvcc_version.cache_clear()


@pytest.mark.parametrize("capability", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (64, 8, 64)])
def test_usual_models_are_supported(num_heads, num_kv_heads, head_dim, capability):
    for num_queries in range(1, 17):
        shape = (num_heads, num_kv_heads, head_dim, num_queries, torch.bfloat16, capability)
        assert PagedAttention.supports(*shape) is None


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 17))
def test_hopper_has_all_groups_and_queries(head_dim, group):
    for num_queries in range(1, 17):
        shape = (2 * group, 2, head_dim, num_queries, torch.bfloat16, HOPPER)
        assert PagedAttention.supports(*shape) is None
        fits = num_queries * group <= 128
        assert (PagedAttention.supports(*shape, torch.float8_e4m3fn) is None) == fits


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((32, 8, 256, 7, torch.bfloat16, HOPPER), "head dim 256"),
        ((32, 8, 128, 7, torch.float32, HOPPER), "float32"),
        ((32, 8, 128, 17, torch.bfloat16, HOPPER), "17 queries"),
        ((32, 1, 128, 1, torch.bfloat16, HOPPER), "32 query heads"),
        ((30, 8, 128, 1, torch.bfloat16, HOPPER), "30 query heads over 8"),
        ((16, 1, 128, 9, torch.bfloat16, HOPPER, torch.float8_e4m3fn), "9 queries of 16 heads"),
        ((32, 8, 128, 7, torch.bfloat16, ADA, torch.float8_e4m3fn), "float8_e4m3fn on compute"),
        ((32, 8, 128, 7, torch.bfloat16, HOPPER, torch.float16), "KV of torch.float16"),
        ((32, 8, 128, 7, torch.bfloat16, (7, 5)), "compute capability 7.5"),
    ],
)
def test_refusals_name_the_reason(shape, named):
    assert named in (PagedAttention.supports(*shape) or "")


def test_missing_compiler(monkeypatch, fresh_compiler_search):
    monkeypatch.setattr(build.shutil, "which", lambda path: None)
    with pytest.raises(RuntimeError, match="needs nvcc"):
        build.find_nvcc()


def test_failing_compiler(monkeypatch, tmp_path, fresh_compiler_search):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such luck\nexit 3\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SGLANG_VEGAS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no such luck"):
        build.load([build.Source("selection.cu", (), (9, 0))])
    assert not list((tmp_path / "cache" / "kernels").glob("*.so"))
