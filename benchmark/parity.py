"""Does VEGAS give plain SGLang's greedy text, and how fast is it?

Starts plain SGLang and VEGAS one after the other on this machine's device, sends both the parity
prompts of the tests (alone, then four at once) and times decoding. Where a text differs, the gap
between plain SGLang's two best tokens at the first difference tells a near-tie from an error.

    python benchmark/parity.py --model-path M [--num-steps 7] [--out benchmark/results/X.json]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import (  # noqa: E402
    add_common_flags,
    add_model_flag,
    commit,
    device_name,
    write_report,
)
from tests.prompts import acceptance_prompts, load_tokenizer, parity_prompts  # noqa: E402
from tests.server.greedy_pairs import NEW_TOKENS, answers, compare  # noqa: E402
from tests.server_process import Server, launch_server  # noqa: E402


def decode_rates(server: Server, prompts: list) -> dict[str, dict[str, float]]:
    """Tokens a second of decoding, prompts in the prefix cache, the better of two runs."""
    rates = {}
    for batch_size in (1, len(prompts)):
        ids = [list(prompt.ids) for prompt in prompts[:batch_size]]
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        best, reply = 0.0, []
        for _ in range(3):  # the first fills the prefix cache
            started = time.perf_counter()
            reply = server.generate(ids, **sampling)
            best = max(best, batch_size * NEW_TOKENS / (time.perf_counter() - started))
        lengths = [r["meta_info"].get("spec_accept_length") for r in reply]
        rates[f"batch_{batch_size}"] = {
            "tokens_per_second": best,
            "accept_length": sum(lengths) / len(lengths) if all(lengths) else 1.0,
        }
        print(f"  batch {batch_size}: {best:.1f} tokens/s")
    return rates


def measure(options: argparse.Namespace, algorithm: str | None, log: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(options.model_path)
    prompts = parity_prompts(tokenizer)
    extra = list(options.server_args)
    if algorithm:
        extra += ["--speculative-num-steps", str(options.num_steps)]
        extra += ["--vegas-speculate-above", "0"]
    print(f"{algorithm or 'plain SGLang'}: starting")
    with launch_server(
        options.model_path, algorithm=algorithm, extra_args=extra, log_path=log
    ) as server:
        alone = answers(server, prompts, 1)
        server.flush_cache()
        together = answers(server, prompts, 4)
        rates = decode_rates(server, acceptance_prompts(tokenizer))
    return {"alone": alone, "together": together, "rates": rates, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Parity and decode rate of VEGAS.")
    add_model_flag(parser)
    add_common_flags(parser)
    options = parser.parse_args()
    plain = measure(options, None, options.log_dir / "parity_plain.log")
    vegas = measure(options, "VEGAS", options.log_dir / "parity_vegas.log")
    report: dict[str, Any] = {
        "device": device_name(),
        "commit": options.commit or commit(),
        "model": Path(options.model_path).name,
        "num_steps": options.num_steps,
        "server_args": options.server_args,
    }
    # Plain SGLang against itself at another batch size: the differences rounding alone makes.
    runs = {
        "vegas_alone": (plain["alone"], vegas["alone"]),
        "vegas_four_at_once": (plain["together"], vegas["together"]),
        "plain_alone_against_four_at_once": (plain["alone"], plain["together"]),
    }
    print(f"{'run':34} {'prompts':>7} {'differ':>6} {'tokens':>6} {'differ':>6} {'max gap':>8}")
    for name, (left, right) in runs.items():
        pairs = zip(left, right, plain["prompts"], strict=True)
        cases = [compare(a, b, prompt.name) for a, b, prompt in pairs]
        parted = [case for case in cases if case["first_difference"] is not None]
        gaps = [case["gap_at_first_difference"] for case in parted]
        report[name] = {
            "prompts": len(cases),
            "prompts_that_differ": len(parted),
            "tokens": sum(case["tokens"] for case in cases),
            "tokens_after_a_difference": sum(c["tokens"] - c["same_tokens"] for c in cases),
            "largest_gap_at_first_difference": max(gaps, default=0.0),
            "cases": cases,
        }
        row = report[name]
        print(
            f"{name:34} {row['prompts']:7} {row['prompts_that_differ']:6} {row['tokens']:6} "
            f"{row['tokens_after_a_difference']:6} {row['largest_gap_at_first_difference']:8.4f}"
        )
    report["rates"] = {"plain": plain["rates"], "vegas": vegas["rates"]}
    for batch, rate in vegas["rates"].items():
        base = plain["rates"][batch]["tokens_per_second"]
        print(
            f"{batch}: VEGAS {rate['tokens_per_second']:.1f} tokens/s, plain {base:.1f}, "
            f"ratio {rate['tokens_per_second'] / base:.2f}, "
            f"{rate['accept_length']:.2f} tokens an iteration"
        )
    write_report(report, options.out)


if __name__ == "__main__":
    main()
