"""Where answers end, what they cost and what they leave in the prefix cache: as plain SGLang.

The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.pair import Pair, generate_body, prompt
from tests.server_process import Server
from tests.tiny_model import CONTEXT_LEN, MIN_TOKENS, NUM_STEPS, check_greedy
from tests.tiny_tokenizer import ALPHABET, SPECIAL

pytestmark = pytest.mark.server

# Every place in an accepted run, and a run further.
OFFSETS = range(NUM_STEPS + 3)
SHORT = 20  # a prompt that is drafted densely, so that runs are accepted whole


def text_of(ids: list[int]) -> str:
    return "".join(ALPHABET[i - len(SPECIAL)] for i in ids if i >= len(SPECIAL))


def stopped(ids: list[int], **sampling: Any) -> dict[str, Any]:
    """With `ignore_eos` SGLang ignores stop tokens too."""
    return generate_body(ids, **{"ignore_eos": False, **sampling})


def test_case_04_second_turn_finds_the_first(tiny_pair: Pair) -> None:
    """With answers that a stop ends in the middle of an accepted run."""
    prompts = [prompt(length, salt=n) for length in (SHORT, 90) for n in OFFSETS]
    answers = tiny_pair.vegas.generate(prompts, **generate_body([])["sampling_params"])
    runs = [answer["output_ids"] for answer in answers]
    tiny_pair.flush()
    for index, (ids, run) in enumerate(zip(prompts, runs, strict=True)):
        offset = OFFSETS[index % len(OFFSETS)]
        answer = tiny_pair.check_one(stopped(ids, stop_token_ids=[run[offset]]))["output_ids"]
        assert len(answer) <= offset + 1
        # What was accepted past the stop may be the continuation: it must not be found either.
        for follow_up in (ids + answer + run[offset + 1 :], ids + answer + [5, 6, 7]):
            second = tiny_pair.check_one(generate_body(follow_up, max_new_tokens=4))
            assert second["meta_info"]["cached_tokens"] <= len(ids) + len(answer)


def test_case_05_chats_reuse_as_much(tiny_pair: Pair) -> None:
    tiny_pair.flush()
    for salt in range(3):
        messages = [{"role": "user", "content": f"{salt} What is a cache, in short?"}]
        for turn in range(4):
            body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 13}
            answer = tiny_pair.check_one(body, "/v1/chat/completions")
            usage = answer["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            assert (cached > 0) == (turn > 0 or salt > 0)
            messages = [
                *messages,
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "And?"},
            ]


def test_case_09_prompts_that_end_at_the_limit(tiny_pair: Pair) -> None:
    distances = range(1, 2 * NUM_STEPS + 6)
    bodies = [
        {"input_ids": prompt(CONTEXT_LEN - d, salt=d), "sampling_params": {"temperature": 0} | more}
        for d in distances
        for more in ({}, {"max_new_tokens": d}, {"max_new_tokens": 500})
    ]
    for body in bodies:
        body["sampling_params"]["ignore_eos"] = True
    answers = tiny_pair.check(bodies)
    ends = {a["meta_info"]["finish_reason"]["type"] for a in answers if "meta_info" in a}
    assert ends == {"length"}
    assert sum("meta_info" in answer for answer in answers) > NUM_STEPS


@pytest.mark.parametrize("length", [SHORT, 90])
def test_case_10_stops_at_every_offset(tiny_pair: Pair, length: int) -> None:
    ids = prompt(length)
    whole = tiny_pair.vegas.generate(ids, **generate_body(ids)["sampling_params"])["output_ids"]
    bodies = []
    for offset in OFFSETS:
        token = whole[offset]
        stops: list[dict[str, Any]] = [{"stop_token_ids": [token]}]
        if token >= len(SPECIAL):
            text = text_of(whole[max(offset - 1, 0) : offset + 1])
            stops += [{"stop": [text]}, {"stop": text, "no_stop_trim": True}]
            stops += [{"stop": [text], "stop_token_ids": [whole[offset + 1]]}]
            stops += [{"stop_regex": re.escape(text)}]
        # The end token, forced there; and stops met in the step that reaches the limit.
        stops += [{"logit_bias": {"1": 25.0}, "min_new_tokens": offset}]
        for stop in stops:
            bodies += [stopped(ids, **stop)]
            bodies += [stopped(ids, max_new_tokens=offset + 1 + room, **stop) for room in (0, 1, 4)]
    answers = tiny_pair.check(bodies)
    kinds = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert kinds == {"stop", "length"}


@pytest.mark.parametrize("length", [SHORT, 90])
def test_case_11_token_limits(tiny_pair: Pair, length: int) -> None:
    limits = (0, 1, 2, NUM_STEPS, NUM_STEPS + 1, NUM_STEPS + 2)
    bodies = [
        generate_body(prompt(length, salt), max_new_tokens=limit, ignore_eos=ignore)
        for limit in limits
        for ignore in (True, False)
        for salt in (0, 1)
    ]
    # The end token is so likely that it is emitted as soon as it may be.
    eager = {"ignore_eos": False, "logit_bias": {"1": 25.0}}
    bodies += [
        generate_body(prompt(length), min_new_tokens=least, max_new_tokens=40, **eager)
        for least in (0, 1, 2, NUM_STEPS, NUM_STEPS + 1, NUM_STEPS + 2)
    ]
    answers = tiny_pair.check(bodies)
    # Plain SGLang's scheduler ends by a stop token that isn't one, beside `min_new_tokens`.
    odd = generate_body(prompt(length), min_new_tokens=9, stop_token_ids=[2**31, -1], **eager)
    bodies.append(odd)
    answers.append(tiny_pair.vegas.post("/generate", odd))
    for body, answer in zip(bodies, answers, strict=True):
        emitted = len(answer["output_ids"])
        assert answer["meta_info"]["completion_tokens"] == emitted
        assert emitted <= body["sampling_params"]["max_new_tokens"]
        assert emitted >= body["sampling_params"].get("min_new_tokens", 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"stop": ["a", "Q"]}, {"n": 3}, {"echo": True}, {"max_tokens": 1}],
    ids=str,
)
def test_case_12_usage_and_streamed_text(tiny_pair: Pair, options: dict[str, Any]) -> None:
    body = {"model": "default", "prompt": "What is a cache? ", "temperature": 0, "max_tokens": 40}
    body |= options
    whole = tiny_pair.check([body], "/v1/completions")[0]
    # Each character is a token; special tokens and a cut stop string show less text than tokens.
    shown = sum(len(choice["text"]) for choice in whole["choices"])
    prompts = len(body["prompt"]) * body.get("n", 1) if options.get("echo") else 0
    assert whole["usage"]["completion_tokens"] >= shown - prompts
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(tiny_pair.vegas.events("/v1/completions", streamed))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    # The prefix cache is warm by now.
    usage = {k: v for k, v in chunks[-1]["usage"].items() if k != "prompt_tokens_details"}
    assert usage == {k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"}


def test_case_22_prompts_within_the_budget(tiny_pair: Pair, tiny: tuple[Server, Any]) -> None:
    _, model = tiny
    lengths = range(1, MIN_TOKENS + NUM_STEPS + 2)
    new_tokens = NUM_STEPS + 2  # the prefill's, and one full run
    answers = tiny_pair.check(
        [generate_body(prompt(n, salt=n), max_new_tokens=new_tokens) for n in lengths]
    )
    for n, answer in zip(lengths, answers, strict=True):
        check_greedy(model, prompt(n, salt=n), answer["output_ids"])
        if n <= MIN_TOKENS:  # drafts see everything, so all are accepted
            assert answer["meta_info"]["spec_verify_ct"] == 1, n
            assert answer["meta_info"]["spec_accept_rate"] == 1.0, n
