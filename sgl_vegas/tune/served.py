"""Measuring settings on servers of one's own: what a tuner can't be wrong about."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from sgl_vegas.lab.experiment import Progress
from sgl_vegas.tune.server_process import free_port, start, stop, wait_until_healthy
from sgl_vegas.tune.steps import Point

START_DEADLINE_S = 900
REQUEST_TIMEOUT_S = 3600


class Served:
    """Starts a server a setting and sends it all prompts, `concurrency` at a time.

    A prompt's tokens a second are its stream's, from the first token to the last, times the
    concurrency: its own prefill is not in it, those of others are.
    """

    def __init__(
        self,
        model_path: str,
        prompts: list[tuple[str, list[int]]],
        num_new: int,
        temperature: float,
        top_p: float,
        concurrency: int,
        server_flags: Sequence[str],
        log_path: Path,
        progress: Progress,
    ) -> None:
        self.how = (
            f"measured on servers of their own, {concurrency} of {len(prompts)} prompts at a time"
        )
        self._model_path, self._prompts = model_path, prompts
        self._sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": num_new,
            "ignore_eos": True,
        }
        self._concurrency = min(concurrency, len(prompts))
        self._server_flags, self._log_path = list(server_flags), log_path
        self._progress = progress
        self._known: dict[tuple[int, float], tuple[Point, Point]] = {}

    def acceptance(self, gamma: int, ratios: Sequence[float]) -> list[Point]:
        return [self._measured(gamma, ratio)[0] for ratio in ratios]

    def throughput(self, gammas: Sequence[int], ratios: Sequence[float]) -> list[Point]:
        return [self._measured(gamma, ratio)[1] for gamma in gammas for ratio in ratios]

    def plain(self) -> float:
        """Tokens a second without speculation."""
        answers = self._run([], "plain SGLang")
        return sum(a["tokens_per_s"] for a in answers.values()) / len(answers) * self._concurrency

    def _measured(self, gamma: int, ratio: float) -> tuple[Point, Point]:
        if (gamma, ratio) not in self._known:
            flags = [
                *("--speculative-algorithm", "VEGAS", "--speculative-num-steps", str(gamma)),
                *("--vegas-sparsity-ratio", str(ratio), "--vegas-speculate-above", "0"),
            ]
            answers = self._run(flags, f"gamma {gamma}, ratio {ratio:g}")
            tokens = {name: a["tokens_per_iteration"] for name, a in answers.items()}
            rates = {name: a["tokens_per_s"] * self._concurrency for name, a in answers.items()}
            self._known[gamma, ratio] = Point(gamma, ratio, tokens), Point(gamma, ratio, rates)
        return self._known[gamma, ratio]

    def _run(self, flags: list[str], label: str) -> dict[str, dict[str, float]]:
        done, lock = 0, threading.Lock()

        def ask(prompt: tuple[str, list[int]]) -> tuple[str, dict[str, float]]:
            nonlocal done
            answer = _stream(url, prompt[1], self._sampling)
            with lock:
                done += 1
                self._progress(label, done, len(self._prompts))
            return prompt[0], answer

        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", self._model_path),
            *(*self._server_flags, *flags),
        ]
        with _server(command, self._log_path) as url:
            with contextlib.suppress(requests.RequestException):  # graphs and caches warm
                _stream(url, self._prompts[0][1][:64], {**self._sampling, "max_new_tokens": 8})
            with ThreadPoolExecutor(self._concurrency) as pool:
                return dict(pool.map(ask, self._prompts))


def _stream(url: str, ids: list[int], sampling: dict[str, Any]) -> dict[str, float]:
    """Send one request; tokens a second from the first token on, and tokens an iteration.

    Raises:
        requests.HTTPError: for an answer that isn't 2xx.
    """
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    first, last, meta = None, 0.0, {}
    with requests.post(
        f"{url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            meta, last = json.loads(line[len(b"data: ") :])["meta_info"], time.perf_counter()
            if first is None:
                first, first_tokens = last, meta["completion_tokens"]
    if first is None:
        raise requests.RequestException("the stream was empty")
    tokens = meta["completion_tokens"]
    iterations = meta.get("spec_verify_ct") or tokens
    return {
        "tokens_per_s": (tokens - first_tokens) / max(last - first, 1e-9),
        # The first token is the prefill's.
        "tokens_per_iteration": (tokens - 1) / max(iterations, 1),
    }


@contextlib.contextmanager
def _server(command: list[str], log_path: Path) -> Iterator[str]:
    """Run `command` on a free port of this machine until the block ends; its address.

    Raises:
        ServerStartError: if it ends or isn't healthy in time, with the end of its log.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start([*command, "--host", "127.0.0.1", "--port", str(port)], {}, log_path)
    try:
        for _ in wait_until_healthy(url, process, log_path, START_DEADLINE_S):
            pass
        yield url
    finally:
        stop(process)
