"""Where does a decoding iteration's time go? A table from a GPU trace of SGLang's profiler.

    python benchmark/trace_table.py TRACE.json.gz [--steps 4]

Kernels are grouped by what they do; `idle` is the time in which no kernel ran. Kernels of different
streams may overlap, so that shares of the time sum up to more than 100%. A trace comes from
`benchmark/serving.py --profile FOLDER`.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

# First match wins; lower case.
GROUPS = {
    "attention": ("attend_kernel", "combine_kernel", "flash", "fmha"),
    "plan": ("plan_kernel",),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk", "cublas", "gemv"),
    # Behind the products, of which some end in a splitKreduce_kernel.
    "selection": ("begin_kernel", "reduce_kernel", "reference_kernel", "compact"),
    "norms, rope, activation": ("norm", "rope", "rotary", "silu", "act_and_mul"),
    "argmax and sampling": (
        "argmax",
        "argmin",
        "softmax",
        "top_k",
        "topp",
        "renorm",
        "exponential",
    ),
    "copies": ("memcpy", "memset", "copy"),
}


def group_of(name: str) -> str:
    lower = name.lower()
    # PyTorch's own reductions share a prefix with ours.
    if "at::native" in lower:
        return "argmax and sampling" if "argmax" in lower else "other PyTorch kernels"
    return next(
        (group for group, parts in GROUPS.items() if any(part in lower for part in parts)),
        "other kernels",
    )


def busy_us(events: list[dict[str, Any]]) -> float:
    """Length of the union of the events' intervals, in microseconds."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        start, stop = event["ts"], event["ts"] + event["dur"]
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def read_kernels(path: Path) -> list[dict[str, Any]]:
    """Kernels, copies and fills of a trace: ts and dur in microseconds."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [event for event in events if event.get("cat") in kinds]


def wall_us(events: list[dict[str, Any]]) -> float:
    """From the first kernel's start to the last one's end."""
    return max(event["ts"] + event["dur"] for event in events) - min(e["ts"] for e in events)


def summarise(events: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Group -> (microseconds, kernels), and `idle` with none."""
    groups: dict[str, list[float]] = defaultdict(list)
    for event in events:
        groups[group_of(event["name"])].append(event["dur"])
    rows = {name: (sum(times), len(times)) for name, times in groups.items()}
    rows["idle"] = (wall_us(events) - busy_us(events), 0)
    return dict(sorted(rows.items(), key=lambda item: -item[1][0]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of an iteration by kind of kernel.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=4, help="iterations in the trace")
    options = parser.parse_args()
    events = read_kernels(options.trace)
    rows, total = summarise(events), wall_us(events)
    print(f"{'':26} {'ms an iteration':>15} {'share':>6} {'kernels':>8}")
    for name, (us, count) in rows.items():
        ms = us / 1e3 / options.steps
        print(f"{name:26} {ms:15.3f} {us / total:6.1%} {count / options.steps:8.0f}")


if __name__ == "__main__":
    main()
