"""What the memory bus and the matrix units allow: the floor of a decode step, from a config alone.

Counted are the linear layers, the output head once, and the KV cache. Left out are norms, biases,
activations, the arithmetic of attention, and the embedding, of which a step reads one row a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_vegas.config import VegasConfig

BYTES_AN_ELEMENT = 2  # bfloat16, weights and KV


@dataclass(frozen=True)
class Hardware:
    """One GPU, as measured.

    Attributes:
        copy_bandwidth: bytes a second, read plus written.
        matrix_rate: bf16 floating-point operations a second.
    """

    name: str
    copy_bandwidth: float
    matrix_rate: float


@dataclass(frozen=True)
class ModelShape:
    """What a step reads and computes.

    Attributes:
        ffn_size: intermediate size, of one expert if there are several.
        num_experts, experts_per_token: 1 for a dense model.
        tied: the output head is the embedding.
        sliding_layers: how many of `num_layers` attend to the last `window` tokens only.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    sliding_layers: int = 0
    window: int = 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """Of a Hugging Face `config.json`: Qwen3, Qwen3-MoE and gpt-oss, and what is like them."""
        num_experts = config.get("num_experts") or config.get("num_local_experts") or 1
        kinds = config.get("layer_types") or []
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            ffn_size=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            num_experts=num_experts,
            experts_per_token=config["num_experts_per_tok"] if num_experts > 1 else 1,
            sliding_layers=kinds.count("sliding_attention"),
            window=config.get("sliding_window") or 0,
        )

    @property
    def shared_params(self) -> int:
        """Parameters that every token uses: attention, routers, the output head."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return self.num_layers * (attention + router) + self.vocab_size * self.hidden_size

    @property
    def expert_params(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights in memory, the embedding included."""
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        experts = self.num_layers * self.num_experts * self.expert_params
        return BYTES_AN_ELEMENT * (self.shared_params + embedding + experts)

    def experts_touched(self, tokens: int) -> float:
        """Expected experts of a layer that `tokens` tokens use, if each token routes evenly and
        on its own."""
        untouched = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - untouched)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a forward pass over `tokens` tokens reads."""
        experts = self.num_layers * self.experts_touched(tokens) * self.expert_params
        return BYTES_AN_ELEMENT * (self.shared_params + experts)

    def flops(self, tokens: int) -> float:
        """Operations of the linear layers over `tokens` tokens."""
        experts = self.num_layers * self.experts_per_token * self.expert_params
        return 2.0 * tokens * (self.shared_params + experts)

    @property
    def kv_bytes_a_layer(self) -> int:
        """Bytes of one token's KV in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * BYTES_AN_ELEMENT

    @property
    def kv_bytes_a_token(self) -> int:
        return self.num_layers * self.kv_bytes_a_layer

    def kv_bytes(self, context: int, attended: int | None = None) -> int:
        """Bytes of KV one request's step reads: `attended` tokens (default: all of `context`) in
        full-attention layers, the window in the others."""
        full = context if attended is None else attended
        full_layers = self.num_layers - self.sliding_layers
        windows = self.sliding_layers * min(self.window, context)
        return self.kv_bytes_a_layer * (full_layers * full + windows)


@dataclass(frozen=True)
class Floor:
    """Shortest times of one case, in ms.

    Attributes:
        plain_ms: a plain decode step.
        draft_ms: one of the gamma draft steps.
        verify_ms: the pass over gamma + 1 tokens a request.
    """

    plain_ms: float
    draft_ms: float
    verify_ms: float

    def speedup(self, gamma: int, tokens_per_iteration: float) -> float:
        iteration = gamma * self.draft_ms + self.verify_ms
        return tokens_per_iteration * self.plain_ms / iteration


def floor(
    shape: ModelShape, hardware: Hardware, batch: int, context: int, gamma: int, ratio: float
) -> Floor:
    """Weights are read while the matrix units work; the KV cache is read in between."""

    def linear_s(tokens: int) -> float:
        read = shape.read_bytes(tokens) / hardware.copy_bandwidth
        return max(read, shape.flops(tokens) / hardware.matrix_rate)

    full_s = batch * shape.kv_bytes(context) / hardware.copy_bandwidth
    budget = VegasConfig(sparsity_ratio=ratio).budget(context)
    draft_s = batch * shape.kv_bytes(context, attended=budget) / hardware.copy_bandwidth
    return Floor(
        plain_ms=1e3 * (linear_s(batch) + full_s),
        draft_ms=1e3 * (linear_s(batch) + draft_s),
        verify_ms=1e3 * (linear_s(batch * (gamma + 1)) + full_s),
    )


# Of the published memory bandwidth and dense bf16 rate, what a copy and a matrix product reached
# on an H200 (benchmark/results/serving_h200.json).
COPY_SHARE, MATRIX_SHARE = 0.87, 0.77
PUBLISHED = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
    "L40S": (0.864e12, 362e12),
}


def named_hardware(name: str) -> Hardware:
    """One of `PUBLISHED`, at the share of its published rates that an H200 reaches."""
    bandwidth, rate = PUBLISHED[name]
    return Hardware(name, bandwidth * COPY_SHARE, rate * MATRIX_SHARE)
