"""A Hugging Face causal language model whose attention the laboratory supplies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sgl_vegas_lab"

# Given a layer's index, its queries (batch_size, num_tokens, num_heads, head_dim), its new keys and
# values (batch_size, num_tokens, num_kv_heads, head_dim) and the logits' scale: the output, shaped
# like the queries.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class LabModel:
    """Runs forward passes; every layer's attention is the `attend` of the call.

    Attributes:
        num_layers, num_kv_heads, head_dim: of its attention layers, all alike.
        context_len: most tokens that the model has positions for.
    """

    def __init__(self, path: str | Path, device: str, dtype: torch.dtype) -> None:
        """Raises:
        ValueError: for a model with sliding windows or attention sinks, which the laboratory does
            not draft for.
        """
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda **_: None)
        config = AutoConfig.from_pretrained(str(path))
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"The laboratory needs full attention in every layer; this model has "
                f"{', '.join(sorted(kinds - {'full_attention'}))}."
            )
        self.device, self.dtype = torch.device(device), dtype
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation=NAME
        )
        self._model.to(self.device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
        heads = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.context_len: int = config.max_position_embeddings

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, num_logits: int = 1
    ) -> torch.Tensor:
        """Args:
            ids, positions: (batch_size, num_tokens) int64.
            num_logits: of the last tokens of each row whose logits are wanted, at least 1.

        Returns:
            (batch_size, num_logits, vocab).
        """
        return self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=num_logits,
            attend=attend,
        ).logits


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    attend: Attend,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with (batch_size, num_heads, num_tokens, head_dim)."""
    if sliding_window is not None or s_aux is not None:
        raise ValueError("The laboratory drafts for neither sliding windows nor attention sinks.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(module.layer_idx, q, k, v, scaling), None
