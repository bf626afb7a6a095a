"""Starting a server as a child process, and ending it with all of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import requests

LOG_TAIL_LINES = 40
# Below what Linux hands out by default.
PORTS = (20000, 32000)


class ServerStartError(RuntimeError):
    """The server ended, or did not become healthy in time; the message carries its log's tail."""


def start(
    command: Sequence[str], env: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group of its own, which `stop` can end.

    Args:
        env: variables on top of this process's.
    """
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group, also when its leader is already gone.

    Not SIGTERM: SGLang would first finish its running requests.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_healthy(
    url: str, process: subprocess.Popen[bytes], log_path: Path, deadline_s: float
) -> Iterator[float]:
    """Yield the seconds waited, about once a second, until the server at `url` answers.

    Raises:
        ServerStartError: with the tail of its log.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < deadline_s:
        if process.poll() is not None:
            raise ServerStartError(_why(log_path, f"ended with status {process.returncode}"))
        with contextlib.suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(url + "/health", timeout=30).ok:
                return
        yield waited
        time.sleep(1)
    raise ServerStartError(_why(log_path, f"is not healthy after {deadline_s:.0f} s"))


def log_tail(log_path: Path) -> str:
    """The last lines of the log, for error messages."""
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def free_port() -> int:
    """A loopback port for a server to listen on.

    Not one that the system hands out by itself: in the half minute until the server listens, such
    a port may become the near end of somebody's connection.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _why(log_path: Path, what: str) -> str:
    return f"the server {what}; the end of {log_path}:\n{log_tail(log_path)}"
