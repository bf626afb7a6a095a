"""The paper's benchmarks on a running server: AIME25, CodeElo and LongBench-v2.

    python -m sglang.launch_server --model-path M --speculative-algorithm VEGAS &
    python benchmark/tasks.py aime25 --model-path M --url http://127.0.0.1:30000 --out aime25.json

asks the questions with the sampling parameters of the model's card and reports tokens an iteration,
tokens a second, and the share of right answers (CodeElo's are for its own judge). --source is a hub
name or a local file (.json, .jsonl, .parquet, .csv); without it, the data set's usual one.
--prompts-out writes the questions as python -m sgl_vegas.lab and sgl_vegas.tune read them.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import commit, device_name, write_report  # noqa: E402
from sgl_vegas.lab.prompts import chat_ids  # noqa: E402

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
REQUEST_TIMEOUT_S = 6 * 3600

# By a part of the model's name, in lower case; from the models' cards.
SAMPLING = {
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
    "gpt-oss": {"temperature": 1.0, "top_p": 1.0},
    "deepseek-r1": {"temperature": 0.6, "top_p": 0.95},
}
DEFAULT_SAMPLING = {"temperature": 0.6, "top_p": 0.95}


@dataclass(frozen=True)
class Question:
    """Attributes:
    answer: None where only a judge can tell.
    """

    name: str
    text: str
    answer: str | None


@dataclass(frozen=True)
class Task:
    """Attributes:
    source, split: the data set's usual place on the hub.
    question: makes a record a question.
    given: finds the answer in a model's text; None if there is none.
    """

    source: str
    split: str
    question: Callable[[dict[str, Any], int], Question]
    given: Callable[[str], str | None]


def _aime(record: dict[str, Any], number: int) -> Question:
    text = _field(record, "problem", "question")
    return Question(
        str(record.get("id", number)),
        f"{text}\n\nReason step by step and end with the answer in \\boxed{{}}.",
        str(_field(record, "answer")).strip(),
    )


def _boxed(text: str) -> str | None:
    """The number of the last \\boxed{...}, as AIME's answers are integers."""
    found = re.findall(r"\\boxed\{\s*(\d+)\s*\}", text)
    return str(int(found[-1])) if found else None


def _codeelo(record: dict[str, Any], number: int) -> Question:
    parts = [f"# {_field(record, 'title', 'problem_name')}", _field(record, "description")]
    for name in ("input", "output", "interaction"):
        if record.get(name):
            parts.append(f"## {name.capitalize()}\n{record[name]}")
    for given, wanted in record.get("examples") or []:
        parts.append(f"## Example\nInput:\n{given}\nOutput:\n{wanted}")
    if record.get("note"):
        parts.append(f"## Note\n{record['note']}")
    parts.append("Write a C++ program that solves this problem, in one code block.")
    return Question(str(record.get("problem_id", number)), "\n\n".join(parts), None)


def _longbench(record: dict[str, Any], number: int) -> Question:
    choices = "\n".join(f"({letter}) {_field(record, f'choice_{letter}')}" for letter in "ABCD")
    return Question(
        str(record.get("_id", number)),
        f"Here is a text.\n\n{_field(record, 'context')}\n\n"
        f"Question: {_field(record, 'question')}\n{choices}\n\n"
        "Which choice is right? End with: The correct answer is (letter).",
        str(_field(record, "answer")).strip(),
    )


def _letter(text: str) -> str | None:
    found = re.findall(r"correct answer is:?\s*\**\(?([ABCD])\b", text)
    return found[-1] if found else None


TASKS = {
    "aime25": Task("math-ai/aime25", "test", _aime, _boxed),
    "codeelo": Task("Qwen/CodeElo", "test", _codeelo, lambda text: None),
    "longbench-v2": Task("THUDM/LongBench-v2", "train", _longbench, _letter),
}


