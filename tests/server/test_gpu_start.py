"""On a GPU machine VEGAS needs no flag but its name."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.prompts import acceptance_prompts, load_tokenizer
from tests.server.engine import engine_answers
from tests.server_process import Server, free_port, start, stop, wait_until_healthy

pytestmark = [pytest.mark.gpu, pytest.mark.server]

# While all run, a poll of the server's load must see it.
NEW_TOKENS = 256


def test_launch_server(server_slot: ServerSlot, model_path: Path, tmp_path: Path) -> None:
    server_slot.stop()
    port = free_port()
    log = tmp_path / "server.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)),
        *("--speculative-algorithm", "VEGAS", "--port", str(port)),
    ]
    process = start(command, {}, log)
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        for _ in wait_until_healthy(server, process):
            pass
        question = [{"role": "user", "content": "Name the capital of France."}]
        chat = server.chat(question, temperature=0, max_tokens=32)
        assert "Paris" in chat["choices"][0]["message"]["content"]
        prompt = acceptance_prompts(load_tokenizer(model_path))[0]
        for temperature in (0, 0.6):
            body = server.generate(
                list(prompt.ids), temperature=temperature, max_new_tokens=128, ignore_eos=True
            )
            # Whether it drafts is up to the measured step times of this small model.
            assert len(body["output_ids"]) == 128
        complete = server.complete("The capital of France is", temperature=0, max_tokens=8)
        assert "Paris" in complete["choices"][0]["text"]
        fill(server, load_tokenizer(model_path))
    finally:
        stop(process)


def fill(server: Server, tokenizer: Any) -> None:
    """As many requests as run at once, as long as the context and the pool allow: all answered."""
    info = server.get("/server_info").json()
    count = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    room = min(info["max_req_input_len"], info["max_total_num_tokens"] // count) - NEW_TOKENS
    ids = list(itertools.chain.from_iterable(p.ids for p in acceptance_prompts(tokenizer)))
    # They start at different places, so that none finds another's prefix.
    prompts = [(ids[n * 97 :] + ids)[:room] for n in range(count)]
    running = 0
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(
            server.generate, prompts, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        while not answers.done():
            running = max(running, server.load()["num_running_reqs"])
    assert [len(answer["output_ids"]) for answer in answers.result()] == [NEW_TOKENS] * count
    # SGLang counts the row of a prompt that it is in the middle of twice, so that the last of these
    # requests may have to wait.
    assert count - 1 <= running <= count


def test_engine(server_slot: ServerSlot, model_path: Path) -> None:
    server_slot.stop()
    prompt = acceptance_prompts(load_tokenizer(model_path))[0]
    (answer,) = engine_answers(
        {"model_path": str(model_path), "speculative_algorithm": "VEGAS"},
        {
            "input_ids": [list(prompt.ids)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 128, "ignore_eos": True},
        },
        env={"SGLANG_VEGAS_SPECULATE_ABOVE": "0"},
    )
    assert len(answer["ids"]) == 128
    assert answer["meta"]["spec_accept_length"] > 4
