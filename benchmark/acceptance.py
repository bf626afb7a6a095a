"""How many tokens an iteration does each policy reach on a real model and long prompts?

Starts one VEGAS server a policy, sends the acceptance prompts of the tests (4K to 6K tokens,
greedy) and takes tokens an iteration from the server's own `meta_info`.

    python benchmark/acceptance.py --model-path M [--policies vegas streaming] [--out X.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
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
from tests.prompts import Prompt, acceptance_prompts, load_tokenizer  # noqa: E402
from tests.server_process import launch_server  # noqa: E402


def measure(options: argparse.Namespace, policy: str, prompts: list[Prompt]) -> list[dict]:
    """Tokens an iteration of each prompt, without the prefill's token: no iteration made it."""
    flags = [
        *("--speculative-num-steps", str(options.num_steps)),
        *("--vegas-sparsity-ratio", str(options.sparsity_ratio), "--vegas-policy", policy),
        *("--vegas-speculate-above", "0"),
        *options.server_args,
    ]
    print(f"{policy}: starting")
    log = options.log_dir / f"acceptance_{policy.replace(':', '_')}.log"
    cases = []
    with launch_server(
        options.model_path, algorithm="VEGAS", extra_args=flags, log_path=log
    ) as server:
        for prompt in prompts:
            body = server.generate(
                list(prompt.ids),
                temperature=0,
                max_new_tokens=options.max_new_tokens,
                ignore_eos=True,
            )
            iterations = body["meta_info"]["spec_verify_ct"]
            cases.append(
                {
                    "prompt": prompt.name,
                    "prompt_tokens": len(prompt.ids),
                    "tokens": len(body["output_ids"]),
                    "iterations": iterations,
                    "tokens_per_iteration": (len(body["output_ids"]) - 1) / iterations,
                }
            )
            print(f"  {prompt.name}: {cases[-1]['tokens_per_iteration']:.2f}", flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens an iteration, by policy.")
    add_model_flag(parser)
    add_common_flags(parser)
    parser.add_argument("--policies", nargs="+", default=["vegas", "streaming"])
    parser.add_argument("--sparsity-ratio", type=float, default=0.07)
    parser.add_argument("--max-new-tokens", type=int, default=264)
    options = parser.parse_args()
    prompts = acceptance_prompts(load_tokenizer(options.model_path))
    report: dict[str, Any] = {
        "device": device_name(),
        "commit": options.commit or commit(),
        "model": Path(options.model_path).name,
        "num_steps": options.num_steps,
        "sparsity_ratio": options.sparsity_ratio,
        "policies": {policy: measure(options, policy, prompts) for policy in options.policies},
    }
    print(f"{'policy':12} {'prompts':>7} {'iterations':>10} {'tokens an iteration':>19} {'min':>5}")
    for policy, cases in report["policies"].items():
        rates = [case["tokens_per_iteration"] for case in cases]
        print(
            f"{policy:12} {len(cases):7} {sum(case['iterations'] for case in cases):10} "
            f"{statistics.mean(rates):19.2f} {min(rates):5.2f}"
        )
    write_report(report, options.out)


if __name__ == "__main__":
    main()
