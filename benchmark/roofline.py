"""What this machine's memory bus and matrix units can do.

python benchmark/roofline.py    # measures this GPU and prints one line of JSON
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sgl_vegas.tune.roofline import Hardware


def measure_hardware() -> Hardware:
    """Measure this machine's device in a child process, which gives all its memory back.

    Raises:
        RuntimeError: with the end of its output.
    """
    child = subprocess.run(
        [sys.executable, str(Path(__file__))], capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise RuntimeError(f"measuring the GPU failed:\n{child.stderr[-2000:]}")
    return Hardware(**json.loads(child.stdout.splitlines()[-1]))


def _measure() -> Hardware:
    import torch

    cuda = torch.cuda.is_available()
    return Hardware(
        name=torch.cuda.get_device_name() if cuda else "CPU",
        copy_bandwidth=_copy_bandwidth(4 * 10**9 if cuda else 2 * 10**8, cuda),
        matrix_rate=_matrix_rate(8192 if cuda else 512, cuda),
    )


def _copy_bandwidth(size: int, cuda: bool) -> float:
    """Bytes a second, read plus written, of copying `size` bytes."""
    import torch

    source = torch.zeros(size, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), cuda)


def _matrix_rate(width: int, cuda: bool) -> float:
    """bf16 operations a second of a square product."""
    import torch

    matrix = torch.randn(width, width, device="cuda" if cuda else "cpu").to(torch.bfloat16)
    return 2 * width**3 / _best_seconds(lambda: matrix @ matrix, cuda)


def _best_seconds(work: Any, cuda: bool, runs: int = 20) -> float:
    """The shortest of `runs` runs: a roofline is what the device can do."""
    import torch

    synchronize = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(3):
        work()
    best = math.inf
    for _ in range(runs):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    print(json.dumps(vars(_measure())))
