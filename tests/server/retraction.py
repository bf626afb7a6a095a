"""More requests at once than the KV pool holds: SGLang retracts some and resumes them later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.server.pair import ask_all
from tests.server_process import Server

RETRACTED = "KV cache pool is full. Retract requests."
AT_LEAST = 3


def overfill(server: Server, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all of them at once, once SGLang has retracted again and again."""
    seen = len(server.log())
    answers = ask_all(server, bodies, len(bodies))
    assert server.log()[seen:].count(RETRACTED) >= AT_LEAST
    return answers
