"""Draws a report of benchmark/serving.py.

python benchmark/plots.py benchmark/results/X.json benchmark/results/X.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_vegas.lab.plots import pyplot

COLOURS = {"plain": "#9a9a9a", "drafts": "#4c86c6", "verify": "#1f4e79", "gaps": "#e07b39"}
WIDTH = 0.38


def plot(report: dict[str, Any], paths: Sequence[Path]) -> None:
    """Write the plot to each path; the suffix says the format.

    Raises:
        SystemExit: without matplotlib, with what to install.
    """
    cases = [case for case in report["cases"] if case["iteration_ms"] or case["speedup"]]
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_speedups(left, cases)
    _draw_iterations(right, cases, report["gamma"])
    simulated = ", accepted tokens simulated" if any(c["simulated"] for c in cases) else ""
    figure.suptitle(
        f"{report['model']} on {report['gpu']}: VEGAS at gamma {report['gamma']}, "
        f"ratio {report['ratio']}{simulated}"
    )
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        print(f"wrote {path}")
    pyplot.close(figure)


def _label(case: dict[str, Any]) -> str:
    name = f"{case['batch']} × {case['context']:,}"
    return name + ("\n(plain steps)" if case["mode"] == "plain" else "")


def _draw_speedups(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    """Measured beside the roofline's."""
    for offset, key, name, colour in (
        (-WIDTH / 2, "speedup", "measured", COLOURS["verify"]),
        (WIDTH / 2, "roofline_speedup", "roofline", COLOURS["plain"]),
    ):
        places = [index + offset for index in range(len(cases))]
        bars = axes.bar(places, [c[key] or 0 for c in cases], WIDTH, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [_label(case) for case in cases])
    axes.set_xlabel("batch × context")
    axes.set_ylabel("decode speed, plain SGLang = 1")
    axes.margins(y=0.35)  # room for the legend
    axes.legend(ncols=2, loc="upper center", fontsize=9)


def _draw_iterations(axes: Any, cases: Sequence[dict[str, Any]], gamma: int) -> None:
    """The phases of one iteration beside the plain steps that make as many tokens."""
    places = range(len(cases))
    plain = [(c["baseline_step_ms"] or 0) * (c["tokens_per_iteration"] or 0) for c in cases]
    axes.bar(
        *([place - WIDTH / 2 for place in places], plain, WIDTH),
        **{"label": "plain steps for as many tokens", "color": COLOURS["plain"]},
    )
    bottom = [0.0] * len(cases)
    for key, name, factor in (
        ("draft_step_ms", "drafts", gamma),
        ("verify_ms", "verify", 1),
        ("gap_ms", "gaps", 1),
    ):
        heights = [factor * (case[key] or 0) for case in cases]
        label = f"{gamma} drafts" if name == "drafts" else name
        axes.bar(
            *([place + WIDTH / 2 for place in places], heights, WIDTH),
            **{"bottom": bottom, "label": label, "color": COLOURS[name]},
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [_label(case) for case in cases])
    axes.set_xlabel("batch × context")
    axes.set_ylabel("ms an iteration")
    axes.margins(y=0.35)  # room for the legend
    axes.legend(ncols=2, loc="upper center", fontsize=9)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    plot(json.loads(Path(sys.argv[1]).read_text()), [Path(name) for name in sys.argv[2:]])
