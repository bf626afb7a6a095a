"""What a verify pass and the scheduler ask a grammar, against plain decoding's way of asking it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar
from sglang.srt.speculative.spec_utils import traverse_tree

from sgl_vegas.sampling.grammar_guard import for_masks
from tests.tiny_tokenizer import ALPHABET, SPECIAL, make_tokenizer

VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)
END = 1
# Grammar, what is committed, drafts, and what the target says in their place.
WALKS = [
    ('root ::= "x" "abc"', "x", "abd", "abc"),
    ('root ::= "x" more\nmore ::= more', "", "xab", "x"),
    ('root ::= "x" "a" more\nmore ::= more', "x", "aaa", "a"),
    ('root ::= "x" "ab" more\nmore ::= more', "x", "abc", "ab"),
    # Dead where only the drafts go.
    ('root ::= "x" ("a" more | "bc")\nmore ::= more', "x", "aaa", "bc"),
    ('root ::= "x" ("ab" more | "ac")\nmore ::= more', "x", "abc", "ac"),
]


def ids(text: str) -> list[int]:
    return [len(SPECIAL) + ALPHABET.index(character) for character in text]


@pytest.fixture
def backend(tmp_path: Path) -> GuidanceBackend:
    return GuidanceBackend(make_tokenizer(tmp_path))


def compiled(backend: GuidanceBackend, grammar: str) -> GuidanceGrammar:
    template = backend.dispatch_ebnf(grammar)
    assert isinstance(template, GuidanceGrammar)
    return template.copy()


def allowed(row: torch.Tensor) -> set[int]:
    return {n for n in range(VOCAB_SIZE) if int(row[n // 32]) >> (n % 32) & 1}


def new_mask(grammar: Any, size: int) -> torch.Tensor:
    mask = grammar.allocate_vocab_mask(vocab_size=VOCAB_SIZE, batch_size=size, device="cpu")
    return mask.fill_(-1)


def masks_of(grammar: Any, last: int, drafts: list[int]) -> list[set[int]]:
    """As a verify pass makes them."""
    size = 1 + len(drafts)
    mask = new_mask(grammar, size)
    children = torch.tensor([*range(1, size), -1])
    no_siblings = torch.full((size,), -1)
    tokens = torch.tensor([last, *drafts])
    traverse_tree(children, no_siblings, tokens, for_masks(grammar), mask, VOCAB_SIZE)
    return [allowed(row) for row in mask]


@pytest.mark.parametrize(("text", "committed", "drafts", "emitted"), WALKS)
def test_masks_and_ends_are_those_of_plain_decoding(
    backend: GuidanceBackend, text: str, committed: str, drafts: str, emitted: str
) -> None:
    plain, ours = compiled(backend, text), compiled(backend, text)
    for token in ids(committed):
        plain.accept_token(token)
        ours.accept_token(token)
    masks = masks_of(ours, 0, ids(drafts))
    said = [*ids(emitted), END]
    for place, token in enumerate(said):
        row = new_mask(plain, 1)
        with contextlib.suppress(ValueError):  # plain decoding doesn't look
            plain.fill_vocab_mask(row, 0)
        if ids(drafts)[:place] == said[:place]:
            assert masks[place] == allowed(row[0]), place
        assert token in allowed(row[0])
        plain.accept_token(token)
    for token in said:
        ours.accept_token(token)
    assert ours.is_terminated() and plain.is_terminated()


def test_a_pass_leaves_the_grammar_as_it_is(backend: GuidanceBackend) -> None:
    grammar = compiled(backend, 'root ::= "x" [a-c]*')
    grammar.accept_token(ids("x")[0])
    first = masks_of(grammar, 0, ids("abc"))
    assert masks_of(grammar, 0, ids("abc")) == first
    assert all(mask == {*ids("abc"), END} for mask in first)


def test_what_the_grammar_forbids_is_told(backend: GuidanceBackend) -> None:
    grammar = compiled(backend, 'root ::= "ab"')
    for_masks(grammar)
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        grammar.accept_token(END)


def test_other_grammars_are_walked_themselves() -> None:
    grammar = object()
    assert for_masks(grammar) is grammar
    assert for_masks(None) is None
