"""Clients that hang up and retry, a pool that runs out, and what is left behind: nothing.

The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.idle import assert_nothing_is_held, wait_until_idle
from tests.server.mixed_traffic import HANG_UP_AFTER_S, hang_up, table_cache
from tests.server.pair import (
    CACHED,
    GREEDY,
    Pair,
    ask_all,
    assert_same,
    generate_body,
    one_call,
    prompt,
    seen,
)
from tests.server.retraction import overfill
from tests.server_process import Server
from tests.tiny_model import BATCH, check_greedy

pytestmark = pytest.mark.server

CLIENTS = 16
NUM_MIXED = 500
# New tokens of a long request.
LONG = 70
NUM_CHURNED, DISTINCT = 2_000, 100
# Calls at a time, and requests in each: more than there are rows.
CALLS, CALL_SIZE = 8, 20


def num_aborted(server: Server) -> float:
    """Requests that SGLang ended because their clients were gone, since the server's start."""
    return server.metrics().get("sglang:num_aborted_requests_total", 0)


def test_case_03_cancel_and_retry_beside_others(tiny_pair: Pair) -> None:
    """One prefix for all; bystanders' answers are those of plain SGLang, where they are alone."""
    prefix = prompt(120)
    bystanders = [generate_body(prefix + prompt(20, salt=n), max_new_tokens=60) for n in range(6)]
    retried = [generate_body(prefix + prompt(9, salt=n), max_new_tokens=100) for n in range(6, 12)]
    bodies = bystanders + retried
    tiny_pair.flush()
    alone = [tiny_pair.plain.post("/generate", body)["output_ids"] for body in bodies]
    server = tiny_pair.vegas
    before, aborted = table_cache(server), num_aborted(server)
    for attempt in (0, 2):

        def client(index: int, attempt: int = attempt) -> list[int]:
            if index >= len(bystanders):
                for _ in range(3):
                    hang_up(server, bodies[index], HANG_UP_AFTER_S * (1 + attempt))
            return server.post("/generate", bodies[index])["output_ids"]

        with ThreadPoolExecutor(len(bodies)) as clients:
            assert list(clients.map(client, range(len(bodies)))) == alone
    assert num_aborted(server) > aborted
    # Tables were handed on, and given up for others, all the while.
    cache = table_cache(server)
    assert cache["hits"] > before["hits"] and cache["evictions"] > before["evictions"]
    assert_nothing_is_held(server)


def overfilling_bodies() -> list[dict[str, Any]]:
    """As many long requests as run at once, of three kinds, and short ones.

    The prompts alone nearly fill the pool. The short ones take the rows that retractions leave.
    """
    bodies = [generate_body(prompt(80 + n, salt=n), max_new_tokens=LONG) for n in range(BATCH)]
    for n, body in enumerate(bodies):
        if n % 3 == 1:
            body["sampling_params"] |= {"frequency_penalty": 0.6}
        if n % 3 == 2:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
    return bodies + [generate_body(prompt(100, salt=n), max_new_tokens=5) for n in range(BATCH)]


def test_cases_06_07_retracted_again_and_again(tiny_pair: Pair) -> None:
    """All that is seen is plain SGLang's, whose pool is never full.

    Rows of retracted requests go to others, whose tables they must not draft by, nor theirs.
    """
    bodies = overfilling_bodies()
    tiny_pair.flush()
    penalised = {n for n, b in enumerate(bodies) if "frequency_penalty" in b["sampling_params"]}
    whole: dict[int, dict[str, Any]] = {}
    # Those with penalties one at a time: plain SGLang forgets counts where batches merge.
    for some, together in ((penalised, 1), ({*range(len(bodies))} - penalised, 16)):
        asked = [bodies[n] for n in some]
        whole |= zip(some, ask_all(tiny_pair.plain, asked, together), strict=True)
    for n, answer in enumerate(overfill(tiny_pair.vegas, bodies)):
        # After a retraction, a first token is sampled without penalties, as in plain SGLang.
        if n not in penalised or answer["meta_info"].get("num_retractions", 0) == 0:
            assert_same(seen(whole[n], CACHED), seen(answer, CACHED), f"request {n}")
    assert_nothing_is_held(tiny_pair.vegas)