def load_questions(task: Task, source: str | None = None) -> list[Question]:
    """The questions of a local file or of a data set on the hub.

    Raises:
        ValueError: for a file of another kind, or a record that lacks a field, by name.
    """
    path = Path(source or task.source)
    from datasets import load_dataset

    if source is not None and path.exists():
        reader = READERS.get(path.suffix)
        if reader is None:
            raise ValueError(f"{path}: want one of {', '.join(READERS)}.")
        records: Any = load_dataset(reader, data_files=str(path), split="train")
    else:
        records = load_dataset(source or task.source, split=task.split)
    return [task.question(record, number) for number, record in enumerate(records, start=1)]


def sampling_of(model_path: str) -> dict[str, float]:
    name = Path(model_path).name.lower()
    return next((found for part, found in SAMPLING.items() if part in name), DEFAULT_SAMPLING)


def ask(url: str, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": sampling}
    answer = requests.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    answer.raise_for_status()
    return answer.json()


def result_of(task: Task, question: Question, body: dict[str, Any]) -> dict[str, Any]:
    meta = body["meta_info"]
    tokens, iterations = meta["completion_tokens"], meta.get("spec_verify_ct") or 0
    given = task.given(body["text"])
    return {
        "name": question.name,
        "prompt_tokens": meta["prompt_tokens"],
        "tokens": tokens,
        # The first token is the prefill's. None without speculation.
        "tokens_per_iteration": (tokens - 1) / iterations if iterations else None,
        "tokens_per_s": tokens / meta["e2e_latency"],
        "right": None if question.answer is None else given == question.answer,
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over questions; None where no question has the figure."""

    def mean(key: str) -> float | None:
        values = [r[key] for r in results if r[key] is not None]
        return statistics.mean(values) if values else None

    return {key: mean(key) for key in ("tokens_per_iteration", "tokens_per_s", "tokens", "right")}


def _field(record: dict[str, Any], *names: str) -> Any:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise ValueError(f"a record lacks {' or '.join(names)}; it has {', '.join(record)}.")


def main() -> None:
    options = _parser().parse_args()
    task = TASKS[options.task]
    try:
        questions = load_questions(task, options.source)[: options.limit]
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if options.prompts_out is not None:
        with options.prompts_out.open("w") as file:
            for question in questions:
                messages = [{"role": "user", "content": question.text}]
                file.write(json.dumps({"name": question.name, "messages": messages}) + "\n")
        print(f"wrote {options.prompts_out}")
        return
    if options.url is None or options.model_path is None:
        sys.exit("error: needs --url and --model-path, or --prompts-out")
    from tqdm import tqdm
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model_path)
    sampling = {**sampling_of(options.model_path), "max_new_tokens": options.max_new_tokens}

    def run(question: Question) -> dict[str, Any]:
        ids = chat_ids(tokenizer, [{"role": "user", "content": question.text}])
        return result_of(task, question, ask(options.url, ids, sampling))

    with ThreadPoolExecutor(options.concurrency) as pool:
        results = list(tqdm(pool.map(run, questions), total=len(questions), desc=options.task))
    found = summary(results)
    write_report(
        {
            "task": options.task,
            "model": Path(options.model_path).name,
            "device": device_name(),
            "commit": commit(),
            "sampling": sampling,
            "concurrency": options.concurrency,
            "summary": found,
            "questions": results,
        },
        options.out,
    )
    for key, value in found.items():
        print(f"{key:22}{'-' if value is None else format(value, '10.2f')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("task", choices=sorted(TASKS))
    add("--source", help="hub name or local file")
    add("--limit", type=int, help="take this many questions from the front")
    add("--model-path", help="for its chat template and its card's sampling parameters")
    add("--url", help="of a running server")
    add("--max-new-tokens", type=int, default=32768)
    add("--concurrency", type=int, default=8)
    add("--prompts-out", type=Path, help="write the questions as JSONL and end")
    add("--out", type=Path, help="write JSON here")
    return parser


if __name__ == "__main__":
    main()
