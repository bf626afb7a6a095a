"""How fast are the CUDA kernels of verification, drafts and selection, one layer at a time?

Times graph replays over random page tables, in turn over several KV caches, and sets them against
this device's copy bandwidth, measured in the same run, and SGLang's FA3 where it can be imported.
FA3 comes first, as in a process without VEGAS, and again at each shape, as after ScoreCollector has
set a part of the L2 aside. Verification and drafts write their new K and V, which FA3 leaves to
another kernel. Prints ratios last. Results are the medians of several replays.

    python benchmark/kernels.py [--out benchmark/results/X.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sgl_vegas_kernels.paged_attention import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    PagedAttention,
    ScoreCollector,
    Tables,
)

from benchmark.environment import commit, write_report  # noqa: E402

DEVICE, DTYPE, FP8 = "cuda", torch.bfloat16, torch.float8_e4m3fn
RATIO, MIN_TOKENS, MAX_K = 0.07, 256, 16384
REPLAYS = 7


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_queries: int
    # Different KV caches that calls rotate over, so that none finds its own in the L2.
    caches: int = 2
    # Calls a graph.
    calls: int = 10

    def bytes(self, tokens: int) -> int:
        return self.batch * tokens * self.num_kv_heads * self.head_dim * 2 * DTYPE.itemsize


SHAPES = [
    Shape("Qwen3-8B, 4 x 122,880", 4, 122_880, 32, 8, 128, 7),
    Shape("Qwen3-8B, 32 x 16,384", 32, 16_384, 32, 8, 128, 7),
    Shape("gpt-oss-20b, 8 x 65,536", 8, 65_536, 64, 8, 64, 7),
    Shape("Qwen3-8B, 64 x 1,024", 64, 1_024, 32, 8, 128, 7, caches=4, calls=24),
]


def time_graph(call: Callable[[int], object], calls: int) -> float:
    """Microseconds a call, the median of several replays of a graph of call(0), call(1), ..."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a second, read and written. By kernels: a graph's copies between buffers are slower."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_graph(lambda i: torch.neg(source, out=target), 4) * 1e-6)


