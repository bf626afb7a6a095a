"""Serve a model with VEGAS and say how to try it: what `make serve` runs once the model is there.

python tools/serve.py --model-path MODEL [--algorithm VEGAS] [--port 30000] [SGLang's own flags]
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from sgl_vegas.tune.server_process import ServerStartError
from tests.server_process import (
    Server,
    server_command,
    start,
    stop,
    wait_until_healthy,
)

START_DEADLINE_S = 1800  # a large model may have to be read from a slow disk


def usage(server: Server, algorithm: str) -> str:
    """What to type, and where to look, once the server answers."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Write a short story about a lighthouse."}],
        "max_tokens": 200,
    }
    own_body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 100}}
    lines = [
        "",
        f"Ready: {server.url}   (log: {server.log_path}; Ctrl-C stops it)",
        "Try it:",
        _curl(server.url + "/v1/chat/completions", body),
    ]
    if algorithm:
        lines += [
            f"Acceptance of {algorithm}, in tokens an iteration:",
            "  - the decode lines below: 'accept len'",
            "  - each answer of /generate: meta_info.spec_accept_length, as in",
            "  " + _curl(server.url + "/generate", own_body),
            f"  - {server.url}/metrics: sglang:spec_accept_length",
        ]
    return "\n".join([*lines, ""])


def _curl(url: str, body: dict) -> str:
    data = shlex.quote(json.dumps(body))
    return f"  curl -s {url} -H 'Content-Type: application/json' -d {data}"


def copy_log(log_path: Path, stopped: threading.Event) -> None:
    """Copy what the server logs to standard output until `stopped`, and then the rest."""
    with log_path.open(errors="replace") as log:
        while True:
            ending = stopped.wait(0.5)
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if ending:
                return


def serve(command: list[str], server: Server, algorithm: str) -> int:
    """Run until the server ends or Ctrl-C; returns the exit status."""
    process = start(command, {}, server.log_path)
    stopped = threading.Event()
    follower = threading.Thread(target=copy_log, args=(server.log_path, stopped))
    try:
        for waited in wait_until_healthy(server, process, START_DEADLINE_S):
            last_line = (server.log().splitlines() or [""])[-1]
            print(f"\r\033[K{waited:4.0f} s  {last_line[:90]}", end="", flush=True)
        print("\r\033[K" + usage(server, algorithm), flush=True)
        follower.start()
        return process.wait()
    except ServerStartError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopping.")
        return 0
    finally:
        stop(process)
        stopped.set()
        if follower.ident is not None:
            follower.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--algorithm", default="VEGAS", help="empty for plain SGLang")
    parser.add_argument("--port", type=int, default=30000)
    asked, sglang_flags = parser.parse_known_args()
    # `kill` ends the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    command = server_command(
        asked.model_path, asked.algorithm or None, asked.port, ["--enable-metrics", *sglang_flags]
    )
    print(shlex.join(command), flush=True)
    log_path = Path(tempfile.mkdtemp(prefix="sgl-vegas-")) / "server.log"
    return serve(command, Server(f"http://127.0.0.1:{asked.port}", log_path), asked.algorithm)


if __name__ == "__main__":
    sys.exit(main())
