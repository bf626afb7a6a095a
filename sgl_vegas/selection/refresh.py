"""Vegas, whose list each draft step ranks again by short codes of the keys."""

from __future__ import annotations

import dataclasses
import functools

import torch

from sgl_vegas.config import VegasConfig
from sgl_vegas.key_codes.basis import load_basis
from sgl_vegas.key_codes.words import WordCodes
from sgl_vegas.selection.policy import Collected
from sgl_vegas.selection.ranked import RankedPolicy


class RefreshPolicy(RankedPolicy):
    """Verification chooses four times as many candidates as drafts attend to; every draft step
    ranks them by its own query and the codes of `--vegas-key-basis`, one list a layer.

    A held list is stale: what the next token's query looks at is not what the last one's did. Paid
    from the same bytes: the codes that a step reads come off what it attends to. With 64 bits a
    head of 64 dims, it attends to 89% of the budget. A context that is no longer than its
    candidates is attended to as a whole.
    """

    collects = Collected.FIRST_AND_LAST
    reselects = True
    #: Candidates that verification leaves, a time those that a draft step attends to.
    candidates = 4
    #: Of how many draft steps the first ranks again; CUDA kernels do at every one.
    every = 1

    def __init__(self, config: VegasConfig) -> None:
        """Raises:
        ValueError: without a basis, for a file that is none, or for a ratio that makes everything
            a candidate.
        """
        super().__init__(config)
        if config.key_basis is None:
            raise ValueError(
                f"--vegas-policy {config.policy} needs --vegas-key-basis, a file that "
                "`python -m sgl_vegas.calibrate` writes."
            )
        self.basis = load_basis(config.key_basis)
        ranking_steps = -(-config.num_steps // self.every)
        # What codes cost a step, as a share of a candidate's KV entry.
        self._code_share = self.basis.share_of_entry * ranking_steps / config.num_steps
        widened = self.candidates / (1 + self.candidates * self._code_share)
        if config.sparsity_ratio * widened >= 1:
            raise ValueError(
                f"--vegas-sparsity-ratio must be below {1 / widened:.3f} with --vegas-policy "
                f"{config.policy}, which makes {widened:.2f} times as many entries candidates; "
                f"got {config.sparsity_ratio}."
            )
        most = config.max_tokens
        self._table_config = dataclasses.replace(
            config,
            sparsity_ratio=config.sparsity_ratio * widened,
            min_tokens=max(int(config.min_tokens * widened), 1),
            max_tokens=None if most is None else max(int(most * widened), 1),
        )
        # The same for all layers and steps of a round of drafts.
        self._wanted_of = functools.lru_cache(maxsize=1)(self._wanted)

    @property
    def table_config(self) -> VegasConfig:
        return self._table_config

    def attended(self, seq_len: int) -> int:
        size = self.table_size(seq_len)
        return size if size == seq_len else max(size // self.candidates, 1)

    def extra_reads(self, seq_len: int) -> float:
        size = self.table_size(seq_len)
        return 0.0 if size == seq_len else size * self._code_share

    def check_server(
        self, num_layers: int, num_kv_heads: int, head_dim: int, in_kernels: bool
    ) -> None:
        shape, wanted = tuple(self.basis.means.shape), (num_layers, num_kv_heads, head_dim)
        if shape != wanted:
            raise ValueError(
                f"--vegas-key-basis {self.config.key_basis} is of another model: its (layers, KV "
                f"heads, head dim) are {shape}, the model's {wanted}."
            )
        if in_kernels:
            WordCodes.of(self.basis)

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
        if step % self.every:
            return None
        assert tables is not None
        if self.basis.means.device != q.device:
            self.basis = self.basis.to(q.device)
        surplus = tables < 0
        rows = torch.arange(len(tables), device=q.device)[:, None]
        coded = self.basis.components(layer, keys[rows, tables.clamp_min(0)])
        queries = self.basis.project(layer, q.unflatten(1, (keys.shape[2], -1)))
        logits = (queries @ coded.permute(0, 2, 3, 1)).flatten(1, 2) * scale
        weights = logits.masked_fill(surplus[:, None], float("-inf")).softmax(dim=-1).mean(dim=1)
        wanted = self._wanted_of(budgets, q.device)
        most = min(max(budgets), tables.shape[1])
        # Padding comes last, below any weight that underflowed to 0.
        best = weights.masked_fill(surplus, -1.0).topk(most).indices
        beyond = torch.arange(most, device=q.device) >= wanted
        return tables.gather(1, best).masked_fill(beyond, -1)

    def _wanted(self, budgets: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """(batch_size, 1) int64: how many positions each request attends to."""
        return torch.tensor(budgets, device=device).unsqueeze(1)
