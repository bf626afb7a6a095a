"""The interface of a drafting policy, and the table of those that ship.

A policy decides which KV positions a request's drafts attend to beside the recent ones. It can
cost or gain acceptance and nothing else: verification attends to everything.
"""

from __future__ import annotations

import enum
import importlib

import torch

from sgl_vegas.config import VegasConfig


class Collected(enum.Enum):
    """Which queries of a verify pass a policy has scores of; after a prefill, the prompt's last."""

    NOTHING = enum.auto()
    FIRST_AND_LAST = enum.auto()
    ALL = enum.auto()
    LAST_ACCEPTED = enum.auto()

    def places(self, num_verified: int, num_correct_drafts: int) -> list[int]:
        """Which of a verify pass's queries, from 0, of which that many drafts were accepted."""
        return {
            Collected.NOTHING: [],
            Collected.FIRST_AND_LAST: [0, num_verified - 1],
            Collected.ALL: list(range(num_verified)),
            Collected.LAST_ACCEPTED: [num_correct_drafts],
        }[self]


class SelectionPolicy:
    """Chooses positions for one attention layer.

    A table is made for one request after a prefill or verify pass (`select`) and held for the
    drafts that follow; a policy that `reselects` is asked at every draft step too, for a batch of
    requests (`select_step`). One instance serves all requests.
    """

    #: Whose scores `select` reads.
    collects: Collected = Collected.NOTHING
    #: Whether the policy makes tables; without, and without `reselects`, drafts attend to
    #: everything.
    makes_tables: bool = True
    #: Whether `select_step` is asked at every draft step. Not for CUDA graphs.
    reselects: bool = False

    def __init__(self, config: VegasConfig) -> None:
        for wanted, method in ((self.makes_tables, "select"), (self.reselects, "select_step")):
            if wanted and getattr(type(self), method) is getattr(SelectionPolicy, method):
                raise TypeError(f"{type(self).__name__} lacks {method}()")
        self.config = config

    @property
    def table_config(self) -> VegasConfig:
        """The config whose budget tables have."""
        return self.config

    @property
    def needs_scores(self) -> bool:
        return self.collects is not Collected.NOTHING

    def table_size(self, seq_len: int) -> int:
        """Most positions that `select` chooses of `seq_len`; `seq_len` if drafts are dense."""
        return self.table_config.budget(seq_len)

    def attended(self, seq_len: int) -> int:
        """Most positions of `seq_len` that a draft step attends to beside the recent ones."""
        selects = self.makes_tables or self.reselects
        return self.config.budget(seq_len) if selects else seq_len

    def extra_reads(self, seq_len: int) -> float:
        """What a draft step reads to choose, in KV entries, beside those that it attends to; the
        mean over an iteration's steps."""
        return 0.0

    def check_server(
        self, num_layers: int, num_kv_heads: int, head_dim: int, in_kernels: bool
    ) -> None:
        """Refuse a model that the policy's own files aren't for, or what CUDA kernels can't do.

        Raises:
            ValueError: naming the flag.
        """

    def select(
        self, layer: int, scores: torch.Tensor | None, seq_len: int, device: torch.device
    ) -> torch.Tensor:
        """Select positions in `[0, seq_len)`; called if the policy `makes_tables`.

        Args:
            layer: index of the attention layer.
            scores: (num_queries, num_heads, seq_len + t) float32, scaled pre-softmax logits of the
                collected queries over every KV entry, `-inf` where a query may not look. One query
                after prefill (t = 0); after verify, t = num_draft_tokens. None if the policy
                collects nothing, and where `table_size` is the whole context.
            seq_len: number of positions to choose from: those before the first verified token.
            device: where the result must lie.

        Returns:
            (k,) integer tensor of positions in any order, k the same for every layer of a request.
        """
        raise NotImplementedError

    def select_step(
        self,
        layer: int,
        step: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        seq_lens: tuple[int, ...],
        budgets: tuple[int, ...],
        tables: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor | None:
        """Select again in mid-draft, by the step's own queries; called if the policy `reselects`.

        Called for some requests at once, not always the same ones, so that what a policy remembers
        of a request from `select` must be in its table.

        Args:
            layer: index of the attention layer.
            step: of the draft, from 0.
            q: (batch_size, num_heads, head_dim), the step's query of each request.
            keys: (batch_size, n, num_kv_heads, head_dim), those of the positions to choose from,
                n at least the longest of `seq_lens`; what lies behind a request's own is finite and
                doesn't count. What the policy looks at of them is for `extra_reads` to say.
            seq_lens: of each request, the number of positions to choose from, at least 1; the same
                for all layers and steps of a round of drafts.
            budgets: of each request, the most positions that it may attend to: what `attended`
                says, of the policy with that request's sparsity ratio. The laboratory asks for
                several ratios in one call, so that this alone counts and `config`'s doesn't.
            tables: (batch_size, m) int64, what `select` chose, each padded with -1 at its end; None
                if the policy makes no tables.
            scale: factor of the logits.

        Returns:
            Positions in `[0, seq_len)` of each request: (batch_size, k) integer for all KV heads,
            or (batch_size, num_kv_heads, k) for each, k at most the largest of `budgets`.
            -1 where a request has fewer; the same entries of all its heads. None to attend to what
            the step before did; not at step 0.
        """
        raise NotImplementedError


def build_policy(config: VegasConfig) -> SelectionPolicy:
    """Build `config.policy`: a shipped name, or `package.module:Class`.

    Raises:
        ValueError: for an unknown name or a class that is no SelectionPolicy.
    """
    from sgl_vegas.selection.all_queries import AllQueriesPolicy
    from sgl_vegas.selection.dense import DensePolicy
    from sgl_vegas.selection.last_accepted import LastAcceptedPolicy
    from sgl_vegas.selection.oracle import OraclePolicy
    from sgl_vegas.selection.quest import QuestPolicy
    from sgl_vegas.selection.refresh import RefreshPolicy
    from sgl_vegas.selection.streaming import StreamingPolicy
    from sgl_vegas.selection.vegas import VegasPolicy

    shipped: dict[str, type[SelectionPolicy]] = {
        "vegas": VegasPolicy,
        "vegas-refresh": RefreshPolicy,
        "streaming": StreamingPolicy,
        "quest": QuestPolicy,
        "last-accepted": LastAcceptedPolicy,
        "all-queries": AllQueriesPolicy,
        "oracle": OraclePolicy,
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
