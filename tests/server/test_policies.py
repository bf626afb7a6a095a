"""Every policy serves, and none changes an output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.server.policies import check_outputs, policy_flags
from tests.tiny_model import tiny_server

pytestmark = pytest.mark.server

# One of each kind of path: `last-accepted` and `vegas-refresh` are served in test_table_reuse.py,
# `vegas` by the other tests, `oracle` goes the way of `quest`, and the rest differ in their lists
# only, so that a server for each of them is for who changes one.
POLICIES = ["quest"]
if os.environ.get("VEGAS_TEST_EVERY_POLICY"):
    POLICIES += ["vegas", "streaming", "all-queries", "oracle", "dense"]


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_the_targets(
    policy: str, server_slot: ServerSlot, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    server_slot.stop()
    folder, model = tiny_model
    with tiny_server(folder, *policy_flags(policy, model, tmp_path)) as server:
        check_outputs(server, model, policy)
