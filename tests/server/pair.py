"""Two servers over one tiny model: what a client sees of one must be what it sees of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.server_process import Server
from tests.tiny_model import VOCAB_SIZE, tiny_server

# float32; a verify pass sums in another order than a decode step.
LOGPROB_TOLERANCE = 2e-3
TOGETHER = 12
# What a request finds cached depends on who came first.
CACHED = ("cached_tokens", "prompt_tokens_details")
GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}


@dataclass(frozen=True)
class Pair:
    plain: Server
    vegas: Server

    @property
    def both(self) -> tuple[Server, Server]:
        return self.plain, self.vegas

    def check(
        self,
        bodies: Sequence[dict[str, Any]],
        path: str = "/generate",
        plain_together: int = TOGETHER,
    ) -> list[Any]:
        """Send `bodies` to both, several at a time, and compare all that is seen.

        Args:
            plain_together: how many at a time plain SGLang is sent.

        Returns VEGAS's answers.
        """

        def ask(server: Server, together: int) -> list[requests.Response]:
            with ThreadPoolExecutor(together) as clients:
                return list(clients.map(lambda body: server.request("POST", path, body), bodies))

        plain, vegas = ask(self.plain, plain_together), ask(self.vegas, TOGETHER)
        return [
            compared(expected, answer, body, CACHED)
            for expected, answer, body in zip(plain, vegas, bodies, strict=True)
        ]

    def check_one(self, body: dict[str, Any], path: str = "/generate") -> Any:
        """The same for one request, on the prefix caches as they are."""
        plain, vegas = (server.request("POST", path, body) for server in self.both)
        return compared(plain, vegas, body)

    def flush(self) -> None:
        for server in self.both:
            server.flush_cache()


@contextmanager
def start_pair(folder: Path) -> Iterator[Pair]:
    """Both over the tiny model in `folder`."""
    # A table takes about a KB, so that many requests at once overflow the table cache.
    flags = ("--enable-metrics", "--vegas-table-cache-gb", "0.00003")
    with start_both(tiny_server(folder, algorithm=None), tiny_server(folder, *flags)) as pair:
        yield pair


@contextmanager
def start_both(
    plain: AbstractContextManager[Server], vegas: AbstractContextManager[Server]
) -> Iterator[Pair]:
    """They start at once: half of a start keeps one core busy."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(2) as starts:
            started = [starts.submit(stack.enter_context, server) for server in (plain, vegas)]
        yield Pair(*(server.result() for server in started))


def ask_all(server: Server, bodies: Sequence[dict[str, Any]], together: int) -> list[Any]:
    """The answers of `/generate`, `together` at a time."""
    with ThreadPoolExecutor(together) as clients:
        return list(clients.map(lambda body: server.post("/generate", body), bodies))


def compared(
    plain: requests.Response, vegas: requests.Response, body: Any, left_out: Sequence[str] = ()
) -> Any:
    """VEGAS's answer, once it is the same as plain SGLang's."""
    assert vegas.status_code == plain.status_code, (body, vegas.text, plain.text)
    answer = vegas.json()
    if plain.ok:
        assert_same(seen(plain.json(), left_out), seen(answer, left_out), str(body)[:400])
    return answer


def prompt(length: int, salt: int = 0) -> list[int]:
    """Token ids that differ from their start on for different salts."""
    return [(7 * i * i + (3 + salt) * i + 5 + 11 * salt) % VOCAB_SIZE for i in range(length)]


def generate_body(ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": {**GREEDY, **sampling}}


def one_call(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The requests of `generate_body` in one body of `/generate`, which answers by a list."""
    keys = ("input_ids", "sampling_params")
    return {key: [body[key] for body in bodies] for key in keys}


# Of `meta_info` and of the OpenAI bodies, what names or times a request, or says how it was
# speculated.
_OWN = ("id", "created", "metadata", "weight_version", "num_retractions", "cached_tokens_details")
_TIMED = ("latency", "time", "_ts", "throughput", "spec_")


def seen(body: Any, left_out: Sequence[str] = ()) -> Any:
    """`body` without what differs from request to request, and without the keys `left_out`."""
    if isinstance(body, dict):
        return {
            key: seen(value, left_out)
            for key, value in body.items()
            if key not in (*_OWN, *left_out) and not any(part in key for part in _TIMED)
        }
    if isinstance(body, list):
        return [seen(item, left_out) for item in body]
    return body


def assert_same(want: Any, got: Any, what: str) -> None:
    """Equal but for rounding of numbers, at any depth."""
    if isinstance(want, dict) and isinstance(got, dict):
        assert got.keys() == want.keys(), what
        for key in want:
            if key == "cached_tokens":
                # The KV of an answer's last token is there if it was drafted; in plain SGLang if
                # the next step has been launched, which it is under overlap, and here isn't.
                assert want[key] <= got[key] <= want[key] + 1, (what, want, got)
            else:
                assert_same(want[key], got[key], f"{key} of {what}")
    elif isinstance(want, list) and isinstance(got, list):
        assert len(got) == len(want), (what, want, got)
        for index, (expected, actual) in enumerate(zip(want, got, strict=True)):
            assert_same(expected, actual, f"{index} of {what}")
    elif isinstance(want, float) and isinstance(got, float):
        assert abs(got - want) <= LOGPROB_TOLERANCE, (what, want, got)
    else:
        assert got == want, (what, want, got)
