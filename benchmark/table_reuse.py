"""Does a request draft better from its first token if its cached prefix brings a table along?

Conversations over long texts (a question, its answer, the next question), questions that share a
text, and prompts that come again, each sent to a server per `--vegas-first-table`; a stream shows
the tokens of the first iterations after the prefill. Answers and `cached_tokens` must be the same
with all of them and, with --plain, with plain SGLang.

    python benchmark/table_reuse.py --model-path M [--texts 12] [--plain] [--out X.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import (  # noqa: E402
    add_common_flags,
    add_model_flag,
    commit,
    device_name,
    write_report,
)
from tests.prompts import code, load_tokenizer, prose  # noqa: E402
from tests.server_process import Server, launch_server  # noqa: E402

MODES = ("cached", "prompt", "none")
ITERATIONS = (1, 2, 4)
# Of each answer, that a conversation goes on with.
ANSWER_TOKENS = 16
TEXTS = [
    *(f"prose {topic}" for topic in ("types", "compound", "specialnames", "formatstrings")),
    *("prose assert", "prose numbers"),
    *(f"code {module}" for module in ("ast", "argparse", "heapq", "textwrap", "difflib", "json")),
]
QUESTIONS = (
    "What is this text about? Answer in one paragraph.",
    "Which names does it mention? List the most important ones.",
    "Explain the last part of it in simple words.",
    "What would a beginner get wrong about this?",
)


def text_of(name: str) -> str:
    kind, _, topic = name.partition(" ")
    if kind == "prose":
        return prose(topic)
    return "\n".join(code(m) for m in (topic, "ast", "argparse"))


class Client:
    """Sends requests and keeps, for each, its answer's beginning and the tokens after each
    iteration."""

    def __init__(self, server: Server, num_steps: int) -> None:
        self.server = server
        # Enough for the last of ITERATIONS. Read to their end, since how much of an answer is
        # cached of which the client hangs up is a matter of luck.
        self.num_tokens = max(ANSWER_TOKENS, ITERATIONS[-1] * (num_steps + 1) + 1)
        self.requests: list[dict[str, Any]] = []

    def ask(self, kind: str, ids: list[int]) -> list[int]:
        counts: list[int] = []
        last: dict[str, Any] = {}
        stream = self.server.stream(
            ids, temperature=0, max_new_tokens=self.num_tokens, ignore_eos=True
        )
        for last in stream:
            counts.append(last["meta_info"]["completion_tokens"])
        answer = last["output_ids"][:ANSWER_TOKENS]
        self.requests.append(
            {
                "kind": kind,
                "prompt_tokens": len(ids),
                "cached_tokens": last["meta_info"]["cached_tokens"],
                "tokens_after_iteration": counts,
                "ids": answer,
            }
        )
        return answer


def traffic(client: Client, tokenizer: Any, texts: int, text_tokens: int) -> Iterator[None]:
    """Yields after each text. Kinds of requests: "first", which finds nothing cached, "turn",
    "question" and "again"."""

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    for name in TEXTS[:texts]:
        text = tokenizer.decode(tokenizer.encode(text_of(name))[:text_tokens])
        client.server.flush_cache()
        messages = [{"role": "user", "content": f"{text}\n\n{QUESTIONS[0]}"}]
        first = ids_of(messages)
        for turn in range(3):
            ids = ids_of(messages)
            answer = client.ask("turn" if turn else "first", ids)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
            messages.append({"role": "user", "content": QUESTIONS[turn + 1]})
        for question in QUESTIONS[1:3]:
            client.ask("question", ids_of([{"role": "user", "content": f"{text}\n\n{question}"}]))
        client.ask("again", first)
        yield


def measure(options: argparse.Namespace, mode: str, tokenizer: Any) -> list[dict[str, Any]]:
    flags = [
        *("--speculative-num-steps", str(options.num_steps)),
        *("--vegas-sparsity-ratio", str(options.sparsity_ratio)),
        *("--vegas-first-table", mode, "--vegas-speculate-above", "0"),
    ]
    algorithm = "VEGAS"
    if mode == "plain":
        # As VEGAS runs on a CPU; otherwise the last token of an answer is cached too.
        flags, algorithm = ["--disable-overlap-schedule"], None
    log = options.log_dir / f"table_reuse_{mode}.log"
    with launch_server(
        options.model_path,
        algorithm=algorithm,
        extra_args=[*flags, *options.server_args],
        log_path=log,
    ) as server:
        client = Client(server, options.num_steps)
        for i, _ in enumerate(traffic(client, tokenizer, options.texts, options.text_tokens)):
            print(f"{mode}: text {i + 1} of {options.texts}", flush=True)
        if mode == "cached":
            print(server.get("/server_info").json()["internal_states"][0]["vegas"])
    return client.requests


def rates(requests: list[dict[str, Any]], kind: str, n: int) -> list[float]:
    """Each request's tokens an iteration over its first n, without the prefill's token."""
    counts = [r["tokens_after_iteration"] for r in requests if r["kind"] == kind]
    return [(of_one[n] - of_one[0]) / n for of_one in counts]


def summarise(
    requests: list[dict[str, Any]], baseline: list[dict[str, Any]] | None
) -> dict[str, dict[str, float]]:
    """By kind: means and standard errors, also of the differences from a baseline, request by
    request."""

    def put(row: dict[str, float], name: str, values: list[float]) -> None:
        row[name] = statistics.mean(values)
        row[f"{name}_stderr"] = statistics.stdev(values) / len(values) ** 0.5

    found = {}
    for kind in ("first", "turn", "question", "again"):
        row: dict[str, float] = {}
        for n in ITERATIONS:
            values = rates(requests, kind, n)
            row["requests"] = len(values)
            put(row, f"first_{n}", values)
            if baseline is not None:
                others = rates(baseline, kind, n)
                differences = [a - b for a, b in zip(values, others, strict=True)]
                put(row, f"first_{n}_over_prompt", differences)
        found[kind] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_flag(parser)
    add_common_flags(parser)
    parser.add_argument("--sparsity-ratio", type=float, default=0.07)
    parser.add_argument("--texts", type=int, default=len(TEXTS), help="2 or more")
    parser.add_argument("--text-tokens", type=int, default=2000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--plain", action="store_true", help="compare with plain SGLang too")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model_path)
    modes = [*options.modes, *(["plain"] if options.plain else [])]
    runs = {mode: measure(options, mode, tokenizer) for mode in modes}
    same = {
        key: all([r[key] for r in run] == [r[key] for r in runs[modes[0]]] for run in runs.values())
        for key in ("ids", "cached_tokens")
    }
    report = {
        "device": device_name(),
        "commit": options.commit or commit(),
        "model": Path(options.model_path).name,
        "num_steps": options.num_steps,
        "sparsity_ratio": options.sparsity_ratio,
        "text_tokens": options.text_tokens,
        "compared": modes,
        "same_answers": same["ids"],
        "same_cached_tokens": same["cached_tokens"],
        "modes": {mode: summarise(runs[mode], runs.get("prompt")) for mode in options.modes},
        "requests": runs,
    }
    write_report(report, options.out)
    print(f"answers alike: {same['ids']}; cached_tokens alike: {same['cached_tokens']}")
    print(f"{'':10}{'':10}" + "".join(f"{f'first {n}':>16}" for n in ITERATIONS))
    for kind in ("first", "turn", "question", "again"):
        for mode in options.modes:
            row = report["modes"][mode][kind]
            cells = (
                f"{row[f'first_{n}']:.2f} +- {row[f'first_{n}_stderr']:.2f}" for n in ITERATIONS
            )
            print(f"{kind:10}{mode:10}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
