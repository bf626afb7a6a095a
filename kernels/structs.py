"""The kernels' parameter structs, field by field as in plan.cuh, params.cuh, selection.cu and
ranking.cu."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_int64, c_void_p

import torch

# Bytes of what the structs point to.
CTA_START_BYTES = 32
LIST_BYTES = 16
SCORE_GROUPS_BYTES = 16
SHARE_BYTES = 48
LAYER_STATE_BYTES = 8
HISTOGRAM_BINS = 4096
GROUP_TOKENS = 16


class Plan(ctypes.Structure):
    _fields_ = [("ctas", c_void_p), ("lists", c_void_p)]


class PlanParams(ctypes.Structure):
    _fields_ = [
        ("plan", Plan),
        ("seq_lens", c_void_p),
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("bases", c_void_p),
        ("batch", c_int),
        ("num_head_sets", c_int),
        ("num_ctas", c_int),
        ("extra", c_int),
        ("max_count", c_int),
        ("window", c_int),
    ]


class AttendParams(ctypes.Structure):
    _fields_ = [
        ("plan", Plan),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("new_k", c_void_p),
        ("new_v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("sinks", c_void_p),
        ("req_to_token", c_void_p),
        ("positions", c_void_p),
        ("partial_o", c_void_p),
        ("partial_stats", c_void_p),
        ("pieces_done", c_void_p),
        ("scores", c_void_p),
        ("references", c_void_p),
        ("score_groups", c_void_p),
        ("q_stride", c_int64),
        ("new_k_stride", c_int64),
        ("new_v_stride", c_int64),
        ("req_to_token_stride", c_int64),
        ("score_head_stride", c_int64),
        ("max_count", c_int),
        ("batch", c_int),
        ("num_kv_heads", c_int),
        ("num_head_sets", c_int),
        ("group", c_int),
        ("num_queries", c_int),
        ("num_new", c_int),
        ("keeps_scores", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("v_scale", c_float),
    ]


class Selection(ctypes.Structure):
    _fields_ = [
        ("score_groups", c_void_p),
        ("num_shares", c_void_p),
        ("shares", c_void_p),
        ("chosen", c_void_p),
        ("states", c_void_p),
        ("histograms", c_void_p),
        ("keys", c_void_p),
        ("scores", c_void_p),
    ]


class BeginParams(ctypes.Structure):
    _fields_ = [
        ("selection", Selection),
        ("rank_lens", c_void_p),
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("bases", c_void_p),
        ("ratio", c_double),
        ("min_tokens", c_int64),
        ("max_tokens", c_int64),
        ("capacity", c_int64),
        ("num_heads", c_int),
        ("batch", c_int),
        ("num_blocks", c_int),
    ]


class SelectParams(ctypes.Structure):
    _fields_ = [
        ("selection", Selection),
        ("rows", c_void_p),
        ("lse", c_void_p),
        ("references", c_void_p),
        ("positions", c_void_p),
        ("score_head_stride", c_int64),
        ("max_count", c_int),
        ("batch", c_int),
        ("num_kv_heads", c_int),
        ("group", c_int),
        ("num_queries", c_int),
    ]


class RankingParams(ctypes.Structure):
    _fields_ = [
        ("words", c_void_p),
        ("positions", c_void_p),
        ("counts", c_void_p),
        ("bases", c_void_p),
        ("wanted", c_void_p),
        ("rows", c_void_p),
        ("req_to_token", c_void_p),
        ("weights", c_void_p),
        ("scores", c_void_p),
        ("stats", c_void_p),
        ("req_to_token_stride", c_int64),
        ("width", c_int),
        ("max_count", c_int),
        ("num_parts", c_int),
    ]


def pointer(tensor: torch.Tensor, dtype: torch.dtype, ndim: int, what: str) -> int:
    """The address of a tensor whose last dimension is dense. ValueError for another type."""
    if tensor.dtype != dtype or tensor.dim() != ndim or not tensor.is_cuda:
        raise ValueError(
            f"{what}: expected a {ndim}-dimensional CUDA tensor of {dtype}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    if ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{what}: the last dimension must be dense, its stride is not 1")
    return tensor.data_ptr()
