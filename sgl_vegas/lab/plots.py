"""A comparison as a picture: acceptance by ratio, by draft position, and by weight covered."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

MARKERS = "osD^vP*X<>"


def pyplot() -> Any:
    """matplotlib's, drawing to files.

    Raises:
        SystemExit: without matplotlib, with what to install.
    """
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        sys.exit("plots need matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    return pyplot


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a row a temperature: tokens an iteration by sparsity ratio, acceptance by draft
    position (both at the middle gamma), tokens an iteration by gamma, and against the share of
    attention weight that drafts see (as the paper's figures 4, 8 and 10, for this model).

    Raises:
        SystemExit: without matplotlib, with what to install.
    """
    rows = report["rows"]
    temperatures = sorted({row["temperature"] for row in rows})
    figure, axes = pyplot().subplots(
        len(temperatures),
        4,
        figsize=(17, 3.8 * len(temperatures)),
        layout="constrained",
        squeeze=False,
    )
    for line, temperature in zip(axes, temperatures, strict=True):
        _draw_line(line, [row for row in rows if row["temperature"] == temperature])
        how = f"T {temperature:g}" if temperature else "greedy"
        line[0].set_ylabel(f"{how}\ntokens an iteration")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"{report['model']}: {len(report['prompts'])} prompts of {min(report['prompts'].values())} "
        f"to {max(report['prompts'].values())} tokens; bars are standard errors over prompts"
    )
    figure.savefig(path, dpi=120)


def _draw_line(line: Any, rows: list[dict[str, Any]]) -> None:
    gamma = _middle({row["gamma"] for row in rows})
    ratio = _middle({row["ratio"] for row in rows})
    by_policy = defaultdict(list)
    for row in rows:
        by_policy[row["policy"]].append(row)
    by_ratio, by_position, by_gamma, by_weight = line
    for index, (policy, of_policy) in enumerate(by_policy.items()):
        style = {
            "label": policy,
            "color": f"C{index}",
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
        }
        _errorbar(by_ratio, [r for r in of_policy if r["gamma"] == gamma], "ratio", style)
        _errorbar(by_gamma, [r for r in of_policy if r["ratio"] == ratio], "gamma", style)
        for row in of_policy:
            if (row["gamma"], row["ratio"]) == (gamma, ratio):
                rates = row["acceptance_by_position"]
                by_position.plot(range(1, len(rates) + 1), rates, **style)
        points = [
            (statistics.mean(row["covered_by_position"]), row["tokens_per_iteration"])
            for row in of_policy
            if row["gamma"] == gamma and row["covered_by_position"]
        ]
        if points:
            by_weight.plot(*zip(*sorted(points), strict=True), **style)
    by_ratio.set(xlabel="sparsity ratio", title=f"gamma {gamma}")
    by_position.set(
        xlabel="draft position",
        ylabel="accepted, if those before were",
        title=f"gamma {gamma}, ratio {ratio:g}",
    )
    by_gamma.set(xlabel="gamma", title=f"ratio {ratio:g}")
    by_weight.set(xlabel="attention weight covered", title=f"gamma {gamma}, all ratios")
    for axis in line:
        axis.grid(alpha=0.3)


def _errorbar(axis: Any, rows: list[dict[str, Any]], key: str, style: dict[str, Any]) -> None:
    rows = sorted(rows, key=lambda row: row[key])
    axis.errorbar(
        [row[key] for row in rows],
        [row["tokens_per_iteration"] for row in rows],
        yerr=[row["stderr"] for row in rows],
        capsize=2,
        **style,
    )


def _middle(values: set[float]) -> float:
    return sorted(values)[len(values) // 2]
