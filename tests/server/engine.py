"""Run `sglang.Engine` in a process of its own, as a user's script would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("run_engine.py")
TIMEOUT_S = 400


def engine_answers(
    engine: Mapping[str, Any], generate: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """`ids` and `meta` of each answer of `sglang.Engine(**engine).generate(**generate)`."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(engine), json.dumps(generate)],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])
