"""Random KV pools, page tables and requests for the tests of the CUDA kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = "cuda"
POISON = float("nan")


@dataclass
class Case:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    scale: float
    num_queries: int

    def slots(self, request: int) -> torch.Tensor:
        return self.req_to_token[self.rows[request]]

    def queries(self, request: int) -> torch.Tensor:
        return self.q[request * self.num_queries : (request + 1) * self.num_queries]

    def output(self, request: int) -> torch.Tensor:
        return self.out[request * self.num_queries : (request + 1) * self.num_queries]


def make_case(
    seq_lens: list[int],
    num_queries: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    reserve: int = 32,
    sharpness: float = 1.0,
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> Case:
    """Requests of which each has its own row (1 and up, shuffled); a length of -1 gives a padding
    request, on row 0. Rows share some slots. The last slot holds NaNs, and every position that no
    request has leads there."""
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(seq_lens) + num_heads + head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32)

    batch, width = len(seq_lens), max([*seq_lens, 1]) + reserve
    num_slots = max(2 * width, 512) + 1
    num_rows = batch + 3
    req_to_token = torch.stack(
        [
            torch.randperm(num_slots - 2, generator=generator, device=DEVICE)[:width] + 1
            for _ in range(num_rows)
        ]
    ).int()
    order = torch.randperm(num_rows - 1, generator=generator, device=DEVICE)[:batch] + 1
    lengths = torch.tensor(seq_lens, device=DEVICE)
    rows = torch.where(lengths < 0, 0, order)
    req_to_token[0] = 0
    used = torch.zeros(num_rows, dtype=torch.long, device=DEVICE)
    used[rows] = lengths + reserve
    beyond = torch.arange(width, device=DEVICE) >= used.unsqueeze(1)
    beyond[0] = False
    req_to_token.masked_fill_(beyond, num_slots - 1)
    k_cache = normal(num_slots, num_kv_heads, head_dim).to(kv_dtype or dtype)
    v_cache = normal(num_slots, num_kv_heads, head_dim).to(kv_dtype or dtype)
    k_cache[-1] = v_cache[-1] = POISON
    # A strided view, as queries are one of the qkv projection.
    wide = (sharpness * normal(batch * num_queries, num_heads + 2, head_dim)).to(dtype)
    q = wide[:, :num_heads]
    return Case(
        q,
        k_cache,
        v_cache,
        req_to_token,
        rows,
        lengths,
        torch.full((batch * num_queries, num_heads, head_dim), POISON, device=DEVICE, dtype=dtype),
        head_dim**-0.5,
        num_queries,
    )


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