def read_bandwidth() -> float:
    """Bytes a second, read alone."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.float32)
    return source.nbytes / (time_graph(lambda i: source.max(), 4) * 1e-6)


class Bench:
    """A shape's inputs."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        generator = torch.Generator(DEVICE).manual_seed(1)
        batch, width = shape.batch, shape.seq_len + 64
        num_slots = batch * width + 1
        slots = torch.randperm(num_slots - 1, generator=generator, device=DEVICE).int() + 1
        self.req_to_token = torch.zeros(batch + 1, width, dtype=torch.int32, device=DEVICE)
        self.req_to_token[1:] = slots.view(batch, width)
        self.rows = torch.arange(1, batch + 1, device=DEVICE)
        self.seq_lens = torch.full((batch,), shape.seq_len, device=DEVICE)
        self.fa3_lens = {n: (self.seq_lens + n).int() for n in (1, shape.num_queries)}
        kv_shape = (num_slots, shape.num_kv_heads, shape.head_dim)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=DEVICE, dtype=DTYPE)

        self.caches = [(normal(*kv_shape), normal(*kv_shape)) for _ in range(shape.caches)]
        heads = (shape.num_heads, shape.head_dim)
        self.q = normal(batch * shape.num_queries, *heads)
        new_shape = (batch * shape.num_queries, shape.num_kv_heads, shape.head_dim)
        self.new_kv = normal(*new_shape), normal(*new_shape)
        self.new_kv1 = self.new_kv[0][:batch], self.new_kv[1][:batch]
        self.out = torch.empty_like(self.q)
        self.q1, self.out1 = normal(batch, *heads), torch.empty_like(self.q[:batch])
        self.scale = shape.head_dim**-0.5

    def make_kernels(self) -> None:
        shape, batch = self.shape, self.shape.batch
        args = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.verify = PagedAttention(*args, shape.num_queries, batch, DTYPE, DEVICE)
        self.draft = PagedAttention(*args, 1, batch, DTYPE, DEVICE)
        num_rows = batch + 1
        self.collector = ScoreCollector(
            *(shape.caches, num_rows, shape.num_heads, shape.num_kv_heads),
            *(batch * shape.seq_len, batch, RATIO, MIN_TOKENS, MAX_K, DEVICE),
        )
        self.tables = Tables(
            torch.zeros(shape.caches, num_rows, MAX_K, dtype=torch.int32, device=DEVICE),
            torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
            torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
        )

    def plan(self, _: int = 0) -> None:
        self.verify.plan_dense(self.seq_lens, self.rows, self.shape.num_queries)

    def dense(self, i: int, scores: ScoreCollector | None = None) -> None:
        layer = i % self.shape.caches
        self.verify.dense(
            *(self.q, *self.caches[layer], self.req_to_token, self.scale, self.out),
            *(scores, layer, self.new_kv),
        )

    def select(self, i: int) -> None:
        self.collector.select(self.verify, i % self.shape.caches, self.rows, self.tables)

    def dense_with_scores(self, i: int) -> None:
        self.dense(i, self.collector)

    def whole_layer(self, i: int) -> None:
        self.dense_with_scores(i)
        self.select(i)

    def begin(self, _: int = 0) -> None:
        self.collector.begin(self.seq_lens, self.rows, self.tables)

    def plan_draft(self, _: int = 0) -> None:
        self.draft.plan_sparse(self.seq_lens, self.rows, self.tables, 3)

    def sparse(self, i: int) -> None:
        layer = i % self.shape.caches
        self.draft.sparse(
            *(self.q1, *self.caches[layer], self.req_to_token, self.tables),
            *(layer, self.scale, self.out1, self.new_kv1),
        )

    def dense_one(self, i: int) -> None:
        self.draft.dense(
            *(self.q1, *self.caches[i % self.shape.caches], self.req_to_token),
            *(self.scale, self.out1),
        )

    def fa3(self, i: int, num_queries: int) -> None:
        from sgl_kernel.flash_attn import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,
        )

        shape = self.shape
        q = self.q if num_queries == shape.num_queries else self.q1
        k, v = self.caches[i % shape.caches]
        flash_attn_with_kvcache(
            q.view(shape.batch, num_queries, shape.num_heads, shape.head_dim),
            *(k.unsqueeze(1), v.unsqueeze(1)),
            page_table=self.req_to_token[1:],
            cache_seqlens=self.fa3_lens[num_queries],
            softmax_scale=self.scale,
            causal=True,
        )

    def time_fa3(self) -> dict[str, float]:
        """Microseconds by what was timed; nothing where there is no FA3."""
        if importlib.util.find_spec("sgl_kernel") is None:
            return {}
        return {
            f"FA3, {n} queries": time_graph(lambda i, n=n: self.fa3(i, n), self.shape.calls)
            for n in self.fa3_lens
        }

    def run(self) -> dict[str, tuple[float, int]]:
        """Microseconds and KV bytes (0: not meaningful) by what was timed."""
        shape, calls = self.shape, self.shape.calls
        found: dict[str, tuple[float, int]] = {}
        full = shape.bytes(shape.seq_len + shape.num_queries)
        self.make_kernels()
        self.plan()
        self.begin()
        for i in range(2 * shape.caches):  # references that fit, and tables
            self.whole_layer(i)
        found["plan"] = time_graph(self.plan, calls), 0
        found["begin"] = time_graph(self.begin, calls), 0
        found["verify"] = time_graph(self.dense, calls), full
        found["verify with scores"] = time_graph(self.dense_with_scores, calls), full
        found["select"] = time_graph(self.select, calls), 0
        found["verify with scores, select"] = time_graph(self.whole_layer, calls), full
        self.plan_draft()
        listed = int(self.tables.counts[1]) + 4
        found["draft plan"] = time_graph(self.plan_draft, calls), 0
        found["draft"] = time_graph(self.sparse, calls), shape.bytes(listed)
        self.draft.plan_dense(self.seq_lens, self.rows, 1)
        found["dense, one query"] = time_graph(self.dense_one, calls), full
        for name, microseconds in self.time_fa3().items():
            found[f"{name}, L2 set aside"] = microseconds, full
        self.new_kv = None
        found["verify, no new KV"] = time_graph(self.dense, calls), full
        self.caches = [(k.to(FP8), v.to(FP8)) for k, v in self.caches]
        self.verify = PagedAttention(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.num_queries),
            *(shape.batch, DTYPE, DEVICE, FP8),
        )
        self.plan()
        found["verify, no new KV, FP8"] = time_graph(self.dense, calls), full // 2
        return found


