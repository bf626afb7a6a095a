"""Log-probabilities, biases, penalties, filters and samples, against plain SGLang or float64.

The numbers are those of docs/cases.md.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.server.pair import LOGPROB_TOLERANCE, Pair, generate_body, prompt
from tests.server_process import Server
from tests.tiny_model import NUM_STEPS, VOCAB_SIZE

pytestmark = pytest.mark.server

LENGTHS = (12, 40, 90, 150)
TOP = 3


@torch.no_grad()
def logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(len(ids), vocab) float64, of the token after each."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, dim=-1)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 4, "temperature": 1.3}])
def test_case_14_logprobs_are_a_prefills(
    tiny: tuple[Server, Any], sampling: dict[str, float]
) -> None:
    """One entry an emitted token: that of the target after the tokens before it."""
    server, model = tiny
    prompts = [prompt(n, salt=n) for n in LENGTHS]
    asked = {"return_logprob": True, "top_logprobs_num": TOP, "token_ids_logprob": [3, 7, 90]}
    answers = server.post(
        "/generate",
        {
            "input_ids": prompts,
            "sampling_params": generate_body([], **sampling)["sampling_params"],
            "return_logprob": [True, True, True, True],
            "top_logprobs_num": [TOP] * 4,
            "token_ids_logprob": [asked["token_ids_logprob"]] * 4,
        },
    )
    for ids, answer in zip(prompts, answers, strict=True):
        emitted, meta = answer["output_ids"], answer["meta_info"]
        exact = logprobs(model, ids + emitted, sampling.get("temperature", 1.0))
        # SGLang's own re-scoring, a prefill at temperature 1.
        again = server.post(
            "/generate",
            {
                **generate_body(ids + emitted, max_new_tokens=0),
                "return_logprob": True,
                "logprob_start_len": len(ids) - 1,
            },
        )["meta_info"]["input_token_logprobs"]
        if not sampling:
            rescored = [entry[0] for entry in again[-len(emitted) :]]
            got = [entry[0] for entry in meta["output_token_logprobs"]]
            assert got == pytest.approx(rescored, abs=LOGPROB_TOLERANCE)
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert len(meta[name]) == len(emitted) == 48, name
        for place, token in enumerate(emitted):
            row = exact[len(ids) + place - 1]
            logprob, reported, _ = meta["output_token_logprobs"][place]
            assert reported == token
            assert logprob == pytest.approx(row[token].item(), abs=LOGPROB_TOLERANCE)
            best = [value for value, *_ in meta["output_top_logprobs"][place]]
            assert best == pytest.approx(row.topk(TOP).values.tolist(), abs=LOGPROB_TOLERANCE)
            for value, named, _ in meta["output_token_ids_logprobs"][place]:
                assert value == pytest.approx(row[named].item(), abs=LOGPROB_TOLERANCE)


def test_case_14_logprobs_where_a_stop_ends_a_run(tiny_pair: Pair) -> None:
    """None of what was accepted past the end, streamed or not, in batches of many kinds."""
    ids = prompt(20)
    whole = tiny_pair.vegas.generate(ids, **generate_body(ids)["sampling_params"])["output_ids"]
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    bodies = [
        {**generate_body(ids, ignore_eos=False, stop_token_ids=[whole[n]]), **asked}
        for n in range(NUM_STEPS + 3)
    ]
    bodies += [{**generate_body(ids, max_new_tokens=n), **asked} for n in range(1, NUM_STEPS + 3)]
    # Others in the batch that ask for nothing, or for the prompt's too.
    bodies += [generate_body(prompt(30, salt=n)) for n in range(4)]
    bodies += [{**generate_body(prompt(30)), **asked, "logprob_start_len": 0}]
    for body, answer in zip(bodies, tiny_pair.check(bodies), strict=True):
        if "return_logprob" in body:
            entries = answer["meta_info"]["output_token_logprobs"]
            assert [entry[1] for entry in entries] == answer["output_ids"]
            streamed = list(tiny_pair.vegas.events("/generate", {**body, "stream": True}))
            assert streamed[-1]["output_ids"] == answer["output_ids"]
            got = [e[1] for e in streamed[-1]["meta_info"]["output_token_logprobs"]]
            assert got == answer["output_ids"]


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": -1.5, "presence_penalty": 0.5},
    {"logit_bias": {"5": 6.0, "7": -100}},
    {"frequency_penalty": 1.9, "logit_bias": {"40": 9.0}},
]


def test_case_15_penalties_and_biases(tiny_pair: Pair) -> None:
    """Side by side in one batch with requests that have none; in plain SGLang each alone.

    Plain SGLang loses counts where batches with and without penalties merge.
    """
    # A bias that makes greedy text repeat itself, so that penalties have something to do.
    again: dict[str, Any] = {"logit_bias": {"40": 12.0, "41": 11.0, "42": 10.0}}
    bodies = [generate_body(prompt(n)) for n in LENGTHS]
    for penalty in PENALTIES:
        bias = again["logit_bias"] | penalty.get("logit_bias", {})
        bodies += [generate_body(prompt(n), **penalty) for n in LENGTHS[1:3]]
        bodies += [generate_body(prompt(n), **{**penalty, "logit_bias": bias}) for n in LENGTHS]
    answers = tiny_pair.check(bodies, plain_together=1)
    texts = {tuple(answer["output_ids"]) for answer in answers}
    assert len(texts) > len(answers) * 0.7  # most penalties changed the output


@torch.no_grad()
def test_case_15_all_three_penalties(tiny: tuple[Server, Any]) -> None:
    """In float64: plain SGLang's order of them without overlap is that of a set."""
    server, model = tiny
    frequency, presence, repetition = -1.5, 0.5, 1.2
    bodies = [
        generate_body(
            prompt(n),
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
        )
        for n in LENGTHS
    ]
    for body in bodies:
        ids, emitted = body["input_ids"], server.post("/generate", body)["output_ids"]
        rows = model(torch.tensor([ids + emitted])).logits[0]
        counts = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
        for place, token in enumerate(emitted):
            row = rows[len(ids) + place - 1] - counts * frequency - (counts > 0) * presence
            scale = torch.where(counts > 0, repetition, 1.0)
            row = torch.where(row < 0, row * scale, row / scale)
            assert row[token] >= row.max() - LOGPROB_TOLERANCE, (len(ids), place)
            counts[token] += 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_case_15_a_bias_of_minus_100_forbids(tiny: tuple[Server, Any], temperature: float) -> None:
    server, _ = tiny
    ids = prompt(40)
    free = server.generate([ids] * 16, temperature=temperature, max_new_tokens=48, ignore_eos=True)
    usual = {token for answer in free for token in answer["output_ids"]}
    forbidden = {str(token): -100 for token in sorted(usual)[::2]}
    answers = server.generate(
        [ids] * 16,
        temperature=temperature,
        max_new_tokens=48,
        ignore_eos=True,
        logit_bias=forbidden,
    )
    for answer in answers:
        assert not {str(token) for token in answer["output_ids"]} & forbidden.keys()


