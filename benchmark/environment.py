"""What every benchmark has: its common flags, what it ran on, and its report on disk."""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.server_process import has_cuda

ROOT = Path(__file__).resolve().parent.parent


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True)


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--commit", default=None, help="where there is no git repository")
    parser.add_argument("server_args", nargs="*", help="flags for the servers, behind --")


def write_report(report: dict[str, Any], out: Path | None) -> None:
    """Nothing is written without a path."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {out}")


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
