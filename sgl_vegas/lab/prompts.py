"""What the laboratory asks a model: a file, a folder, or the shipped set.

The shipped set is fifteen prompts of 2K to 7K tokens, three of each kind: prose, code, mathematics,
chat and retrieval. Prose and code are the Python manual and standard library of the interpreter
(PSF licence), so one Python version gives one set; the rest is generated.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

Prompts = list[tuple[str, list[int]]]

SIZES = (2000, 4000, 7000)
NEEDLE_ANSWER = "48213"
NEEDLE = f"The access code of the northern archive is {NEEDLE_ANSWER}"
NEEDLE_QUESTION = "What is the access code of the northern archive? Answer in one sentence."


def read_prompts(path: Path | None, tokenizer: Any, most: int | None) -> Prompts:
    """Those of `load_prompts`, or the shipped ones without a path; the first `most` of them."""
    prompts = shipped_prompts(tokenizer) if path is None else load_prompts(path, tokenizer)
    return prompts[:most]


def load_prompts(path: Path, tokenizer: Any) -> Prompts:
    """Read (name, token ids) from a JSONL file or a folder of text files.

    A line is an object with `prompt` (text), `messages` (a chat, answered by the model's template)
    or `input_ids`, and perhaps a `name`. A folder's `.txt` and `.md` files are a prompt each.

    Raises:
        ValueError: naming the file and line, for anything else.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".md"))
        if not files:
            raise ValueError(f"{path} has no .txt or .md files.")
        return [(file.name, tokenizer.encode(file.read_text())) for file in files]
    prompts: Prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}).") from error
        prompts.append(_prompt(record, number, where, tokenizer))
    if not prompts:
        raise ValueError(f"{path} has no prompts.")
    names = [name for name, _ in prompts]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two prompts have one name.")
    return prompts


def _prompt(record: Any, number: int, where: str, tokenizer: Any) -> tuple[str, list[int]]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object.")
    name = str(record.get("name", number))
    if isinstance(record.get("input_ids"), list):
        ids, vocab_size = record["input_ids"], len(tokenizer)
        if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"{where}: input_ids must be tokens of the model.")
    elif isinstance(record.get("messages"), list):
        ids = chat_ids(tokenizer, record["messages"])
    elif isinstance(record.get("prompt"), str):
        ids = tokenizer.encode(record["prompt"])
    else:
        raise ValueError(f"{where}: needs prompt, messages or input_ids.")
    if not ids:
        raise ValueError(f"{where}: the prompt is empty.")
    return name, list(ids)


def shipped_prompts(tokenizer: Any, sizes: tuple[int, ...] = SIZES) -> Prompts:
    """The shipped set: of each kind a prompt of about each of `sizes` tokens."""
    kinds: dict[str, Callable[[Any, int, int], list[int]]] = {
        "prose": _prose,
        "code": _code,
        "mathematics": _mathematics,
        "chat": _chat,
        "retrieval": _retrieval,
    }
    return [
        (f"{kind}-{size}", make(tokenizer, index, size))
        for kind, make in kinds.items()
        for index, size in enumerate(sizes)
    ]


def _prose(tokenizer: Any, index: int, size: int) -> list[int]:
    text = prose(("specialnames", "types", "execmodel")[index % 3])
    if index % 3 == 1:
        return asked_ids(tokenizer, "Summarise the following text in a few paragraphs.", text, size)
    return plain_ids(tokenizer, text, size)


def _code(tokenizer: Any, index: int, size: int) -> list[int]:
    return plain_ids(tokenizer, code(("statistics", "ast", "argparse")[index % 3]), size)


def _mathematics(tokenizer: Any, index: int, size: int) -> list[int]:
    """Solved equations, up to one that isn't."""
    return plain_ids(tokenizer, "\n".join(_equations(index, size // 20)), size)


def _equations(seed: int, count: int) -> Iterator[str]:
    state = 4711 + seed
    for number in range(1, count + 1):
        state = (1103515245 * state + 12345) % 2**31
        a, x, b = 2 + state // 7 % 17, 1 + state // 131 % 40, 1 + state // 1301 % 90
        yield (
            f"Problem {number}. Solve {a}x + {b} = {a * x + b}.\n"
            f"Subtract {b} from both sides: {a}x = {a * x}.\n"
            f"Divide both sides by {a}: x = {x}.\n"
            f"Check: {a} * {x} + {b} = {a * x} + {b} = {a * x + b}. The solution is x = {x}.\n"
        )


def _chat(tokenizer: Any, index: int, size: int) -> list[int]:
    """A conversation about the manual, whose last question is about its first answers."""
    names = sorted(topics)[index::3]
    messages: list[dict[str, str]] = []
    length = 0
    for name in names:
        answer = topics[name][: min(size, 2000)]
        length += len(tokenizer.encode(answer)) + 20
        if length > size - 100:
            break
        messages += [
            {"role": "user", "content": f"What does the Python manual say about {name}?"},
            {"role": "assistant", "content": answer},
        ]
    question = f"Compare the first thing I asked you about, {names[0]}, with the second."
    return chat_ids(tokenizer, [*messages, {"role": "user", "content": question}])


def _retrieval(tokenizer: Any, index: int, size: int) -> list[int]:
    haystack = prose(("compound", "formatstrings", "assignment")[index % 3])
    return needle_ids(tokenizer, (0.2, 0.5, 0.8)[index % 3], haystack, size)


def prose(topic: str) -> str:
    """The Python manual from `topic` on, so that any length can be cut from its front."""
    rest = (text for name, text in sorted(topics.items()) if name > topic)
    return "\n\n".join([topics[topic], *rest])


def code(module: str) -> str:
    """Source of a pure-Python standard library module."""
    return inspect.getsource(importlib.import_module(module))


def plain_ids(tokenizer: Any, text: str, num_tokens: int) -> list[int]:
    """The first `num_tokens` of a text.

    Raises:
        ValueError: if it has fewer.
    """
    ids = tokenizer.encode(text)[:num_tokens]
    if len(ids) < num_tokens:
        raise ValueError(f"{len(ids)} tokens of text, wanted {num_tokens}.")
    return ids


def asked_ids(tokenizer: Any, question: str, text: str, num_tokens: int) -> list[int]:
    """A question about a text that is cut to fit into `num_tokens`."""
    content = f"{question}\n\n{cut(tokenizer, text, num_tokens - 60)}"
    return chat_ids(tokenizer, [{"role": "user", "content": content}])


def needle_ids(tokenizer: Any, depth: float, haystack: str, num_tokens: int) -> list[int]:
    """A fact, `NEEDLE`, at `depth` (0 to 1) of a long text, and a question for it at the end.

    A model that retrieves it answers with `NEEDLE_ANSWER`.
    """
    sentences = cut(tokenizer, haystack, num_tokens - 120).split(". ")
    sentences.insert(round(depth * len(sentences)), NEEDLE)
    content = f"{'. '.join(sentences)}\n\n{NEEDLE_QUESTION}"
    return chat_ids(tokenizer, [{"role": "user", "content": content}])


def cut(tokenizer: Any, text: str, num_tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode(text)[:num_tokens])


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a conversation, up to where the assistant answers."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
