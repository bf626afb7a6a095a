"""Wrong tables cost acceptance and nothing else: outputs stay the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ServerSlot
from tests.hostile_policy import KIND_FILE, KINDS
from tests.server.pair import generate_body, prompt
from tests.tiny_model import check_greedy, tiny_server

pytestmark = pytest.mark.server
LENGTHS = (90, 120, 150, 190)


def test_outputs_do_not_depend_on_tables(
    server_slot: ServerSlot, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    server_slot.stop()
    folder, model = tiny_model
    kind_file = tmp_path / "kind"
    kind_file.write_text("right")
    accept_lengths = {}
    with tiny_server(
        folder,
        *("--vegas-policy", "tests.hostile_policy:HostilePolicy"),
        env={KIND_FILE: str(kind_file), "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as server:
        for kind in KINDS:
            kind_file.write_text(kind)
            emitted, iterations = 0, 0
            for length in LENGTHS:
                ids = prompt(length)
                answer = server.post("/generate", generate_body(ids))
                check_greedy(model, ids, answer["output_ids"])
                emitted += answer["meta_info"]["completion_tokens"]
                iterations += answer["meta_info"]["spec_verify_ct"]
            accept_lengths[kind] = emitted / iterations
    print(accept_lengths)
    # All wrong kinds are far from the right tables; how far is the model's business.
    for kind in KINDS[1:]:
        assert accept_lengths[kind] < 0.9 * accept_lengths["right"], accept_lengths
