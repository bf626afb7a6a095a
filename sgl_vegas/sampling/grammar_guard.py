"""Grammars that come to a dead end, such as `root ::= root`, kept from ending the scheduler.

llguidance notices a dead end when it is asked for a mask there: the mask allows the end token, and
the matcher raises from then on, but takes that token. Plain decoding asks without looking for
errors, and the request ends. A verify pass looks, asks about drafts that the request may never
emit, and doesn't ask the request's own matcher where a run goes on.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from sgl_vegas.sglang_compat import GuidanceGrammar


class EndingGrammar(GuidanceGrammar):
    """A request's grammar, which takes the end token at a dead end."""

    def accept_token(self, token: int) -> None:
        if token in self.eos_tokens and not self.ll_matcher.is_stopped():
            mask = self.allocate_vocab_mask(0, batch_size=1, device="cpu")
            with contextlib.suppress(ValueError):
                self.fill_vocab_mask(mask, 0)
        super().accept_token(token)


class GrammarWalk:
    """A copy of a request's grammar that a verify pass makes its masks by.

    A copy, because a matcher that has raised can't be rolled back.
    """

    def __init__(self, grammar: EndingGrammar) -> None:
        self._grammar: Any = copy.copy(grammar)
        self._grammar.ll_matcher = grammar.ll_matcher.deep_copy()
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def accept_token(self, token: int) -> None:
        self._until_dead(self._grammar.accept_token, token)

    def fill_vocab_mask(self, vocab_mask: Any, index: int) -> None:
        self._until_dead(self._grammar.fill_vocab_mask, vocab_mask, index)

    def rollback(self, num_tokens: int) -> None:
        self._until_dead(self._grammar.rollback, num_tokens)

    def is_terminated(self) -> bool:
        return self._is_dead or self._grammar.is_terminated()

    def _until_dead(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except ValueError:
            self._is_dead = True


def for_masks(grammar: Any) -> Any:
    """What a verify pass may walk in place of a request's `grammar`, which may be None."""
    if not isinstance(grammar, GuidanceGrammar):
        return grammar
    grammar.__class__ = EndingGrammar
    return GrammarWalk(grammar)  # pyright: ignore[reportArgumentType]
