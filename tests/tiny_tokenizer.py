"""A tokenizer of one token a character, so that a tiny model can be asked for text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Printable ASCII but for two, and the line feed: with two special tokens, 96.
ALPHABET = "".join(c for c in map(chr, range(32, 127)) if c not in "`~") + "\n"
SPECIAL = ("<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(folder: Path) -> Any:
    """Save the tokenizer to `folder` and give it. Characters that it lacks are left out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # How byte-level tokenizers write these two.
    names = [{" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in ALPHABET]
    vocab = {name: index for index, name in enumerate((*SPECIAL, *names))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
