"""Does a server stay right and whole under mixed traffic, for as long as one cares to wait?

Clients share prefixes, hang up after 15 ms, retry and overfill a tiny KV pool; the prefix cache is
flushed now and then. Every answer is compared with the same prompt's answer alone; at the end KV
pool and table cache must be empty, and the server's memory no larger than after the first quarter.

    python benchmark/soak.py --model-path M [--minutes 30] [--out X.json]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import (  # noqa: E402
    add_common_flags,
    add_model_flag,
    commit,
    device_name,
    write_report,
)
from tests.prompts import load_tokenizer  # noqa: E402
from tests.server import mixed_traffic  # noqa: E402
from tests.server_process import launch_server  # noqa: E402

MAX_GROWTH = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_flag(parser)
    add_common_flags(parser)
    parser.add_argument("--minutes", type=float, default=30)
    options = parser.parse_args()
    some = mixed_traffic.make_requests(load_tokenizer(options.model_path))

    def progress(outcome: mixed_traffic.Outcome, elapsed: float) -> None:
        print(
            f"{elapsed:5.0f} s: {outcome.answered} answered, {outcome.hung_up} hung up, "
            f"{len(outcome.wrong)} wrong, {outcome.memory[-1] / 1e9:.3f} GB",
            flush=True,
        )

    with launch_server(
        options.model_path,
        algorithm="VEGAS",
        extra_args=[*mixed_traffic.FLAGS, *options.server_args],
        log_path=options.log_dir / "soak.log",
    ) as server:
        used_before = server.load()["num_used_tokens"]
        outcome = mixed_traffic.run(server, some, options.minutes * 60, progress=progress)
        used_after = server.load()["num_used_tokens"]
        cache = mixed_traffic.table_cache(server)
        retractions = server.log().count("KV cache pool is full. Retract requests.")
    quarter = len(outcome.memory) // 4
    growth = max(outcome.memory[-max(quarter, 1) :]) / outcome.memory[quarter]
    checks = {
        "answers as alone": not outcome.wrong,
        "KV pool whole": used_after == used_before,
        "table cache empty": cache["tables"] == cache["used_bytes"] == 0,
        "memory flat": growth <= MAX_GROWTH,
        "pool overflowed": retractions > 0,
        "table cache overflowed": cache["evictions"] > 0,
    }
    report = {
        "device": device_name(),
        "commit": options.commit or commit(),
        "minutes": options.minutes,
        "answered": outcome.answered,
        "hung_up": outcome.hung_up,
        "flushed": outcome.flushed,
        "retractions": retractions,
        "memory_growth": growth,
        "memory_bytes": outcome.memory,
        "table_cache": cache,
        "checks": checks,
    }
    write_report(report, options.out)
    for name, passed in checks.items():
        print(f"{name:24}{'yes' if passed else 'NO'}")
    if not all(checks.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
