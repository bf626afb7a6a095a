"""Tables of cached prefixes: who gets them, who doesn't, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.prompts import Prompt
from tests.server import traffic
from tests.server.mixed_traffic import table_cache
from tests.server.pair import generate_body, prompt
from tests.server.policies import check_outputs, policy_flags
from tests.server_process import Server
from tests.tiny_model import check_greedy, tiny_server

pytestmark = pytest.mark.server

COUNTED = ("hits", "misses", "stores", "evictions")
NOT_KEPT = "VEGAS keeps no tables in the prefix cache"


@pytest.fixture
def context(prompts: list[Prompt]) -> Prompt:
    """Long enough for a table."""
    return next(p for p in prompts if p.name == "code-1k-heapq")


def counts(server: Server) -> dict[str, int]:
    cache = table_cache(server)
    return {name: cache[name] for name in COUNTED}


def new_counts(server: Server, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in counts(server).items()}


def generate(server: Server, ids: list[int], **options: Any) -> list[int]:
    body = {"input_ids": ids, "sampling_params": {**traffic.GREEDY, "max_new_tokens": 16}}
    return server.post("/generate", body | options)["output_ids"]


def test_a_follow_up_takes_its_prefix_table(vegas_server: Server, context: Prompt) -> None:
    vegas_server.flush_cache()
    ids = list(context.ids)
    before = counts(vegas_server)
    answer = generate(vegas_server, ids)
    # At the end of the prompt, and at the end of the answer.
    assert new_counts(vegas_server, before) == dict(hits=0, misses=1, stores=2, evictions=0)
    follow_up = ids + answer + ids[:20]
    generate(vegas_server, follow_up)
    assert new_counts(vegas_server, before) == dict(hits=1, misses=1, stores=4, evictions=0)
    # It reaches too little of this prompt, whose rest drafts would attend to as a whole.
    generate(vegas_server, ids[:400] + ids[:700])
    assert new_counts(vegas_server, before)["misses"] == 2


def test_samples_of_one_prompt_share_a_table(vegas_server: Server, context: Prompt) -> None:
    vegas_server.flush_cache()
    before = counts(vegas_server)
    sampling = {"temperature": 0, "max_new_tokens": 8, "n": 3}
    vegas_server.post("/generate", {"input_ids": list(context.ids), "sampling_params": sampling})
    assert new_counts(vegas_server, before)["hits"] >= 2


def test_other_namespaces_find_no_table(vegas_server: Server, context: Prompt) -> None:
    vegas_server.flush_cache()
    ids = list(context.ids)
    generate(vegas_server, ids, extra_key="one")
    before = counts(vegas_server)
    generate(vegas_server, ids, extra_key="another")
    assert new_counts(vegas_server, before) == dict(hits=0, misses=1, stores=2, evictions=0)
    generate(vegas_server, ids, extra_key="one")
    assert new_counts(vegas_server, before)["hits"] == 1


def test_a_flush_drops_tables(vegas_server: Server, context: Prompt) -> None:
    generate(vegas_server, list(context.ids))
    assert table_cache(vegas_server)["tables"] > 0
    vegas_server.flush_cache()
    cache = table_cache(vegas_server)
    assert cache["tables"] == cache["used_bytes"] == 0
    before = counts(vegas_server)
    generate(vegas_server, list(context.ids))
    assert new_counts(vegas_server, before)["hits"] == 0


def test_prometheus(vegas_server: Server, context: Prompt) -> None:
    for _ in range(2):
        generate(vegas_server, list(context.ids))
    found = vegas_server.metrics()
    cache = counts(vegas_server)
    assert cache["hits"] > 0
    for name in COUNTED:
        assert found[f"sglang:vegas_table_cache_{name}_total"] == cache[name]


def ask_by_prefixes(server: Server, model: Any) -> None:
    """Prompts that share a prefix, each twice and then continued."""
    for salt in range(3):
        ids = prompt(100) + prompt(20, salt)
        for more in ([], [], prompt(9, salt + 5)):
            body = generate_body(ids + more, max_new_tokens=24)
            answer = server.post("/generate", body)["output_ids"]
            check_greedy(model, ids + more, answer)
            ids += more + answer


# These two serve a policy each that no other test does, since a start costs half a minute.
def test_unified_radix_cache(
    server_slot: ServerSlot, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    server_slot.stop()
    folder, model = tiny_model
    flags = policy_flags("last-accepted", model, tmp_path)
    with tiny_server(folder, *flags, env={"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}) as server:
        check_outputs(server, model, "last-accepted")
        before = counts(server)
        ask_by_prefixes(server, model)
        assert table_cache(server)["enabled"]
        assert new_counts(server, before)["hits"] >= 2
        assert NOT_KEPT not in server.log()
        server.flush_cache()
        assert table_cache(server)["used_bytes"] == 0


def test_without_a_radix_cache(
    server_slot: ServerSlot, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    server_slot.stop()
    folder, model = tiny_model
    flags = policy_flags("vegas-refresh", model, tmp_path)
    with tiny_server(folder, *flags, "--disable-radix-cache") as server:
        check_outputs(server, model, "vegas-refresh")
        ask_by_prefixes(server, model)
        assert server.log().count(NOT_KEPT) == 1
        assert not table_cache(server)["enabled"]
