"""Which refresh in mid-draft wins? Variants of `vegas-refresh` at equal bytes a draft step.

Fits bases of several sizes to the model, lets each variant draft along the same answers as `vegas`
and the oracle, and prints the difference from `vegas` with its standard error over prompts. What
they are and what came of them: docs/refresh.md.

    python benchmark/refresh_variants.py --model-path M [--out benchmark/results/X.json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmark.environment import commit, device_name, write_report  # noqa: E402
from sgl_vegas.calibrate.__main__ import collect  # noqa: E402
from sgl_vegas.key_codes.basis import STEPS, KeyBasis, fit_basis  # noqa: E402
from sgl_vegas.key_codes.moments import Moments  # noqa: E402
from sgl_vegas.key_codes.texts import calibration_prompts  # noqa: E402
from sgl_vegas.lab.experiment import Grid, make_texts, run_cells  # noqa: E402
from sgl_vegas.lab.model import LabModel  # noqa: E402
from sgl_vegas.lab.progress import Bar  # noqa: E402
from sgl_vegas.lab.prompts import read_prompts  # noqa: E402
from sgl_vegas.lab.report import mean_and_error  # noqa: E402
from sgl_vegas.selection.refresh import RefreshPolicy  # noqa: E402


class ThreeCandidates(RefreshPolicy):
    candidates = 3


class EverySecondStep(RefreshPolicy):
    every = 2


class EveryThirdStep(RefreshPolicy):
    every = 3


HERE = "benchmark.refresh_variants"
# Basis (bits of a head, or bits of a dim for uniform codes of the keys themselves) and policies.
VARIANTS = {
    "64": [
        *("vegas", "oracle", "vegas-refresh"),
        *(f"{HERE}:{name}" for name in ("ThreeCandidates", "EverySecondStep", "EveryThirdStep")),
    ],
    "32": ["vegas-refresh"],
    "96": [f"{HERE}:ThreeCandidates"],
    "128": [f"{HERE}:ThreeCandidates"],
    "uniform 1": ["vegas-refresh"],
    "uniform 2": ["vegas-refresh"],
    "uniform 4": ["vegas-refresh"],
}


def uniform_basis(moments: Moments, bits: int) -> KeyBasis:
    """Each dim of a key by itself, all with as many bits."""
    num_keys = torch.tensor(moments.num_keys, dtype=torch.float64)[:, None, None]
    means = moments.key_sum / num_keys
    squares = moments.key_square.diagonal(dim1=-2, dim2=-1) / num_keys
    spread = (squares - means.square()).clamp_min(1e-12).sqrt()
    alike = torch.eye(means.shape[-1]).expand(*means.shape, -1)
    return KeyBasis(
        means=means.float(),
        encode=alike,
        decode=alike,
        bits=torch.full(means.shape, bits, dtype=torch.uint8),
        steps=(STEPS[bits] * spread).float(),
    )


def basis_of(name: str, moments: Moments) -> KeyBasis:
    kind, _, bits = name.rpartition(" ")
    return uniform_basis(moments, int(bits)) if kind else fit_basis(moments, int(bits))


def main() -> None:
    options = _parse()
    model = LabModel(options.model_path, options.device, getattr(torch, options.dtype))
    prompts = read_prompts(None, model.tokenizer, options.max_prompts)
    rows: list[dict[str, Any]] = []
    report = {
        "device": device_name(),
        "commit": options.commit or commit(),
        "model": Path(options.model_path).name,
        "dtype": options.dtype,
        "rows": rows,
    }
    bar = Bar()
    with tempfile.TemporaryDirectory() as folder:
        moments = collect(model, calibration_prompts(model.tokenizer))
        for name in VARIANTS:
            basis_of(name, moments).save(Path(folder) / name)
        for temperature in options.temperatures:
            texts = None
            for name, policies in VARIANTS.items():
                grid = Grid(
                    policies=tuple(policies),
                    ratios=(options.ratio,),
                    gammas=(options.gamma,),
                    temperatures=(temperature,),
                    iterations=options.iterations,
                    coverage_every=0,
                    batch_bytes=options.batch_gb * 1e9,
                    key_basis=str(Path(folder) / name),
                )
                if texts is None:
                    texts = make_texts(model, prompts, grid, temperature, bar.update)
                arguments = (temperature, options.gamma, grid.ratios, bar.update)
                for row in run_cells(model, texts, grid, *arguments):
                    rows.append({"basis": name, **row})
                    write_report(report, options.out)
    bar.close()
    _print(rows, options.temperatures)


def _print(rows: list[dict[str, Any]], temperatures: list[float]) -> None:
    for temperature in temperatures:
        mine = [row for row in rows if row["temperature"] == temperature]
        vegas = next(row for row in mine if row["policy"] == "vegas")
        print(f"T {temperature:g}: vegas makes {vegas['tokens_per_iteration']:.2f} an iteration")
        for row in mine:
            pairs = zip(row["by_prompt"].values(), vegas["by_prompt"].values(), strict=True)
            mean, stderr = mean_and_error([own - of_vegas for own, of_vegas in pairs])
            policy = row["policy"].rpartition(":")[2]
            print(f"  {row['basis']:>10} {policy:<16} {mean:+.2f} ± {stderr:.2f}")


def _parse() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--ratio", type=float, default=0.07)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--batch-gb", type=float, default=4.0)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None, help="where there is no git repository")
    return parser.parse_args()


if __name__ == "__main__":
    main()