@torch.no_grad()
def test_case_15_min_p_keeps_to_its_tokens(tiny: tuple[Server, Any]) -> None:
    """Each token is one that the float64 distribution, cut by min-p, allows; greedy at min-p 1."""
    server, model = tiny
    bodies = server.post(
        "/generate",
        {
            "input_ids": [prompt(n, salt) for n in LENGTHS for salt in range(4)],
            "sampling_params": [
                {"temperature": 1.0, "min_p": min_p, "max_new_tokens": 32, "ignore_eos": True}
                for _ in LENGTHS
                for min_p in (0.05, 0.3, 0.9, 1.0)
            ],
        },
    )
    for index, body in enumerate(bodies):
        ids, min_p = prompt(LENGTHS[index // 4], index % 4), (0.05, 0.3, 0.9, 1.0)[index % 4]
        rows = logprobs(model, ids + body["output_ids"]).exp()
        for place, token in enumerate(body["output_ids"]):
            row = rows[len(ids) + place - 1]
            assert row[token] >= min_p * row.max() * (1 - 1e-4), (min_p, place)


def test_case_16_samples_of_one_prompt_differ(tiny: tuple[Server, Any]) -> None:
    server, _ = tiny
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "n": 8}
    body = {"input_ids": prompt(90), "sampling_params": sampling}
    answers = [tuple(answer["output_ids"]) for answer in server.post("/generate", body)]
    # Of 96 tokens, 24 times: equal samples would mean shared randomness.
    assert len(set(answers)) == 8


def test_case_16_a_seed_does_what_it_does_in_plain_sglang(tiny_pair: Pair) -> None:
    """Nothing: without --enable-deterministic-inference, refused here, SGLang ignores seeds."""
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 7}
    for server in tiny_pair.both:
        answers = server.generate([prompt(90)] * 6, **sampling)
        assert len({tuple(answer["output_ids"]) for answer in answers}) == 6


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_case_21_figures_follow_from_tokens_and_passes(
    tiny: tuple[Server, Any], sampling: dict[str, float]
) -> None:
    """From the emitted ids and the verify count alone, and run by run as they were streamed."""
    server, _ = tiny
    followed = 0
    for n in LENGTHS:
        # The prefill's token and a whole number of runs, whatever their lengths: end by the chunk.
        body = generate_body(prompt(n), **sampling)
        chunks = list(server.events("/generate", {**body, "stream": True}))
        lengths = [len(chunk["output_ids"]) for chunk in chunks]
        meta = chunks[-1]["meta_info"]
        passes = meta["spec_verify_ct"]
        emitted = lengths[-1]
        assert meta["completion_tokens"] == emitted == 48
        assert meta["spec_accept_length"] == pytest.approx(emitted / passes)
        assert meta["spec_num_proposed_drafts"] == passes * NUM_STEPS
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == passes
        accepted = sum(count * correct for correct, count in enumerate(histogram))
        assert meta["spec_num_correct_drafts"] == accepted
        assert meta["spec_accept_rate"] == pytest.approx(accepted / (passes * NUM_STEPS))
        # A pass emits its accepted drafts and one token more; the last may overshoot the limit.
        overshoot = accepted + passes - (emitted - 1)
        assert 0 <= overshoot <= NUM_STEPS
        if len(lengths) == passes + 1:  # chunks may be sent together
            runs = [end - start for start, end in itertools.pairwise(lengths)]
            runs[-1] += overshoot
            assert histogram == [runs.count(correct + 1) for correct in range(len(histogram))]
            followed += 1
    assert followed > 0
