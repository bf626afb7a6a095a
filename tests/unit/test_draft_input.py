"""What the scheduler does to the draft input of a batch: filter, merge, relay."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when SGLang is imported

from sgl_vegas.draft_input import VegasDraftInput

FIELDS = ("bonus_tokens", "future_indices")


def make(field: str, values: list[int]) -> VegasDraftInput:
    draft_input = VegasDraftInput()
    setattr(draft_input, field, torch.tensor(values))
    return draft_input


def values(draft_input: VegasDraftInput, field: str) -> list[int]:
    tensor = getattr(draft_input, field)
    assert tensor is not None
    return tensor.tolist()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [3, 1], [2], []])
def test_filter_keeps_the_named_requests_in_order(field: str, kept: list[int]) -> None:
    draft_input = make(field, [10, 11, 12, 13])
    draft_input.filter_batch(torch.tensor(kept, dtype=torch.int64), new_indices_cpu=kept)
    assert values(draft_input, field) == [10 + i for i in kept]


@pytest.mark.parametrize("field", FIELDS)
def test_merge_appends_and_leaves_the_other_alone(field: str) -> None:
    first, second = make(field, [10, 11]), make(field, [7, 8, 9])
    first.merge_batch(second)
    assert values(first, field) == [10, 11, 7, 8, 9]
    assert values(second, field) == [7, 8, 9]


@pytest.mark.parametrize("field", FIELDS)
def test_merge_after_filter(field: str) -> None:
    first, second = make(field, [10, 11, 12]), make(field, [7, 8])
    first.filter_batch(torch.tensor([2, 0]))
    second.filter_batch(torch.tensor([], dtype=torch.int64))
    first.merge_batch(second)
    first.merge_batch(make(field, [5]))
    assert values(first, field) == [12, 10, 5]


def test_filter_of_an_input_that_carries_nothing() -> None:
    draft_input = VegasDraftInput()
    draft_input.filter_batch(torch.tensor([0]))
    assert draft_input.bonus_tokens is None
    assert draft_input.future_indices is None


@pytest.mark.parametrize(("mine", "other"), [FIELDS, FIELDS[::-1]])
def test_modes_are_not_merged(mine: str, other: str) -> None:
    with pytest.raises(AssertionError):
        make(mine, [1]).merge_batch(make(other, [2]))


def test_sglang_takes_it_for_a_draft_step_of_one_token() -> None:
    draft_input = make("bonus_tokens", [1, 2])
    assert draft_input.is_draft_input()
    assert not draft_input.is_verify_input()
    assert draft_input.num_tokens_per_req == 1
    assert draft_input.num_tokens_for_logprob_per_req == 1
    # Read, without a check for the algorithm, by SGLang's relay between iterations.
    assert draft_input.topk_p is draft_input.topk_index is draft_input.hidden_states is None
