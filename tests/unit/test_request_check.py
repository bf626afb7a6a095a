"""What a request may hold, before it gets to the scheduler."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_vegas.request_check import check_request

MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=100), sampling_params_class=SamplingParams
)


def check(
    sampling: Any = None, ids: list[int] | None = None, overrides: Any = None, embeds: Any = None
) -> None:
    request = SimpleNamespace(
        sampling_params={} if sampling is None else sampling,
        positional_embed_overrides=overrides,
        input_embeds=embeds,
    )
    check_request(MANAGER, request, [5, 99] if ids is None else ids)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0, "top_p": 1, "max_new_tokens": 5.0, "n": 2, "ignore_eos": 1},
        {"temperature": None, "max_new_tokens": None, "stop": None},
        {"stop": "a", "stop_token_ids": [1, 2], "stop_regex": ["a", "b"], "regex": "a"},
        {"stop": ["a"], "stop_token_ids": {1, 5.0}, "json_schema": "{}", "min_new_tokens": True},
        {"logit_bias": {"5": -100, "6": 1.5}},
        {"logit_bias": {5: -100.0}},  # as `Engine` may be asked
        {"custom_params": {"a": 1, "b": [1, {"c": [{}]}]}, "sampling_seed": 2**40},
        {"temperature": np.float64(0.5), "max_new_tokens": np.int64(4), "top_k": torch.tensor(3)},
        {"stop_token_ids": [1, None, np.int32(7)], "logit_bias": {"5": True, "6": np.float32(2)}},
    ],
)
def test_what_sglang_takes_is_let_through(sampling: dict[str, Any]) -> None:
    check(sampling)


def test_stops_that_nobody_can_emit_are_dropped() -> None:
    sampling = {"stop_token_ids": [-1, 1, None, np.int64(99), 100, 5.0, 2**40]}
    request = SimpleNamespace(
        sampling_params=sampling, positional_embed_overrides=None, input_embeds=None
    )
    check_request(MANAGER, request, [5])
    assert request.sampling_params == {"stop_token_ids": [1, 99, 5]}
    assert len(sampling["stop_token_ids"]) == 7, "the caller's own"


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ([], "sampling_params"),
        ({"regex": ["a"]}, "regex"),
        ({"ebnf": {"root": 1}}, "ebnf"),
        ({"json_schema": {}}, "json_schema"),
        ({"max_new_tokens": "5"}, "max_new_tokens"),
        ({"max_new_tokens": 5.5}, "max_new_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [5.5]}, "stop_token_ids"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": math.nan}}, "logit_bias"),
        ({"logit_bias": {"5": -math.inf}}, "logit_bias"),
        ({"logit_bias": {"5": 10**40}}, "logit_bias"),
        ({"no_such": 1}, "no_such"),
        ({"is_normalized": True}, "is_normalized"),
        ({"stop_strs": ["a"]}, "stop_strs"),
    ],
)
def test_malformed_sampling_is_refused_by_name(sampling: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check(sampling)


@pytest.mark.parametrize("ids", [[-1], [5, 100], [2**63, 5]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="vocabulary of 100"):
        check(ids=ids)


def test_a_prompt_needs_tokens_or_embeddings() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        check(ids=[])
    check(ids=[], embeds=[[0.5]])


def test_overrides_of_embeddings_are_objects() -> None:
    check(overrides=PositionalEmbeds(embeds=torch.zeros(1, 8), positions=[0]))
    with pytest.raises(ValueError, match="positional_embed_overrides"):
        check(overrides={"embeds": [], "positions": []})
