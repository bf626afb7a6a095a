"""A user's script: `sglang.Engine` as a library, greedy answers as JSON on the last line.

python run_engine.py ENGINE_ARGUMENTS_JSON GENERATE_ARGUMENTS_JSON
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    replies = engine.generate(**json.loads(sys.argv[2]))
    assert isinstance(replies, list)
    print(json.dumps([{"ids": r["output_ids"], "meta": r["meta_info"]} for r in replies]))
    engine.shutdown()


if __name__ == "__main__":
    main()
