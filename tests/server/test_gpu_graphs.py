"""Under CUDA graphs and overlap scheduling: batches that fit no graph, and rows that change hands.

Answers may part only where the two best tokens nearly tie, as in test_gpu_parity.py: another batch
size is another order of summation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.prompts import Prompt
from tests.server import greedy_pairs
from tests.server_process import Server, launch_server

pytestmark = [pytest.mark.gpu, pytest.mark.server]

SLOTS = 64
REQUESTS = 2000
BATCH_SIZES = (1, 3, 5, 7, 9)
# Of the batch sizes above only the first has a graph of its own.
GRAPHS = ("1", "4", "8", "32")
# Clients at a time: as many rows as graphs take, and more than there are rows.
CLIENTS = (24, 128)
FLAGS = (
    *("--cuda-graph-bs-decode", *GRAPHS, "--cuda-graph-backend-prefill", "disabled"),
    *("--max-running-requests", str(SLOTS)),
)
VEGAS_FLAGS = ("--vegas-speculate-above", "0", "--vegas-min-tokens", "64")


@pytest.fixture(scope="module")
def plain_answers(
    server_slot: ServerSlot, model_path: Path, prompts: list[Prompt], tmp_path_factory: Any
) -> list[dict[str, Any]]:
    server_slot.stop()
    log = tmp_path_factory.mktemp("plain") / "server.log"
    with launch_server(model_path, algorithm=None, extra_args=FLAGS, log_path=log) as server:
        return greedy_pairs.answers(server, prompts, 1)


@pytest.fixture(scope="module")
def graph_server(plain_answers: list, model_path: Path, tmp_path_factory: Any) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("graphs") / "server.log"
    with launch_server(
        model_path, algorithm="VEGAS", extra_args=(*FLAGS, *VEGAS_FLAGS), log_path=log
    ) as server:
        yield server


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_parity_at_batch_sizes_between_graphs(
    graph_server: Server,
    plain_answers: list[dict[str, Any]],
    prompts: list[Prompt],
    batch_size: int,
) -> None:
    answers = greedy_pairs.answers(graph_server, prompts, batch_size)
    for plain, vegas, prompt in zip(plain_answers, answers, prompts, strict=True):
        greedy_pairs.check_near_tie(greedy_pairs.compare(plain, vegas, prompt.name))
    lengths = [a["accept_length"] for a in answers]
    assert sum(lengths) / len(lengths) > 3  # drafts are accepted, at this batch size too


def churn_requests(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Short requests of random length, many of them with a prefix in common."""
    generator = random.Random(0)
    requests = []
    for _ in range(REQUESTS):
        ids = generator.choice(prompts).ids
        # Mostly within the budget of 64 selected positions, some beyond it.
        length = min(len(ids), generator.choice([4, 20, 60, 70, 150, 300]) + generator.randrange(9))
        start = generator.choice([0, generator.randrange(len(ids) - length + 1)])
        requests.append(
            {
                "input_ids": list(ids[start : start + length]),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": generator.randrange(1, 25),
                    "ignore_eos": True,
                },
                **greedy_pairs.LOGPROBS,
            }
        )
    return requests


def answer(server: Server, request: dict[str, Any]) -> dict[str, Any]:
    return greedy_pairs.answer_of(server.post("/generate", request))


def test_requests_churned_through_few_rows_answer_as_alone(
    graph_server: Server, prompts: list[Prompt]
) -> None:
    requests = churn_requests(prompts)
    alone = [answer(graph_server, request) for request in requests]
    graph_server.flush_cache()
    before = graph_server.load()["num_used_tokens"]
    together = []
    share = REQUESTS // len(CLIENTS)
    for part, count in enumerate(CLIENTS):
        with ThreadPoolExecutor(count) as clients:
            together += clients.map(
                lambda request: answer(graph_server, request),
                requests[part * share : (part + 1) * share],
            )
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        greedy_pairs.check_near_tie(greedy_pairs.compare(one, other, f"request {index}"))
    graph_server.flush_cache()
    assert graph_server.load()["num_used_tokens"] == before
