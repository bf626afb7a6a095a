"""Start an SGLang server as a child process, talk to it, and stop its whole process tree."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from sgl_vegas.tune import server_process
from sgl_vegas.tune.server_process import free_port, stop

START_DEADLINE_S = 600
REQUEST_TIMEOUT_S = 900

# Greedy parity needs a CPU run in float32: bfloat16 ties would flip with the batch size. 48K KV
# slots of a 135M model are about 2 GB.
CPU_FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--max-total-tokens", "49152", "--max-running-requests", "8", "--sleep-on-idle"),
    # SGLang's default, xgrammar, ends the scheduler on a CPU.
    *("--grammar-backend", "llguidance"),
)
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1"}
CUDA_FLAGS = ("--device", "cuda", "--dtype", "bfloat16")
# More flags for every server of the tests, such as the memory it may take on a shared GPU.
EXTRA_FLAGS = "VEGAS_TEST_SERVER_FLAGS"

Prompt = str | list[str] | list[int] | list[list[int]]


@dataclass(frozen=True)
class Server:
    """A running server. Methods raise `requests.HTTPError` unless the answer is 2xx.

    Attributes:
        url: without a trailing slash.
        log_path: standard output and error of the server, growing while it runs.
    """

    url: str
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, for error messages."""
        return server_process.log_tail(self.log_path)

    def request(self, method: str, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        """Any request, whatever its status; for the tests of refusals."""
        return requests.request(
            method, self.url + path, json=body, timeout=REQUEST_TIMEOUT_S, **kwargs
        )

    def get(self, path: str) -> requests.Response:
        response = self.request("GET", path)
        response.raise_for_status()
        return response

    def post(self, path: str, body: Any) -> Any:
        response = self.request("POST", path, body)
        response.raise_for_status()
        return response.json()

    def generate(self, prompt: Prompt, **sampling: Any) -> Any:
        """SGLang's own `/generate`: one answer, or a list of answers for a list of prompts."""
        return self.post("/generate", {**_prompt_field(prompt), "sampling_params": sampling})

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", chat_body(messages, **options))

    def complete(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"model": "default", "prompt": prompt, **options})

    def stream(self, prompt: Prompt, **sampling: Any) -> Generator[dict[str, Any]]:
        """The chunks of a streamed `/generate`. Closing the iterator drops the connection."""
        body = {**_prompt_field(prompt), "sampling_params": sampling, "stream": True}
        return self.events("/generate", body)

    def events(self, path: str, body: Any, **kwargs: Any) -> Generator[dict[str, Any]]:
        """The server-sent events of a streaming endpoint, up to `[DONE]`."""
        with self.request("POST", path, body, stream=True, **kwargs) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)

    def flush_cache(self) -> None:
        """Empty the prefix cache, once the server is idle."""
        self.request("POST", "/flush_cache?timeout=60").raise_for_status()

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, labels left out."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    def load(self) -> dict[str, Any]:
        """Requests and KV tokens in use, as the scheduler counts them."""
        return self.get("/v1/loads").json()["loads"][0]


def chat_body(messages: Sequence[Mapping[str, str]], **options: Any) -> dict[str, Any]:
    return {"model": "default", "messages": list(messages), **options}


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    first = prompt[0] if isinstance(prompt, list) else prompt
    return {"text" if isinstance(first, str) else "input_ids": prompt}


@contextlib.contextmanager
def launch_server(
    model_path: str | Path,
    *,
    algorithm: str | None,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_path: str | Path,
) -> Iterator[Server]:
    """Run a server on a free loopback port until the block ends.

    Args:
        algorithm: value of `--speculative-algorithm`; None for plain SGLang.
        extra_args: flags behind the defaults of this device, which they override.
        env: variables on top of this process's.

    Raises:
        ServerStartError: if it is not healthy in time.
    """
    log_path = Path(log_path)
    port = free_port()
    process = start(server_command(model_path, algorithm, port, extra_args), env or {}, log_path)
    try:
        server = Server(f"http://127.0.0.1:{port}", log_path)
        for _ in wait_until_healthy(server, process):
            pass
        yield server
    finally:
        stop(process)


def server_command(
    model_path: str | Path, algorithm: str | None, port: int, extra_args: Sequence[str] = ()
) -> list[str]:
    """The command line; argparse lets a later flag win, so `extra_args` come last."""
    speculation = ["--speculative-algorithm", algorithm] if algorithm else []
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port)),
        *("--skip-server-warmup", "--enable-cache-report"),
        *(CUDA_FLAGS if has_cuda() else CPU_FLAGS),
        *os.environ.get(EXTRA_FLAGS, "").split(),
        *speculation,
        *extra_args,
    ]


def start(
    command: Sequence[str], env: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group of its own, which `stop` can end."""
    device_env = {} if has_cuda() else CPU_ENV
    return server_process.start(command, {**device_env, **env}, log_path)


def wait_until_healthy(
    server: Server, process: subprocess.Popen[bytes], deadline_s: float = START_DEADLINE_S
) -> Iterator[float]:
    """Yield the seconds waited, about once a second, until the server answers.

    Raises:
        ServerStartError: with the tail of its log.
    """
    return server_process.wait_until_healthy(server.url, process, server.log_path, deadline_s)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
