"""Transform coding of keys for the error that counts: that of their products with queries.

A key's error `e` costs a logit `q . e`, so of all codes with as many bits the best make
`E[(q . e)^2]` smallest. With queries whitened, `q' = Cq^(-1/2) q` and `k' = Cq^(1/2) k`, it is
the plain squared error of `k'`, whose principal components are coded each by a uniform quantiser,
with bits where they lower that error most. Uniform codes of the keys themselves, or of their own
principal components, need several times the bits: what varies most in keys is not what queries
look at.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from sgl_vegas.key_codes.moments import Moments

# Of a unit Gaussian's best uniform quantiser with 0, 1, ... bits: step, and mean squared error
# (J. Max, "Quantizing for minimum distortion", 1960, table II).
STEPS = (0.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000871)
# Directions that no query of the texts looked along count this much of an average one.
RIDGE = 1e-3


@dataclass(frozen=True)
class KeyBasis:
    """How the keys of each layer and KV head are coded.

    Attributes:
        means: (num_layers, num_kv_heads, head_dim) float32, of keys.
        encode, decode: (num_layers, num_kv_heads, head_dim, head_dim) float32; a key's components
            are `(k - mean) @ encode`, and `components @ decode + mean` is the key again.
        bits: (num_layers, num_kv_heads, head_dim) uint8, of each component's code, at most 8.
        steps: (num_layers, num_kv_heads, head_dim) float32, of each component's quantiser.
    """

    means: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor
    bits: torch.Tensor
    steps: torch.Tensor

    @property
    def bits_per_key(self) -> int:
        """Bits of one head's code of one token, the same for all layers and heads."""
        return int(self.bits[0, 0].sum())

    @property
    def share_of_entry(self) -> float:
        """A code's size as a share of a KV entry's, key and value in 16 bits."""
        return self.bits_per_key / (2 * 16 * self.means.shape[-1])

    def components(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """What the codes of keys, (..., num_kv_heads, head_dim) of any type, stand for: float32 of
        the same shape, the middles of the intervals that a key's components lie in."""
        exact = torch.einsum(
            "...hd,hde->...he", keys.float() - self.means[layer], self.encode[layer]
        )
        bits, steps = self.bits[layer], self.steps[layer]
        half = 2.0 ** (bits.float() - 1)
        level = (exact / steps).floor().maximum(-half).minimum(half - 1)
        return torch.where(bits > 0, (level + 0.5) * steps, 0.0)

    def project(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Queries, (..., num_kv_heads, group_size, head_dim), whose products with `components` are
        those with the keys, but for a constant of each query; float32 of the same shape."""
        return queries.float() @ self.decode[layer].mT

    def to(self, device: torch.device | str) -> KeyBasis:
        return KeyBasis(*(tensor.to(device) for tensor in self._tensors().values()))

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(
            {name: tensor.contiguous() for name, tensor in self._tensors().items()}, str(path)
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_basis(path: str | Path) -> KeyBasis:
    """Read what `KeyBasis.save` wrote.

    Raises:
        ValueError: naming the file, if it can't be read or is something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return KeyBasis(**load_file(str(path)))
    except (OSError, SafetensorError, TypeError) as error:
        raise ValueError(f"{path} is no key basis: {error}.") from error


def fit_basis(moments: Moments, bits_per_key: int) -> KeyBasis:
    """The codes of `bits_per_key` bits a head that cost the texts' logits least.

    Raises:
        ValueError: for moments of nothing, or bits that no code of this head_dim has.
    """
    head_dim = moments.key_sum.shape[-1]
    if min(moments.num_keys) == 0 or min(moments.num_queries) == 0:
        raise ValueError("A key basis needs keys and queries of every layer.")
    if not 1 <= bits_per_key <= 8 * head_dim:
        raise ValueError(f"Bits of a key must be in [1, {8 * head_dim}], got {bits_per_key}.")
    num_keys = torch.tensor(moments.num_keys, dtype=torch.float64)[:, None, None]
    num_queries = torch.tensor(moments.num_queries, dtype=torch.float64)[:, None, None, None]
    means = moments.key_sum / num_keys
    covariance = (
        moments.key_square / num_keys[..., None] - means[..., :, None] * means[..., None, :]
    )
    looks = moments.query_square / num_queries
    average = looks.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(1e-12)
    looks = looks + RIDGE * average[..., None, None] * torch.eye(head_dim, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(looks)
    root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT
    inverse = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
    variances, axes = torch.linalg.eigh(root @ covariance @ root)
    variances = variances.clamp_min(1e-12)
    bits = _share_bits(variances, bits_per_key)
    steps = torch.tensor(STEPS, dtype=torch.float64)[bits] * variances.sqrt()
    # Of components without bits; nothing is divided by zero.
    steps = torch.where(bits > 0, steps, 1.0)
    return KeyBasis(
        means=means.float(),
        encode=(root @ axes).float(),
        decode=(axes.mT @ inverse).float(),
        bits=bits.to(torch.uint8),
        steps=steps.float(),
    )


def _share_bits(variances: torch.Tensor, total: int) -> torch.Tensor:
    """(..., head_dim) int64: `total` bits, one by one to where the next saves most error."""
    errors = torch.tensor((*ERRORS, 0.0), dtype=variances.dtype)
    bits = torch.zeros_like(variances, dtype=torch.int64)
    for _ in range(total):
        saved = variances * (errors[bits] - errors[bits + 1])
        best = saved.masked_fill(bits == 8, -1.0).argmax(dim=-1, keepdim=True)
        bits.scatter_add_(-1, best, torch.ones_like(best))
    return bits
