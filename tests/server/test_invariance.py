"""Wrong tables cost acceptance and nothing else: outputs stay plain SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ServerSlot
from tests.hostile_policy import KIND_FILE, KINDS
from tests.prompts import Prompt
from tests.server.conftest import PlainAnswers
from tests.server_process import Server, launch_server

pytestmark = pytest.mark.server
NUM_STEPS = 3
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def kind_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "kind"
    path.write_text("right")
    return path


@pytest.fixture(scope="module")
def hostile_server(
    plain: PlainAnswers, server_slot: ServerSlot, model_path: Path, kind_file: Path
) -> Iterator[Server]:
    server_slot.stop()
    with launch_server(
        model_path,
        algorithm="VEGAS",
        extra_args=(
            *("--speculative-num-steps", str(NUM_STEPS), "--vegas-min-tokens", "32"),
            *("--vegas-policy", "tests.hostile_policy:HostilePolicy"),
        ),
        env={KIND_FILE: str(kind_file), "PYTHONPATH": str(Path(__file__).parents[2])},
        log_path=kind_file.with_name("server.log"),
    ) as server:
        yield server


def test_outputs_do_not_depend_on_tables(
    hostile_server: Server, kind_file: Path, plain: PlainAnswers, prompts: list[Prompt]
) -> None:
    chosen = [
        p for p in prompts if p.name in ("prose-1k-import", "code-1k-heapq", "needle-1k-late")
    ]
    accept_lengths = {}
    for kind in KINDS:
        kind_file.write_text(kind)
        emitted, iterations = 0, 0
        for prompt in chosen:
            body = hostile_server.generate(
                list(prompt.ids), temperature=0, max_new_tokens=NEW_TOKENS
            )
            expected = plain.alone[prompt.name].ids[:NEW_TOKENS]
            assert tuple(body["output_ids"]) == expected, (kind, prompt.name)
            emitted += body["meta_info"]["completion_tokens"]
            iterations += body["meta_info"]["spec_verify_ct"]
        accept_lengths[kind] = emitted / iterations
    # All wrong kinds are far from the right tables; how far is the model's business.
    for kind in KINDS[1:]:
        assert accept_lengths[kind] < 0.9 * accept_lengths["right"], accept_lengths
