"""Codes of 64 bits as words, and their scores as products with the bits.

A component's value is linear in the bits of its level, so a query's score of a key is, but for a
constant of the query, the sum of a weight a set bit: what kernels need is one vector of 64 weights
a query head, whatever the bits of the components are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_vegas.key_codes.basis import KeyBasis

WORD_BITS = 64


@dataclass(frozen=True)
class WordCodes:
    """A basis of 64 bits a key, as kernels read it. Components are in order, lowest bits first;
    those without bits are left out, and padding has no bits.

    Attributes:
        encode: (num_layers, num_kv_heads, head_dim, 64) float32: `keys @ encode + shift`, rounded
            down and clamped to [0, most], are a key's levels.
        shift, most: (num_layers, num_kv_heads, 64) float32.
        offsets: (num_layers, num_kv_heads, 64) int32, of each component's lowest bit.
        weigh: (num_layers, num_kv_heads, 64, head_dim) float32: bit j counts `q @ weigh[j]`.
    """

    encode: torch.Tensor
    shift: torch.Tensor
    most: torch.Tensor
    offsets: torch.Tensor
    weigh: torch.Tensor

    @classmethod
    def of(cls, basis: KeyBasis) -> WordCodes:
        """Raises:
        ValueError: for a basis of other than 64 bits a key.
        """
        if basis.bits_per_key != WORD_BITS or basis.bits.sum(dim=-1).ne(WORD_BITS).any():
            raise ValueError(
                f"--vegas-key-basis has {basis.bits_per_key} bits a key; on a GPU it must have "
                f"{WORD_BITS} (`python -m sgl_vegas.calibrate --bits {WORD_BITS}`)."
            )
        bits = basis.bits.long()
        num_layers, num_kv_heads, head_dim = bits.shape
        # Components with bits first, in their order; there are at most 64.
        order = torch.sort((bits == 0).long(), dim=-1, stable=True).indices[..., :WORD_BITS]
        bits = bits.gather(-1, order)
        steps = basis.steps.gather(-1, order)
        across = order.unsqueeze(-2).expand(-1, -1, head_dim, -1)
        encode = basis.encode.gather(-1, across) / steps.unsqueeze(-2)
        decode = basis.decode.gather(-2, across.mT) * steps.unsqueeze(-1)
        half = torch.where(bits > 0, 2.0 ** (bits.float() - 1), 0.0)
        shift = half - (basis.means.unsqueeze(-2) @ encode).squeeze(-2)
        offsets = bits.cumsum(dim=-1) - bits
        # The component of each bit of the word, and the bit's place in it.
        owner = torch.searchsorted(
            bits.cumsum(dim=-1),
            torch.arange(WORD_BITS).expand(num_layers, num_kv_heads, -1).contiguous(),
            right=True,
        )
        place = torch.arange(WORD_BITS) - offsets.gather(-1, owner)
        weigh = decode.gather(-2, owner.unsqueeze(-1).expand(-1, -1, -1, head_dim))

        def padded(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, WORD_BITS - x.shape[-1])).contiguous()

        return cls(
            encode=padded(encode),
            shift=padded(shift),
            most=padded((2.0 ** bits.float() - 1) * (bits > 0)),
            offsets=padded(offsets.clamp(max=WORD_BITS - 1).int()),
            weigh=(weigh * 2.0 ** place.float().unsqueeze(-1)).contiguous(),
        )

    def to(self, device: torch.device | str) -> WordCodes:
        return WordCodes(
            *(x.to(device) for x in (self.encode, self.shift, self.most, self.offsets, self.weigh))
        )


def encode_keys(codes: WordCodes, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Words of keys, (n, num_kv_heads, head_dim): (n, num_kv_heads) int64."""
    levels = torch.einsum("nhd,hdc->nhc", keys.float(), codes.encode[layer]) + codes.shift[layer]
    levels = levels.floor().clamp_min(0).minimum(codes.most[layer]).long()
    # Fields don't overlap: a sum is a union.
    return (levels << codes.offsets[layer]).sum(dim=-1)


def score_words(
    codes: WordCodes, layer: int, q: torch.Tensor, words: torch.Tensor, scale: float
) -> torch.Tensor:
    """Logits of one request, each head's but for a constant: (num_heads, n) float32.

    Args:
        q: (num_heads, head_dim).
        words: (n, num_kv_heads) int64.
    """
    bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, device=words.device) & 1).float()
    weights = q.float().unflatten(0, (words.shape[1], -1)) @ codes.weigh[layer].mT
    return (weights @ bits.permute(1, 2, 0)).flatten(0, 1) * scale
