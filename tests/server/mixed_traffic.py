"""Clients that share prefixes, hang up, retry and overfill a tiny pool: what a server must survive.

Every answer must equal the same prompt's answer when it is alone, and afterwards nothing may be
left behind in the KV pool or in the table cache.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import requests

from tests.prompts import code, prose
from tests.server_process import Server

# A pool that the clients overfill, requests admitted as if they would hardly generate, tables for
# short contexts, and a table cache that overflows: 15 KB a page of SmolLM2's tables.
FLAGS = (
    *("--speculative-num-steps", "4", "--vegas-speculate-above", "0"),
    *("--max-total-tokens", "2000", "--schedule-conservativeness", "0.01"),
    *("--vegas-min-tokens", "64", "--vegas-table-cache-gb", "0.00007"),
)
CLIENTS = 6
HANG_UP_AFTER_S = 0.015
FLUSH_EVERY_S = 20.0


@dataclass(frozen=True)
class Request:
    ids: tuple[int, ...]
    new_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        return {
            "input_ids": list(self.ids),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.new_tokens,
                "ignore_eos": True,
            },
        }


@dataclass
class Outcome:
    answered: int = 0
    hung_up: int = 0
    flushed: int = 0
    # Requests whose answer was another one than when they were alone.
    wrong: list[Request] = field(default_factory=list)
    # Resident bytes of the server's processes, over time.
    memory: list[int] = field(default_factory=list)


def make_requests(tokenizer: Any, seed: int = 0) -> list[Request]:
    """Prefixes of 200 to 700 tokens, continued in several ways, some of them far."""
    generator = random.Random(seed)
    found = []
    for text in (prose("types"), code("heapq"), prose("compound"), code("textwrap")):
        ids = tokenizer.encode(text[:20000])
        prefix = ids[: generator.randrange(200, 700)]
        for _ in range(6):
            start = generator.randrange(1000, 2000)
            tail = ids[start : start + generator.choice([3, 20, 60])]
            found.append(Request((*prefix, *tail), generator.choice([4, 16, 40, 160])))
    return found


def answer(server: Server, request: Request) -> tuple[int, ...]:
    return tuple(server.post("/generate", request.body)["output_ids"])


def hang_up(server: Server, body: dict[str, Any], after_s: float = HANG_UP_AFTER_S) -> None:
    """Send a request and be gone, which SGLang notices seconds later."""
    with contextlib.suppress(requests.RequestException):
        requests.post(server.url + "/generate", json=body, timeout=after_s)


def run(
    server: Server,
    some: list[Request],
    seconds: float,
    at_least: int = 0,
    progress: Callable[[Outcome, float], None] = lambda outcome, elapsed: None,
) -> Outcome:
    """Send `some` in random order from several clients, with a flush now and then, for `seconds`
    and until `at_least` are answered."""
    server.flush_cache()
    alone = {request: answer(server, request) for request in some}
    outcome, lock = Outcome(), threading.Lock()
    start = time.monotonic()
    end = start + seconds

    def client(number: int, until: float, seed: int) -> None:
        generator = random.Random(seed * CLIENTS + number)
        while time.monotonic() < until:
            request = generator.choice(some)
            if generator.random() < 0.25:
                hang_up(server, request.body)
                with lock:
                    outcome.hung_up += 1
            found = answer(server, request)
            with lock:
                outcome.answered += 1
                if found != alone[request]:
                    outcome.wrong.append(request)

    failures: list[BaseException] = []

    def guarded(*args: Any) -> None:
        try:
            client(*args)
        except BaseException as error:
            failures.append(error)

    while not failures and ((now := time.monotonic()) < end or outcome.answered < at_least):
        until = now + FLUSH_EVERY_S
        threads = [
            threading.Thread(target=guarded, args=(n, until, outcome.flushed))
            for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.flush_cache()
        outcome.flushed += 1
        outcome.memory.append(resident_bytes(server))
        progress(outcome, time.monotonic() - start)
    if failures:
        raise failures[0]
    return outcome


def resident_bytes(server: Server) -> int:
    """Of the process that listens at the server's address, and its children."""
    port = int(server.url.rsplit(":", 1)[1])
    (listener,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port  # pyright: ignore[reportAttributeAccessIssue]
    }
    process = psutil.Process(listener)
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total


def table_cache(server: Server) -> dict[str, Any]:
    """What the server's info endpoint says of the table cache."""
    return server.get("/server_info").json()["internal_states"][0]["vegas"]["table_cache"]
