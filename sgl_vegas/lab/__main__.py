"""Which drafting policy suits a model and its prompts?

    python -m sgl_vegas.lab --model-path M [--prompts FILE_OR_FOLDER] [--out lab.json]

drafts along the model's own answers with each policy, ratio and gamma, and compares tokens an
iteration, acceptance by draft position, the share of attention weight that drafts see, and what a
draft step reads. Needs no server; any Hugging Face model whose layers all have full attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from sgl_vegas import __version__
from sgl_vegas.lab.experiment import Grid, run_grid
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.plots import plot
from sgl_vegas.lab.progress import Bar
from sgl_vegas.lab.prompts import read_prompts
from sgl_vegas.lab.report import table

POLICIES = ("vegas", "streaming", "quest", "last-accepted", "all-queries", "oracle")


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        grid = _grid(options)
        model = LabModel(options.model_path, options.device, getattr(torch, options.dtype))
        prompts = read_prompts(options.prompts, model.tokenizer, options.max_prompts)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    report: dict[str, Any] = {
        "model": Path(options.model_path).name,
        "version": __version__,
        "device": _device_name(options.device),
        "dtype": options.dtype,
        "top_p": grid.top_p,
        "min_tokens": grid.min_tokens,
        "seed": grid.seed,
        "prompts": {name: len(ids) for name, ids in prompts},
        "rows": [],
    }
    bar = Bar()
    try:
        for row in run_grid(model, prompts, grid, bar.update):
            report["rows"].append(row)
            if options.out is not None:  # a run that is ended early leaves what it has
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    except ValueError as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
    if options.plot is not None:
        plot(report, options.plot)
        print(f"wrote {options.plot}")
    print(table(report["rows"], baseline=options.policies[0]))


def _grid(options: argparse.Namespace) -> Grid:
    return Grid(
        policies=tuple(options.policies),
        ratios=tuple(options.ratios),
        gammas=tuple(options.gammas),
        temperatures=tuple(options.temperatures),
        top_p=options.top_p,
        min_tokens=options.min_tokens,
        iterations=options.iterations,
        coverage_every=options.coverage_every,
        seed=options.seed,
        batch_bytes=options.batch_gb * 1e9,
        key_basis=options.key_basis,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vegas.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="folder or hub name of a Hugging Face model")
    add(
        "--prompts",
        type=Path,
        help="JSONL (prompt, messages or input_ids a line) or a folder of text files; without, "
        "the shipped fifteen",
    )
    add("--max-prompts", type=int, help="take this many prompts from the front")
    add(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        help="as of --vegas-policy; the others are compared with the first",
    )
    add("--ratios", nargs="+", type=float, default=[0.03, 0.07, 0.15], help="sparsity ratios")
    add("--gammas", nargs="+", type=int, default=[4, 7, 10], help="draft lengths")
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.6], help="0 is greedy")
    add("--top-p", type=float, default=0.95, help="of sampling")
    add("--min-tokens", type=int, default=1, help="least entries selected; the server's is 256")
    add("--iterations", type=int, default=60, help="of each prompt in each cell")
    add(
        "--coverage-every",
        type=int,
        default=8,
        help="iterations between two that measure the weight covered; 0 for never",
    )
    add("--key-basis", help="of vegas-refresh: what `python -m sgl_vegas.calibrate` wrote")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if cuda else "cpu")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16" if cuda else "float32",
    )
    add("--batch-gb", type=float, default=30.0 if cuda else 2.0, help="for what drafts attend to")
    add("--out", type=Path, help="write JSON here")
    add("--plot", type=Path, help="write a plot here (.svg, .png, .pdf)")
    return parser


if __name__ == "__main__":
    main()
