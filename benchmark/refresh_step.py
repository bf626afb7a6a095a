"""What does ranking again cost a draft step on the GPU: `vegas-refresh` against `vegas`.

Times the attention of draft steps alone, as graphs of all layers of a model, over random tables of
the sizes that the policies would make; both read the same bytes. Prints ratios last.

    python benchmark/refresh_step.py [--out benchmark/results/X.json]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sgl_vegas_kernels.paged_attention import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    PagedAttention,
    Tables,
)

from benchmark.environment import commit, device_name, write_report  # noqa: E402
from benchmark.kernels import time_graph  # noqa: E402
from sgl_vegas.key_codes.basis import fit_basis  # noqa: E402
from sgl_vegas.key_codes.moments import Moments  # noqa: E402
from sgl_vegas.key_codes.step_ranking import StepRanking  # noqa: E402
from sgl_vegas.key_codes.words import WordCodes  # noqa: E402
from sgl_vegas.selection.refresh import RefreshPolicy  # noqa: E402
from sgl_vegas.tables.request_tables import RequestTables  # noqa: E402

DEVICE, DTYPE = "cuda", torch.bfloat16
RATIO = 0.07
# Different tables, words and KV that layers rotate over, so that none finds its own in the L2.
LAYERS = 4


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    seq_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_layers: int = 36


SHAPES = (
    Shape("1 x 131,072", 1, 131_072),
    Shape("4 x 122,880", 4, 122_880),
    Shape("32 x 16,384", 32, 16_384),
    Shape("8 x 65,536", 8, 65_536),
)


def measure(shape: Shape) -> dict[str, Any]:
    batch, length = shape.batch, shape.seq_len
    kv_shape = (batch * length + 1, shape.num_kv_heads, shape.head_dim)
    share = 64 / (2 * 16 * shape.head_dim)
    budget = int(RATIO * length)
    candidates = int(budget * RefreshPolicy.candidates / (1 + RefreshPolicy.candidates * share))
    caches = [
        tuple(torch.randn(kv_shape, device=DEVICE, dtype=DTYPE) for _ in range(2))
        for _ in range(LAYERS)
    ]
    req_to_token = torch.randperm(batch * length, device=DEVICE).view(batch, length).int() + 1
    req_to_token = torch.cat([torch.zeros_like(req_to_token[:1]), req_to_token])
    req_to_token = torch.nn.functional.pad(req_to_token, (0, 8))
    rows = torch.arange(1, batch + 1, device=DEVICE)
    seq_lens = torch.full((batch,), length, device=DEVICE)

    def made(size: int) -> RequestTables:
        tables = RequestTables(LAYERS, batch + 1, size, DEVICE)
        for layer in range(LAYERS):
            for row in range(1, batch + 1):
                chosen = torch.randperm(length, device=DEVICE)[:size].sort().values
                tables.put(layer, row, length, chosen)
        return tables

    attention = PagedAttention(
        *(shape.num_heads, shape.num_kv_heads, shape.head_dim, 1, batch, DTYPE, DEVICE)
    )
    q = torch.randn(batch, shape.num_heads, shape.head_dim, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)
    scale = shape.head_dim**-0.5
    moments = Moments(LAYERS, shape.num_kv_heads, shape.head_dim)
    for layer, (keys, _) in enumerate(caches):
        moments.add(layer, q.cpu(), keys[:2000].cpu())
    held, wide = made(budget), made(candidates)
    ranking = StepRanking(
        WordCodes.of(fit_basis(moments, 64)),
        wide,
        RefreshPolicy.candidates,
        shape.num_heads,
        kv_shape[0],
        batch,
    )
    every = torch.arange(kv_shape[0], device=DEVICE)
    for layer, (keys, _) in enumerate(caches):
        ranking.encode(layer, every, keys)
    held_tables = Tables(held.positions, held.counts, held.bases)
    ranked_tables = Tables(ranking.positions, ranking.wanted, wide.bases)
    calls = shape.num_layers + 1
    new_slots = req_to_token[1:, length - 7 : length].flatten().long()

    # Call 0 is what comes once a pass.
    def vegas(call: int) -> None:
        if call == 0:
            attention.plan_sparse(seq_lens, rows, held_tables, 0)
            return
        layer = call % LAYERS
        attention.sparse(q, *caches[layer], req_to_token, held_tables, layer, scale, out)

    def refresh(call: int) -> None:
        if call == 0:
            ranking.begin(rows)
            attention.plan_sparse(seq_lens, rows, ranked_tables, 0)
            return
        layer = call % LAYERS
        ranking.choose(layer, q, rows, req_to_token, scale)
        attention.sparse(q, *caches[layer], req_to_token, ranked_tables, 0, scale, out)

    def choose(call: int) -> None:
        ranking.choose(call % LAYERS, q, rows, req_to_token, scale)

    def encode(call: int) -> None:
        ranking.encode(call % LAYERS, new_slots, caches[call % LAYERS][0])

    times = {
        name: time_graph(call, calls) * calls / 1e3
        for name, call in (
            *(("vegas", vegas), ("vegas-refresh", refresh)),
            *(("of that, ranking", choose), ("coding a verify pass", encode)),
        )
    }
    kv_bytes = 2 * batch * budget * shape.num_kv_heads * shape.head_dim * DTYPE.itemsize
    return {**asdict(shape), "ms": times, "bytes_a_layer": kv_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None, help="where there is no git repository")
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)))
    options = parser.parse_args()
    cases = []
    for index in options.shapes:
        print(f"{SHAPES[index].name} ...", flush=True)
        cases.append(measure(SHAPES[index]))
        torch.cuda.empty_cache()
        report = {
            "device": device_name(),
            "commit": options.commit or commit(),
            "ratio": RATIO,
            "cases": cases,
        }
        write_report(report, options.out)
    print(f"Attention of a draft step, ms ({SHAPES[0].num_layers} layers of Qwen3-8B):")
    for case in cases:
        ms = case["ms"]
        parts = ", ".join(f"{name} {value:.3f}" for name, value in ms.items())
        print(
            f"{case['name']:>14}: {parts}; refresh / vegas {ms['vegas-refresh'] / ms['vegas']:.2f}"
        )


if __name__ == "__main__":
    main()
