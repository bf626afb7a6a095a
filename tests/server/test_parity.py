"""Greedy answers of VEGAS are plain SGLang's, token for token, however they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.prompts import Prompt
from tests.server import traffic
from tests.server.conftest import PlainAnswers
from tests.server_process import Server

pytestmark = pytest.mark.server

TOGETHER = 4


def differences(
    want: Mapping[str, traffic.Answer], got: Mapping[str, traffic.Answer]
) -> dict[str, str]:
    """Where each answer leaves plain SGLang's; empty if none does."""
    assert want.keys() == got.keys()
    found = {}
    for name, expected in want.items():
        actual = got[name]
        if actual.ids != expected.ids:
            same = _common_prefix(expected.ids, actual.ids)
            found[name] = (
                f"token {same} of {len(expected.ids)}: "
                f"{actual.ids[same : same + 3]}, plain {expected.ids[same : same + 3]}"
            )
        elif (actual.text, actual.finish) != (expected.text, expected.finish):
            found[name] = f"equal ids, but {actual.finish}, plain {expected.finish}"
    return found


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def assert_cached_alike(plain: int, vegas: int) -> None:
    """VEGAS caches no token that plain SGLang does not, and at most the answer's last one less.

    That token's KV is written by the step after it: overlap scheduling, on in plain SGLang here,
    has launched that step already; VEGAS on a CPU runs without overlap.
    """
    assert plain - 1 <= vegas <= plain


def test_recorded_answers_cover_limits_and_stops(plain: PlainAnswers) -> None:
    """Guards the other tests: plain answers that all end alike would leave a case untested."""
    assert len(plain.alone) >= 24
    assert {answer.finish for answer in plain.alone.values()} == {"length", "stop"}


def test_alone(plain: PlainAnswers, vegas_server: Server, prompts: list[Prompt]) -> None:
    assert differences(plain.alone, traffic.alone(vegas_server, prompts)) == {}


def test_four_at_once(plain: PlainAnswers, vegas_server: Server, prompts: list[Prompt]) -> None:
    vegas_server.flush_cache()
    some = prompts[::2]
    groups = len(some) // TOGETHER
    answers = {}
    for start in range(groups):
        group = some[start::groups]  # strided, so that short and long prompts mix
        names = [prompt.name for prompt in group]
        answers.update(zip(names, traffic.ask_together(vegas_server, group), strict=True))
    assert len(answers) == len(some)
    assert differences({name: plain.alone[name] for name in answers}, answers) == {}


def test_streamed(plain: PlainAnswers, vegas_server: Server, prompts: list[Prompt]) -> None:
    answers = {}
    for prompt in prompts[::5]:
        text = ""
        chunk = {}
        for chunk in vegas_server.stream(list(prompt.ids), **traffic.GREEDY):
            assert chunk["text"].startswith(text), "a chunk took back streamed text"
            text = chunk["text"]
        answers[prompt.name] = traffic.Answer.of(chunk)
    assert differences({name: plain.alone[name] for name in answers}, answers) == {}


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
def test_token_limit_within_an_iteration(
    plain: PlainAnswers, vegas_server: Server, prompts: list[Prompt], limit: int
) -> None:
    prompt = next(p for p in prompts if len(plain.alone[p.name].ids) > limit)
    answer = traffic.ask(vegas_server, prompt.ids, max_new_tokens=limit)
    assert answer.ids == plain.alone[prompt.name].ids[:limit]
    assert answer.finish == "length"


def test_stops_near_the_limit(
    plain: PlainAnswers, vegas_server: Server, ending_prompt: Prompt
) -> None:
    answers = traffic.stops_near_the_limit(vegas_server, ending_prompt)
    assert differences(plain.near_the_limit, answers) == {}
    for kind in ("end of text", "stop token", "stop string", "stop regex"):
        ends = {answer.finish for name, answer in answers.items() if name.startswith(kind)}
        assert "stop" in ends, kind


def test_prefix_cache_hits(
    plain: PlainAnswers, vegas_server: Server, prefix_prompts: list[Prompt]
) -> None:
    answers = traffic.prefix_hits(vegas_server, prefix_prompts)
    assert differences(plain.prefix_hits, answers) == {}
    for name, answer in answers.items():
        assert_cached_alike(plain.prefix_hits[name].cached_tokens, answer.cached_tokens)
        assert (answer.cached_tokens > 0) == (not name.endswith("cold"))


def test_two_chat_turns(plain: PlainAnswers, vegas_server: Server) -> None:
    turns = traffic.chat_turns(vegas_server)
    assert turns.keys() == plain.chat_turns.keys()
    for name, turn in turns.items():
        expected = plain.chat_turns[name]
        assert_cached_alike(expected.cached_tokens, turn.cached_tokens)
        assert replace(turn, cached_tokens=expected.cached_tokens) == expected
