"""What can't be served is refused clearly, and a refusal or a lost client harms nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_vegas.tune.server_process import ServerStartError
from tests.prompts import Prompt
from tests.server.idle import assert_nothing_is_held
from tests.server_process import CPU_ENV, CPU_FLAGS, Server, launch_server

pytestmark = pytest.mark.server

MODEL = "the model's folder"
# Flags, and what the message must name.
REFUSED = {
    "draft model": (
        ["--speculative-draft-model-path", MODEL],
        "--speculative-draft-model-path",
    ),
    "tree": (["--speculative-eagle-topk", "2"], "--speculative-eagle-topk"),
    "no draft": (["--speculative-num-steps", "0"], "--speculative-num-steps"),
    "draft tokens": (["--speculative-num-draft-tokens", "3"], "--speculative-num-draft-tokens"),
    "lossy": (["--speculative-accept-threshold-single", "0.5"], "--speculative-accept-threshold"),
    "page size": (["--page-size", "16"], "--page-size"),
    "tensor parallelism": (["--tp-size", "2"], "--tp-size"),
    "pipeline": (["--pp-size", "2"], "--pp-size"),
    "disaggregation": (["--disaggregation-mode", "decode"], "--disaggregation-mode"),
    "hierarchical cache": (["--enable-hierarchical-cache"], "--enable-hierarchical-cache"),
    "overlap": (["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
    "lora": (["--enable-lora", "--lora-paths", "a=."], "--enable-lora"),
    "determinism": (
        ["--enable-deterministic-inference", "--attention-backend", "triton"],
        "--enable-deterministic-inference",
    ),
    "processor": (["--enable-custom-logit-processor"], "--enable-custom-logit-processor"),
    "hidden states": (["--enable-return-hidden-states"], "--enable-return-hidden-states"),
    "tokenizers": (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num"),
    "kv type": (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype"),
    "attention": (["--attention-backend", "triton"], "--attention-backend"),
    "ratio": (["--vegas-sparsity-ratio", "0"], "--vegas-sparsity-ratio"),
    "ratio text": (["--vegas-sparsity-ratio", "much"], "--vegas-sparsity-ratio"),
    "min tokens": (["--vegas-min-tokens", "0"], "--vegas-min-tokens"),
    "max tokens": (["--vegas-max-tokens", "1"], "--vegas-max-tokens"),
    "policy": (["--vegas-policy", "best"], "--vegas-policy"),
}
ACCEPTED = {
    "defaults": [],
    "settings": ["--speculative-num-steps", "3", "--vegas-sparsity-ratio", "0.15"],
}


@pytest.fixture(scope="module")
def outcomes(model_path: Path) -> dict[str, str]:
    """What became of each command line, by its name above."""
    cases = {name: flags for name, (flags, _) in REFUSED.items()} | ACCEPTED
    base = ["--model-path", str(model_path), *CPU_FLAGS, "--speculative-algorithm", "VEGAS"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse_arguments.py"))],
        env={**os.environ, **CPU_ENV},
        input=json.dumps(
            [
                base + [str(model_path) if flag is MODEL else flag for flag in flags]
                for flags in cases.values()
            ]
        ),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_start(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case].startswith("ValueError: ")
    assert REFUSED[case][1] in outcomes[case]


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_at_start(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "accepted"


def test_refused_server_ends_with_the_reason(model_path: Path, tmp_path: Path) -> None:
    refused = launch_server(
        model_path,
        algorithm="VEGAS",
        extra_args=["--page-size", "16"],
        log_path=tmp_path / "refused.log",
    )
    with pytest.raises(ServerStartError) as death, refused:
        pass
    last_line = str(death.value).splitlines()[-1]
    assert last_line == "ValueError: VEGAS does not support --page-size other than 1."


GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BAD_REQUESTS: dict[str, tuple[str, Any]] = {
    "no prompt": (GENERATE, {"sampling_params": {}}),
    "temperature": (GENERATE, {"text": "a", "sampling_params": {"temperature": -1}}),
    "top_p": (GENERATE, {"text": "a", "sampling_params": {"top_p": 1.5}}),
    "negative length": (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
    "prompt too long": (GENERATE, {"input_ids": [5] * 9000}),
    "unknown token": (GENERATE, {"input_ids": [5, 10**6]}),
    "negative token": (GENERATE, {"input_ids": [5, -1]}),
    "unknown token in a batch": (GENERATE, {"input_ids": [[5], [10**6]]}),
    "hidden states": (GENERATE, {"text": "a", "return_hidden_states": True}),
    "logit processor": (GENERATE, {"text": "a", "custom_logit_processor": "{}"}),
    "no tokens": (GENERATE, {"text": ""}),
    "no tokens in a batch": (GENERATE, {"text": ["a", ""]}),
    "no ids in a batch": (GENERATE, {"input_ids": [[5], []]}),
    # The tiny model's tokenizer drops this letter.
    "nothing but unknown letters": (COMPLETIONS, {"model": "default", "prompt": "\u00e9"}),
    "embeddings": (GENERATE, {"input_ids": [5, 6], "positional_embed_overrides": {}}),
    "embeddings in a batch": (
        GENERATE,
        {"input_ids": [[5, 6]], "positional_embed_overrides": [{"embeds": [], "positions": [0]}]},
    ),
    "grammar of another type": (
        GENERATE,
        {"text": "a", "sampling_params": {"ebnf": {"root": ["a"]}}},
    ),
    "SGLang's own parameter": (
        GENERATE,
        {"text": "a", "sampling_params": {"is_normalized": True, "temperature": 0}},
    ),
    "endless bias": (GENERATE, {"text": "a", "sampling_params": {"logit_bias": {"5": 1e300}}}),
    "two grammars": (GENERATE, {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}),
    "bad regex": (GENERATE, {"text": "a", "sampling_params": {"regex": "("}}),
    "bad schema": (GENERATE, {"text": "a", "sampling_params": {"json_schema": "{"}}),
    "no messages": (CHAT, {"model": "default"}),
    "empty messages": (CHAT, {"model": "default", "messages": []}),
    "chat temperature": (CHAT, {"model": "default", "messages": HELLO, "temperature": -1}),
}


def short_answer(server: Server) -> list[int]:
    return server.generate("The capital of France is", temperature=0, max_new_tokens=12)[
        "output_ids"
    ]


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_request(tiny: tuple[Server, Any], case: str) -> None:
    server, _ = tiny
    before = short_answer(server)
    path, body = BAD_REQUESTS[case]
    assert server.request("POST", path, body).status_code == 400
    assert short_answer(server) == before


def test_client_that_disconnects(vegas_server: Server, prompts: list[Prompt]) -> None:
    before = short_answer(vegas_server)
    long = next(prompt for prompt in prompts if "-1k" in prompt.name)
    for chunks_read in (1, 3):
        stream = vegas_server.stream(
            list(long.ids), temperature=0, max_new_tokens=6000, ignore_eos=True
        )
        for _ in range(chunks_read):
            next(stream)
        stream.close()
    assert_nothing_is_held(vegas_server)
    assert short_answer(vegas_server) == before


def test_aborted_request(vegas_server: Server, prompts: list[Prompt]) -> None:
    before = short_answer(vegas_server)
    long = next(prompt for prompt in prompts if "-1k" in prompt.name)
    sampling = {"temperature": 0, "max_new_tokens": 6000, "ignore_eos": True}
    body = {"input_ids": list(long.ids), "sampling_params": sampling, "rid": "aborted"}
    stream = vegas_server.events("/generate", {**body, "stream": True})
    next(stream)  # it generates now
    vegas_server.request("POST", "/abort_request", {"rid": "aborted"}).raise_for_status()
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 6000
    assert_nothing_is_held(vegas_server)
    assert short_answer(vegas_server) == before


def test_abort_of_one_leaves_the_others(vegas_server: Server, prompts: list[Prompt]) -> None:
    """An abort shrinks the running batch; the other request's tables must move with it."""
    kept, aborted = [prompt for prompt in prompts if "-1k" in prompt.name][:2]
    sampling = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}
    alone = vegas_server.generate(list(kept.ids), **sampling)["output_ids"]
    stream = vegas_server.stream(list(aborted.ids), **{**sampling, "max_new_tokens": 6000})
    next(stream)
    with ThreadPoolExecutor(1) as client:
        beside = client.submit(vegas_server.generate, list(kept.ids), **sampling)
        for _ in range(4):
            next(stream)
        stream.close()
        assert beside.result()["output_ids"] == alone
    assert_nothing_is_held(vegas_server)
