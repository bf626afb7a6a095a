"""What VEGAS needs of a loaded model's attention layers."""

from __future__ import annotations

import torch
from torch import nn

from sgl_vegas.sglang_compat import AttentionType, RadixAttention


def kv_bytes_per_token(layers: list[RadixAttention], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers, which `attention_layers` checked."""
    layer = layers[0]
    return 2 * len(layers) * layer.tp_k_head_num * layer.qk_head_dim * dtype.itemsize


def attention_layers(model: nn.Module) -> list[RadixAttention]:
    """The model's attention layers, by layer id.

    Raises:
        ValueError: naming the layer and why VEGAS can't serve it.
    """
    layers = sorted(
        (module for module in model.modules() if isinstance(module, RadixAttention)),
        key=lambda layer: layer.layer_id,
    )
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        raise ValueError(
            f"VEGAS does not support {type(model).__name__}: "
            "not every layer has one attention of its own."
        )
    for layer in layers:
        reasons = {
            "a sliding window": layer.sliding_window_size > -1,
            "cross-attention": layer.is_cross_attention,
            "attention that is not causal": layer.attn_type != AttentionType.DECODER,
            "soft-capped logits": layer.logit_cap > 0,
            "value heads of another size": layer.v_head_dim != layer.qk_head_dim,
            "another logit scale than layer 0": layer.scaling != layers[0].scaling,
            "another number of heads than layer 0": (
                (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
                != (layers[0].tp_q_head_num, layers[0].tp_k_head_num, layers[0].qk_head_dim)
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(
                    f"VEGAS does not support {type(model).__name__}: layer {layer.layer_id} has "
                    f"{reason}. Serve it without speculation."
                )
    return layers