# Of FA3's time, or of the floor's; the shapes in order.
TARGETS: dict[str, tuple[float, ...]] = {
    "verify / FA3": (1.02, 1.02, 1.02),
    "verify with scores / FA3": (1.03, 1.03, 1.06),
    "selection / FA3": (0.04, 0.04, 0.08),
    "sparse floor / measured": (0.80, 0.80, 0.70),
}


def summary(shape: Shape, times: dict[str, tuple[float, int]], bandwidth: float) -> dict[str, Any]:
    """The case's figures by the names that results are compared by, in microseconds."""
    _, draft_bytes = times["draft"]
    fa3 = times.get(f"FA3, {shape.num_queries} queries")
    return {
        "shape": asdict(shape),
        "fa3_us": fa3[0] if fa3 else None,
        "verify_us": times["verify"][0],
        "verify_collect_us": times["verify with scores"][0],
        "selection_us": times["select"][0],
        "sparse_decode_us": times["draft"][0],
        "sparse_floor_us": draft_bytes / bandwidth * 1e6,
        "times": {
            name: {"us": us, "bytes": size, "of_copy": size / (us * 1e-6) / bandwidth}
            for name, (us, size) in times.items()
        },
    }


def ratios(case: dict[str, Any]) -> dict[str, float]:
    found = {"sparse floor / measured": case["sparse_floor_us"] / case["sparse_decode_us"]}
    if case["fa3_us"]:
        for name, key in (
            ("verify / FA3", "verify_us"),
            ("verify with scores / FA3", "verify_collect_us"),
            ("selection / FA3", "selection_us"),
        ):
            found[name] = case[key] / case["fa3_us"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None, help="where there is no git repository")
    options = parser.parse_args()
    bandwidth, reads = copy_bandwidth(), read_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, copies at {bandwidth / 1e12:.2f} TB/s, "
        f"reads at {reads / 1e12:.2f} TB/s"
    )
    print(f"{'':44}{'us':>9}{'of copy bandwidth':>19}")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "commit": options.commit or commit(),
        "copy_bytes_per_second": bandwidth,
        "read_bytes_per_second": reads,
        "cases": [],
    }
    fa3 = {shape: Bench(shape).time_fa3() for shape in SHAPES}
    for shape in SHAPES:
        print(shape.name)
        full = shape.bytes(shape.seq_len + shape.num_queries)
        times = {name: (us, full) for name, us in fa3[shape].items()} | Bench(shape).run()
        for name, (microseconds, size) in times.items():
            share = size / (microseconds * 1e-6) / bandwidth
            print(
                f"  {name:42}{microseconds:9.1f}" + (f"{share:18.1%}" if size else ""), flush=True
            )
        report["cases"].append(summary(shape, times, bandwidth))
        torch.cuda.empty_cache()
    print("\n" + " " * 28 + "".join(f"{shape.name:>26}" for shape in SHAPES))
    for name, targets in TARGETS.items():
        line = f"{name:28}"
        for i, case in enumerate(report["cases"]):
            ratio = ratios(case).get(name)
            target = f" (target {targets[i]:.2f})" if i < len(targets) else " " * 14
            line += f"{'-' if ratio is None else f'{ratio:.3f}':>12}{target}"
        print(line)
    write_report(report, options.out)


if __name__ == "__main__":
    main()