def mixed_body(generator: random.Random) -> dict[str, Any]:
    """A request of any kind that the server takes, short ones mostly."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        dict,
        lambda: {"temperature": 1.0, "top_p": 0.9},
        lambda: {"temperature": 0.8, "min_p": 0.1, "n": 3},
        lambda: {"frequency_penalty": 0.5},
        lambda: {"ignore_eos": False, "stop_token_ids": [generator.randrange(96)]},
        lambda: {"regex": "[a-z]{1,30}", "ignore_eos": False},
        lambda: {"max_new_tokens": 0},
        lambda: {"max_new_tokens": 100},
    ]
    shared = prompt(generator.choice([0, 40, 80]))
    ids = shared + prompt(generator.randrange(1, 60), salt=generator.randrange(1, 40))
    sampling = {"max_new_tokens": generator.choice([1, 5, 20, 40]), **generator.choice(kinds)()}
    return generate_body(ids, **sampling)


def test_case_08_mixed_requests_leave_no_slot_behind(tiny: tuple[Server, Any]) -> None:
    server, _ = tiny
    generator = random.Random(8)
    bodies = [mixed_body(generator) for _ in range(NUM_MIXED)]
    cancelled = {n for n in range(NUM_MIXED) if generator.random() < 0.2}

    after = [0.1 * generator.random() for _ in range(NUM_MIXED)]
    aborted = num_aborted(server)

    def client(n: int) -> None:
        if n in cancelled:
            hang_up(server, bodies[n], after[n])
        else:
            server.post("/generate", bodies[n])

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(NUM_MIXED)))
    assert_nothing_is_held(server)
    assert num_aborted(server) > aborted


def test_case_17_disconnects_at_any_time(tiny: tuple[Server, Any]) -> None:
    """From before the prefill to deep in the answer: at each time something else is under way."""
    server, model = tiny
    body = generate_body(prompt(100), max_new_tokens=150)
    aborted = num_aborted(server)
    # Together, so that they are still under way when it is noticed.
    with ThreadPoolExecutor(30) as clients:
        list(clients.map(lambda n: hang_up(server, body, n / 1000), range(1, 90, 3)))
    assert wait_until_idle(server)["num_running_reqs"] == 0
    assert num_aborted(server) > aborted
    # While streaming, after any number of chunks; others go on beside.
    with ThreadPoolExecutor(4) as clients:
        beside = [
            clients.submit(server.generate, prompt(50 + n), **{**GREEDY, "max_new_tokens": 150})
            for n in range(4)
        ]
        for chunks in range(1, 7):
            stream = server.events("/generate", {**body, "stream": True})
            for _ in range(chunks):
                next(stream)
            stream.close()
        for n, answer in enumerate(beside):
            check_greedy(model, prompt(50 + n), answer.result()["output_ids"])
    assert_nothing_is_held(server)


def test_case_19_churned_through_few_rows(tiny_pair: Pair) -> None:
    """Each answer is plain SGLang's, whom each distinct request is sent alone."""
    generator = random.Random(19)
    bodies = [
        generate_body(
            # Some within the budget of selected positions; many have a prefix in common.
            prompt(generator.randrange(1, 200), salt=generator.randrange(8)),
            max_new_tokens=generator.randrange(1, 13),
        )
        for _ in range(DISTINCT)
    ]
    alone = [answer["output_ids"] for answer in ask_all(tiny_pair.plain, bodies, 1)]
    drawn = [generator.randrange(DISTINCT) for _ in range(NUM_CHURNED)]
    batches = [drawn[first : first + CALL_SIZE] for first in range(0, NUM_CHURNED, CALL_SIZE)]
    asked = [one_call([bodies[n] for n in batch]) for batch in batches]
    for batch, replies in zip(batches, ask_all(tiny_pair.vegas, asked, CALLS), strict=True):
        assert [reply["output_ids"] for reply in replies] == [alone[n] for n in batch]
    assert_nothing_is_held(tiny_pair.vegas)
