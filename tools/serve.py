"""Serve a model from a clone: start SGLang, say where it answers, show its log, stop it cleanly.

    python -m tools.serve [--algorithm VEGAS] [--model-path M] [--port 30000] [-- SGLANG FLAGS]

`make serve` calls this once it has made the environment and the model.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.server_process import (
    Server,
    ServerStartError,
    server_command,
    start,
    stop,
    wait_until_healthy,
)
from tools.prepare_model import default_folder

PROGRESS_INTERVAL_S = 5
LOG_POLL_S = 0.5

READY = """
{name} answers at {url}. Try it:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "default", "max_tokens": 100, \\
         "messages": [{{"role": "user", "content": "Name three rivers of France."}}]}}'
"""
ACCEPTANCE = """
Tokens accepted per verification:
  all requests  `accept len` in the log lines below, or spec_accept_length in {url}/metrics
  one request   meta_info.spec_accept_length in the answer of
                curl {url}/generate -H 'Content-Type: application/json' -d '{{"text": "Once"}}'
"""


def check_port(port: int) -> None:
    """Raise SystemExit if the port is taken: its owner's answers would be mistaken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(
                f"Port {port} can't be used ({error.strerror}). Set another."
            ) from None


def show_progress(server: Server, process: subprocess.Popen[bytes]) -> float:
    """Print a line every few seconds until the server is healthy; return the seconds it took."""
    started = shown = time.monotonic()
    for waited in wait_until_healthy(server, process):
        if time.monotonic() - shown >= PROGRESS_INTERVAL_S:
            shown = time.monotonic()
            last = [line for line in server.log().splitlines() if line.strip()][-1:]
            print(f"  {waited:3.0f} s  {last[0][:100] if last else ''}", flush=True)
    return time.monotonic() - started


def follow_log(server: Server, process: subprocess.Popen[bytes]) -> int:
    """Print what the server logs from now on, until it ends; return its status."""
    with server.log_path.open(errors="replace") as log:
        log.seek(0, 2)
        while True:
            status = process.poll()
            for line in log:
                print(line, end="", flush=True)
            if status is not None:
                return status
            time.sleep(LOG_POLL_S)


def serve(algorithm: str | None, model_path: Path, port: int, extra_args: list[str]) -> int:
    """Run the server until it ends or this process is told to end."""
    check_port(port)
    log_path = Path(tempfile.mkstemp(prefix="sgl-vegas-", suffix=".log")[1])
    command = server_command(model_path, algorithm, port, ["--enable-metrics", *extra_args])
    name = f"{model_path.name} with {algorithm or 'plain SGLang'}"
    print(f"Starting {name}; log in {log_path}:\n  {' '.join(command)}", flush=True)
    process = start(command, {}, log_path)
    try:
        server = Server(f"http://127.0.0.1:{port}", log_path)
        seconds = show_progress(server, process)
        print(f"Ready after {seconds:.0f} s.", READY.format(name=name, url=server.url))
        if algorithm:
            print(ACCEPTANCE.format(url=server.url))
        print("Ctrl-C stops it. Its log from here on:\n", flush=True)
        return follow_log(server, process)
    except ServerStartError as error:
        raise SystemExit(str(error)) from None
    finally:
        print("Stopping the server.", flush=True)
        stop(process)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with VEGAS or plain SGLang.")
    parser.add_argument(
        "--algorithm", default="VEGAS", help="empty for plain SGLang; default: %(default)s"
    )
    parser.add_argument(
        "--model-path", type=Path, default=default_folder(), help="default: %(default)s"
    )
    parser.add_argument("--port", type=int, default=30000, help="default: %(default)s")
    parser.add_argument("sglang_flags", nargs="*", metavar="SGLANG FLAGS", help="after --")
    options = parser.parse_args()

    # Like Ctrl-C, so that the server is stopped too when only this process is told to end.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        status = serve(
            options.algorithm or None, options.model_path, options.port, options.sglang_flags
        )
    except KeyboardInterrupt:
        status = 0
    sys.exit(status)


if __name__ == "__main__":
    main()
