"""The table of a GPU trace, on a trace written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmark.trace_table import read_kernels, summarise, wall_us

KERNELS = [
    ("void attend_kernel<false, true>(AttendParams)", 0, 100),
    ("nvjet_tst_128x64", 110, 37),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>", 147, 3),
    # Beside the product: counted, but not twice in the time in which something ran.
    ("void reduce_kernel(SelectParams)", 120, 20),
    ("void at::native::reduce_kernel<512, ArgMaxOps>", 150, 10),
    ("void at::native::elementwise_kernel", 170, 5),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in KERNELS
    ]
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": -50, "dur": 500})
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_wall_time_counts_overlapping_kernels_once(trace: Path) -> None:
    assert wall_us(read_kernels(trace)) == 175


def test_time_by_group_and_idle_time(trace: Path) -> None:
    assert summarise(read_kernels(trace)) == {
        "attention": (100, 1),
        "matrix products": (40, 2),
        "selection": (20, 1),
        "argmax and sampling": (10, 1),
        "other PyTorch kernels": (5, 1),
        "idle": (20, 0),
    }
