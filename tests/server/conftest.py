"""Plain SGLang's answers, recorded once a session, then the plain server is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.prompts import Prompt, load_tokenizer, parity_prompts
from tests.server import traffic
from tests.server.pair import Pair, start_pair
from tests.server_process import Server
from tests.tiny_model import make_tiny_model


@dataclass(frozen=True)
class PlainAnswers:
    alone: dict[str, traffic.Answer]
    prefix_hits: dict[str, traffic.Answer]
    near_the_limit: dict[str, traffic.Answer]
    chat_turns: dict[str, traffic.ChatTurn]
    openai_calls: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    return load_tokenizer(model_path)


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[Prompt]:
    return parity_prompts(tokenizer)


@pytest.fixture(scope="session")
def prefix_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """A chat that ends by itself, and a context that is drafted sparsely."""
    return [p for p in prompts if p.name in ("chat-0", "code-1k-heapq")]


@pytest.fixture(scope="session")
def ending_prompt(prompts: list[Prompt]) -> Prompt:
    """A chat whose answer ends by itself, after some 27 tokens."""
    return next(p for p in prompts if p.name == "chat-2")


@pytest.fixture(scope="session")
def plain(
    server_slot: ServerSlot,
    prompts: list[Prompt],
    prefix_prompts: list[Prompt],
    ending_prompt: Prompt,
) -> PlainAnswers:
    server = server_slot.get("plain_server")
    answers = PlainAnswers(
        alone=traffic.alone(server, prompts),
        prefix_hits=traffic.prefix_hits(server, prefix_prompts),
        near_the_limit=traffic.stops_near_the_limit(server, ending_prompt),
        chat_turns=traffic.chat_turns(server),
        openai_calls=traffic.openai_calls(server),
    )
    server_slot.stop()
    return answers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The tiny model's folder, and the model in float64."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make_tiny_model(folder)


@pytest.fixture
def tiny_pair(server_slot: ServerSlot, tiny_model: tuple[Path, Any]) -> Pair:
    """Plain SGLang and VEGAS over the tiny model, to be asked one after the other."""
    return server_slot.hold("tiny_pair", lambda: start_pair(tiny_model[0]))


@pytest.fixture
def tiny(tiny_pair: Pair, tiny_model: tuple[Path, Any]) -> tuple[Server, Any]:
    """The VEGAS server of the pair, and its model in float64."""
    return tiny_pair.vegas, tiny_model[1]
