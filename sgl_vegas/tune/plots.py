"""The three steps as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sgl_vegas.lab.plots import pyplot
from sgl_vegas.lab.report import mean_and_error
from sgl_vegas.tune.steps import Step


def plot(steps: Sequence[Step], plain: float, how: str, path: Path) -> None:
    """Draw each step's points with their standard errors, the chosen one marked.

    Args:
        plain: tokens a second without speculation, a line in the steps that choose by throughput.
    """
    figure, axes = pyplot().subplots(1, len(steps), figsize=(13, 3.9), layout="constrained")
    for axis, step in zip(axes, steps, strict=True):
        by_gamma = len({point.gamma for point in step.points}) > 1
        points = sorted(step.points, key=lambda p: (p.gamma, p.ratio))
        places = [p.gamma if by_gamma else p.ratio for p in points]
        errors = [mean_and_error(list(p.by_prompt.values()))[1] for p in points]
        axis.errorbar(places, [p.mean for p in points], yerr=errors, marker="o", capsize=2)
        chosen = step.chosen.gamma if by_gamma else step.chosen.ratio
        axis.plot([chosen], [step.chosen.mean], "o", markersize=11, color="C3", fillstyle="none")
        if step.unit == "tokens a second":
            axis.axhline(plain, color="grey", linestyle="--", label="plain")
            axis.legend(frameon=False)
        axis.set(
            title=step.title, xlabel="gamma" if by_gamma else "sparsity ratio", ylabel=step.unit
        )
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.3)
    figure.suptitle(how, fontsize=9)
    figure.savefig(path, dpi=120)
