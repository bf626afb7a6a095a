"""What a result was measured on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.server_process import has_cuda

ROOT = Path(__file__).resolve().parent.parent


def device_name() -> str:
    if not has_cuda():
        return "CPU"
    import torch

    return torch.cuda.get_device_name()


def commit() -> str:
    """Of this repository; "unknown" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
