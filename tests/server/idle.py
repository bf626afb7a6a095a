"""What a server holds once nobody asks it anything: nothing."""

from __future__ import annotations

import time
from typing import Any

from tests.server.mixed_traffic import table_cache
from tests.server_process import Server

IDLE_WITHIN_S = 30.0


def wait_until_idle(server: Server) -> dict[str, Any]:
    """The load once nothing runs, or when that takes too long."""
    end = time.monotonic() + IDLE_WITHIN_S
    while True:
        load = server.load()
        if load["num_running_reqs"] == load["num_waiting_reqs"] == 0 or time.monotonic() > end:
            return load
        time.sleep(0.1)


def assert_nothing_is_held(server: Server) -> None:
    """SGLang counts as used what is neither free nor in the prefix cache, which is empty then."""
    load = wait_until_idle(server)
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    server.flush_cache()
    assert server.load()["num_used_tokens"] == 0
    cache = table_cache(server)
    assert cache["tables"] == cache["used_bytes"] == 0
