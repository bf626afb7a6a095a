"""The interface of a drafting policy, and the table of those that ship.

A policy decides which KV positions a request's drafts attend to beside the recent ones. It can
cost or gain acceptance and nothing else: verification attends to everything.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

import torch

from sgl_vegas.config import VegasConfig


class SelectionPolicy(ABC):
    """Chooses positions for one request and one attention layer after a prefill or verify pass."""

    #: Whether `select` reads the scores of the pass; without, none are collected.
    needs_scores: bool = False
    #: Whether the policy makes tables at all; without, drafts attend to everything.
    makes_tables: bool = True

    def __init__(self, config: VegasConfig) -> None:
        self.config = config

    @abstractmethod
    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        """Select positions in `[0, seq_len)`.

        Args:
            layer: index of the attention layer.
            scores: (num_queries, num_heads, seq_len + t) float32, scaled pre-softmax logits of the
                collected queries over every KV entry, `-inf` where a query may not look. One query
                after prefill (t = 0), two after verify (t = num_draft_tokens). None unless
                `needs_scores`, and where the whole context is within the budget.
            seq_len: number of positions to choose from: those before the first verified token.
            device: where the result must lie.

        Returns:
            (k,) integer tensor of positions in any order, k the same for every layer of a request.
        """


def build_policy(config: VegasConfig) -> SelectionPolicy:
    """Build `config.policy`: a shipped name, or `package.module:Class`.

    Raises:
        ValueError: for an unknown name or a class that is no SelectionPolicy.
    """
    from sgl_vegas.selection.dense import DensePolicy
    from sgl_vegas.selection.streaming import StreamingPolicy
    from sgl_vegas.selection.vegas import VegasPolicy

    shipped: dict[str, type[SelectionPolicy]] = {
        "vegas": VegasPolicy,
        "streaming": StreamingPolicy,
        "dense": DensePolicy,
    }
    if config.policy in shipped:
        return shipped[config.policy](config)
    if ":" not in config.policy:
        raise ValueError(
            f"--vegas-policy must be one of {tuple(shipped)} or 'package.module:Class', "
            f"got {config.policy!r}."
        )
    module_name, _, class_name = config.policy.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--vegas-policy {config.policy!r} can't be loaded: {error}.") from error
    if not (isinstance(policy, type) and issubclass(policy, SelectionPolicy)):
        raise ValueError(f"--vegas-policy {config.policy!r} is not a SelectionPolicy.")
    return policy(config)
