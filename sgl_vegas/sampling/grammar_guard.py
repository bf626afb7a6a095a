"""Grammars that come to a dead end, kept from ending the scheduler."""

from __future__ import annotations

from typing import Any


class GrammarGuard:
    """A request's grammar while masks of a verify pass are made.

    llguidance raises where a grammar allows nothing more, such as `root ::= root`, having allowed
    the end token alone. Plain decoding doesn't ask it whether it did: a request ends there.
    """

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_token(self, token: int) -> None:
        self._guarded(self._grammar.accept_token, token)

    def fill_vocab_mask(self, vocab_mask: Any, index: int) -> None:
        self._guarded(self._grammar.fill_vocab_mask, vocab_mask, index)

    def rollback(self, num_tokens: int) -> None:
        self._guarded(self._grammar.rollback, num_tokens)

    def is_terminated(self) -> bool:
        return self._is_dead or self._grammar.is_terminated()

    def _guarded(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except ValueError:
            self._is_dead = True
