"""What `launch_server` makes of command lines, without starting servers.

Standard input holds a JSON list of argument lists; standard output's last line is a JSON list of
what became of each: "accepted", or the exception as `Type: message`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys


def outcome(arguments: list[str]) -> str:
    from sglang.srt.server_args import prepare_server_args

    try:
        prepare_server_args(arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # A fork for each: parsing writes environment variables and SGLang's global state.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(outcome, json.load(sys.stdin), chunksize=1)))


if __name__ == "__main__":
    main()
