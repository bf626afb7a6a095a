"""On a GPU in bfloat16, greedy text parts from plain SGLang's only where two tokens nearly tie."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ServerSlot
from tests.prompts import Prompt
from tests.server import greedy_pairs
from tests.server_process import launch_server

pytestmark = [pytest.mark.gpu, pytest.mark.server]


@pytest.mark.parametrize(
    "flags",
    [
        ("--attention-backend", "fa3"),
        # Without graphs, every step is launched by Python.
        ("--attention-backend", "flashinfer", "--disable-cuda-graph"),
    ],
    ids=["fa3", "flashinfer-eager"],
)
def test_differences_are_near_ties(
    flags: tuple[str, ...],
    server_slot: ServerSlot,
    model_path: Path,
    prompts: list[Prompt],
    tmp_path: Path,
) -> None:
    server_slot.stop()
    flags = (*flags, "--cuda-graph-backend-prefill", "disabled")
    answers = {}
    for algorithm in (None, "VEGAS"):
        extra = (*flags, "--vegas-speculate-above", "0") if algorithm else flags
        with launch_server(
            model_path, algorithm=algorithm, extra_args=extra, log_path=tmp_path / "server.log"
        ) as server:
            answers[algorithm] = greedy_pairs.answers(server, prompts, 4)
    cases = [
        greedy_pairs.compare(plain, vegas, prompt.name)
        for plain, vegas, prompt in zip(answers[None], answers["VEGAS"], prompts, strict=True)
    ]
    assert sum(case["tokens"] for case in cases) > 1000
    for case in cases:
        greedy_pairs.check_near_tie(case)
