"""A grammar's dead ends reach nobody; everything else does."""

from __future__ import annotations

import pytest

from sgl_vegas.sampling.grammar_guard import GrammarGuard


class Grammar:
    """Raises after token 7, as llguidance does at a dead end."""

    finished = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> None:
        self.tokens.append(token)
        self._check()

    def fill_vocab_mask(self, vocab_mask: list[int], index: int) -> None:
        self._check()
        vocab_mask[index] = len(self.tokens)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[-num_tokens:]

    def is_terminated(self) -> bool:
        return self.tokens[-1:] == [1]

    def _check(self) -> None:
        if 7 in self.tokens:
            raise ValueError("NoExtensionBias")


def test_calls_go_through() -> None:
    grammar, mask = Grammar(), [-1, -1]
    guard = GrammarGuard(grammar)
    guard.accept_token(5)
    guard.fill_vocab_mask(mask, 1)
    assert (grammar.tokens, mask, guard.is_terminated()) == ([5], [-1, 1], False)
    guard.rollback(1)
    guard.accept_token(1)
    assert grammar.tokens == [1] and guard.is_terminated() and not guard.finished


def test_nothing_is_masked_behind_a_dead_end() -> None:
    mask = [-1, -1]
    guard = GrammarGuard(Grammar())
    guard.accept_token(7)
    assert guard.is_terminated()
    guard.fill_vocab_mask(mask, 0)
    assert mask == [-1, -1]


def test_other_errors_are_told() -> None:
    with pytest.raises(TypeError):
        GrammarGuard(Grammar()).fill_vocab_mask(None, 0)  # pyright: ignore[reportArgumentType]
