"""Under CUDA graphs and overlap scheduling: a full pool, constraints, batches that fit no graph,
and rows that change hands.

Answers may part from plain SGLang's only where its two best tokens nearly tie, as in
test_gpu_parity.py: another batch size is another order of summation. The numbers are those of
docs/cases.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.prompts import Prompt
from tests.server import greedy_pairs
from tests.server.constraints import check_constraint, constrained, has_ended
from tests.server.idle import assert_nothing_is_held
from tests.server.pair import Pair, ask_all, generate_body, one_call, start_both
from tests.server.retraction import overfill
from tests.server_process import launch_server

pytestmark = [pytest.mark.gpu, pytest.mark.server]

SLOTS = 64
# Holds the longest prompts of a batch, and half of what SLOTS long requests come to.
POOL_TOKENS = 20480
BATCH_SIZES = (1, 3, 5, 7, 9)
# Of the batch sizes above only the first has a graph of its own.
GRAPHS = ("1", "4", "8", "32")
MORE_THAN_GRAPHS = 48
# As many as plain SGLang is sent at a time, so that it need not retract.
TOGETHER = 16
GRAMMAR_BACKEND = "xgrammar"
NUM_CONSTRAINED = 200
NUM_FREE = 40
NUM_CHURNED = 10_000
DISTINCT = 300
# Calls at a time, and requests in each: as many rows as graphs take, and more than there are rows.
CHURNS = ((4, 6), (8, 20))
FLAGS = (
    *("--cuda-graph-bs-decode", *GRAPHS, "--cuda-graph-backend-prefill", "disabled"),
    *("--max-running-requests", str(SLOTS), "--max-total-tokens", str(POOL_TOKENS)),
    # Requests are admitted as if those of earlier prefill batches would hardly generate: in many
    # batches, so that the pool overflows.
    *("--schedule-conservativeness", "0.01", "--chunked-prefill-size", "2048"),
)
VEGAS_FLAGS = ("--vegas-speculate-above", "0", "--vegas-min-tokens", "64")


@pytest.fixture(scope="module")
def pair(
    server_slot: ServerSlot, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    server_slot.stop()
    logs = tmp_path_factory.mktemp("gpu-pair")
    plain = launch_server(model_path, algorithm=None, extra_args=FLAGS, log_path=logs / "plain.log")
    vegas = launch_server(
        model_path,
        algorithm="VEGAS",
        extra_args=(*FLAGS, *VEGAS_FLAGS),
        log_path=logs / "vegas.log",
    )
    with start_both(plain, vegas) as pair:
        for server in pair.both:
            info = server.get("/server_info").json()
            assert not info["disable_overlap_schedule"]
            assert info["grammar_backend"] == GRAMMAR_BACKEND
        yield pair


@pytest.fixture(scope="module")
def plain_answers(pair: Pair, prompts: list[Prompt]) -> list[dict[str, Any]]:
    return greedy_pairs.answers(pair.plain, prompts, 1)


def piece(prompts: Sequence[Prompt], length: int, generator: random.Random) -> list[int]:
    """`length` tokens from anywhere in a prompt that has so many."""
    ids = generator.choice([prompt.ids for prompt in prompts if len(prompt.ids) >= length])
    start = generator.randrange(len(ids) - length + 1)
    return list(ids[start : start + length])


def logged(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, **greedy_pairs.LOGPROBS}


def check_near_ties(plain: Sequence[dict[str, Any]], vegas: Sequence[dict[str, Any]]) -> None:
    """Replies of `/generate`: the same most of the way, and parted by near-ties only."""
    cases = [
        greedy_pairs.compare(
            greedy_pairs.answer_of(one), greedy_pairs.answer_of(other), f"request {index}"
        )
        for index, (one, other) in enumerate(zip(plain, vegas, strict=True))
    ]
    for case in cases:
        greedy_pairs.check_near_tie(case)
    assert sum(case["same_tokens"] for case in cases) > sum(case["tokens"] for case in cases) / 2


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_case_18_batch_sizes_between_graphs(
    pair: Pair, plain_answers: list[dict[str, Any]], prompts: list[Prompt], batch_size: int
) -> None:
    answers = greedy_pairs.answers(pair.vegas, prompts, batch_size)
    for plain, vegas, prompt in zip(plain_answers, answers, prompts, strict=True):
        greedy_pairs.check_near_tie(greedy_pairs.compare(plain, vegas, prompt.name))
    lengths = [a["accept_length"] for a in answers]
    assert sum(lengths) / len(lengths) > 3  # drafts are accepted, at this batch size too


def test_case_18_more_requests_than_the_largest_graph(pair: Pair, prompts: list[Prompt]) -> None:
    generator = random.Random(18)
    some = [Prompt(f"{n}", tuple(piece(prompts, 90, generator))) for n in range(MORE_THAN_GRAPHS)]
    plain = greedy_pairs.answers(pair.plain, some, TOGETHER)
    vegas = greedy_pairs.answers(pair.vegas, some, MORE_THAN_GRAPHS)
    for one, other, prompt in zip(plain, vegas, some, strict=True):
        greedy_pairs.check_near_tie(greedy_pairs.compare(one, other, prompt.name))


def test_case_06_retracted_under_overlap(pair: Pair, prompts: list[Prompt]) -> None:
    """Their prompts alone nearly fill the pool."""
    generator = random.Random(6)
    bodies = [
        logged(generate_body(piece(prompts, 250 + n, generator), max_new_tokens=250))
        for n in range(SLOTS)
    ]
    check_near_ties(ask_all(pair.plain, bodies, TOGETHER), overfill(pair.vegas, bodies))
    assert_nothing_is_held(pair.vegas)


def test_case_13_xgrammar_in_mixed_batches(pair: Pair, prompts: list[Prompt]) -> None:
    generator = random.Random(13)
    bodies = [
        constrained(index, piece(prompts, generator.randrange(5, 90), generator), generator)
        for index in range(NUM_CONSTRAINED)
    ]
    bodies += [generate_body(piece(prompts, 20 + n, generator)) for n in range(NUM_FREE)]
    bodies = [logged(body) for body in bodies]
    generator.shuffle(bodies)
    answers = ask_all(pair.vegas, bodies, SLOTS)
    ended = 0
    for body, answer in zip(bodies, answers, strict=True):
        sampling = body["sampling_params"]
        if sampling.keys() & {"json_schema", "regex", "ebnf"}:
            check_constraint(sampling, answer)
            ended += has_ended(answer)
    assert ended > NUM_CONSTRAINED // 5
    greedy = [n for n, body in enumerate(bodies) if body["sampling_params"]["temperature"] == 0]
    plain = ask_all(pair.plain, [bodies[n] for n in greedy], TOGETHER)
    check_near_ties(plain, [answers[n] for n in greedy])
    assert_nothing_is_held(pair.vegas)


def churn_bodies(prompts: Sequence[Prompt], generator: random.Random) -> list[dict[str, Any]]:
    """Requests of a few tokens, many of them with a prefix in common."""
    bodies = []
    for _ in range(DISTINCT):
        ids = generator.choice(prompts).ids
        # Mostly within the budget of 64 selected positions, some beyond it.
        length = min(len(ids), generator.choice([4, 20, 60, 70, 150, 300]) + generator.randrange(9))
        start = generator.choice([0, generator.randrange(len(ids) - length + 1)])
        part = ids[start : start + length]
        bodies.append(generate_body(part, max_new_tokens=generator.randrange(1, 13)))
    return bodies


def test_case_19_churned_through_few_rows(pair: Pair, prompts: list[Prompt]) -> None:
    """Each answer as plain SGLang's, whom each distinct request is sent alone."""
    generator = random.Random(19)
    bodies = churn_bodies(prompts, generator)
    alone = ask_all(pair.plain, [logged(body) for body in bodies], 1)
    for calls, size in CHURNS:
        drawn = [generator.randrange(DISTINCT) for _ in range(NUM_CHURNED // len(CHURNS))]
        batches = [drawn[first : first + size] for first in range(0, len(drawn), size)]
        asked = [logged(one_call([bodies[n] for n in batch])) for batch in batches]
        replies = ask_all(pair.vegas, asked, calls)
        check_near_ties([alone[n] for n in drawn], list(itertools.chain.from_iterable(replies)))
    assert_nothing_is_held(pair.vegas)
