"""Which gamma and sparsity ratio should my server use?

    python -m sgl_vegas.tune --model-path M [--prompts FILE_OR_FOLDER] [-- --server-flag ...]

takes the paper's three steps (section 3.4): the ratio at which acceptance stops rising, at the
largest gamma; then gamma by throughput; then the ratio again by throughput. On a machine with a GPU
it measures servers, which it starts with the flags behind `--`. Elsewhere, or with --gpu, it
measures acceptance on the model and takes times from a roofline of the GPU named.

It prints the flags, says how sure it is, and writes a file for the server:

    python -m sglang.launch_server --model-path M --config vegas.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from sgl_vegas.lab.experiment import Grid, Progress
from sgl_vegas.lab.model import LabModel
from sgl_vegas.lab.progress import Bar
from sgl_vegas.lab.prompts import read_prompts
from sgl_vegas.tune.estimate import Estimate
from sgl_vegas.tune.plots import plot
from sgl_vegas.tune.roofline import PUBLISHED, ModelShape, named_hardware
from sgl_vegas.tune.served import Served
from sgl_vegas.tune.steps import Step, tune


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    bar = Bar()
    try:
        measure = _measure(options, bar.update)
        steps = tune(measure, options.gammas, options.ratios)
        plain = measure.plain()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    finally:
        bar.close()
    chosen = steps[-1].chosen
    flags = {
        "speculative-algorithm": "VEGAS",
        "speculative-num-steps": f"{chosen.gamma}",
        "vegas-sparsity-ratio": f"{chosen.ratio:g}",
        "vegas-policy": options.policy,
        **({"vegas-key-basis": options.key_basis} if options.key_basis else {}),
    }
    options.config.write_text(
        "# By sgl_vegas.tune; tokens a second: "
        f"{chosen.mean:.0f}, without speculation {plain:.0f}; {measure.how}.\n"
        + "".join(f"{name}: {value}\n" for name, value in flags.items())
    )
    if options.plot is not None:
        plot(steps, plain, measure.how, options.plot)
    if options.out is not None:
        options.out.write_text(json.dumps(_report(steps, plain, measure.how), indent=1) + "\n")
    _print(steps, plain, measure.how, flags, options.config)


def _print(steps: list[Step], plain: float, how: str, flags: dict[str, str], config: Path) -> None:
    for step in steps:
        print(f"\n{step.title}, in {step.unit}")
        for point in step.points:
            mark = "*" if point is step.chosen else " "
            print(f" {mark} {point.setting:24} {point.mean:10.2f}")
        print(f"   {step.chosen.setting}: {step.doubt}.")
    chosen = steps[-1].chosen
    print(f"\nFigures: {how}.")
    print(f"Without speculation: {plain:.2f} tokens a second.")
    if chosen.mean <= plain:
        print("Speculation does not pay at this load; serve without it.")
    line = " ".join(f"--{name} {value}" for name, value in flags.items())
    print(f"{line}    (or --config {config})")


def _report(steps: list[Step], plain: float, how: str) -> dict[str, Any]:
    return {
        "how": how,
        "plain_tokens_per_s": plain,
        "steps": [
            {
                "title": step.title,
                "unit": step.unit,
                "points": [vars(point) for point in step.points],
                "chosen": {"gamma": step.chosen.gamma, "ratio": step.chosen.ratio},
                "doubt": step.doubt,
            }
            for step in steps
        ],
    }


def _measure(options: argparse.Namespace, progress: Progress) -> Estimate | Served:
    grid = Grid(
        policies=(options.policy,),
        ratios=tuple(options.ratios),
        gammas=tuple(options.gammas),
        temperatures=(options.temperature,),
        top_p=options.top_p,
        iterations=options.iterations,
        coverage_every=0,
        key_basis=options.key_basis,
    )
    if options.gpu is None and torch.cuda.is_available():
        prompts = read_prompts(
            options.prompts,
            AutoTokenizer.from_pretrained(options.model_path),
            options.max_prompts,
        )
        basis = ["--vegas-key-basis", options.key_basis] if options.key_basis else []
        return Served(
            options.model_path,
            prompts,
            grid.num_new,
            options.temperature,
            options.top_p,
            options.batch,
            [*options.server_flags, "--vegas-policy", options.policy, *basis],
            options.log,
            progress,
        )
    config = AutoConfig.from_pretrained(options.model_path)
    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    model = LabModel(options.model_path, device, dtype)
    prompts = read_prompts(options.prompts, model.tokenizer, options.max_prompts)
    context = options.context or sum(len(ids) for _, ids in prompts) // len(prompts)
    return Estimate(
        model,
        prompts,
        grid,
        options.temperature,
        ModelShape.from_config(config.to_dict()),
        named_hardware(options.gpu or "H200"),
        options.batch,
        context,
        progress,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vegas.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="folder or hub name of the model")
    add("--prompts", type=Path, help="as of python -m sgl_vegas.lab")
    add("--max-prompts", type=int, help="take this many prompts from the front")
    add("--ratios", nargs="+", type=float, default=[0.03, 0.05, 0.07, 0.1, 0.15])
    add("--gammas", nargs="+", type=int, default=[3, 4, 5, 6, 7, 8, 10])
    add("--policy", default="vegas", help="as of --vegas-policy")
    add("--key-basis", help="of vegas-refresh: what `python -m sgl_vegas.calibrate` wrote")
    add("--temperature", type=float, default=0.6, help="0 is greedy")
    add("--top-p", type=float, default=0.95)
    add("--iterations", type=int, default=40, help="of each prompt, at every token accepted")
    add("--batch", type=int, default=8, help="requests that run together")
    add("--gpu", choices=sorted(PUBLISHED), help="estimate for this GPU instead of measuring")
    add("--context", type=int, help="of an estimate, tokens a request; default: the prompts'")
    add("--config", type=Path, default=Path("vegas.yaml"), help="write the server's flags here")
    add("--plot", type=Path, help="write a plot here (.svg, .png, .pdf)")
    add("--out", type=Path, help="write JSON here")
    add("--log", type=Path, default=Path("vegas_tune_server.log"), help="of the servers started")
    add("server_flags", nargs="*", metavar="-- --server-flag", help="flags of the servers")
    return parser


if __name__ == "__main__":
    main()
