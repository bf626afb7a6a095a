"""GPU times of each iteration's phases, for benchmarks: one JSON line an iteration.

On with the environment variable SGLANG_VEGAS_TIMING_FILE. Nothing waits: an iteration is written
once a later one finds its events passed.
"""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass, field

import torch

TIMING_FILE = "SGLANG_VEGAS_TIMING_FILE"
PHASES = ("start", "drafted", "verify", "verified")


@dataclass
class _Iteration:
    mode: str
    batch: int
    events: dict[str, torch.cuda.Event] = field(default_factory=dict)


class PhaseTimer:
    """Records an event at the start of an iteration, after its drafts, and around its verify."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # open as long as the server
        self._iterations: deque[_Iteration] = deque()

    @classmethod
    def from_env(cls) -> PhaseTimer | None:
        path = os.environ.get(TIMING_FILE)
        return cls(path) if path and torch.cuda.is_available() else None

    def begin(self, mode: str, batch: int) -> None:
        """`mode`: speculate or plain."""
        self._iterations.append(_Iteration(mode, batch))
        self.mark("start")
        self._write_finished()

    def mark(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._iterations[-1].events[phase] = event

    def _write_finished(self) -> None:
        while len(self._iterations) > 1 and self._iterations[1].events["start"].query():
            done = self._iterations.popleft()
            if len(done.events) < len(PHASES):
                continue  # it failed on the way
            start, drafted, verify, verified = (done.events[phase] for phase in PHASES)
            line = {
                "mode": done.mode,
                "batch": done.batch,
                "draft_ms": start.elapsed_time(drafted) if done.mode == "speculate" else 0.0,
                "verify_ms": verify.elapsed_time(verified),
                "iteration_ms": start.elapsed_time(self._iterations[0].events["start"]),
            }
            self._file.write(json.dumps(line) + "\n")
