"""The paper's benchmarks, on small files in their formats."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.tasks import TASKS, load_questions, result_of, sampling_of, summary

AIME = {"problem": "What is 6 times 7?", "answer": "42", "id": "0"}
CODEELO = {
    "problem_id": "1A",
    "title": "Square",
    "description": "Square a number.",
    "input": "One number.",
    "output": "Its square.",
    "interaction": "",
    "examples": [["3", "9"], ["4", "16"]],
    "note": "Small numbers only.",
}
LONGBENCH = {
    "_id": "66f",
    "context": "A cat sat on a mat.",
    "question": "Who sat?",
    **{f"choice_{letter}": f"animal {letter}" for letter in "ABCD"},
    "answer": "C",
}


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(autouse=True)
def no_shared_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_aime(tmp_path: Path) -> None:
    (question,) = load_questions(TASKS["aime25"], write(tmp_path / "a.jsonl", AIME))
    assert question.name == "0" and question.answer == "42"
    assert question.text.startswith(AIME["problem"]) and "\\boxed{}" in question.text
    other = {"question": "What is 1 plus 1?", "answer": 2}
    (question,) = load_questions(TASKS["aime25"], write(tmp_path / "b.jsonl", other))
    assert (question.name, question.answer) == ("1", "2")


def test_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(AIME))
        writer.writeheader()
        writer.writerow(AIME)
    (question,) = load_questions(TASKS["aime25"], str(path))
    assert question.answer == "42"


def test_codeelo(tmp_path: Path) -> None:
    (question,) = load_questions(TASKS["codeelo"], write(tmp_path / "c.jsonl", CODEELO))
    assert question.name == "1A" and question.answer is None
    wanted = (
        "Square a number.",
        "## Input\nOne number.",
        "Input:\n4\nOutput:\n16",
        "Small numbers",
    )
    assert all(part in question.text for part in wanted)
    assert "Interaction" not in question.text


def test_longbench(tmp_path: Path) -> None:
    (question,) = load_questions(TASKS["longbench-v2"], write(tmp_path / "l.jsonl", LONGBENCH))
    assert question.answer == "C"
    assert "(D) animal D" in question.text and LONGBENCH["context"] in question.text


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("aime25", "so \\boxed{41}, no: \\boxed{ 042 }.", "42"),
        ("aime25", "the answer is 42", None),
        ("longbench-v2", "The correct answer is (B). No. The correct answer is **C**", "C"),
        ("longbench-v2", "It is C", None),
        ("codeelo", "```int main```", None),
    ],
)
def test_answers_are_found(name: str, text: str, given: str | None) -> None:
    assert TASKS[name].given(text) == given


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks answer; it has problem"):
        load_questions(TASKS["aime25"], write(tmp_path / "a.jsonl", {"problem": "x"}))
    text = tmp_path / "a.txt"
    text.write_text("x")
    with pytest.raises(ValueError, match=r"want one of \.json"):
        load_questions(TASKS["aime25"], str(text))


def test_figures_are_the_servers(tmp_path: Path) -> None:
    task = TASKS["aime25"]
    questions = load_questions(task, write(tmp_path / "a.jsonl", AIME, {**AIME, "id": "1"}))
    meta = {"prompt_tokens": 9, "completion_tokens": 41, "spec_verify_ct": 10, "e2e_latency": 2.0}
    right = result_of(task, questions[0], {"text": "\\boxed{42}", "meta_info": meta})
    plain = {**meta, "completion_tokens": 61, "spec_verify_ct": 0}
    wrong = result_of(task, questions[1], {"text": "\\boxed{1}", "meta_info": plain})
    assert right["tokens_per_iteration"] == 4.0 and wrong["tokens_per_iteration"] is None
    found = summary([right, wrong])
    assert found == {"tokens_per_iteration": 4.0, "tokens_per_s": 25.5, "tokens": 51, "right": 0.5}


def test_sampling_is_the_cards() -> None:
    assert sampling_of("Qwen/Qwen3-8B")["top_k"] == 20
    assert sampling_of("models/gpt-oss-20b") == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_of("SmolLM2") == {"temperature": 0.6, "top_p": 0.95}
